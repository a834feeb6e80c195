"""Runs that sample ahead: killed, stopped, rolled back and extended, they are the run that was left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.base.watchdog import KILLED_STATUS
from keel.base.world import World
from keel.rollout.native.engine import NativeEngine
from ranks import run_ranks
from run.test_ranks import Lost, statuses
from run.test_resume import assert_same, lines, options, train_until_killed
from trainer.small import BASE, Letters

pytestmark = pytest.mark.processes


ONE, TWO = "rollout.max_staleness=1", "rollout.max_staleness=2"
FULL = "parallel.sharding=full"
STEPS = 6


@pytest.fixture(scope="module", params=[ONE, TWO], ids=["1", "2"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return request.param, keel.train(BASE, overrides=options(folder, request.param)).directory


def test_killed_stopped_and_resumed_equals_in_one_go(tmp_path: Path, whole: tuple[str, Path]) -> None:
    staleness, alone = whole
    run = tmp_path / "small"
    train_until_killed(tmp_path, run / "metrics.jsonl", 8, staleness)  # between two checkpoints

    def stop(state: Any, metrics: Any) -> None:
        if state.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = keel.train(BASE, overrides=options(tmp_path, staleness), resume=True, callbacks=[stop])
    assert (stopped.exit_status, stopped.steps) == (143, 13)
    keel.train(BASE, overrides=options(tmp_path, staleness), resume=True)
    assert_same(run, alone)
    ages = [line["staleness/max"] for line in lines(run, "metrics.jsonl")]
    assert ages == [float(min(step, int(staleness[-1]))) for step in range(20)]
    assert not [thread for thread in threading.enumerate() if thread.name == "keel-rollouts"]


def shorter(folder: Path, steps: int, staleness: str) -> list[str]:
    return [f"run.max_steps={steps}", *(option for option in options(folder, staleness) if "max_steps" not in option)]


def test_a_run_that_is_extended_is_the_run_that_never_ended(tmp_path: Path, whole: tuple[str, Path]) -> None:
    staleness, alone = whole
    keel.train(BASE, overrides=shorter(tmp_path, 7, staleness))
    keel.train(BASE, overrides=options(tmp_path, staleness), resume=True)
    assert lines(tmp_path / "small", "metrics.jsonl") == lines(alone, "metrics.jsonl")


def test_it_may_change_when_a_run_is_resumed(tmp_path: Path, whole: tuple[str, Path]) -> None:
    staleness, _ = whole
    keel.train(BASE, overrides=shorter(tmp_path, 4, staleness))
    run = keel.train(BASE, overrides=shorter(tmp_path, 6, "rollout.max_staleness=0"), resume=True).directory
    assert [line["staleness/max"] for line in lines(run, "metrics.jsonl")][4:] == [0.0, 0.0]


def test_a_rollback_gives_up_what_was_sampled_ahead(tmp_path: Path) -> None:
    """The fifth skip in a row, at step 11, takes the run back to step 3; a run killed after that is the same."""
    faults = ["task.name=trainer.faults:poisoned", "checkpoint.best=false", ONE]
    alone = keel.train(BASE, overrides=options(tmp_path / "whole", *faults)).directory
    ages = [line["staleness/max"] for line in lines(alone, "metrics.jsonl")]
    assert ages == [0.0, 1.0, 1.0, 0.0, *[1.0] * 16]
    assert [event["to"] for event in lines(alone, "events.jsonl") if event["kind"] == "rollback"] == [3]
    run = tmp_path / "small"
    train_until_killed(tmp_path, run / "abandoned" / "attempt-0" / "metrics.jsonl", 8, *faults)
    keel.train(BASE, overrides=options(tmp_path, *faults), resume=True)
    assert_same(run, alone)


class Counting(Letters):
    """Letters whose reward fails on one completion of each step after the first, and that counts what it judged."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "judged", [0])

    def counters(self) -> dict[str, float]:
        return {"judged": float(self.judged[0])}

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        self.judged[0] += 1
        if not problem.key.startswith("held") and problem.key.endswith("/1") and not problem.key.startswith("0/0/"):
            raise ValueError(f"no reward in {problem.key}")
        return super().reward(problem, turns)


@pytest.mark.parametrize("staleness", ["rollout.max_staleness=0", ONE, TWO])
def test_failures_and_counts_belong_to_the_step_that_learns_from_them(tmp_path: Path, staleness: str) -> None:
    """Also over evaluations in between, and over a resume whose first rollouts come from the checkpoint."""
    more = [f"run.dir={tmp_path}", staleness, "reward.on_error=zero", "eval.every=1", "checkpoint.every=2"]
    keel.train(BASE, task=Counting(), overrides=[*more, "run.max_steps=2"])
    run = keel.train(BASE, task=Counting(), overrides=[*more, "run.max_steps=5"], resume=True).directory
    assert [line["task/judged"] for line in lines(run, "metrics.jsonl")] == [12.0] * 5
    failures = [event for event in lines(run, "events.jsonl") if event["kind"] == "reward/failed"]
    expected = [(step, f"no reward in 0/{step - 1}/1") for step in range(2, 6) for _ in range(4)]
    assert [(event["step"], event["message"].rpartition(": ")[2]) for event in failures] == expected


class Missing(Letters):
    """Has no problems for the fourth step."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if step == 3:
            raise KeelError("the problems of step 4 are missing: make them")
        return super().sample(count, seed=seed, step=step)


def test_an_error_ahead_ends_the_run_at_its_step_which_can_be_resumed(tmp_path: Path) -> None:
    more = [f"run.dir={tmp_path}", TWO, "run.max_steps=6", "checkpoint.every=1"]
    with pytest.raises(KeelError, match="the problems of step 4 are missing: make them"):
        keel.train(BASE, task=Missing(), overrides=more)
    assert len(lines(tmp_path / "small", "metrics.jsonl")) == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "keel-rollouts"]
    assert keel.train(BASE, overrides=more, resume=True).steps == 6


LATE = """
import sys, time
import keel
from keel.rollout.native.engine import NativeEngine
from keel.trainer import overlap
from trainer.small import BASE

class Late(NativeEngine):
    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer, copy=True)
    def generate(self, *args, step=0, **options):
        if step == 1:
            time.sleep(1.0)
            print("sampled")
        return super().generate(*args, step=step, **options)
    def interrupt(self):
        pass
    def close(self):
        print("closed")

def stop(state, metrics):
    raise KeyError("in a callback")

overlap.GRACE_S = 0.0
sys.modules["late"] = sys.modules["__main__"]
overrides = [f"run.dir={sys.argv[1]}", "rollout.max_staleness=1", "rollout.engine=late:Late", "eval.every=0"]
keel.train(BASE, overrides=overrides, callbacks=[stop])
"""


def test_a_run_that_ends_while_the_thread_samples_lets_it_end(tmp_path: Path) -> None:
    """An interpreter that ends under a thread inside of torch aborts; an engine is not closed under it either."""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LATE, str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (ended.returncode, "in a callback" in ended.stderr) == (1, True)
    assert ended.stdout.splitlines()[-2:] == ["sampled", "closed"]


def train(folder: Path, staleness: str, resume: bool = False, stop_at: int | None = None, *more: str) -> int:
    def stop(state: Any, metrics: Any) -> None:
        if state.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    overrides = [f"run.dir={folder}", f"run.max_steps={STEPS}", "checkpoint.every=1", "eval.every=2", staleness, *more]
    task = Lost() if "RANK" in os.environ else Letters()
    return keel.train(BASE, task=task, overrides=overrides, resume=resume, callbacks=[stop]).exit_status


class Telling(NativeEngine):
    """Sends in a sync too, as one of servers does that ranks share."""

    def __init__(self, model: Any, tokenizer: Any, world: World) -> None:
        super().__init__(model, tokenizer, copy=True)
        self.world = world

    def sync(self, policy: Any, version: int | None = None) -> None:
        assert self.world.all_gather(("sync", version)) == [("sync", version)] * self.world.size
        super().sync(policy, version)


TELLING = "rollout.engine=run.test_overlap:Telling"


@pytest.mark.parametrize(("staleness", "more"), [(ONE, [FULL]), (TWO, [TELLING])], ids=["sharded", "replicated"])
def test_two_ranks_stopped_and_killed_and_gone_on_with(tmp_path: Path, staleness: str, more: list[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert statuses(run_ranks(train, whole, staleness, False, None, *more)) == [0, 0]
    assert statuses(run_ranks(train, parts, staleness, False, 2, *more)) == [143, 143]
    killed = run_ranks(train, parts, staleness, True, None, *more, env={"KILL_AT": "4"})
    assert statuses(killed) == [KILLED_STATUS, -signal.SIGKILL]
    assert statuses(run_ranks(train, parts, staleness, True, None, *more)) == [0, 0]
    assert_same(parts / "small", whole / "small")
    assert train(tmp_path / "one", staleness) == 0
    two, one = (lines(folder / "small", "metrics.jsonl") for folder in (whole, tmp_path / "one"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


class LostProblems(Lost):
    """Fails on rank 1 when it draws the problems of step 3, in the sampler's thread."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if os.environ["RANK"] == "1" and step == 3:
            raise KeelError("no problems here")
        return super().sample(count, seed=seed, step=step)


def fail_ahead(folder: Path, staleness: str) -> int:
    overrides = [f"run.dir={folder}", f"run.max_steps={STEPS}", staleness, "checkpoint.every=1", "eval.every=1"]
    return keel.train(BASE, task=LostProblems(), overrides=overrides).exit_status


@pytest.mark.parametrize("staleness", [ONE, TWO])
def test_an_error_in_the_thread_of_one_rank_ends_all(tmp_path: Path, staleness: str) -> None:
    """Over the checkpoints and evaluations before its step, which wait for what is in flight."""
    first, second = run_ranks(fail_ahead, tmp_path, staleness)
    assert first.status == 2
    assert second.status == 1  # nobody below `keel.train` turns it into a line
    assert "no problems here" in second.err
    assert len(lines(tmp_path / "small", "metrics.jsonl")) == 3
