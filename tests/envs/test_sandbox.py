"""The sandbox under attack. Where no sandbox can be had these tests fail."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keel.api import train
from keel.base.errors import KeelError
from keel.envs import programs
from keel.envs.bubblewrap import _is_root
from keel.envs.sandbox import LONGEST_ERROR, LONGEST_KIND, WORKER, Lost, Program, ProgramAnswer, Sandbox, SandboxLimits
from keel.envs.sandbox import sandbox as shared
from keel.envs.sandbox_worker import THREADS

PATIENCE_S = 60.0  # for what takes milliseconds, on a machine that is busy
LIMITS = SandboxLimits(timeout_s=2.0, memory_mb=192, disk_mb=8, output_kb=64, workers=2)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["KEEL_TEST_SECRET"] = "sesame-in-the-environment"
    started = Sandbox(LIMITS)
    yield started
    started.close()
    del os.environ["KEEL_TEST_SECRET"]


@pytest.fixture
def unconfined() -> Iterator[Sandbox]:
    """The same programs without a sandbox: shows that an attack would succeed there."""
    started = Sandbox(SandboxLimits(sandbox="none", timeout_s=2.0, memory_mb=192, disk_mb=8, output_kb=64, workers=1))
    yield started
    started.close()


def run(sandbox: Sandbox, code: str, stdin: str = "") -> ProgramAnswer:
    with sandbox.program() as program:
        return program.ask({"exec": code, "stdin": stdin}, time.monotonic() + PATIENCE_S)


def held(sandbox: Sandbox, warm: int) -> None:
    """The warm process is the same one, and programs still run."""
    assert sandbox._process.pid == warm
    assert run(sandbox, "print(int(input()) + 1)", "41\n").output == "42\n"


# Each raises in the sandbox: the exception it must end with.
REFUSED = {
    "fork": ("import os\nos.fork()", "PermissionError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/sh'])", "PermissionError"),
    "exec": ("import os, sys\nos.execv(sys.executable, ['python'])", "PermissionError"),
    "disk, one file": ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()", "OSError"),
    "disk, many files": ("for i in range(10**6): open(f'/tmp/{i}', 'wb').write(bytes(1 << 16))", "OSError"),
    "disk, empty files": ("for i in range(10**6): open(f'/tmp/{i}', 'wb')", "OSError"),
    "disk, outside /tmp": ("open('/x', 'w')", "OSError"),
    "disk, the library": (  # whose owner is root, or Keel's user
        "import os\ntry: open(os.__file__, 'a')\nexcept OSError as e: raise OSError(str(e))",
        "OSError",
    ),
    "shared memory": ("import os\nos.memfd_create('x')", "PermissionError"),
    "shared memory, by name": ("open('/dev/shm/x', 'w')", "FileNotFoundError"),
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "memory, by small pieces": ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
    "a file at home": ("open(HOME_FILE)", "FileNotFoundError"),
    "passwords": ("open('/etc/passwd')", "FileNotFoundError"),
    "other processes": ("open('/proc/1/environ')", "FileNotFoundError"),
    "a file of the run": ("open(SECRET_FILE)", "FileNotFoundError"),
    "a link out": ("import os\nos.symlink(SECRET_FILE, '/tmp/x')\nopen('/tmp/x')", "FileNotFoundError"),
    "a link out by ..": (
        "import os\nos.symlink('../../../../../..' + SECRET_FILE, '/tmp/y')\nopen('/tmp/y')",
        "FileNotFoundError",
    ),
    "a hard link out": ("import os\nos.link(os.__file__, '/tmp/x')", "PermissionError"),
    "Keel's own source": ("import keel", "ModuleNotFoundError"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)", "PermissionError"),
    "network, datagrams": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "PermissionError"),
    "network, local sockets": ("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0x')", "PermissionError"),
    "killing the parent": ("import os\nos.kill(WARM, 9)", "ProcessLookupError"),
    "killing a process group": ("import os\nos.killpg(WARM, 9)", "ProcessLookupError"),
    "more time": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))", "ValueError"),
    "a device's mode": ("import os\nos.chmod('/dev/null', 0o600)", "PermissionError"),
    "the mode of an open device": ("import os\nos.fchmod(os.open('/dev/null', os.O_RDWR), 0o600)", "PermissionError"),
    "a device's times": ("import os\nos.utime('/dev/null', (0, 0))", "PermissionError"),
    "a lock that others see": ("import fcntl\nfcntl.flock(open('/dev/null'), fcntl.LOCK_EX)", "PermissionError"),
    "a record lock": ("import fcntl, os\nfcntl.lockf(open(os.__file__), fcntl.LOCK_SH)", "PermissionError"),
    "a lease": ("import fcntl, os\nfcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)", "PermissionError"),
    "signals about a file": ("import fcntl\nfcntl.fcntl(open('/dev/null'), fcntl.F_SETOWN, 1)", "PermissionError"),
    "network, a pair": ("import socket\nsocket.socketpair(socket.AF_TIPC)", "PermissionError"),
    "an open descriptor": ("import os\nfor fd in range(4, 64): os.write(fd, b'x')", "OSError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attack_is_refused(sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "tests.json"
    secret.write_text("hidden")
    warm = sandbox._process.pid
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile(dir=Path.home()) as home:
        values = {
            "HOME_FILE": home.name,
            "SECRET_FILE": str(secret),
            "PORT": server.getsockname()[1],
            "WARM": warm,
        }
        code, error = REFUSED[name]
        answer = run(sandbox, "".join(f"{key} = {value!r}\n" for key, value in values.items()) + code)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert answer.message.get("kind") == error, answer
    held(sandbox, warm)


# System calls that a program makes past Python: all must fail.
CALLS = ("ptrace", "process_vm_readv", "unshare", "setns", "mount", "umount2", "bpf", "keyctl", "io_uring_setup")
CALLS += (
    "membarrier",
    "fchmodat2",
    "userfaultfd",
    "perf_event_open",
    "shmget",
    "pidfd_open",
    "chroot",
    "pivot_root",
    "fork",
    "vfork",
    "clone3",
)


@pytest.mark.parametrize("name", CALLS)
def test_system_call_is_refused(sandbox: Sandbox, name: str) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # this kind of processor has no such call, as aarch64 has no fork
        assert name in ("fork", "vfork")
        return
    code = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nr = libc.syscall({number}, 0, 0, 0, 0, 0)\n"
    answer = run(sandbox, code + "print(r, ctypes.get_errno())")
    assert answer.output == ("-1 38\n" if name == "clone3" else "-1 1\n")


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(999)",
    "deaf to signals": "import signal\nfor s in range(1, 32):\n try: signal.signal(s, signal.SIG_IGN)\n"
    " except OSError: pass\nwhile True: pass",
    "in C": "9 ** 9 ** 9",
    "waits for input": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "never raises": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "threads": "import threading\ndef f():\n while True: pass\nfor i in range(8): threading.Thread(target=f).start()",
    "talks to Keel in bytes without end": "import os\nwhile True: os.write(1, b'') or os.write(3, b'')",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_program_is_ended(sandbox: Sandbox, name: str) -> None:
    warm = sandbox._process.pid
    with sandbox.program() as program:
        answer = program.ask({"exec": ENDLESS[name], "stdin": ""}, time.monotonic() + 0.3)
    assert answer.fault == "timeout"
    held(sandbox, warm)
    assert _eventually(lambda: len(_below(warm)) <= 2 * LIMITS.workers + 2)


def test_attacks_do_not_disturb_programs_beside_them(sandbox: Sandbox) -> None:
    """As in a run: some completions attack while others are judged."""
    warm = sandbox._process.pid
    attacks = ["fork bomb", "disk, one file", "memory", "killing the parent", "an open descriptor"]
    codes = [*(REFUSED[name][0] for name in attacks), *list(ENDLESS.values())[:4], "print('x' * 10**6)"]

    def attack(code: str) -> ProgramAnswer:
        with sandbox.program() as program:
            return program.ask({"exec": f"WARM = {warm}\n{code}"}, time.monotonic() + 0.3)

    def honest(number: int) -> str:
        with sandbox.program() as program:
            request = {"exec": "print(int(input()) * 2)", "stdin": str(number)}
            return program.ask(request, time.monotonic() + PATIENCE_S).output

    with ThreadPoolExecutor(4) as threads:
        attacking = [threads.submit(attack, code) for code in codes]
        assert list(threads.map(honest, range(24))) == [f"{2 * number}\n" for number in range(24)]
        assert not any(future.result().ok for future in attacking)
    held(sandbox, warm)


@pytest.mark.slow
def test_attacks_are_held_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every completion and every reward is that of the same run without attacks in the same sandbox."""
    monkeypatch.setattr(programs, "_memory", programs._Memory(0))  # or the second run would run no program
    box, over = shared(SandboxLimits(timeout_s=PATIENCE_S)), threading.Event()
    warm = box._process.pid
    known = f"HOME_FILE = SECRET_FILE = {__file__!r}\nPORT, WARM = 9, {warm}\n"
    codes = [*(code for code, _ in REFUSED.values()), *ENDLESS.values(), THREAD_BOMB.replace("print(count)", "raise")]

    def run_of(name: str) -> list[tuple[object, ...]]:
        options = ["warmstart.steps=2", "warmstart.batch_size=4", "run.max_steps=2", "rollout.prompts_per_step=4"]
        options += ["rollout.num_generations=4", "eval.samples=4", "eval.k=[1]", "checkpoint.every=2"]
        options += [f"task.timeout_s={PATIENCE_S}", f"run.dir={tmp_path / name}"]
        result = train(Path(__file__).parents[2] / "configs/code.yaml", overrides=options)
        records = map(json.loads, (result.directory / "rollouts.jsonl").read_text().splitlines())
        return [(each["problem"], each["completion"], each["reward"], each["parts"]) for each in records]

    def attack() -> int:
        for count, code in enumerate(itertools.cycle(codes)):
            if over.is_set() and count >= len(codes):
                return count
            with box.program() as program:
                assert not program.ask({"exec": known + code, "stdin": ""}, time.monotonic() + 0.3).ok, code
        raise AssertionError

    alone = run_of("alone")
    with ThreadPoolExecutor(1) as threads:
        attacking = threads.submit(attack)
        try:
            assert run_of("attacked") == alone
        finally:
            over.set()
        assert attacking.result() >= len(codes)
    held(box, warm)


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    for code in ("while True: print('x' * 999)", "import os\nwhile True: os.write(2, b'y' * 99999)"):
        answer = run(sandbox, code)
        assert answer.fault == "output"
        assert len(answer.output + answer.errors) == LIMITS.output_kb * 1024
    assert run(sandbox, "import os\nwhile True: os.write(3, b'z' * 99999)").fault == "output"
    held(sandbox, sandbox._process.pid)


THREAD_BOMB = """
import _thread, threading, time
threading.stack_size(1 << 15)  # so that memory is not what bounds them
count = 0
try:
    while True:
        _thread.start_new_thread(time.sleep, (999,))
        count += 1
except RuntimeError:
    print(count)
"""


def test_threads_of_each_program_are_bounded(sandbox: Sandbox) -> None:
    """Whoever runs Keel; and the threads of one are not missing to another."""
    with sandbox.program() as first, sandbox.program() as second:
        for program in (first, second):
            answer = program.ask({"exec": THREAD_BOMB}, time.monotonic() + PATIENCE_S)
            assert answer.output == f"{THREADS - 1}\n", answer
    held(sandbox, sandbox._process.pid)


def test_programs_have_neither_roots_id_nor_a_right(sandbox: Sandbox) -> None:
    """As the kernel sees them from outside: what root owns, they can only read."""
    with sandbox.program():
        states = [_status(pid) for pid in _below(sandbox._process.pid)]
    programs = [state for state in states if state.get("Seccomp") == "2"]
    assert programs
    for program in programs:
        assert "0" not in (program["Uid"] + "\t" + program["Gid"]).split("\t")
        assert "0" not in program["Groups"].split()
        assert {int(program[kind], 16) for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert program["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("user", "ids", "root"),
    [
        (1000, "0 0 4294967295", False),
        (0, "0 0 4294967295", True),
        (0, "0 0 1", True),
        (0, "0 1000 1", False),  # a user's own namespace, as of `unshare --map-root-user`
        (0, "0 100000 65536\n65536 9 1", True),  # a container's root, which can give programs another id
    ],
)
def test_root_is_known_by_its_number_outside(monkeypatch: pytest.MonkeyPatch, user: int, ids: str, root: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(Path, "read_text", lambda path: ids)
    assert _is_root() is root


def test_root_that_can_give_no_other_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.envs.bubblewrap._is_root", lambda: True)
    monkeypatch.setattr("keel.envs.bubblewrap.NOBODY", 2**32 - 1)  # which is no id
    with pytest.raises(KeelError, match=r"root .*CAP_SETUID"):
        Sandbox(LIMITS)


def test_signals_reach_nobody_else(sandbox: Sandbox) -> None:
    warm = sandbox._process.pid
    with sandbox.program() as other:
        code = "import os\nfor s in range(1, 32):\n for p in (-1, 0, 1, 2):\n  try: os.kill(p, s)\n  except OSError: 0"
        run(sandbox, code)
        assert other.ask({"exec": "print('alive')"}, time.monotonic() + PATIENCE_S).output == "alive\n"
    held(sandbox, warm)


SEARCH = """
import gc, os
found = str(os.environ)
for thing in gc.get_objects():
    try:
        found += repr(thing)[:100000]
    except BaseException:
        pass
for folder, _, files in os.walk("/"):
    for name in files:
        try:
            found += open(os.path.join(folder, name)).read() if folder.startswith(("/tmp", "/home", "/root/.k")) else ""
        except BaseException:
            pass
print(chr(115) + "esame-in-the" in found, chr(115) + "esame-of-before" in found)
"""


def test_secrets_and_earlier_programs_are_nowhere(sandbox: Sandbox) -> None:
    for _ in range(4):  # as many as may have been forked ahead
        before = "x = 'sesame-of-before'\nopen('/tmp/left', 'w').write(x)\nimport builtins\nbuiltins.len = x"
        assert run(sandbox, before, "sesame-of-before").ok
    answer = run(sandbox, SEARCH)
    assert answer.output == "False False\n"
    assert run(sandbox, "import os\nprint(os.listdir('/tmp'), len('abc'))").output == "[] 3\n"
    held(sandbox, sandbox._process.pid)


def test_unconfined_programs_have_all_rights(unconfined: Sandbox, tmp_path: Path) -> None:
    """What `sandbox: none` says; and that the attacks above test something."""
    secret = tmp_path / "tests.json"
    secret.write_text("hidden")
    assert run(unconfined, f"print(open({str(secret)!r}).read())").output == "hidden\n"
    assert run(unconfined, "import os\nif os.fork(): os.wait()\nelse: os._exit(0)").ok
    # What a program leaves behind is ended with its group: this would hold the connection open for an hour.
    assert run(unconfined, "import os, time\nif not os.fork(): time.sleep(3600)").ok


@pytest.mark.parametrize("kind", ["auto", "none"])
def test_no_program_outlives_its_sandbox(kind: str) -> None:
    with Sandbox(SandboxLimits(sandbox=kind, workers=1)) as sandbox:
        warm = sandbox._process.pid
        program = sandbox.program()
        assert program.ask({"exec": "while True: pass"}, time.monotonic() + 0.1).fault == "timeout"
        assert _eventually(lambda: _below(warm))  # some are forked ahead
        programs = _below(warm)
    assert _eventually(lambda: not any(map(_alive, programs)))


FORGED = {
    "pickle": pickle.dumps({"ok": True}) + b"\n",
    "no object": b"[true]\n",
    "too deep": b"[" * 100_000 + b"\n",
    "no JSON": b"\xff\xfe{}\n",
    "a giant number": b'{"value": ' + b"9" * 100_000 + b"}\n",
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_message_is_a_fault(sandbox: Sandbox, name: str) -> None:
    answer = run(
        sandbox, f"import os\ndata = {FORGED[name]!r}\nwhile data: data = data[os.write(3, data):]\nos._exit(0)"
    )
    assert (answer.fault, dict(answer.message)) == ("ended", {})


def test_result_that_is_no_data_is_an_error(sandbox: Sandbox) -> None:
    class_ = "class P:\n def __reduce__(self): return (print, ('owned',))\n def __eq__(self, other): return True\n"
    with sandbox.program() as program:
        until = time.monotonic() + PATIENCE_S
        assert program.ask({"exec": f"{class_}def f(): return P()\ndef g(): return [P()]"}, until).ok
        for name in "fg":
            answer = program.ask({"call": name, "args": [], "kwargs": {"dict": []}}, until)
            assert answer.message["kind"] == "NotData"


def test_early_exit_is_no_success(sandbox: Sandbox) -> None:
    assert run(sandbox, "import os\nos._exit(0)").fault == "ended"
    assert run(sandbox, "exit(0)").ok
    assert not run(sandbox, "exit(3)").ok
    assert run(sandbox, "import atexit\natexit.register(print, 'late')").output == "late\n"
    assert run(sandbox, "import ctypes\nctypes.string_at(0)").fault == "ended"


def test_without_a_sandbox_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KeelError, match=r"bubblewrap.*sandbox: none"):
        Sandbox(LIMITS)
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no user namespaces' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(KeelError, match=r"no user namespaces.*sandbox: none"):
        Sandbox(LIMITS)


@pytest.mark.parametrize("wrong", [{"sandbox": "docker"}, {"timeout_s": 0}, {"memory_mb": 8}, {"workers": -1}])
def test_limits_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(KeelError):
        SandboxLimits(**wrong)  # type: ignore[arg-type]


def test_a_warm_process_that_died_is_started_again(sandbox: Sandbox) -> None:
    first = sandbox._process.pid
    os.killpg(first, signal.SIGKILL)
    sandbox._process.wait()
    assert run(sandbox, "print(1)").output == "1\n"
    assert sandbox._process.pid != first


@pytest.mark.parametrize("whom", ["bubblewrap", "the warm process", "both"])
def test_no_program_outlives_the_warm_process(whom: str) -> None:
    with Sandbox(SandboxLimits(workers=1)) as sandbox, ThreadPoolExecutor(1) as threads:
        outer = sandbox._process.pid
        program = sandbox.program()
        asked = threads.submit(program.ask, {"exec": "import time\ntime.sleep(999)"}, time.monotonic() + 999)
        (inner,) = _children(outer)
        assert _eventually(lambda: len(_below(inner)) > 1)  # this one, and one that was forked ahead
        started = _below(outer)
        for pid in {"bubblewrap": [outer], "the warm process": [inner], "both": [outer, inner]}[whom]:
            os.kill(pid, signal.SIGKILL)
        if whom == "bubblewrap":
            assert _eventually(lambda: not _alive(outer))
        else:
            assert _eventually(lambda: not any(map(_alive, started)))
        assert run(sandbox, "print(1)").output == "1\n"
        with pytest.raises(Lost):  # a fault of the sandbox, not of the program
            asked.result(PATIENCE_S)
        assert _eventually(lambda: not any(map(_alive, started)))


WRITABLE = """
import os, stat
found = []
for folder, folders, files in os.walk('/'):
    if folder.startswith('/tmp'):
        continue
    for path in (folder, *(os.path.join(folder, name) for name in files)):
        if os.path.exists(path) and not stat.S_ISCHR(os.stat(path).st_mode) and os.access(path, os.W_OK):
            found.append(path)
import sys
for folder in sys.path + [p + '/site-packages' for p in sys.path] + ['/', '/dev']:
    try:
        open(folder + '/left', 'w')
        found.append(folder)
    except OSError:
        pass
print(found)
"""


def test_nothing_is_writable_outside_of_a_programs_folder(sandbox: Sandbox) -> None:
    with sandbox.program() as program:
        assert program.ask({"exec": WRITABLE}, time.monotonic() + PATIENCE_S).output == "[]\n"


def test_an_unconfined_message_is_believed_before_any_program_alone(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = 'import os\nos.write(3, b\'{"unconfined": "owned", "ready": true}\\n\')'
    assert not run(sandbox, forged).ok
    held(sandbox, sandbox._process.pid)
    text = WORKER.read_text().replace("self.libc.capset(header, none)", "-1")
    broken = tmp_path / "worker.py"
    broken.write_text(text)
    monkeypatch.setattr("keel.envs.sandbox.WORKER", broken)
    with Sandbox(LIMITS) as other, pytest.raises(KeelError, match=r"could not be set up: .*capset"):
        other.program()


def test_a_connection_is_shut_though_another_process_has_a_copy(sandbox: Sandbox) -> None:
    program = sandbox.program()
    copy = os.dup(program._channel.fileno())
    try:
        assert program.ask({"exec": "while True: pass"}, time.monotonic() + 0.1).fault == "timeout"
        assert os.read(copy, 1) == b""
    finally:
        os.close(copy)


def test_a_fork_of_keel_ends_nothing_of_its_parent() -> None:
    with Sandbox(SandboxLimits(workers=1)) as sandbox, sandbox.program() as program:
        fork = os.fork()
        if fork == 0:
            program.close()
            sandbox.close()
            os._exit(0)
        assert os.waitpid(fork, 0)[1] == 0
        warm = sandbox._process.pid
        assert program.ask({"exec": "print(2)"}, time.monotonic() + PATIENCE_S).output == "2\n"
        held(sandbox, warm)


def test_a_program_answers_one_request_at_a_time(sandbox: Sandbox) -> None:
    called, go_on = threading.Event(), threading.Event()

    def answer(message: Mapping[str, Any]) -> dict[str, Any]:
        called.set()
        return {"value": go_on.wait(PATIENCE_S)}

    until = time.monotonic() + PATIENCE_S
    with sandbox.program() as program, ThreadPoolExecutor(1) as threads:
        first = threads.submit(program.ask, {"exec": "assert f()", "setup": ""}, until, answer)
        assert called.wait(PATIENCE_S)
        with pytest.raises(RuntimeError):
            program.ask({"exec": "1"}, until)
        go_on.set()
        assert first.result().ok


@pytest.mark.parametrize(
    ("rest", "seconds", "fault"), [("while True: pass", 0.5, "timeout"), ("", 60, "ended"), ("os._exit(0)", 60, None)]
)
def test_a_message_is_no_end(sandbox: Sandbox, rest: str, seconds: float, fault: str | None) -> None:
    with sandbox.program() as program:
        code = f"import os\nprint('x', flush=True)\nos.write(3, b'{{\"ok\": true}}\\n')\n{rest}"
        answer = program.ask({"exec": code, "stdin": ""}, time.monotonic() + seconds)
    assert answer.fault == fault
    assert fault == "timeout" or answer.output == "x\n"


def test_errors_are_apart_from_output_and_threads_are_waited_for(sandbox: Sandbox) -> None:
    answer = run(sandbox, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (answer.output, answer.errors) == ("out\n", "err\n")
    late = "import atexit, threading, time\natexit.register(print, 'exit')\nsaid = threading.Event()\n"
    late += "threading.Thread(target=lambda: (said.wait(), time.sleep(.1), print('thread'))).start()\n"
    late += "print('main')\nsaid.set()"
    assert run(sandbox, late).output == "main\nthread\nexit\n"
    assert run(sandbox, f"{late}\nraise SystemExit(0)").output == "main\nthread\nexit\n"


def test_words_of_a_program_are_short(sandbox: Sandbox) -> None:
    forged = """{"error": "' + 'e' * 10**6 + '", "kind": "' + 'k' * 10**6 + '"}\\n"""
    with sandbox.program() as program:
        code = f"import os\ndata = ('{forged}').encode()\nwhile data: data = data[os.write(3, data):]"
        answer = program.ask({"exec": code}, time.monotonic() + PATIENCE_S)
    assert answer.error == "e" * LONGEST_ERROR
    assert answer.kind == "k" * LONGEST_KIND


def test_a_failed_start_leaks_no_descriptor(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*descriptors: int) -> None:
        raise OSError("no more")

    run(sandbox, "")
    monkeypatch.setattr(sandbox, "fork", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no more"):
        Program(sandbox)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.processes
def test_nothing_outlives_a_killed_keel() -> None:
    code = (
        "import time\nfrom keel.envs.sandbox import SandboxLimits, Sandbox\n"
        "s = Sandbox(SandboxLimits(workers=1))\np = s.program()\n"
        "print(s._process.pid, flush=True)\np.ask({'exec': 'while True: pass'}, time.monotonic() + 999)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as keel:
        assert keel.stdout is not None
        warm = int(keel.stdout.readline())
        assert _eventually(lambda: _below(warm))
        keel.kill()
    assert _eventually(lambda: not _alive(warm))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return parents


def _below(pid: int) -> set[int]:
    """Processes below one."""
    parents = _parents()
    below, count = {pid}, -1
    while len(below) != count:
        count = len(below)
        below |= {child for child, parent in parents.items() if parent in below}
    return below - {pid}


def _status(pid: int) -> dict[str, str]:
    """What the kernel says about a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _eventually(true: object, seconds: float = PATIENCE_S) -> bool:
    until = time.monotonic() + seconds
    while not (held := true()) and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(held)
