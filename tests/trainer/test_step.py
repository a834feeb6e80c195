"""One step: what it computes, what it measures, and what it leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from keel.base.types import Problem
from keel.kl import advantage_penalty
from keel.losses import mismatch_weights
from keel.losses.objective import kl_values, objective
from keel.run.build import build_policy, build_run
from keel.trainer import step as step_module
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step, with_advantages
from trainer.small import small_config

NAMES = """reward/mean reward/std reward/penalized reward/part/letters reward/within_group_std
reward/zero_variance_fraction loss/total loss/policy loss/kl loss/kl_share kl/policy_ref/sequence/mean
kl/policy_ref/overlap
kl/sampler_policy/k1/mean kl/sampler_policy/k3/mean kl/old_policy/k3/mean kl/beta kl/clamped_fraction
kl/rejected_fraction logp/policy_mean logp/ref_mean logp/sampler_gap_max entropy/mean ratio/clip_low_fraction
ratio/clip_high_fraction ratio/max ratio/ess mismatch/ess mismatch/capped_fraction
mismatch/unreported_fraction grad/norm grad/clip_factor optim/learning_rate guard/skipped
guard/rollbacks guard/nonfinite guard/spike guard/over_budget kl/policy_ref/sequence/se kl/policy_ref/sequence/p95
length/mean length/max length/truncated_fraction prompt/truncated_fraction parse/ok_fraction
time/rollout_s time/score_s time/update_s time/sync_s time/total_s time/trainer_wait_s time/sampler_wait_s
speed/tokens_per_s memory/peak_gib staleness/mean staleness/max"""
ALWAYS = NAMES.split()
STATISTICS = [f"kl/policy_ref/{k}/{s}" for k in ("k1", "k2", "k3") for s in ("mean", "se", "min", "max", "p95")]


def make(*overrides: str) -> tuple[TrainingRun, State]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    return run, State(kl=run.controller.init())


def weights(run: TrainingRun) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in run.policy.model.parameters() if p.requires_grad])


def test_all_metrics_of_the_contract_are_there_and_kl_starts_at_zero() -> None:
    run, state = make()
    first = train_step(run, state)
    second = train_step(run, first.state)
    assert set(first.metrics) == {*ALWAYS, *STATISTICS}
    assert first.metrics["kl/policy_ref/k3/max"] < 1e-9
    assert second.metrics["kl/policy_ref/k3/mean"] > 1e-6
    assert second.metrics["logp/sampler_gap_max"] < 1e-4
    assert (second.state.step, second.state.policy_version) == (2, 2)


def test_the_samplers_gap_is_measured_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose report is off by one nat from token 8 of the context on, in stretches from 4 and 8 on."""
    monkeypatch.setattr("keel.kl.measure.FIRST_BIN_TOKENS", 2)
    run, state = make("guards.on_step0_kl=warn")
    inner = run.collect

    def off(*args: Any, **options: Any) -> Any:
        def changed(prompt: int, completion: Any) -> Any:
            logp = [x + (prompt + at >= 8) for at, x in enumerate(completion.sample_logp)]
            return replace(completion, sample_logp=tuple(logp))

        return [
            replace(g, completions=tuple(changed(len(g.prompt_tokens), c) for c in g.completions))
            for g in inner(*args, **options)
        ]

    run.collect = off  # type: ignore[assignment]
    metrics = train_step(run, state).metrics
    means = {int(n.split("_")[-1].split("/")[0]): x for n, x in metrics.items() if "depth" in n and n.endswith("mean")}
    assert len(means) >= 2
    for start, mean in means.items():
        assert mean == pytest.approx(math.exp(-1) if start >= 8 else 0.0, abs=1e-3)  # k3 of d = −1 is e⁻¹


def test_gradient_is_that_of_the_formula_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = make("kl.beta=0.5", "kl.estimator=k2", "optim.max_grad_norm=1e9")
    state = train_step(run, state).state  # away from the reference
    seen: dict[str, Any] = {}
    inner = run.optimizer.step

    def spy(loss: float = 0.0, **guard: Any) -> Any:
        seen["grad"] = torch.cat([p.grad.flatten().clone() for p in run.optimizer.parameters])
        return inner(loss, **guard)

    twin = build_policy(small_config()).model
    twin.load_state_dict(run.policy.model.state_dict())
    with run.reference.model() as held:  # type: ignore[union-attr]
        reference = {k: v.clone() for k, v in held.state_dict().items()}
    monkeypatch.setattr(run.optimizer, "step", spy)
    batch = train_step(run, state).batch

    frozen = build_policy(small_config()).model
    frozen.load_state_dict(reference)
    policy_terms, kl_sum, tokens = [], 0.0, 0
    for group in batch.groups:
        rewards = torch.tensor([r.total for r in group.rewards])
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for completion, a in zip(group.completions, advantage, strict=True):
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            picked = ids[0, len(group.prompt_tokens) :, None]
            logp = twin(ids).logits[0, len(group.prompt_tokens) - 1 : -1].log_softmax(-1).gather(-1, picked)
            with torch.no_grad():
                ref = frozen(ids).logits[0, len(group.prompt_tokens) - 1 : -1].log_softmax(-1).gather(-1, picked)
            policy_terms.append(-(a * (logp - logp.detach()).exp()).mean())
            kl_sum, tokens = kl_sum + 0.5 * (logp - ref).square().sum(), tokens + len(completion.tokens)
    (torch.stack(policy_terms).mean() + 0.5 * kl_sum / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert torch.allclose(seen["grad"], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("split", ["optim.microbatch_tokens=12", "optim.microbatch_tokens=30"])
def test_microbatches_change_nothing(split: str) -> None:
    whole, state = make()
    parts, _ = make(split)
    batch = train_step(parts, state).batch
    train_step(whole, state)
    assert len(batch.micros) > 1
    assert torch.allclose(weights(whole), weights(parts), atol=1e-5)


def test_without_penalty_and_measurement_no_reference_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = make("kl.beta=0", "kl.measure_every=0")

    def spent(*_: Any) -> None:
        raise AssertionError("a pass was spent")

    monkeypatch.setattr(step_module, "score_reference", spent)
    monkeypatch.setattr(step_module, "score_policy", spent)
    metrics = train_step(run, state).metrics
    assert run.reference is None
    assert not any(name.startswith("kl/policy_ref") for name in metrics)


def test_measured_only_now_and_then_at_beta_zero() -> None:
    run, state = make("kl.beta=0", "kl.measure_every=2")
    measured = []
    for _ in range(4):
        state, metrics, _ = train_step(run, state)
        measured.append("kl/policy_ref/k3/mean" in metrics)
    assert measured == [True, False, True, False]


def test_a_non_finite_gradient_is_skipped_with_a_complete_line() -> None:
    run, state = make("optim.schedule=linear", "run.max_steps=10")
    state = train_step(run, state).state
    before, rate = weights(run), run.optimizer.lr
    hook = run.optimizer.parameters[0].register_hook(lambda grad: grad * math.nan)
    moments = {k: v.clone() for k, v in run.optimizer.inner.state[run.optimizer.parameters[0]].items()}
    bad = train_step(run, state)
    hook.remove()
    assert set(bad.metrics) == {*ALWAYS, *STATISTICS}
    assert bad.metrics["guard/skipped"] == 1.0
    assert torch.equal(before, weights(run))
    assert run.optimizer.lr == rate
    assert all(torch.equal(moments[k], v) for k, v in run.optimizer.inner.state[run.optimizer.parameters[0]].items())
    assert bad.state.policy_version == state.policy_version
    assert bad.state.consecutive_skips == 1
    assert train_step(run, bad.state).state.consecutive_skips == 0


def test_several_updates_a_batch_leave_the_sampler_behind() -> None:
    run, state = make("loss.num_iterations=3", "kl.beta=0.1")
    metrics = train_step(run, state).metrics
    assert run.optimizer.updates == 3
    assert metrics["kl/old_policy/k3/mean"] > 1e-6
    assert metrics["ratio/ess"] < 1.0
    assert metrics["kl/policy_ref/k3/max"] < 1e-9  # measured at the weights that sampled


def test_minibatches_are_updates_of_their_own() -> None:
    run, state = make("optim.minibatches=3")
    metrics = train_step(run, state).metrics
    assert run.optimizer.updates == 3
    assert metrics["kl/policy_ref/k3/max"] < 1e-9
    assert metrics["kl/old_policy/k3/mean"] > 0


def test_rejected_completions_leave_the_policy_term_and_stay_in_the_kl_term() -> None:
    run, state = make("kl.collect_max=1e-9", "kl.beta=1.0")
    state = train_step(run, state).state
    state, metrics, batch = train_step(run, state)
    assert metrics["kl/rejected_fraction"] > 0
    policy_mask = batch.rows.policy_mask
    assert policy_mask is not None
    assert not policy_mask[batch.rejected].any()
    assert metrics["loss/kl"] > 0


LEAVE_THE_POLICY_TERM = {
    "no signal": ("loss.dynamic_sampling=true", "loss.dynamic_sampling_rounds=1"),
    "too far": ("kl.collect_max=1e-9",),
    "truncated": ("loss.mask_truncated_completions=true", "rollout.max_completion_length=4"),
}


# Each reason with each placement under one loss; random combinations are in tests/metamorphic.
PENALISED = [
    (reason, placement, ("grpo", "dr_grpo", "gspo")[(row + column) % 3])
    for row, reason in enumerate(LEAVE_THE_POLICY_TERM)
    for column, placement in enumerate(("loss", "advantage", "reward"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "placement", "loss"), PENALISED)
def test_the_penalty_stays_with_completions_that_leave_the_policy_term(
    reason: str, placement: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient at β = 0.5 less that at β = 0 is the same whether or not the completions were left out."""

    def gradient(beta: str, *overrides: str) -> torch.Tensor:
        common = ("optim.max_grad_norm=1e9", "loss.scale_rewards=none", "guards.on_step0_kl=warn")
        run, state = make(
            f"kl.beta={beta}", "kl.estimator=k1", f"kl.placement={placement}", f"loss.loss_type={loss}", *common,
            *overrides,
        )  # fmt: skip
        with torch.no_grad():  # away from the reference, by the same displacement every time
            for number, parameter in enumerate(run.optimizer.parameters):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.add_(0.1 * noise)
        inner = run.collect
        if reason == "no signal":

            def flat(problems: Any, *, attempt: int, step: int) -> Any:
                groups = inner(problems, attempt=attempt, step=step)
                return [replace(g, rewards=(g.rewards[0],) * len(g.rewards)) for g in groups][:3]

            run.collect = flat  # type: ignore[assignment]
            monkeypatch.setattr(run.task.__class__, "sample", lambda *_, **__: same)
            same = [Problem(f"p{i}", f"{i}=", "abc") for i in range(3)]
        seen: list[torch.Tensor] = []
        step = run.optimizer.step

        def spy(total: float = 0.0, **guard: Any) -> Any:
            seen.append(torch.cat([p.grad.flatten().clone() for p in run.optimizer.parameters]))
            return step(total, **guard)

        monkeypatch.setattr(run.optimizer, "step", spy)
        batch = train_step(run, state).batch
        if any(not option.startswith("rollout.") for option in overrides):
            assert batch.rows.policy_mask is not None
        return seen[0]

    leave = LEAVE_THE_POLICY_TERM[reason]
    alike = [option for option in leave if option.startswith("rollout.")]
    inside = gradient("0.5", *alike) - gradient("0", *alike)
    outside = gradient("0.5", *leave) - gradient("0", *leave)
    assert inside.norm() > 1e-2
    assert torch.allclose(inside, outside, atol=1e-5 * float(inside.norm()) + 1e-6)


def test_truncated_completions_can_be_left_out_of_the_policy_term() -> None:
    run, state = make("loss.mask_truncated_completions=true", "rollout.max_completion_length=30")
    batch = train_step(run, state).batch
    cut = torch.tensor([completion.stop_reason == "length" for completion in batch.completions])
    assert cut.any()
    assert not batch.rows.policy_mask[cut].any()  # type: ignore[index]


def test_reward_and_advantage_doors() -> None:
    for placement in ("reward", "advantage"):
        run, state = make(f"kl.placement={placement}", "kl.estimator=k1", "kl.beta=0.5", "loss.scale_rewards=none")
        state = train_step(run, state).state
        metrics = train_step(run, state).metrics
        assert metrics["loss/kl"] != 0.0
        moved = metrics["reward/penalized"] - metrics["reward/mean"]
        expected = -0.5 * metrics["kl/policy_ref/sequence/mean"] if placement == "reward" else 0.0
        assert moved == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("placement", "weight"),
    [("reward", "sum"), ("advantage", "own"), ("advantage level=sequence", "to go")],
)
def test_the_exact_kl_in_reward_or_advantage_is_the_sum_over_the_vocabulary(
    placement: str, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logit of both models written out: Σ_v π_v (log π_v − log p_v) is what rewards and advantages lose."""
    placement, _, level = placement.partition(" level=")
    run, state = make(
        f"kl.placement={placement}", f"kl.level={level or 'token'}", "kl.estimator=exact", "kl.allow_biased=true",
        "kl.beta=0.5", "loss.scale_rewards=none",
    )  # fmt: skip
    state = train_step(run, state).state  # away from the reference
    twin, frozen = (build_policy(small_config()).model for _ in range(2))
    twin.load_state_dict(run.policy.model.state_dict())
    with run.reference.model() as held:  # type: ignore[union-attr]
        frozen.load_state_dict(held.state_dict())
    taken: list[torch.Tensor] = []

    def spy(scores: Any, view: Any, loss: Any, kl: Any, beta: float, *args: Any, **options: Any) -> Any:
        if placement == "advantage":
            taken.extend(advantage_penalty(kl_values(kl, scores, view), view.action_mask, beta, level=kl.level))
        return objective(scores, view, loss, kl, beta, *args, **options)

    monkeypatch.setattr(step_module, "objective", spy)
    batch = train_step(run, state).batch
    number = 0
    for group in batch.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            with torch.no_grad():
                pi, p = (m(ids).logits[0, len(group.prompt_tokens) - 1 : -1].log_softmax(-1) for m in (twin, frozen))
            kl = (pi.exp() * (pi - p)).sum(-1)
            assert kl.max() > 1e-4
            if weight == "sum":
                assert float(batch.penalty[number]) == pytest.approx(float(-0.5 * kl.sum()), abs=1e-4)  # type: ignore[index]
            else:
                lost = kl if weight == "own" else kl.flip(0).cumsum(0).flip(0)
                assert torch.allclose(taken[number][: len(kl)], -0.5 * lost, atol=1e-4)
            number += 1


def test_the_reverse_kl_over_the_vocabulary_is_trained_on_whatever_sets_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_v p_v (log p_v − log π_v) of full logits, differentiated by autograd; β comes from a controller alone."""
    run, state = make(
        "kl.estimator=exact_reverse", "kl.beta=0", "kl.controller.name=dual", "kl.controller.target=1e-9",
        "kl.controller.low=0.7", "optim.max_grad_norm=1e9",
    )  # fmt: skip
    state = train_step(run, state).state
    assert state.beta >= 0.7
    twin, frozen = (build_policy(small_config()).model for _ in range(2))
    twin.load_state_dict(run.policy.model.state_dict())
    with run.reference.model() as held:  # type: ignore[union-attr]
        frozen.load_state_dict(held.state_dict())
    seen: list[torch.Tensor] = []
    inner = run.optimizer.step

    def spy(total: float = 0.0, **guard: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten().clone() for p in run.optimizer.parameters]))
        return inner(total, **guard)

    monkeypatch.setattr(run.optimizer, "step", spy)
    without = with_advantages
    monkeypatch.setattr(
        step_module, "with_advantages", lambda *a: (b := without(*a)).with_rows(advantages=0 * b.rows.advantages)
    )
    batch = train_step(run, state).batch
    total, tokens = 0.0, 0
    for group in batch.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
            pi, p = (m(ids).logits[0, len(group.prompt_tokens) - 1 : -1].log_softmax(-1) for m in (twin, frozen))
            total, tokens = total + (p.exp() * (p - pi)).sum(), tokens + len(completion.tokens)
    (state.beta * total / tokens).backward()  # type: ignore[union-attr]
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert expected.norm() > 1e-4
    assert torch.allclose(seen[0], expected, atol=1e-6, rtol=1e-4)


def test_a_mismatch_of_half_precision_weights_is_weighed() -> None:
    """The engine shares the weights, and still its numbers are not the trainer's: bf16 rounds by the batch's shape."""
    run, state = make(
        "model.dtype=bfloat16", "loss.mismatch.kind=icepop", "loss.mismatch.floor=0.9999", "loss.mismatch.cap=1.0001",
        "kl.beta=0",
    )  # fmt: skip
    _, metrics, batch = train_step(run, state)
    gap = (batch.rows.old_logp - batch.rows.sample_logp)[batch.rows.action_mask].abs()  # type: ignore[operator]
    assert (gap > 1e-3).float().mean() > 0.1
    plain, state = make("model.dtype=bfloat16", "loss.mismatch.kind=none", "kl.beta=0")
    assert train_step(plain, state).metrics["loss/policy"] != metrics["loss/policy"]
    rows = batch.rows
    weights_ = mismatch_weights(rows.old_logp, rows.sample_logp, rows.action_mask, run.loss.mismatch)  # type: ignore[arg-type]
    assert (weights_ == 0).float().mean() > 0.1


def test_exact_kl_is_measured_in_both_directions_and_close_to_the_sampled_one() -> None:
    run, state = make("kl.exact=true", "rollout.prompts_per_step=16")
    state = train_step(run, state).state
    metrics = train_step(run, state).metrics
    exact = metrics["kl/policy_ref/exact/mean"]
    assert metrics["kl/ref_policy/exact/mean"] > 0
    assert abs(exact - metrics["kl/policy_ref/k3/mean"]) < 5 * metrics["kl/policy_ref/k3/se"] + 1e-6


def test_groups_without_signal_get_company_and_keep_their_kl() -> None:
    run, state = make("loss.dynamic_sampling=true", "loss.dynamic_sampling_rounds=2")
    inner = run.collect

    def flat(problems: Any, *, attempt: int, step: int) -> Any:
        groups = inner(problems, attempt=attempt, step=step)
        return [replace(g, rewards=(g.rewards[0],) * len(g.rewards)) for g in groups]

    run.collect = flat  # type: ignore[assignment]
    batch = train_step(run, state).batch
    assert len(batch.groups) == 9  # three, and three more in each of two rounds
    assert not batch.rows.policy_mask.any()  # type: ignore[union-attr]
    assert batch.rows.action_mask.any()


def test_reward_warmup_scales_the_advantages() -> None:
    plain, state = make()
    slow, _ = make("reward.warmup_steps=4")
    a, b = train_step(plain, state).batch, train_step(slow, state).batch
    assert torch.allclose(a.rows.advantages / 4, b.rows.advantages)  # type: ignore[operator, arg-type]


def test_a_snapshot_reference_moves_and_the_optimizer_forgets() -> None:
    run, state = make("reference.kind=snapshot", "reference.every=2", "reference.reset_optimizer=true")
    state = train_step(run, state).state
    state = train_step(run, state).state
    assert len(run.optimizer.inner.state) == 0
    assert train_step(run, state).metrics["kl/policy_ref/k3/max"] < 1e-9


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora.r=2",),
        ("optim.precision=bfloat16",),
        ("model.gradient_checkpointing=true",),
        ("optim.offload=true",),
        ("loss.loss_type=dapo", "loss.entropy_coef=0.01"),
        ("kl.estimator=exact", "kl.level=sequence"),
        ("kl.controller.name=dual", "kl.controller.target=0.01"),
        ("kl.placement=reward", "kl.estimator=exact_reverse", "kl.beta=0", "optim.minibatches=2"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_options_run_and_learn_something(overrides: tuple[str, ...]) -> None:
    run, state = make(*overrides)
    before = weights(run)
    for _ in range(2):
        state, metrics, _ = train_step(run, state)
    assert metrics["guard/skipped"] == 0.0
    assert not torch.equal(before, weights(run))
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_reward_rises() -> None:
    run, state = make("kl.beta=0.001", "rollout.prompts_per_step=8", "optim.learning_rate=2e-2")
    rewards = []
    for _ in range(25):
        state, metrics, _ = train_step(run, state)
        rewards.append(metrics["reward/mean"])
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_under_auto_k1_k2_and_k3_in_the_loss_train_alike_and_report_otherwise() -> None:
    """The gradient of all three is that of sg(ρ)·k2; plain k3 goes another way."""
    ended, reported = {}, {}
    for name in ("k1", "k2", "k3", "k3 plain"):
        estimator, _, gradient = name.partition(" ")
        run, state = make(f"kl.estimator={estimator}", f"kl.gradient={gradient or 'auto'}", "kl.beta=1.0")
        for _ in range(3):
            state, metrics, _ = train_step(run, state)
        ended[name], reported[name] = weights(run), metrics["loss/kl"]
    assert torch.allclose(ended["k1"], ended["k2"], atol=1e-5)
    assert torch.allclose(ended["k3"], ended["k2"], atol=1e-5)
    assert not torch.allclose(ended["k3 plain"], ended["k2"], atol=1e-4)
    assert len({round(reported[name], 5) for name in ("k1", "k2", "k3")}) == 3
