"""What must not matter, over random models, rollouts and configurations.

A completion's scores, gradient and samples do not depend on its neighbours, the order, the microbatches, the batch's
longest row or a resume; the KL penalty acts on every completion, whatever the loss, the placement and the mask.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from keel.base.types import Completion, Group
from keel.config import load_config
from keel.models import scorer
from keel.rollout import Request, SamplingParams
from keel.run.train import run_training
from keel.trainer import batch as batch_module
from keel.trainer.batch import StepBatch, pack_step, score_policy, split
from keel.trainer.state import TrainingRun
from keel.trainer.step import train_step
from metamorphic.worlds import BASE, budget, configure, groups, make_run, options

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:decoding without shared prompts")]
CLOSE = 2e-5  # nats, in fp32


Name = tuple[str, tuple[int, ...], tuple[bool, ...]]


def name_of(group: Group, completion: Completion) -> Name:
    return group.problem.key, completion.tokens, completion.action


def by_completion(batch: StepBatch) -> dict[Name, torch.Tensor]:
    """`old_logp` of each completion, cut to its own length."""
    rows = batch.rows.old_logp
    assert rows is not None
    names = [name_of(group, completion) for group in batch.groups for completion in group.completions]
    return {name: rows[i, : len(name[1])] for i, name in enumerate(names)}


def scored(run: TrainingRun, rollouts: Sequence[Group], budget_tokens: int = 8192) -> dict[Name, torch.Tensor]:
    run.optim = run.optim.model_copy(update={"microbatch_tokens": budget_tokens})
    return by_completion(score_policy(pack_step(rollouts, run), run))


def written_out(run: TrainingRun, group: Group, completion: Completion) -> torch.Tensor:
    """The model's own log-probabilities of one sequence by itself, unpadded, from all of its logits."""
    ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
    with torch.no_grad():
        logits = run.policy.model(ids).logits[0, len(group.prompt_tokens) - 1 : -1] / run.rollout.temperature
    picked = ids[0, len(group.prompt_tokens) :, None]
    return torch.where(torch.tensor(completion.action), logits.log_softmax(-1).gather(-1, picked)[:, 0], 0.0)


@budget(21)
@given(st.integers(0, 200), groups(), st.integers(0, 10), st.sampled_from([6, 25, 60]))
def test_a_score_depends_on_its_own_sequence_alone(seed, rollouts, order, split):
    run, _ = make_run(configure({"run.seed": seed}))
    shuffled = [replace(g, completions=tuple(reversed(g.completions))) for g in rollouts]
    random.Random(order).shuffle(shuffled)
    together = scored(run, rollouts)
    others = [scored(run, shuffled), scored(run, rollouts, split), *(scored(run, [g]) for g in rollouts)]
    for group in rollouts:
        for completion in group.completions:
            name = name_of(group, completion)
            expected = written_out(run, group, completion)
            mask = torch.tensor(completion.action)
            for found in (together, *others):
                if name in found:
                    assert (found[name] - expected)[mask].abs().max() < CLOSE, run.policy.model.config.model_type


def step_gradient(run: TrainingRun, state: Any) -> tuple[torch.Tensor, StepBatch]:
    """The gradient of the step's first update, and its batch."""
    seen: list[torch.Tensor] = []
    inner = run.optimizer.step

    def spy(total: float = 0.0, **guard: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten().clone() for p in run.optimizer.parameters if p.grad is not None]))
        return inner(total, **guard)

    run.optimizer.step = spy  # type: ignore[method-assign]
    return seen[0] if (batch := train_step(run, state).batch) and seen else torch.zeros(1), batch


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool((first - second).norm() <= 1e-4 * max(first.norm(), second.norm()) + 1e-6)


@budget(8)
@given(options(), groups(), st.integers(0, 10))
def test_a_gradient_does_not_depend_on_order_or_microbatches(chosen, rollouts, order):
    shuffled = []
    for group in rollouts:
        pairs = list(zip(group.completions, group.rewards, strict=True))
        random.Random(order).shuffle(pairs)
        said, earned = zip(*pairs, strict=True)
        shuffled.append(replace(group, completions=said, rewards=earned))
    random.Random(order + 1).shuffle(shuffled)
    size = {"rollout.num_generations": len(rollouts[0].completions)}
    config = configure(chosen, **size)
    found, _ = step_gradient(*make_run(config, rollouts))
    assert found.isfinite().all()
    assert same(found, step_gradient(*make_run(config, shuffled))[0])
    for tokens in (7, 8192):
        split = configure({**chosen, **size, "optim.microbatch_tokens": tokens})
        assert same(found, step_gradient(*make_run(split, rollouts))[0])


@budget(12)
@given(options(), groups(), st.integers(1, 200), st.booleans(), st.integers(1, 64))
def test_a_step_is_the_same_however_memory_cuts_it(chosen, rollouts, fitting, even, chunk):
    config = configure(chosen, **{"rollout.num_generations": len(rollouts[0].completions)})

    def cut(groups: Sequence[Group], budget: int, *, shared_prefix: bool, **_: Any) -> list[list[Group]]:
        return split(groups, budget, shared_prefix=shared_prefix, even=even)

    def step(fitting_tokens: int | None) -> tuple[torch.Tensor, dict[str, float]]:
        run, state = make_run(config, rollouts)
        run.fitting_tokens = fitting_tokens
        gradients: list[torch.Tensor] = []
        update = run.optimizer.step

        def spy(info: Any, **guard: Any) -> Any:
            gradients.append(torch.cat([p.grad.flatten() for p in run.optimizer.parameters if p.grad is not None]))
            return update(info, **guard)

        run.optimizer.step = spy  # type: ignore[method-assign]
        timed = ("time/", "speed/", "memory/")
        metrics = train_step(run, state).metrics
        return gradients[0], {name: value for name, value in metrics.items() if not name.startswith(timed)}

    gradient, metrics = step(None)
    with patch.object(batch_module, "split", cut), patch.object(scorer, "default_chunk", lambda *_: chunk):
        other_gradient, other_metrics = step(fitting)
    assert same(gradient, other_gradient)
    assert other_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4, nan_ok=True)


MASKS: dict[str, dict[str, Any]] = {
    "all stay": {},
    "too far": {"kl.collect_max": 1e-6},
    "truncated": {"loss.mask_truncated_completions": True},
    "no signal": {"loss.dynamic_sampling": True, "loss.dynamic_sampling_rounds": 1},
}


@budget(8)
@given(options(), groups(), st.sampled_from([name for name in MASKS if name != "all stay"]))
def test_the_penalty_is_the_same_whatever_leaves_the_policy_term(chosen, rollouts, reason):
    """∇(β = 0.5) − ∇(β = 0), with and without the mask; in the reward σ would depend on β, so it is switched off."""
    size = {"rollout.num_generations": len(rollouts[0].completions)}
    if chosen["kl.placement"] == "reward":
        chosen = {**chosen, "loss.scale_rewards": "none"}
    if reason == "no signal":
        assume(chosen["loss.baseline"] != "none")

    def penalty(**mask: Any) -> torch.Tensor:
        with_it, batch = step_gradient(*make_run(configure(chosen, **size, **mask), rollouts))
        without, _ = step_gradient(*make_run(configure(chosen, **size, **mask, **{"kl.beta": 0}), rollouts))
        masked.append(batch.rows.policy_mask is not None)
        return with_it - without

    masked: list[bool] = []
    inside, outside = penalty(), penalty(**MASKS[reason])
    assert not masked[0]
    assert inside.norm() > 1e-6
    assert same(inside, outside)


@budget(10)
@given(options(), groups(), st.sampled_from(list(MASKS)))
def test_the_penalty_acts_on_every_completion(chosen, rollouts, reason):
    """∂loss/∂logp of each completion by itself moves with β, so none is exempt."""
    size = {"rollout.num_generations": len(rollouts[0].completions)}
    if reason == "no signal":
        assume(chosen["loss.baseline"] != "none")
    assume(not chosen["kl.estimator"].startswith("exact"))  # whose gradient does not go through logp alone

    def slopes(beta: float) -> torch.Tensor:
        run, state = make_run(configure(chosen, **size, **MASKS[reason], **{"kl.beta": beta}), rollouts)
        seen: list[torch.Tensor] = []
        from keel.trainer import step as step_module

        inner = step_module.score_micro

        def spy(micro: Any, batch: StepBatch, run: TrainingRun) -> Any:
            scores = inner(micro, batch, run)
            if scores.logp.requires_grad:
                scores.logp.retain_grad()
                seen.append(scores.logp)
            return scores

        step_module.score_micro = spy
        try:
            train_step(run, state)
        finally:
            step_module.score_micro = inner
        width = max(part.shape[1] for part in seen)
        return torch.cat([torch.nn.functional.pad(part.grad, (0, width - part.shape[1])) for part in seen])

    moved = ((slopes(0.5) - slopes(0.0)).abs().sum(-1) > 0).reshape(len(rollouts), -1)
    if chosen["kl.placement"] == "reward" and chosen["loss.baseline"] != "none":
        # against its group's mean one penalty may be nothing, and all are where a group says one thing only
        differ = [len({name_of(group, said) for said in group.completions}) > 1 for group in rollouts]
        assert bool(moved.any(-1)[torch.tensor(differ)].all())
    else:
        assert bool(moved.all())


@budget(10)
@given(st.integers(0, 200), st.integers(1, 5), st.sampled_from([2, 5, 64]), st.sampled_from([0.8, 1.0]))
def test_a_sample_depends_on_its_own_prompt_and_noise_alone(seed, count, max_batch, temperature):
    run, _ = make_run(configure({"run.seed": seed}))
    sampling = SamplingParams(temperature=temperature, num_generations=3, max_completion_length=14)
    draw = random.Random(seed)
    requests = [Request(f"p{i}", [draw.randint(3, 60) for _ in range(draw.randint(1, 20))]) for i in range(count)]
    together = dict(zip((r.key for r in requests), run.engine.generate(requests, sampling, seed=seed), strict=True))
    few = replace(sampling, max_batch=max_batch)
    backwards = list(reversed(requests))
    limited = dict(zip((r.key for r in backwards), run.engine.generate(backwards, few, seed=seed), strict=True))
    for request in requests:
        (alone,) = run.engine.generate([request], sampling, seed=seed)
        for found in (together[request.key], limited[request.key]):
            for one, other in zip(alone, found, strict=True):
                assert one.tokens == other.tokens
                assert torch.allclose(torch.tensor(one.sample_logp), torch.tensor(other.sample_logp), atol=1e-4)
        for completion in alone:
            bare = Group(run.task.sample(1, seed=0, step=0)[0], request.tokens, (completion,))
            run.rollout = run.rollout.model_copy(update={"temperature": temperature})
            expected = written_out(run, bare, completion)
            assert torch.allclose(torch.tensor(completion.sample_logp), expected, atol=1e-4)


@budget(8)
@given(options(updates=True), st.sampled_from(list(MASKS)))
def test_what_the_configuration_accepts_runs(chosen, reason):
    if reason == "no signal":
        assume(chosen["loss.baseline"] != "none")
    run, state = make_run(configure(chosen, **MASKS[reason]))
    for _ in range(2):
        state, metrics, _ = train_step(run, state)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["guard/skipped"] == 0.0


TIMED = ("time/", "speed/", "memory/")


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith(TIMED)} for record in records]


@budget(3)
@given(options(updates=True), st.sampled_from(["constant", "linear", "cosine"]))
def test_a_resumed_run_is_the_run_that_never_stopped(chosen, schedule):
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        given_ = [f"{option}={value}" for option, value in {**chosen, "optim.schedule": schedule}.items()]
        decay = [] if schedule == "constant" else ["optim.decay_steps=3"]

        def train(where: str, steps: int, **more: Any) -> Path:
            overrides = [*given_, *decay, f"run.dir={folder / where}", f"run.max_steps={steps}"]
            return run_training(load_config(BASE, overrides), **more).directory  # without findings and report

        whole = train("whole", 3)
        train("parts", 1)
        parts = train("parts", 3, resume=True)
        assert lines(parts, "metrics.jsonl") == lines(whole, "metrics.jsonl")
        trained = [[r for r in lines(run, "rollouts.jsonl") if not r["tracked"]] for run in (parts, whole)]
        assert trained[0] == trained[1]  # the end of the first part has its own comparison of held-out problems
