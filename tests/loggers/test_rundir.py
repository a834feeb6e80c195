"""The run directory under everything that can happen to it: kills, locks, full disks, resumes."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from keel.base import files as files_module
from keel.base.errors import KeelError
from keel.loggers import JsonlLogger, RunDirectory
from keel.loggers.rundir import RunLock, is_locked

WRITER = """
import sys
from keel.loggers import JsonlLogger, RunDirectory
with RunDirectory.create(sys.argv[1]) as run:
    log = JsonlLogger(run)
    step = 0
    while True:
        step += 1
        log.step(step, {"reward/mean": step / 7})
        log.rollouts(step, [{"completion": "x" * 5000}])
        if step == 20:
            print("going", flush=True)
"""


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_writer(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "going\n"
    return writer


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def test_lines_and_files_round_trip(tmp_path):
    with RunDirectory.create(tmp_path / "deep" / "run") as run:
        log = JsonlLogger(run)
        log.step(1, {"reward/mean": 0.5, "kl/beta": np.float32(0.25)})
        log.rollouts(1, [{"problem": "a", "completion": "né\u2028\n</script>", "kl": [0.5, None]}, {"problem": "b"}])
        log.evaluation(1, {"task": "add", "pass@1": 0.75, "ci95": (0.5, 0.9)})
        log.event("resume", step=1, time=12.5, dropped=3)
        run.write_json("summary.json", {"steps": 1, "kl": {"k3": {"mean": math.inf}}})
        run.write_json("findings.json", [])
        assert run.read_json("findings.json") == []
        assert run.read_json("env.json") is None
    path = tmp_path / "deep" / "run"
    assert lines(path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "kl/beta": 0.25}]
    written = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().split("\n")[:-1]]
    assert written[0] == {"step": 1, "problem": "a", "completion": "né\u2028\n</script>", "kl": [0.5, None]}
    assert lines(path / "eval.jsonl") == [{"step": 1, "task": "add", "pass@1": 0.75, "ci95": [0.5, 0.9]}]
    assert lines(path / "events.jsonl") == [{"step": 1, "kind": "resume", "time": 12.5, "dropped": 3}]
    summary = json.loads((path / "summary.json").read_text())
    assert summary == {"steps": 1, "kl": {"k3": {"mean": None}}, "nonfinite": ["kl.k3.mean"]}
    assert not [name for name in os.listdir(path) if name.endswith(".tmp")]


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        JsonlLogger(run).step(3, {"grad/norm": math.nan, "loss/total": -math.inf, "reward/mean": 1.0})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {
        "step": 3,
        "grad/norm": None,
        "loss/total": None,
        "reward/mean": 1.0,
        "nonfinite": ["grad/norm", "loss/total"],
    }


def test_half_a_character_in_a_token_is_kept_as_an_escape(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        JsonlLogger(run).rollouts(1, [{"tokens": ["\ud83d", "ok"]}])
    assert lines(tmp_path / "run" / "rollouts.jsonl")[0]["tokens"] == ["\ud83d", "ok"]


def test_a_torn_last_line_is_cut_on_reopening_and_nothing_else(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        for step in range(1, 4):
            JsonlLogger(run).step(step, {"reward/mean": 0.1})
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 4, "rewa')
    with RunDirectory.resume(tmp_path / "run") as run:
        assert path.read_bytes() == whole
        JsonlLogger(run).step(4, {"reward/mean": 0.2})
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [70_000, 200_000])
def test_a_torn_line_longer_than_the_search_block_is_cut(tmp_path, size):
    with RunDirectory.create(tmp_path / "run") as run:
        JsonlLogger(run).step(1, {"reward/mean": 0.1})
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    for intact in (whole, b""):
        path.write_bytes(intact + b"x" * size)
        RunDirectory.resume(tmp_path / "run").close()
        assert path.read_bytes() == intact


def test_resume_cuts_lines_past_the_checkpoint_and_counts_them(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        log = JsonlLogger(run)
        log.evaluation(0, {"task": "add"})
        for step in range(1, 8):
            log.step(step, {"reward/mean": step / 10})
            log.rollouts(step, [{"completion": "a"}, {"completion": "b"}])
        log.evaluation(6, {"task": "add"})
        log.event("guard", step=7, time=1.0)
        log.event("note", time=1.0)
    with RunDirectory.resume(tmp_path / "run") as run:
        dropped = run.truncate_after(5)
        JsonlLogger(run).step(6, {"reward/mean": 0.6})
    assert dropped == {"metrics.jsonl": 2, "rollouts.jsonl": 4, "eval.jsonl": 1, "events.jsonl": 1}
    path = tmp_path / "run"
    assert [line["step"] for line in lines(path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(path / "eval.jsonl")] == [0]
    assert [line["step"] for line in lines(path / "events.jsonl")] == [None]
    with RunDirectory.resume(path) as run:
        assert run.truncate_after(-1)["eval.jsonl"] == 1
        assert (path / "metrics.jsonl").read_bytes() == b""


def test_what_a_rollback_gives_up_moves_aside_and_its_events_stay(tmp_path):
    path = tmp_path / "run"
    with RunDirectory.create(path) as run:
        log = JsonlLogger(run)
        for step in range(1, 7):
            log.step(step, {"reward/mean": step / 10})
            log.event("guard/skipped", step=step, time=1.0)
        before = (path / "metrics.jsonl").read_bytes()
        for _ in range(2):  # the second time, as after a kill, changes nothing
            folder = run.set_aside(4, attempt=0)
            assert (path / "metrics.jsonl").read_bytes() + (folder / "metrics.jsonl").read_bytes() == before
        assert not (folder / "eval.jsonl").exists()
        log.event("rollback", step=6, time=2.0)
        log.step(5, {"reward/mean": 0.55})
        log.event("checkpoint", step=5, time=3.0)
        assert [line["step"] for line in lines(path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    with RunDirectory.resume(path) as run:
        dropped = run.truncate_after(4)
    assert (dropped["metrics.jsonl"], dropped["events.jsonl"]) == (1, 1)
    assert [line["kind"] for line in lines(path / "events.jsonl")] == ["guard/skipped"] * 6 + ["rollback"]
    with RunDirectory.create(path, overwrite=True):
        assert not (path / "abandoned").exists()


def test_kill_9_of_a_real_writer_leaves_whole_lines_and_a_free_lock(tmp_path):
    path = tmp_path / "run"
    for trial in range(3):
        writer = start_writer(path / str(trial))
        time.sleep(0.02 * trial)
        end(writer)
        with RunDirectory.resume(path / str(trial)) as run:
            steps = [line["step"] for line in lines(run.path / "metrics.jsonl")]
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) >= 20
            assert len(lines(run.path / "rollouts.jsonl")) in (len(steps), len(steps) - 1)


def test_a_directory_in_use_is_refused_with_the_pid(tmp_path):
    path = tmp_path / "run"
    writer = start_writer(path)
    try:
        assert is_locked(path / ".lock")
        for opening in (RunDirectory.resume, RunDirectory.create):
            with pytest.raises(KeelError, match=rf"in use by another process \(pid {writer.pid}\)") as caught:
                opening(path)
            assert "\n" not in str(caught.value)
    finally:
        end(writer)
    assert not is_locked(path / ".lock")
    RunDirectory.resume(path).close()  # the stale pid in the file is no obstacle


def test_the_same_process_cannot_open_a_run_twice_and_asking_keeps_the_lock(tmp_path):
    path = tmp_path / "run"
    code = "import sys; from keel.loggers import RunDirectory; RunDirectory.resume(sys.argv[1])"
    with RunDirectory.create(path) as run:
        run.write_text("config.yaml", "a: 1\n")
        assert is_locked(path / ".lock")
        with pytest.raises(KeelError, match="already open in this process"):
            RunDirectory.resume(path)
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert f"pid {os.getpid()}" in other.stderr
    RunDirectory.resume(path).close()


def test_an_existing_run_is_refused_and_left_alone_unless_overwritten(tmp_path):
    path = tmp_path / "run"
    with RunDirectory.create(path) as run:
        JsonlLogger(run).step(1, {"reward/mean": 0.1})
        (run.checkpoints / "step-1").mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(KeelError, match=r"unfinished run .*--resume.*run\.name.*run\.if_exists=replace"):
        RunDirectory.create(path)
    assert len(lines(path / "metrics.jsonl")) == 1
    (path / "summary.json").write_text("{}")
    with pytest.raises(KeelError, match="a finished run"):
        RunDirectory.create(path)
    with RunDirectory.create(path, overwrite=True) as run:
        assert not (path / "metrics.jsonl").exists()
        assert not any(run.checkpoints.iterdir())
        assert (path / "notes.txt").read_text() == "mine"


def test_a_run_that_never_got_to_a_step_may_be_started_again(tmp_path):
    for _ in range(2):
        with RunDirectory.create(tmp_path / "run") as run:
            run.write_text("config.yaml", "a: 1\n")
            JsonlLogger(run).event("start", step=0, time=1.0)


def test_resume_of_nothing_is_refused(tmp_path):
    with pytest.raises(KeelError, match="no run to resume"):
        RunDirectory.resume(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_full_disk_is_one_line_and_leaves_no_torn_line(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with RunDirectory.create(path) as run:
        log = JsonlLogger(run)
        log.step(1, {"reward/mean": 0.1})
        write, calls = os.write, []

        def full(handle: int, data: bytes) -> int:
            calls.append(data)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(handle, data[:5])  # as a real disk does: part of it fits

        monkeypatch.setattr(files_module.os, "write", full)
        with pytest.raises(KeelError, match="disk is full") as caught:
            log.step(2, {"reward/mean": 0.2})
        assert "\n" not in str(caught.value)
        assert "metrics.jsonl" in str(caught.value)
        monkeypatch.undo()
        log.step(2, {"reward/mean": 0.3})
    assert [line["reward/mean"] for line in lines(path / "metrics.jsonl")] == [0.1, 0.3]


def test_a_failed_whole_file_leaves_the_old_one(tmp_path, monkeypatch):
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_json("summary.json", {"steps": 1})

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files_module.os, "fsync", full)
        with pytest.raises(KeelError, match="disk is full"):
            run.write_json("summary.json", {"steps": 2})
        monkeypatch.undo()
        assert run.read_json("summary.json") == {"steps": 1}
        assert not list(run.path.glob(".*.tmp"))


def test_dev_full_refuses_like_a_full_disk(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        (run.path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(KeelError, match="disk is full"):
            JsonlLogger(run).step(1, {"reward/mean": 0.1})


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KeelError, match="cannot create the run directory"):
        RunDirectory.create(tmp_path / "file" / "run")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(KeelError, match="no permission to write there"):
            RunDirectory.create(tmp_path / "closed" / "run")


def test_sync_and_close_can_be_repeated(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    JsonlLogger(run).step(1, {"reward/mean": 0.1})
    run.sync()
    run.close()
    run.close()


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
