"""The default configuration in two processes has the metrics of one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import keel
from ranks import run_ranks
from run.test_ranks_resume import lines

pytestmark = pytest.mark.processes


DEFAULT = Path(__file__).resolve().parents[2] / "configs" / "default.yaml"
STEPS = 10
ROUNDING = "loss/kl_share"  # the policy's part of the loss is 0 but for rounding, and of that this is the share


def train(folder: Path, name: str) -> int:
    overrides = [f"run.dir={folder}", f"run.name={name}", f"run.max_steps={STEPS}"]
    overrides += ["warmstart.steps=5", "optim.warmup_steps=5", "rollout.prompts_per_step=12"]
    overrides += ["rewards=[{name: trainer.ranks:hashed_reward}]"]  # so few steps learn no digit: these rewards differ
    overrides += ["eval.every=0", "eval.samples=2", "eval.tasks=[]", "model.device=cpu"]
    overrides += ["log.console=none", "log.tensorboard=false"]
    return keel.train(DEFAULT, overrides=overrides).exit_status


def test_the_default_in_two_processes_has_the_metrics_of_one(tmp_path: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        assert [rank.status for rank in run_ranks(train, tmp_path, name, size=size)] == [0] * size
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == STEPS
    assert len({line["reward/mean"] for line in one}) > 1
    for wanted, got in zip(one, two, strict=True):
        assert got.keys() == wanted.keys()
        for metric, value in wanted.items():
            if metric == ROUNDING:
                continue
            if isinstance(value, float):
                assert math.isclose(got[metric], value, rel_tol=1e-4, abs_tol=1e-4), (wanted["step"], metric)
            else:
                assert got[metric] == value, (wanted["step"], metric)
