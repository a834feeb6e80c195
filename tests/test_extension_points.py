"""Every part that an option names by a string may be the user's own: all of them in one run, from YAML to report."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import keel
import keel.envs
from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.kl.controllers import CONTROLLERS
from keel.loggers import Quiet
from keel.losses import LOSSES
from keel.models.head import evaluating
from keel.models.tiny import tiny_model
from keel.rollout import NativeEngine

HERE = __name__
USED: set[str] = set()


def loader(seed: int = 0):
    USED.add("model loader")
    return tiny_model(seed)


def scorer(model, rows, *, temperature):
    USED.add("scorer")
    out = model(input_ids=rows.tokens, attention_mask=rows.attention_mask, position_ids=rows.position_ids)
    logp = (out.logits[:, :-1].float() / temperature).log_softmax(-1)
    return rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))


class Engine(NativeEngine):
    def generate(self, *args, **options):
        USED.add("engine")
        return super().generate(*args, **options)


class Reference:
    kind = "frozen"
    reset_optimizer = False

    def __init__(self, loaded):
        USED.add("reference")
        self.held = copy.deepcopy(loaded.model)

    @contextmanager
    def model(self):
        with evaluating(self.held):
            yield self.held

    def update(self, policy, step, measured_kl=None):
        return False

    def fingerprint(self):
        return "the user's own"

    def state_dict(self):
        return self.held.state_dict()

    def load_state_dict(self, state):
        self.held.load_state_dict(state)


def estimator(logp, ref_logp):
    USED.add("estimator")
    return (logp - ref_logp).square() / 2


def loss(logp, old_logp, advantage, mask, limits, spec):
    USED.add("loss")
    return LOSSES["grpo"].term(logp, old_logp, advantage, mask, limits, spec)


def controller(beta: float, factor: float = 1.0):
    USED.add("controller")
    return CONTROLLERS["fixed"](beta * factor)


def reward(problem: Problem, text: str) -> float:
    USED.add("reward")
    return sum(c.isdigit() for c in text) / 8


class Logger(Quiet):
    def step(self, step, metrics):
        USED.add("logger")


@dataclass(frozen=True)
class Task(keel.envs.Task):
    name: str = "own"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        USED.add("task")
        return [Problem(f"{seed}/{step}/{i}", f"{step}+{i}=", str(step + i)) for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"{i}-1=", str(i - 1)) for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(turns[-1] == problem.answer))


def settings(folder: Path) -> dict:
    return {
        "run": {"name": "own", "dir": str(folder), "max_steps": 2},
        "model": {"name": f"{HERE}:loader", "scorer": f"{HERE}:scorer", "device": "cpu"},
        "task": {"name": f"{HERE}:Task"},
        "rewards": [{"name": f"{HERE}:reward"}],
        "rollout": {
            "engine": f"{HERE}:Engine",
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_completion_length": 4,
        },
        "reference": {"kind": f"{HERE}:Reference"},
        "kl": {
            "beta": 0.01,
            "estimator": f"{HERE}:estimator",
            "controller": {"name": f"{HERE}:controller", "factor": 2.0},
        },
        "loss": {"loss_type": f"{HERE}:loss"},
        "eval": {"every": 0, "samples": 2, "k": [1]},
        "log": {"console": "none", "tensorboard": False, "extra": [f"{HERE}:Logger"]},
    }


def test_all_of_them_train_in_one_run(tmp_path: Path) -> None:
    USED.clear()
    result = keel.train(load_config(settings(tmp_path)))
    wanted = {"model loader", "scorer", "engine", "reference", "estimator", "loss", "controller", "task", "reward"}
    assert {*wanted, "logger"} == USED
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["kl/beta"] == pytest.approx(0.02) for line in lines)
    assert all(torch.isfinite(torch.tensor(line["loss/total"])) for line in lines)


def test_a_reference_of_ones_own_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    keel.train(load_config(settings(tmp_path)))
    more = load_config(settings(tmp_path), ["run.max_steps=3", "run.if_exists=resume"])
    assert keel.train(more).steps == 3
