"""A run in two processes: stopped, killed and gone on with, or refused, as one process would be."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import keel
from keel.base.types import Problem, Reward
from keel.base.watchdog import KILLED_STATUS
from keel.cli import main
from keel.rollout.native.engine import NativeEngine
from ranks import Ended, run_ranks
from run.test_resume import assert_same, lines
from trainer.small import BASE, Letters

pytestmark = pytest.mark.processes


STEPS = 6


class Lost(Letters):
    """Kills rank 1 when it draws the problems of one step."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if (os.environ["RANK"], os.environ.get("KILL_AT")) == ("1", str(step)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(count, seed=seed, step=step)


def train(folder: Path, resume: bool = False, stop_at: int | None = None) -> int:
    def stop(state: Any, metrics: Any) -> None:
        for _ in range(2 if state.step == stop_at else 0):  # torchrun passes it on, and so may what started torchrun
            os.kill(os.getpid(), signal.SIGTERM)

    overrides = [f"run.dir={folder}", f"run.max_steps={STEPS}", "checkpoint.every=1", "eval.every=2"]
    return keel.train(BASE, task=Lost(), overrides=overrides, resume=resume, callbacks=[stop]).exit_status


def statuses(ended: Sequence[Ended]) -> list[int]:
    return [rank.status for rank in ended]


def test_a_run_stopped_and_killed_and_gone_on_with_equals_the_run_left_alone(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert statuses(run_ranks(train, whole)) == [0, 0]
    assert statuses(run_ranks(train, parts, False, 2)) == [143, 143]
    assert sorted(path.name for path in (parts / "small" / "checkpoints").glob("step-*"))[-1] == "step-2"
    killed = run_ranks(train, parts, True, env={"KILL_AT": "4"})
    assert statuses(killed) == [KILLED_STATUS, -signal.SIGKILL]
    assert "rank 1 of 2 has died" in killed[0].err
    assert f"resume with: keel train --resume {parts / 'small'} --nproc 2" in killed[0].err
    assert statuses(run_ranks(train, parts, True)) == [0, 0]
    assert_same(parts / "small", whole / "small")


class Reporting(NativeEngine):
    """Has something to say after each sync."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, copy=True)
        self.said: list[tuple[str, str]] = []

    def sync(self, policy: Any, version: int | None = None) -> None:
        super().sync(policy, version)
        self.said.append(("sampler/lost", f"version {version}"))

    def events(self) -> list[tuple[str, str]]:
        said, self.said = self.said, []
        return said


def train_reporting(folder: Path) -> int:
    overrides = [f"run.dir={folder}", "run.max_steps=2", "rollout.engine=run.test_ranks:Reporting"]
    return keel.train(BASE, overrides=[*overrides, "rollout.max_staleness=1"]).exit_status


def test_what_happens_to_the_sampler_of_any_rank_is_logged_to_the_last(tmp_path: Path) -> None:
    """The last sync is that of the evaluation after the last step."""
    assert statuses(run_ranks(train_reporting, tmp_path)) == [0, 0]
    events = [event for event in lines(tmp_path / "small", "events.jsonl") if event["kind"] == "sampler/lost"]
    assert [event["message"] for event in events] == [
        "version 1",
        "rank 1: version 1",
        "version 2",
        "rank 1: version 2",
    ]


def fails_on_rank_1(problem: Problem, text: str) -> Reward:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no sandbox here")
    return Reward(1.0)


def command(folder: Path, *options: str) -> int:
    """`keel train` with an option of its own on each rank."""
    config = folder / "config.yaml"
    own = options[int(os.environ["RANK"])] if options else "rewards=[{name: run.test_ranks:fails_on_rank_1}]"
    return main(["train", str(config), f"run.dir={folder}", own])


def test_a_reward_that_fails_on_one_rank_is_one_line_of_that_rank(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(BASE))
    first, second = run_ranks(command, tmp_path)
    assert (first.status, first.err) == (2, "")
    assert second.status == 2
    (line,) = second.err.splitlines()
    assert line.startswith("keel: error: rank 1 of 2: ")
    assert "no sandbox here" in line


def test_ranks_with_different_configurations_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(BASE))
    first, second = run_ranks(command, tmp_path, "kl.beta=0.1", "kl.beta=0.2")
    assert statuses([first, second]) == [2, 2]
    (line,) = (first.err + second.err).splitlines()
    assert line.startswith("keel: error: rank 1 of 2 has kl.beta 0.2, rank 0 has 0.1: ")
    assert not (tmp_path / "small").exists()
