"""Every part that an option names by a string may be the user's own: all of them in one run, from YAML to report."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

import keel
import keel.envs
import keel.loggers
from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.kl import CONTROLLERS, ESTIMATORS
from keel.losses import LOSSES
from keel.models.head import evaluating
from keel.models.tiny import tiny_model
from keel.reference.kinds import KINDS
from keel.rollout.native.engine import NativeEngine

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


def loss(inputs, options):
    USED.add("loss")
    return LOSSES["grpo"].term(inputs, options)


def controller(beta: float, factor: float = 1.0):
    USED.add("controller")
    return CONTROLLERS["fixed"](beta * factor)


def reward(problem: Problem, text: str) -> float:
    USED.add("reward")
    return sum(c.isdigit() for c in text) / 8


class Logger(keel.loggers.Logger):
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


def test_validation_writes_into_no_registry(tmp_path: Path) -> None:
    registries = (LOSSES, CONTROLLERS, ESTIMATORS, KINDS)
    before = [dict(registry) for registry in registries]
    load_config(settings(tmp_path))
    assert [dict(registry) for registry in registries] == before
    for registry in registries:
        with pytest.raises(TypeError, match="does not support item assignment"):
            registry["mine"] = None  # type: ignore[index]


@pytest.fixture
def from_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The loss of docs/extending.md as a reader has it: one file, and the line of YAML beside it."""
    page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text().partition("### A loss\n")[2]
    code, section = re.findall(r"```(?:python|text)\n(.*?)```", page, re.S)[:2]
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return section


def with_loss(folder: Path, section: str) -> dict:
    return {**settings(folder), **yaml.safe_load(section)}


def test_a_new_loss_with_its_own_option_is_one_file(tmp_path: Path, from_the_docs: str) -> None:
    runs = {}
    for width in (0.3, 3.0):
        folder = tmp_path / str(width)
        result = keel.train(load_config(with_loss(folder, from_the_docs), [f"loss.width={width}"]))
        assert f"width: {width}" in (result.directory / "config.yaml").read_text()
        lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 2
        runs[width] = [line["grad/norm"] for line in lines]
    assert runs[0.3] != runs[3.0]  # the second pass over a batch sees ratios, and the option acts on them


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("loss.widht=1", "unknown option loss.widht: did you mean loss.width?"),
        ("loss.width=0", "loss.width is 0: it must be above 0"),
        ("loss.width=wide", "loss.width is the text wide: expected a number"),
        ("loss.sapo_temperature_pos=2", "loss.sapo_temperature_pos does not apply to my_losses:spo: leave it out"),
    ],
)
def test_its_options_are_checked_as_keels_own(tmp_path: Path, from_the_docs: str, override: str, says: str) -> None:
    with pytest.raises(KeelError) as caught:
        load_config(with_loss(tmp_path, from_the_docs), [override])
    assert str(caught.value) == says
