"""The command that confines a Python by bubblewrap: its namespaces, and the files that it sees."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import sysconfig

from keel.base.errors import KeelError


def bubblewrap() -> list[str]:
    """The command that confines the warm process: no network, no view of other processes, a few read-only files.

    It keeps one right, and that within its own user namespace: to give every child namespaces of its own. Children
    drop it before they read anything.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise refused("bubblewrap is not installed (apt-get install bubblewrap)")
    command = [
        program,
        "--as-pid-1",  # with the first process of its namespace every other one ends
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
    ]
    for path in _libraries():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    stdlib = sysconfig.get_path("stdlib")
    command += ["--ro-bind", stdlib, stdlib, "--ro-bind", _executable(), _executable()]
    for name in ("site-packages", "dist-packages"):  # Keel itself may be there, with what makes problems and answers
        if os.path.isdir(os.path.join(stdlib, name)):
            masked = os.path.join(stdlib, name)
            command += ["--size", "4096", "--tmpfs", masked, "--remount-ro", masked]
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*command, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def python_command(code: str) -> list[str]:
    """Python as it runs in the sandbox: the standard library alone."""
    return [_executable(), "-S", "-s", "-P", "-c", code]


def _libraries() -> list[str]:
    """Folders and files with the shared libraries of the system and of this Python."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    found = [path for path in (f"/usr/lib/{multiarch}", "/usr/lib64") if os.path.isdir(path)]
    if not multiarch or not os.path.isdir(f"/usr/lib/{multiarch}"):
        found.append("/usr/lib")
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            found.append(link)
        elif os.path.isdir(link):
            found.append(f"{link}/{multiarch}" if os.path.isdir(f"{link}/{multiarch}") else link)
    own = sysconfig.get_config_var("LIBDIR") or ""
    if not any(own == path or own.startswith(f"{path}/") for path in found):
        found += sorted(glob.glob(os.path.join(own, "*.so*")))
    return found


def _executable() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def refused(why: str) -> KeelError:
    return KeelError(
        f"programs cannot be confined: {why}; see docs/code.md, or write sandbox: none to run them with your own rights"
    )
