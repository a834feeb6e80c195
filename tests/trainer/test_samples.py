"""Steps on samples that the policy did not draw: of older weights, of a filtered distribution, of a silent engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.base.types import Completion, Group
from keel.envs.curriculum import Curriculum
from keel.kl import KLState
from keel.kl.measure import controlled_kl
from keel.run.build import build_policy, build_run
from keel.trainer.batch import pack_step, score_policy, score_reference
from keel.trainer.records import measure_final
from keel.trainer.sample import sample_groups, wait_for_sampler
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import Step, train_step
from keel.trainer.summary import summarise
from trainer.small import small_config

SAMPLER_KL = {"kl/sampler_policy/k1/mean", "kl/sampler_policy/k3/mean"}


def make(*overrides: str) -> tuple[TrainingRun, State]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    return run, State(kl=run.controller.init())


def with_completions(groups: Sequence[Group], change: Callable[[Completion], Completion]) -> list[Group]:
    return [replace(group, completions=tuple(map(change, group.completions))) for group in groups]


def samples_of_the_start(run: TrainingRun, state: State, *, stale: bool) -> Step:
    """Two steps, then one on what the weights before them have sampled."""
    problems = run.task.sample(run.rollout.prompts_per_step, seed=5, step=0)
    early = run.collect(problems, attempt=0, step=0)
    for _ in range(2):
        state = train_step(run, state).state
    run.collect = lambda *_, **__: early  # type: ignore[assignment]
    run.rollout = run.rollout.model_copy(update={"max_staleness": 2 if stale else 0})
    return train_step(run, state)


def test_stale_samples_are_measured_and_steered_as_the_policy_is_now() -> None:
    run, state = make("kl.exact=true", "kl.controller.name=ziegler", "kl.controller.target=0.1")
    _, metrics, batch = samples_of_the_start(run, state, stale=True)
    rows = batch.rows
    assert rows.stale
    mask = rows.action_mask
    weights = (rows.old_logp - rows.sample_logp).exp()[mask].double()  # type: ignore[operator]
    u = (rows.old_logp - rows.ref_logp)[mask].double()  # type: ignore[operator]
    assert weights.std() > 0.05
    assert metrics["kl/policy_ref/k1/mean"] == pytest.approx((weights * u).mean().item(), rel=1e-4)
    k3 = torch.expm1(-u) + u
    assert metrics["kl/policy_ref/k3/mean"] == pytest.approx((weights * k3).mean().item(), rel=1e-4)
    assert metrics["mismatch/ess"] == pytest.approx((weights.mean() ** 2 / weights.square().mean()).item(), rel=1e-5)
    exact = batch.scores.exact_kl[mask].double().mean().item()  # type: ignore[union-attr, index]
    assert metrics["kl/policy_ref/exact/mean"] == pytest.approx(exact, rel=1e-6), "of a state: no token is drawn"
    assert run.controller.unit == "per_sequence"
    assert controlled_kl(metrics, run.controller.unit) == pytest.approx(
        (weights * u).sum().item() / len(mask), rel=1e-4
    )
    assert metrics["kl/policy_ref/prefix_gap/mean"] != 0.0
    assert metrics["kl/policy_ref/prefix_gap/se"] > 0.0


def test_fresh_samples_are_measured_without_weights() -> None:
    run, state = make()
    _, metrics, batch = samples_of_the_start(run, state, stale=False)
    rows = batch.rows
    u = (rows.old_logp - rows.ref_logp)[rows.action_mask].double()  # type: ignore[operator]
    assert metrics["kl/policy_ref/k1/mean"] == pytest.approx(u.mean().item(), rel=1e-6)
    assert not any("prefix_gap" in name for name in metrics)


@pytest.mark.parametrize("known", [True, False])
def test_the_kept_mass_is_what_the_filter_leaves_of_the_policy(known: bool) -> None:
    """Against the sum of the three likeliest probabilities of the model's own logits, at every state."""
    run, state = make("rollout.top_k=3", "optim.learning_rate=1e-30")
    if not known:  # an engine of `logp_after_filters`
        inner = run.collect

        def silent(*args: Any, **options: Any) -> Any:
            unknown = tuple(math.nan for _ in range(64))
            return with_completions(inner(*args, **options), lambda c: replace(c, sample_logp=unknown[: len(c.tokens)]))

        run.collect = silent  # type: ignore[assignment]
    _, metrics, batch = train_step(run, state)
    measured = {name for name in metrics if name.startswith(("rollout/kept_mass/", "kl/sampler_policy/"))}
    assert measured == ({f"rollout/kept_mass/{n}" for n in ("mean", "min")} | SAMPLER_KL if known else set())
    masses = []
    for group in batch.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            with torch.no_grad():
                logits = run.policy.model(ids).logits[0, len(group.prompt_tokens) - 1 : -1]
            masses.append(logits.softmax(-1).topk(3).values.sum(-1))
    mass = torch.cat(masses)
    if known:
        assert metrics["rollout/kept_mass/mean"] == pytest.approx(mass.mean().item(), rel=1e-4)
        assert metrics["rollout/kept_mass/min"] == pytest.approx(mass.min().item(), rel=1e-4)
    assert metrics["mismatch/unreported_fraction"] == 0.0
    rows, names = batch.rows, ("old_logp", "ref_logp", "filtered_logp")
    old, ref, filtered = (getattr(rows, name)[rows.action_mask] for name in names)
    weighted = ((old - filtered).exp() * (old - ref)).mean().item()
    assert metrics["kl/policy_ref/k1/mean"] == pytest.approx(weighted, abs=1e-6)


def test_stale_samples_of_filters_have_no_prefix_gap() -> None:
    """What the filters cut, products of weights over the prefixes do not bring back."""
    run, state = make("rollout.top_k=3")
    _, metrics, _ = samples_of_the_start(run, state, stale=True)
    assert "kl/policy_ref/sequence/mean" in metrics
    assert not any("prefix_gap" in name for name in metrics)


@pytest.mark.parametrize(
    ("options", "unknown", "unreported"),
    [
        (("loss.mismatch.level=sequence", "kl.beta=0"), "filtered_logp", False),
        (("loss.mismatch.level=sequence", "kl.beta=0"), "sample_logp", True),
        (("loss.mismatch.level=sequence",), "filtered_logp", True),
        ((), "sample_logp", False),
        (("kl.level=sequence", "kl.estimator=k1"), "filtered_logp", True),
        (("kl.level=sequence", "kl.estimator=k1"), "sample_logp", True),
    ],
)
def test_a_token_is_unreported_where_any_term_would_read_it(
    options: tuple[str, ...], unknown: str, unreported: bool
) -> None:
    run, _ = make("rollout.top_k=3", *options)
    groups = run.collect(run.task.sample(2, seed=5, step=0), attempt=0, step=0)
    groups = with_completions(groups, lambda c: replace(c, **{unknown: (math.nan, *getattr(c, unknown)[1:])}))
    batch = pack_step(groups, run)
    assert batch.unreported == (pytest.approx(8 / int(batch.rows.action_mask.sum())) if unreported else 0.0)
    assert unknown not in batch.reported


def test_the_final_policy_is_measured_on_fresh_samples() -> None:
    run, state = make("rollout.max_staleness=1")
    with closing(run):
        state = train_step(run, train_step(run, state).state).state
        wait_for_sampler(run, state)
        measured = measure_final(run, state)
        batch = score_policy(
            score_reference(pack_step(sample_groups(run, run.collect, 0, 2, Curriculum()).groups, run), run), run
        )
    rows = batch.rows
    u = (rows.old_logp - rows.ref_logp)[rows.action_mask].double()  # type: ignore[operator]
    assert measured["kl/policy_ref/k1/mean"] == pytest.approx(u.mean().item(), rel=1e-9)
    assert not any("prefix_gap" in name for name in measured)


def test_an_engine_that_reports_nothing_is_counted_and_cannot_be_stale() -> None:
    run, state = make()
    inner = run.collect

    def first_unknown(*args: Any, **options: Any) -> Any:
        groups = inner(*args, **options)
        return with_completions(groups, lambda c: replace(c, sample_logp=(math.nan, *c.sample_logp[1:])))

    run.collect = first_unknown  # type: ignore[assignment]
    _, metrics, batch = train_step(run, state)
    assert metrics["mismatch/unreported_fraction"] == pytest.approx(12 / int(batch.rows.action_mask.sum()))
    run.rollout = run.rollout.model_copy(update={"max_staleness": 1})
    with pytest.raises(
        KeelError, match=r"rollout\.max_staleness=1 needs .*rollout\.engine=native reports none"
    ) as caught:
        train_step(run, state)
    assert "\n" not in str(caught.value)


def record(split: str, value: float) -> dict[str, object]:
    return {"task": "countdown", "split": split, "pass@1": value, "ci95": [value, value]}


def test_a_retention_task_of_the_same_name_does_not_take_its_place() -> None:
    state = State(
        kl=KLState(beta=0.0, base=0.0),
        before=(record("trained", 0.1), record("retention", 0.7)),
        evaluated=(record("trained", 0.2), record("retention", 0.9)),
    )
    summary = summarise("countdown", state)
    assert (summary["accuracy"]["before"], summary["accuracy"]["after"]) == (0.1, 0.2)
    assert summary["retention"] == {"countdown": {"before": 0.7, "after": 0.9}}
