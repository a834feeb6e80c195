"""Start a Python process confined by bubblewrap: its namespaces, its user, and the files that it can read."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.envs.sandbox_worker import USER

NOBODY = 65534  # user id of programs outside of the sandbox if Keel runs as root


def confined(python: Sequence[str], pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
    """Start Python in bubblewrap as Keel's user, or as nobody if Keel runs as root."""
    command = _command()
    if not _is_root():
        command += ["--uid", str(USER), "--gid", str(USER), "--", *python]
        return subprocess.Popen(command, pass_fds=pass_fds, **options)
    (info, report), (block, release) = os.pipe(), os.pipe()
    failed: OSError | None = None
    with open(info) as reported, open(release, "wb"):  # closing `release` lets bubblewrap continue
        try:
            command += ["--info-fd", str(report), "--userns-block-fd", str(block)]
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", *python]
            process = subprocess.Popen(command, pass_fds=[*pass_fds, report, block], **options)
        finally:
            os.close(report)
            os.close(block)
        started = reported.read()  # empty if bubblewrap failed
        try:
            for ids in ("uid_map", "gid_map") if started else ():
                path = Path("/proc", str(json.loads(started)["child-pid"]), ids)
                path.write_text(f"{USER} {NOBODY} 1\n{USER + 1} 0 1\n")
        except OSError as error:
            failed = error
    if failed is not None:
        process.wait()  # without the id map it ends without running a program
        why = f"root cannot give them another user id ({failed.strerror})"
        raise refused(f"{why}: run Keel as another user, or with CAP_SETUID and CAP_SETGID")
    return process


def _is_root() -> bool:
    """Whether Keel runs as root, or as a container's root that can give programs another user id."""
    if os.geteuid() != 0:
        return False
    _, outside, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    return outside == 0 or count > NOBODY


def _command() -> list[str]:
    """The command that confines the warm process: no network, no view of other processes, a few read-only files.

    It has capabilities only within its own user namespace: to give each child its own namespaces and another user id.
    Children drop them before they read anything.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise refused("bubblewrap is not installed (apt-get install bubblewrap)")
    command = [
        program,
        "--as-pid-1",  # when the first process of the namespace ends, all others are killed
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
    ]
    stdlib = sysconfig.get_path("stdlib")
    command += _folders([*_libraries(), stdlib, _executable(), "/dev/null"])
    for path in _libraries():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += ["--ro-bind", stdlib, stdlib, "--ro-bind", _executable(), _executable()]
    # Keel itself may be in these folders, with the code that generates problems and answers.
    for name in ("site-packages", "dist-packages"):
        if os.path.isdir(os.path.join(stdlib, name)):
            masked = os.path.join(stdlib, name)
            command += ["--size", "4096", "--tmpfs", masked, "--remount-ro", masked]
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*command, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _folders(paths: Sequence[str]) -> list[str]:
    """Create the folders of these paths, readable by all; bubblewrap would make some readable only by root."""
    return [part for folder in dict.fromkeys(map(os.path.dirname, paths)) for part in ("--dir", folder)]


def python_command(code: str) -> list[str]:
    """Python's command in the sandbox, with only the standard library."""
    return [_executable(), "-S", "-s", "-P", "-c", code]


def _libraries() -> list[str]:
    """Folders and files of the shared libraries of the system and of this Python."""
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
        f"programs cannot be confined: {why}; see docs/code.md, or set sandbox: none to run them without confinement"
    )
