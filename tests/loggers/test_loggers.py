"""The loggers beside the run directory, and the fan-out that keeps a broken one from stopping a run."""

from __future__ import annotations

import builtins
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.loggers import JsonlLogger, Logger, MultiLogger, RunDirectory, build_loggers
from keel.loggers.build import TensorBoardLogger, check_loggers, flat_numbers
from keel.loggers.options import LogOptions

METRICS = {
    "reward/mean": 0.5,
    "kl/policy_ref/k1/mean": 0.3,
    "kl/policy_ref/k3/mean": 0.0213,
    "kl/policy_ref/k3/se": 0.0012,
    "kl/beta": 0.01,
    "ratio/clip_low_fraction": 0.01,
    "ratio/clip_high_fraction": 0.025,
    "grad/norm": 1.234,
    "length/mean": 9.5,
    "speed/tokens_per_s": 3123.4,
}
EVALUATION = {"task": "add", "pass@1": 0.62, "pass@k": {"1": 0.62, "8": 0.8}, "ci95": [0.55, 0.69], "n": 64}


class Broken(Logger):
    """Raises from the second step on."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.steps:
            raise RuntimeError("the server is gone")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("gone for closing too")


class Collect(Logger):
    """A user's logger that takes an argument of its own and the run."""

    def __init__(self, run: RunDirectory, prefix: str = "p") -> None:
        self.run, self.prefix, self.seen = run, prefix, []  # type: ignore[var-annotated]

    def event(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        yield directory


def test_a_broken_logger_is_named_once_and_dropped(run):
    broken, collect = Broken(), Collect(run)
    log = MultiLogger(JsonlLogger(run), {"broken": broken, "collect": collect}, clock=lambda: 100.0)
    for step in range(1, 5):
        log.step(step, METRICS)
    assert log.names == ["collect"]
    log.close()
    assert broken.steps == [1]
    assert broken.closed
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 4
    assert events(run.path) == [
        {
            "step": 2,
            "kind": "logger/dropped",
            "time": 100.0,
            "logger": "broken",
            "during": "step",
            "error": "RuntimeError: the server is gone",
        }
    ]
    assert [kind for kind, _ in collect.seen] == ["logger/dropped"]


def test_the_keeper_must_not_fail_silently(run, monkeypatch):
    log = MultiLogger(JsonlLogger(run))

    def fail(*_: object) -> None:
        raise KeelError("the disk is full")

    monkeypatch.setattr(run, "append", fail)
    with pytest.raises(KeelError, match="disk is full"):
        log.step(1, METRICS)


def test_events_get_the_last_step_and_the_time(run):
    log = MultiLogger(JsonlLogger(run), clock=lambda: 7.0)
    log.event("start")
    log.step(3, METRICS)
    log.event("guard/skipped", reason="nan")
    log.event("rollback", step=2)
    assert [(event["step"], event["kind"], event["time"]) for event in events(run.path)] == [
        (0, "start", 7.0),
        (3, "guard/skipped", 7.0),
        (2, "rollback", 7.0),
    ]


def test_flat_numbers():
    record = {"step": 3, **EVALUATION, "reward": math.nan, "ok": True}
    assert flat_numbers(record) == {
        "pass@1": 0.62, "pass@k/1": 0.62, "pass@k/8": 0.8, "ci95/low": 0.55, "ci95/high": 0.69, "n": 64.0,
    }  # fmt: skip


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, round(event.value, 4)) for event in reader.Scalars(tag)]


def test_tensorboard_round_trip_and_resume(tmp_path):
    log = TensorBoardLogger(tmp_path)
    for step in range(1, 6):
        log.step(step, {"reward/mean": step / 10})
    log.evaluation(5, EVALUATION)
    log.close()
    assert scalars(tmp_path, "eval/add/pass@1") == [(5, 0.62)]
    log = TensorBoardLogger(tmp_path, resumed_from=3)
    log.step(4, {"reward/mean": 4.0})
    log.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.0)]


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package or name == f"torch.utils.{package}":
            raise ImportError(f"No module named {package!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_tensorboard_hides_what_a_rollback_gave_up(tmp_path):
    log = TensorBoardLogger(tmp_path)
    for step in range(1, 7):
        log.step(step, {"reward/mean": 1.0})
    log.event("rollback", step=6, to=3, message="back")
    log.step(4, {"reward/mean": 2.0})
    log.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def log_options(**options):
    return LogOptions(console="none", tensorboard=False, **options)


def test_missing_tensorboard_is_recorded_and_left_out(run, monkeypatch):
    without(monkeypatch, "tensorboard")
    log = build_loggers(LogOptions(console="none"), run, total_steps=5)
    assert log.names == []
    assert "keel-rl[tensorboard]" in events(run.path)[0]["message"]


def test_missing_wandb_names_the_extra(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    without(monkeypatch, "wandb")
    with pytest.raises(KeelError, match=r"pip install 'keel-rl\[wandb\]'"):
        build_loggers(log_options(wandb={"project": "p"}), run, total_steps=5)


def test_wandb_offline_keeps_its_id_over_a_resume(run, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "keel-test", "mode": "offline"}
    ids = []
    for _ in range(2):
        log = build_loggers(log_options(wandb=options), run, total_steps=5, name="one", config={"a": 1})
        assert log.names == ["wandb"]
        log.step(1, {**METRICS, "grad/norm": math.nan})
        log.evaluation(1, EVALUATION)
        assert log.names == ["wandb"]
        log.close()
        ids.append(json.loads((run.path / "wandb.json").read_text())["id"])
    assert ids[0] == ids[1]
    assert list(run.path.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    assert not (run.path / "events.jsonl").exists()  # nothing was dropped


def test_wandb_that_cannot_start_is_one_line(run, monkeypatch):
    import wandb

    def fail(**_: object) -> None:
        raise wandb.errors.UsageError("no API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(KeelError, match=r"no API key configured.*mode=offline") as caught:
        build_loggers(log_options(wandb="project"), run, total_steps=5)
    assert "\n" not in str(caught.value)


def make_a_dict():
    return {}


def test_a_class_that_is_no_logger_is_refused_before_there_is_a_run():
    with pytest.raises(KeelError, match="ByShape is not a logger: derive it from"):
        check_loggers(log_options(extra=[f"{__name__}:ByShape"]))


class ByShape:
    step = rollouts = evaluation = event = close = print


def test_build_takes_a_users_logger_and_checks_its_arguments(run):
    name = f"{__name__}:Collect"
    log = build_loggers(log_options(extra=[{"name": name, "prefix": "q"}]), run, total_steps=5)
    assert log.names == [name]
    for spec, message in (
        ("nothing", "is not module:attr"),
        ("no_such_module:Logger", "cannot import"),
        (f"{__name__}:METRICS", "it must be a function or a class"),
        ({"name": name, "prefx": 1}, "did you mean 'prefix'"),
        ("builtins:dict", "is not a logger: derive it from keel.loggers.Logger"),
        (f"{__name__}:make_a_dict", "returned a dict: derive it from keel.loggers.Logger"),
    ):
        with pytest.raises(KeelError, match=message):
            build_loggers(log_options(extra=[spec]), run, total_steps=5)


def test_importing_the_loggers_loads_nothing_heavy():
    import subprocess

    code = (
        "import keel.loggers, keel.lab.report, sys; print([m for m in ('torch', 'rich', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
