"""The code inside the sandbox: a warm Python that forks one isolated process per program.

`keel.envs.sandbox` starts it by `python -c`, with the text of this file. The warm process never reads a program, an
input or a test: it receives file descriptors and forks, and the child reads its requests itself. The memory of a later
program therefore contains nothing of an earlier one.

A child answers requests, one JSON object per line. `{"exec": code, ...}` runs code in the child's namespace,
`{"call": path, "args": ..., "kwargs": ...}` calls a function of that namespace. While a test runs, its child requests
calls in the same form: the tested function is in another child, and only data is passed between the two.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

CHANNEL = 3  # the child's file descriptor of the connection to Keel
LONGEST_ERROR = 500
WARM = (
    "array bisect calendar cmath collections copy dataclasses datetime decimal enum fractions functools heapq "
    "itertools math operator queue random re statistics string textwrap time traceback typing"
)
USER = 1000  # the id of programs inside the sandbox
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
CLONE_THREAD = 0x00010000
THREADS = 512  # maximum threads of one program
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_NO_NEW_PRIVS = 38
ERRNO, ALLOW, EPERM, ENOSYS, MASKED_EQUAL, EQUAL = 0x00050000, 0x7FFF0000, 1, 38, 7, 4
TCGETS, FIOCLEX = 0x5401, 0x5451
# The allowed system calls: memory, the program's own files and pipes, threads, time. Not allowed: new processes and
# programs, sockets, namespaces, mounts, tracing, shared memory and keys. Locks, leases, modes and times of files are
# not allowed either, because other processes could see them: the library's files may belong to Keel's user.
DESCRIPTOR_COMMANDS = (
    fcntl.F_DUPFD,
    fcntl.F_DUPFD_CLOEXEC,
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    fcntl.F_SETFL,
)
SYSTEM_CALLS = """
access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range dup dup2
dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat faccessat2
fadvise64 fallocate fchdir fdatasync fstat fstatfs fsync ftruncate futex getcpu getcwd
getdents getdents64 getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getrandom
getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid kill lseek lstat
madvise mkdir mkdirat mmap mprotect mremap msync munmap nanosleep newfstatat open openat pause pipe pipe2
poll ppoll pread64 preadv prlimit64 pselect6 pwrite64 pwritev read readlink readlinkat readv recvfrom rename renameat
renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler
sched_yield select sendfile sendto set_robust_list setitimer shutdown sigaltstack stat statfs statx symlink
symlinkat sysinfo tgkill time times truncate umask uname unlink unlinkat wait4 waitid write writev
"""


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Confinement:
    """Namespaces, limits and the system call filter of one child; the child ends if a step fails."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.limits, self.isolated = limits, bool(limits["isolated"])
        if not self.isolated:
            return
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self.filter = self._filter()
        self.own_pids = os.pidfd_open(os.getpid())

    def fork(self) -> int:
        """Fork a child that is process 1 of a new PID namespace."""
        if self.isolated:
            self._check("unshare", self.libc.unshare(CLONE_NEWPID))
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid and self.isolated:
                self._check("setns", self.libc.setns(self.own_pids, CLONE_NEWPID))
        return pid

    def confine(self) -> None:
        """Confine the child, before it reads anything."""
        limits = self.limits
        if self.isolated:
            self._check("unshare", self.libc.unshare(CLONE_NEWNS | CLONE_NEWIPC))
            size = f"size={limits['disk']},nr_inodes=1024,mode=0700,uid={os.getuid()},gid={os.getgid()}"
            flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
            self._check("mount", self.libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, size.encode()))
            # RLIMIT_NPROC counts per user namespace: with its own one, a program does not use up the threads of others.
            self._check("unshare", self.libc.unshare(CLONE_NEWUSER))
        os.setsid()  # signals to a process group cross PID namespaces
        os.chdir(limits["folder"])
        for kind, limit in (
            (resource.RLIMIT_AS, limits["memory"]),
            (resource.RLIMIT_FSIZE, limits["disk"]),
            (resource.RLIMIT_CPU, limits["cpu_s"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            *(((resource.RLIMIT_NPROC, THREADS),) if self.isolated else ()),
        ):
            hard = resource.getrlimit(kind)[1]
            value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (value, value))
        if self.isolated:
            header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
            self._check("capset", self.libc.capset(header, none))
            self._check("prctl", self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            if self.seccomp.seccomp_load(ctypes.c_void_p(self.filter)) < 0:
                raise OSError("seccomp_load failed")

    def _filter(self) -> int:
        """System calls that are not in `SYSTEM_CALLS` fail with EPERM; `clone` may only create threads."""
        library = self.seccomp
        library.seccomp_init.restype = ctypes.c_void_p
        context = library.seccomp_init(ctypes.c_uint32(ERRNO | EPERM))
        if not context:
            raise OSError("seccomp_init failed")

        def rule(action: int, name: str, *compare: _Compare) -> None:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number < 0:  # this architecture does not have the call
                return
            array = (_Compare * len(compare))(*compare)
            added = library.seccomp_rule_add_array(
                ctypes.c_void_p(context), ctypes.c_uint32(action), number, len(compare), array
            )
            if added < 0:
                raise OSError(f"seccomp_rule_add failed for {name}")

        for name in SYSTEM_CALLS.split():
            rule(ALLOW, name)
        rule(ALLOW, "clone", _Compare(0, MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD))
        rule(ERRNO | ENOSYS, "clone3")  # a filter cannot read its flags; libc falls back to clone
        for request in (TCGETS, FIOCLEX):
            rule(ALLOW, "ioctl", _Compare(1, EQUAL, request, 0))
        for command in DESCRIPTOR_COMMANDS:
            rule(ALLOW, "fcntl", _Compare(1, EQUAL, command, 0))
        rule(ALLOW, "socketpair", _Compare(0, EQUAL, socket.AF_UNIX, 0))
        return int(context)

    def _check(self, name: str, result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


ENDS = (StopIteration, StopAsyncIteration)  # raised in a test, they would end its loop and skip the remaining checks


class NotData(Exception):
    """A value that cannot be encoded as data."""


def encode(value: Any) -> Any:
    """A value as JSON, with a tag for types that JSON does not have."""
    if value is None or isinstance(value, bool | str):
        return value if value is None or type(value) is bool else str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Iterator):
        return {"iter": [encode(item) for item in value]}
    raise NotData(f"a {type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """The inverse of `encode`: only built-in types, so that comparing the value runs no code of a program."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    kinds: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "iter": iter}
    return kinds[kind](map(decode, inner))


class Child:
    """One program's process: its namespace and its connection to Keel."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.read, self.write = os.read, os.write
        self.buffer = b""

    def serve(self) -> NoReturn:
        leave = os._exit
        while (request := self.receive()) is not None:
            self.send(self.call(request) if "call" in request else self.execute(request))
            if "stdin" in request:
                break
        leave(0)

    def receive(self) -> dict[str, Any] | None:
        while b"\n" not in self.buffer:
            data = self.read(CHANNEL, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[self.write(CHANNEL, data) :]

    def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run code: `stdin` is its input, `interactive` prints the value of a last expression, `setup` is run before a
        test. Undefined names, and those in `remote` (name to path), become calls to the program."""
        code, stdin = request["exec"], request.get("stdin")
        if stdin is not None:
            _feed(stdin)
        try:
            tree = ast.parse(code, "<program>")
            if "setup" in request:
                exec(compile(request["setup"], "<setup>", "exec"), self.namespace)
                self.link(tree, request.get("remote", {}))
            last = tree.body.pop() if request.get("interactive") and _ends_with_value(tree) else None
            exec(compile(tree, "<program>", "exec"), self.namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<program>", "eval"), self.namespace)
                if value is not None:
                    print(repr(value))
            outcome: dict[str, Any] = {"ok": True}
        except SystemExit as exit:
            outcome = {"exit": exit.code in (None, 0)}
        except BaseException as error:
            outcome = _failure(error)
        return {**outcome, **_flush(stdin is not None)}

    def link(self, tree: ast.AST, remote: dict[str, str]) -> None:
        """Turn every undefined name that a test uses into a call to the program."""
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        unknown = {name: name for name in used - self.namespace.keys() - set(dir(builtins))}
        for name, path in {**unknown, **remote}.items():
            self.namespace[name] = self.proxy(path)

    def proxy(self, path: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            self.send({"call": path, "args": encode(list(args)), "kwargs": encode(kwargs)})
            reply = self.receive()
            if reply is None:
                os._exit(1)
            if "value" in reply:
                return decode(reply["value"])
            kind, text = str(reply.get("kind")), str(reply.get("error"))
            error = getattr(builtins, kind, None)
            if isinstance(error, type) and issubclass(error, Exception) and not issubclass(error, ENDS):
                raise error(*([] if text == kind else [text.removeprefix(f"{kind}: ")]))
            raise RuntimeError(text)

        return ask

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the function at a path: `f`, or `Solution.f`, the method of a new object."""
        try:
            owner, _, name = request["call"].rpartition(".")
            function = getattr(self.namespace[owner](), name) if owner else self.namespace[name]
            value = function(*decode(request["args"]), **decode(request["kwargs"]))
            reply: dict[str, Any] = {"value": encode(value)}
        except KeyError as error:
            missing = error.args[:1] == (request["call"].partition(".")[0],)
            reply = {"error": f"there is no {error.args[0]}", "kind": "NameError"} if missing else _failure(error)
        except BaseException as error:
            reply = _failure(error)
        return {**reply, **_flush(False)}


def _ends_with_value(tree: ast.Module) -> bool:
    return bool(tree.body) and isinstance(tree.body[-1], ast.Expr)


def _failure(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = ""
    return {"error": (f"{kind}: {text}" if text else kind)[:LONGEST_ERROR], "kind": kind}


def _flush(ends: bool) -> dict[str, Any]:
    """Flush a program's output before the reply is sent; with `ends`, run its exit handlers first."""
    try:
        if ends:
            threading._shutdown()  # type: ignore[attr-defined]  # as Python does: threads first
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException as error:
        return _failure(error)
    return {}


def _feed(text: str) -> None:
    """Use a text as the program's standard input."""
    with open("stdin", "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)
    descriptor = os.open("stdin", os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    os.unlink("stdin")
    sys.stdin = _reader()


def _reader() -> io.TextIOWrapper:
    raw = io.FileIO(0, "rb", closefd=False)
    return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="surrogatepass")


def _writer(descriptor: int, line_buffering: bool) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=line_buffering)


def _become_child(confinement: Confinement, channel: int, stdout: int, stderr: int) -> NoReturn:
    """Run the child. Never returns, so that the child cannot continue as the warm process."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for target, source in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (null, stdout, stderr, channel)]):
            os.dup2(source, target)
        os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
        child = Child()
        try:
            confinement.confine()
        except OSError as error:
            child.send({"unconfined": str(error)})
            os._exit(1)
        sys.stdin, sys.stderr = _reader(), _writer(2, True)
        sys.stdout = vars(sys)["__stdout__"] = _writer(1, False)
        child.send({"ready": True})
        child.serve()
    finally:
        os._exit(1)


def main() -> None:
    """Fork a child for each received connection and its two pipes; kill it when Keel closes the connection."""
    limits = json.loads(sys.argv[1])
    if limits["isolated"] and os.getuid() != USER:  # Keel is root, whose processes have no limit on threads
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    for name in WARM.split():
        __import__(name)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # without `-S` the module `site` defines them
    control = socket.socket(fileno=limits["control"])
    confinement = Confinement(limits)
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    children: dict[int, int] = {}  # process by channel
    gc.collect()
    gc.freeze()
    control.send(b"r")
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                data, received, _, _ = socket.recv_fds(control, 1, 3)
                if not data:  # Keel has ended: kill all children
                    for pid in children.values():
                        _kill(pid, confinement.isolated)
                    os._exit(0)
                pid = -1
                # without a free descriptor or process, the connection is closed, which Keel notices
                with contextlib.suppress(OSError):
                    pid = confinement.fork() if len(received) == 3 else -1
                if pid == 0:
                    _become_child(confinement, *received)
                for unused in received[1:] if pid > 0 else received:
                    os.close(unused)
                if pid > 0:
                    children[received[0]] = pid
                    poll.register(received[0], 0)
            elif descriptor == woken:
                os.read(woken, 4096)
                _reap(children, poll, confinement.isolated)
            elif descriptor in children:
                _kill(children[descriptor], confinement.isolated)
                poll.unregister(descriptor)


def _kill(pid: int, isolated: bool) -> None:
    for kill in (os.kill, *(() if isolated else (os.killpg,))):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _reap(children: dict[int, int], poll: select.poll, isolated: bool) -> None:
    channels = {pid: channel for channel, pid in children.items()}
    while children:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if not isolated:
            _kill(pid, isolated)  # kill the remaining processes of its group
        channel = channels[pid]
        del children[channel]
        with contextlib.suppress(KeyError):
            poll.unregister(channel)
        os.close(channel)


if __name__ == "__main__":
    main()
