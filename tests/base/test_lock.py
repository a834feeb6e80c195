"""One writer a folder: the lock goes with its process, whatever ends it, and not with what the process left behind."""

import errno
import inspect
import os
import runpy
import signal
import subprocess
import sys

import pytest

from keel.base.errors import KeelError
from keel.loggers.rundir import RunLock, is_locked

HOLD = (
    "import sys, time; from pathlib import Path; from keel.loggers.rundir import RunLock; "
    "lock = RunLock(Path(sys.argv[1]));"
)


def start(path, then: str) -> subprocess.Popen:
    """A process that holds the lock, has said so, and waits to be killed."""
    code = f"{HOLD} {then}; print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    path = tmp_path / ".lock"
    holder = start(path, "pass")
    try:
        assert is_locked(path)
        with pytest.raises(KeelError, match=rf"^{tmp_path} is in use by another process \(pid {holder.pid}\); "):
            RunLock(path)
        assert path.read_text() == str(holder.pid)  # neither question touched the holder's file
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert not is_locked(path)
    RunLock(path).release()


def test_a_worker_that_outlives_a_killed_run_does_not_hold_its_lock(tmp_path):
    path = tmp_path / ".lock"
    worker = tmp_path / "worker"
    fork = (  # the worker says that it runs: until then it is a copy of the run, lock and all
        "import os; end, start = os.pipe(); pid = os.fork(); pid or (os.write(start, b'.'), time.sleep(600)); "
        f"os.read(end, 1); open({str(worker)!r}, 'w').write(str(pid))"
    )
    holder = start(path, fork)
    try:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(int(worker.read_text()), 0)  # it is still there
        assert not is_locked(path)
        RunLock(path).release()
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


def test_once_in_a_process(tmp_path):
    path = tmp_path / ".lock"
    lock = RunLock(path)
    with pytest.raises(KeelError, match=rf"^{tmp_path} is already open in this process \(pid {os.getpid()}\)"):
        RunLock(path)
    assert is_locked(path)
    lock.release()
    lock.release()
    assert not is_locked(path)
    RunLock(path).release()


def test_two_who_ask_at_once_do_not_take_each_other_for_the_run(tmp_path):
    import fcntl

    path = tmp_path / ".lock"
    RunLock(path).release()
    with path.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # what the other one holds while it asks
        assert not is_locked(path)


def test_asking_makes_no_file_and_needs_none_to_be_writable(tmp_path):
    path = tmp_path / ".lock"
    assert not is_locked(path)
    assert not path.exists()
    lock = RunLock(path)
    path.chmod(0o444)
    assert is_locked(path)
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_trusted(tmp_path, monkeypatch, code):
    import fcntl

    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = RunLock(tmp_path / ".lock"), RunLock(tmp_path / ".lock")
    assert not is_locked(tmp_path / ".lock")
    first.release()
    second.release()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(KeelError, match=rf"^cannot write {tmp_path}/\.lock: "):
        RunLock(tmp_path / ".lock")


def test_the_lock_can_be_imported_where_there_is_no_fcntl(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert "RunLock" in runpy.run_path(inspect.getfile(RunLock))
