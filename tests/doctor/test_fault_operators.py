"""The fault operators of bench/faults: each changes a configuration that loads, and each has its effect.

Look-alikes must sample and score exactly as Keel's own parts do.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

import pytest
import torch

from doctor.schooled import BASE
from faults import engines, losses, references, rewards, scorers, tools  # noqa: F401
from faults.base import LOOKALIKES, OPERATORS, edited
from keel.base.types import Completion, Problem
from keel.config import load_config
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.losses import LossInputs
from keel.losses.policy import Limits
from keel.losses.recipes import declared_options, get_loss
from keel.models.load import load_model
from keel.models.options import LoadedModel
from keel.models.scorer import ScoreRows
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.registry import build_engine

pytestmark = pytest.mark.doctor


LORA = edited(BASE, {"model.lora": {"r": 4}})
TOOLS = edited(
    BASE,
    {
        "task": {"name": "tools", "task": BASE["task"], "tools": ["faults.school:larger"], "format": "tags"},
        "rollout.max_turns": 3,
    },
)
KINDS = ("engine", "sync", "scorer", "reference", "kl", "loss", "reward", "tool")
OWN = [name for name, operator in OPERATORS.items() if operator.kind in KINDS]
TASK = build_task("arithmetic", skill="max", low=0, high=9)


def of_kind(*kinds: str) -> list[str]:
    return [name for name in OWN if OPERATORS[name].kind in kinds]


@pytest.mark.parametrize("name", [*OWN, *LOOKALIKES])
def test_a_change_loads(name: str) -> None:
    change: Any = OPERATORS.get(name) or LOOKALIKES[name]
    fitting = [base for base in (BASE, LORA, TOOLS) if change.fits(base)]
    assert fitting
    for base in fitting:
        load_config(change.apply(base, Random(0)), [])


# Engines


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("doctor.schooled:schooled_model", device="cpu")


@pytest.fixture(scope="module")
def adapted() -> LoadedModel:
    return load_model("doctor.schooled:schooled_model", device="cpu", lora={"r": 4})


def drawn(config: dict[str, Any], loaded: LoadedModel) -> tuple[list[Completion], list[Completion]]:
    """Completions of a configured engine and of Keel's own, after each of two weight changes."""
    rollout, policy = load_config(config, []).rollout, copy.deepcopy(loaded.model)
    engine, native = build_engine(rollout, policy, loaded.tokenizer), NativeEngine(policy, loaded.tokenizer)
    noise, sampling = torch.Generator().manual_seed(0), SamplingParams.of(rollout)
    requests = [Request(p.key, tuple(loaded.tokenizer.encode(str(p.prompt)))) for p in TASK.sample(4, seed=0, step=0)]
    ours, keels = list[Completion](), list[Completion]()
    for step in (1, 2):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.03 * torch.randn(weight.shape, generator=noise) * weight.requires_grad)
        engine.sync(policy, step)
        ours += chain.from_iterable(engine.generate(requests, sampling, step=step))
        keels += chain.from_iterable(native.generate(requests, sampling, step=step))
    return ours, keels


@pytest.mark.parametrize("name", of_kind("engine", "sync"))
def test_a_broken_engine_returns_something_else(name: str, loaded: LoadedModel, adapted: LoadedModel) -> None:
    operator = OPERATORS[name]
    base, policy = (BASE, loaded) if operator.fits(BASE) else (LORA, adapted)
    ours, keels = drawn(operator.apply(base, Random(0)), policy)
    assert ours != keels


@pytest.mark.parametrize("name", [name for name in LOOKALIKES if name.startswith("engine")])
def test_a_sound_engine_draws_what_keels_draws(name: str, loaded: LoadedModel) -> None:
    ours, keels = drawn(LOOKALIKES[name].apply(BASE, Random(0)), loaded)
    for mine, keel in zip(ours, keels, strict=True):
        assert replace(mine, sample_logp=(), filtered_logp=()) == replace(keel, sample_logp=(), filtered_logp=())
        assert mine.sample_logp == pytest.approx(keel.sample_logp, abs=1e-4)


# Scorers


@pytest.fixture(scope="module")
def rows(loaded: LoadedModel) -> ScoreRows:
    """Three rows of different lengths, padded on the right."""
    encode, end = loaded.tokenizer.encode, loaded.tokenizer.eos_token_id
    pairs = [
        (encode(f"max {a} {b}="), [*encode(text), end]) for a, b, text in ((3, 7, "7"), (12, 4, "12"), (1, 0, "5"))
    ]
    lengths = torch.tensor([len(prompt) + len(completion) for prompt, completion in pairs])
    places = torch.arange(int(lengths.max())).expand(len(pairs), -1)
    tokens = torch.zeros_like(places)
    for row, (prompt, completion) in enumerate(pairs):
        tokens[row, : lengths[row]] = torch.tensor([*prompt, *completion])
    prompts = torch.tensor([len(prompt) for prompt, _ in pairs])
    mask = torch.arange(3) < (lengths - prompts)[:, None]
    return ScoreRows(tokens, (places < lengths[:, None]).long(), places.contiguous(), prompts, mask, mask)


def scored(name: str, rows: ScoreRows, loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities at temperature 0.7, and the gradient of their weighted sum."""
    model = copy.deepcopy(loaded.model).requires_grad_(True)
    logp = getattr(scorers, name)(model, rows, temperature=0.7)
    (logp * torch.linspace(1, 2, logp.numel()).view_as(logp)).sum().backward()
    return logp.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("name", of_kind("scorer"))
def test_a_broken_scorer_has_another_value_or_gradient(name: str, rows: ScoreRows, loaded: LoadedModel) -> None:
    spec = OPERATORS[name].apply(BASE, Random(0))["model"]["scorer"]
    for ours, right in zip(scored(spec.split(":")[1], rows, loaded), scored("right", rows, loaded), strict=True):
        if not torch.allclose(ours, right, atol=1e-5):
            return
    pytest.fail("neither the values nor the gradient differ")


@pytest.mark.parametrize("name", ["left_padded", "in_chunks", "cross_entropy"])
def test_a_sound_scorer_has_the_right_values_and_gradient(name: str, rows: ScoreRows, loaded: LoadedModel) -> None:
    for ours, right in zip(scored(name, rows, loaded), scored("right", rows, loaded), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)


# Losses and rewards


def gradient(config: dict[str, Any], shift: float) -> torch.Tensor:
    """∂loss/∂logp of the configured policy term at a ratio of exp(shift)."""
    loss = load_config(config, []).loss
    old, mask = -torch.linspace(0.1, 2.0, 12).view(4, 3), torch.ones(4, 3, dtype=torch.bool)
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2])[:, None].expand(4, 3)
    logp = (old + shift).requires_grad_(True)
    inputs = LossInputs(logp, old, advantages, mask, Limits(0.2, 0.2, "token"))
    get_loss(loss.loss_type).term(inputs, declared_options(loss)).loss.sum().backward()
    assert logp.grad is not None
    return logp.grad


@pytest.mark.parametrize("name", of_kind("loss"))
def test_a_broken_loss_pushes_otherwise(name: str) -> None:
    config = OPERATORS[name].apply(BASE, Random(0))
    assert any(not torch.allclose(gradient(config, d), gradient(BASE, d), atol=1e-6) for d in (0.0, 0.5, -0.5))


def test_the_sound_loss_pushes_as_grpo_does() -> None:
    config = LOOKALIKES["loss of one's own, equal to grpo"].apply(BASE, Random(0))
    for shift in (0.0, 0.5, -0.5):
        torch.testing.assert_close(gradient(config, shift), gradient(BASE, shift))


def paid(config: dict[str, Any], problem: Problem, text: str) -> float:
    return Judge.of(TASK, config["rewards"]).judge(problem, [[text]])[0].total


@pytest.mark.parametrize("name", [name for name in of_kind("reward") if OPERATORS[name].codes == ("reward/gold",)])
def test_gold_earns_nothing_or_least(name: str) -> None:
    config = OPERATORS[name].apply(BASE, Random(0))
    for problem in TASK.sample(6, seed=0, step=0):
        others = [paid(config, problem, text) for text in "0123456789"]
        assert paid(config, problem, TASK.gold(problem)) <= min(others)


@pytest.mark.parametrize("name", [name for name in of_kind("reward") if OPERATORS[name].codes == ("reward/exploit",)])
def test_a_text_that_answers_nothing_earns_what_gold_earns(name: str) -> None:
    config = OPERATORS[name].apply(BASE, Random(0))
    for problem in TASK.sample(6, seed=0, step=0):
        texts = ("", "0", str(problem.prompt), " ".join(map(str, range(10))))
        assert max(paid(config, problem, text) for text in texts) >= paid(config, problem, TASK.gold(problem))


@pytest.mark.parametrize("name", [name for name in LOOKALIKES if name.startswith("reward")])
def test_a_sound_reward_pays_gold_most_and_repeats_itself(name: str) -> None:
    config = LOOKALIKES[name].apply(BASE, Random(0))
    for problem in TASK.sample(6, seed=0, step=0):
        gold = paid(config, problem, TASK.gold(problem))
        wrong = [paid(config, problem, text) for text in ("", "x", *(d for d in "0123456789" if d != problem.answer))]
        assert gold == paid(config, problem, TASK.gold(problem)) > max(wrong)
