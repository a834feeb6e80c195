"""Effects of the loss terms on the policy: closed forms, and faulty options."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doctor.followed import check_named_first, follow
from doctor.schooled import nearness, schooled_config, schooled_model
from keel.base.types import Problem, Reward
from keel.doctor.findings import Finding
from keel.doctor.keel_subject import KeelSubject, build_subject
from keel.doctor.probes import limits
from keel.doctor.probes.balance import Balance, least_typical, measured_kl_weight, probe_balance
from keel.doctor.probes.exploration import drawn_logits, entropy, mean_kl, policy_states, probe_exploration
from keel.doctor.probes.limits import _rejects, probe_limits
from keel.doctor.probes.objective import probe_objective
from keel.doctor.probes.reach import _decays, adapter_scale, course, decay_kl, held_sum, probe_reach
from keel.doctor.probes.update import moved, probe_update
from keel.doctor.thresholds import load_thresholds
from keel.kl import exact_kl
from keel.models.fingerprint import fingerprint
from keel.rollout.sampling import SamplingParams

pytestmark = pytest.mark.doctor


LIMITS = load_thresholds()
LORA = "model.lora={r: 4}"
SKIP = "guards.on_spike=skip"
SMALL = "rewards=[{name: doctor.test_shares:small}]"
LARGE = "rewards=[{name: doctor.test_shares:large}]"


def large(problem: Problem, text: str) -> Reward:
    """The same reward on a scale of 1000."""
    return Reward(1000 * nearness(problem, text).total)


def small(problem: Problem, text: str) -> Reward:
    """The same reward on a scale of 1/1000."""
    return Reward(nearness(problem, text).total / 1000)


def idle_model() -> tuple[Any, Any]:
    """A model whose only trainable weight is unused."""
    model, tokenizer = schooled_model()
    model.requires_grad_(False)
    model.idle = torch.nn.Parameter(torch.ones(3))
    return model, tokenizer


def frozen_model() -> tuple[Any, Any]:
    """A model whose only trainable weight is the norm of the first layer."""
    model, tokenizer = schooled_model()
    model.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    return model, tokenizer


def judged(config) -> list[Finding]:
    """The findings of the probes for loss terms."""
    setup = build_subject(config)
    probe_update(setup)
    probes = (probe_exploration, probe_objective, probe_reach, probe_balance, probe_limits)
    return [finding for probe in probes for finding in probe(setup).findings]


@pytest.fixture(scope="module")
def setup() -> KeelSubject:
    tried = build_subject(schooled_config("optim.weight_decay=30"))
    probe_update(tried)
    return tried


def test_a_course_adds_up_its_factors() -> None:
    warming = course(lambda update: (update + 1) / 1000, 20)
    assert warming.total == pytest.approx(sum(range(1, 21)) / 1000)
    assert warming.largest == pytest.approx(0.02)
    assert course(lambda update: 1.0, 1_000_000).total == pytest.approx(1e6)


@pytest.mark.parametrize("decay", [1e-4, 1e-2])
def test_steps_beside_a_decay_come_to_the_sum_of_a_recursion(decay: float) -> None:
    weight = 0.0
    for _ in range(200):
        weight = weight * (1 - decay) + 1.0
    assert held_sum(200.0, decay) == pytest.approx(weight, rel=decay)
    assert held_sum(200.0, 0.0) == 200.0


def test_the_displacement_of_weight_decay_is_that_of_shrunk_matrices(setup: KeelSubject) -> None:
    first, optimizer = setup.of_batch["update"], setup.run.optimizer
    before = [p.detach().clone() for p in optimizer.parameters]
    still = [None if g is None else torch.zeros_like(g) for g in first.gradients]
    with moved(setup, still, 0.0, 10.0):  # ten times the rate: the decay of ten updates
        shrink = 1 - 10 * 1e-4 * 30
        for parameter, was in zip(optimizer.parameters, before, strict=True):
            torch.testing.assert_close(parameter.detach(), was * (shrink if was.dim() >= 2 else 1.0))
        kl = mean_kl(policy_states(setup), first.before)
    assert kl > 0
    assert decay_kl(setup, first, shrink) == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("beta", [3.0, 10.0, 50.0])
def test_the_equilibrium_of_a_bandit_is_the_closed_form(beta: float) -> None:
    """π* ∝ π_ref·exp(A/β) maximises E[A] − β·KL; its KL is ½·Var(A)/β² to second order."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(1, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    advantage = torch.randn(7, generator=generator, dtype=torch.float64)
    advantage -= (reference.exp() * advantage).sum()
    advantage /= (reference.exp() * advantage.square()).sum().sqrt()
    best = (reference + advantage / beta).log_softmax(-1)
    logits = best.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    loss = -(logp.exp() * advantage).sum() + beta * exact_kl(logp, reference).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-12  # nothing pulls it elsewhere
    kl = float(exact_kl(best, reference).sum())
    balance = Balance(advantage=1.0, kl=1.0, length=1.0)
    assert balance.equilibrium(beta) == pytest.approx(kl, rel=2 / beta)
    assert balance.equilibrium(balance.beta_for(0.3)) == pytest.approx(0.3)
    assert balance.equilibrium(0.0) == math.inf


def test_a_nat_of_the_exact_kl_weighs_one_and_all_is_undone() -> None:
    exact = build_subject(schooled_config("kl.estimator=exact", "loss.loss_type=dapo"))
    before = fingerprint(exact.policy.model)
    probe_update(exact)
    assert measured_kl_weight(exact, exact.of_batch["update"]) == pytest.approx(1.0, abs=0.2)
    for probe in (probe_reach, probe_balance, probe_limits, probe_exploration):
        assert not probe(exact).findings
    assert "update" not in exact.of_batch  # its gradients are as large as the model
    assert fingerprint(exact.policy.model) == before
    assert exact.run.optimizer.updates == 0
    assert not exact.run.optimizer.inner.state
    assert all(parameter.grad is None for parameter in exact.policy.model.parameters())


def test_the_median_spread_is_bounded_from_below_by_order_statistics() -> None:
    assert least_typical(torch.tensor([30.0] * 6), 0.01) == 0.0  # 2⁻⁶ is more than 1 in 100
    assert least_typical(torch.arange(1.0, 8.0), 0.01) == 1.0
    assert least_typical(torch.arange(1.0, 12.0), 0.01) == 2.0


def test_what_is_drawn_at_a_temperature_and_after_filters() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert entropy(torch.zeros(2, 4)) == pytest.approx(math.log(4))
    assert entropy(drawn_logits(logits, SamplingParams(temperature=0.0))) == 0.0
    assert entropy(drawn_logits(logits, SamplingParams(top_k=1))) == 0.0
    two = entropy(drawn_logits(logits, SamplingParams(top_k=2)))
    assert two == pytest.approx(-(4 / 7) * math.log(4 / 7) - (3 / 7) * math.log(3 / 7))
    assert entropy(drawn_logits(logits, SamplingParams(temperature=100.0))) == pytest.approx(math.log(4), rel=1e-3)


def test_the_scale_of_an_adapter() -> None:
    assert adapter_scale(build_subject(schooled_config("model.lora={r: 4, alpha: 2}")).policy.model) == 0.5
    assert adapter_scale(build_subject(schooled_config()).policy.model) is None


HALF = "optim.precision=bfloat16"
DECAYED = ["optim.schedule=linear", "run.max_steps=200"]
FAULTS: list[tuple[str, list[str], str]] = [
    ("optim/no-update", ["optim.learning_rate=1e-9"], "learning_rate"),
    ("optim/no-update", ["optim.learning_rate=1e-13"], "learning_rate"),
    ("optim/no-update", ["optim.warmup_steps=5000"], "warmup_steps"),
    ("optim/no-update", ["optim.schedule=cosine", "optim.decay_steps=1", "run.max_steps=200"], "schedule"),
    ("optim/no-update", [*DECAYED, "optim.learning_rate=2e-3", "optim.decay_steps=3"], "schedule"),
    ("optim/no-update", ["optim.eps=100"], "eps"),
    ("optim/no-update", ["optim.max_grad_norm=1e-10"], "max_grad_norm"),
    ("optim/no-update", ["model.lora={r: 4, alpha: 1.0e-6}"], "alpha"),
    ("optim/no-update", ["model.dtype=bfloat16", "optim.learning_rate=1e-6", "run.max_steps=5000"], "bfloat16"),
    ("optim/weight-decay", ["optim.weight_decay=100"], "decay"),
    ("optim/weight-decay", ["optim.weight_decay=300", LORA, "run.max_steps=200"], "decay"),
    ("kl/too-strong", ["kl.beta=50"], "KL term"),
    ("kl/too-strong", ["kl.beta=50", "kl.placement=reward", "kl.estimator=k1"], "KL term"),
    ("kl/too-strong", ["kl.beta=20", "kl.controller={name: ziegler}"], "controller"),
    ("kl/too-strong", ["kl.beta=5", "loss.loss_type=dr_grpo"], "KL term"),
    ("entropy/too-strong", ["loss.entropy_coef=3"], "entropy_coef"),
    ("reward/scale", [LARGE, "loss.scale_rewards=none"], "scale_rewards"),
    (
        "reward/scale",
        [LARGE, "kl.placement=reward", "kl.estimator=k1"],
        "kl",
    ),
    ("reward/scale", [LARGE, "loss.scale_rewards=none", "kl.beta=0", "loss.entropy_coef=0.01"], "entropy_coef"),
    ("kl/too-strong", [SMALL, "loss.loss_type=dr_grpo"], "rewards differ by little"),
    ("optim/no-update", ["model.name=doctor.test_shares:idle_model"], "no gradient"),
    ("rollout/temperature", ["rollout.temperature=0.02"], "temperature"),
    ("rollout/temperature", ["rollout.temperature=5"], "temperature"),
    ("rollout/temperature", ["rollout.top_p=0.01"], "top_p"),
    ("kl/rejects-all", ["kl.collect_max=1.0e-5"], "KL"),
    ("guard/skips-all", [SKIP, "guards.grad_spike=1.01"], "median"),
    ("guard/skips-all", [SKIP, "guards.grad_spike=1.0000001", "rollout.prompts_per_step=1"], "median"),
    ("guard/skips-all", ["kl.budget=1.0e-8"], "budget"),
    ("loss/no-gradient", ["loss.mismatch={kind: icepop, floor: 1.0, cap: 1.0}", HALF], "no token"),
    ("loss/clip", ["loss.num_iterations=2", "loss.epsilon=1e-7"], "epsilon"),
    ("loss/clip", ["loss.num_iterations=2", "loss.epsilon=9"], "epsilon"),
    ("kl/controller", ["kl.controller={name: step, target: 600}"], "another unit"),
    ("kl/controller", ["kl.controller={name: dual, target: 1000}"], "never reaches the target"),
    ("sampler/too-old", ["rollout.max_staleness=64", "optim.learning_rate=4e-3"], "max_staleness"),
    ("sampler/too-old", ["rollout.max_staleness=64", "optim.learning_rate=1.5e-3"], "max_staleness"),
]


@pytest.mark.parametrize(("code", "overrides", "because"), FAULTS, ids=lambda value: str(value))
def test_a_term_out_of_balance_is_named_with_its_reason_and_its_advice_mends_it(code, overrides, because) -> None:
    config = schooled_config(*overrides)
    findings = judged(config)
    assert [finding.code for finding in findings] == [code], findings
    assert because in findings[0].cause
    assert findings[0].options or "no gradient" in because
    for proposal in findings[0].options:
        again = [finding.code for finding in judged(follow(config, proposal))]
        assert code not in again, proposal


def test_copies_without_a_reward_of_their_own_show_no_standstill() -> None:
    """Random signs instead of advantages cancel each other on equal completions."""
    setup = build_subject(schooled_config("reward.warmup_steps=0"))
    with closing(setup.run):
        probe_update(setup)
        first = setup.of_batch["update"]
        setup.of_batch["update"] = replace(first, real_rewards=False, gradients=[None] * len(first.gradients))
        copied = tuple(replace(g, completions=g.completions[:1] * len(g.completions)) for g in setup.groups)
        assert probe_reach(setup).findings
        same = replace(setup, batch=replace(setup.batch, groups=copied))
        assert probe_reach(same).findings == ()


def test_what_little_is_trained_is_named_at_any_rate() -> None:
    config = schooled_config("model.name=doctor.test_shares:frozen_model")
    (still,) = judged(config)
    assert (still.code, still.severity) == ("optim/no-update", "error")
    assert "weights are trained" in still.cause
    for proposal in still.options:
        (few,) = judged(follow(config, proposal))
        assert (few.code, few.severity) == ("optim/no-update", "warning")
        assert "no matrix among them: model.layers.0.input_layernorm.weight" in few.evidence


def test_advantages_that_never_arrive_are_named_with_what_outweighs_them() -> None:
    config = schooled_config("kl.beta=1", "loss.scale_rewards=none", "reward.warmup_steps=2000")
    late, ruled = judged(config)
    assert (late.code, ruled.code) == ("optim/no-update", "kl/too-strong")
    assert "reward.warmup_steps=2000" in late.cause
    assert "reward.warmup_steps=2000" in ruled.cause
    (proposal,) = late.options
    assert not judged(follow(config, proposal))  # which mends both


HEALTHY: list[list[str]] = [
    ["kl.beta=0.2", "loss.loss_type=dr_grpo"],
    ["kl.beta=0.2", "kl.placement=reward", "kl.estimator=k1", "loss.scale_rewards=none"],
    ["kl.beta=0.2", LORA, "run.seed=7"],
    ["kl.beta=0.001", "loss.loss_type=gmpo"],
    ["loss.entropy_coef=0.01", "loss.loss_type=dr_grpo", "kl.beta=0"],
    ["model.dtype=bfloat16", "run.seed=6"],
    ["optim.weight_decay=0.1", "optim.schedule=linear", "optim.warmup_steps=3"],
    ["optim.learning_rate=1e-5"],
    ["run.max_steps=2", "optim.warmup_steps=1"],
    ["rollout.temperature=0.6", "rollout.top_p=0.95"],
    ["rollout.temperature=1.3"],
    ["kl.collect_max=0.5", "kl.budget=0.1", SKIP],
    ["loss.num_iterations=3", "loss.epsilon=0.1", "loss.epsilon_high=0.4"],
    ["loss.num_iterations=10", "optim.learning_rate=1e-5"],
    ["kl.controller={name: dual, target: 0.05}", "kl.beta=0.2"],
    ["kl.controller={name: step, target: 0.02}", "kl.beta=0.1"],
    ["kl.controller={name: warmup, steps: 15}", "kl.beta=0.1"],
    ["kl.controller={name: ziegler, target: 6}", "kl.beta=0.1"],
    [*DECAYED, "optim.decay_steps=150"],
    ["rollout.max_staleness=2"],
]


@pytest.mark.parametrize("overrides", HEALTHY, ids=" ".join)
def test_terms_in_balance_raise_nothing(overrides) -> None:
    assert not judged(schooled_config(*overrides))


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("optim/no-update", ["optim.learning_rate=1e-10"]),
        ("optim/weight-decay", ["optim.weight_decay=300"]),
        ("kl/too-strong", ["kl.beta=100"]),
        ("entropy/too-strong", ["loss.entropy_coef=5"]),
        ("rollout/temperature", ["rollout.top_k=1"]),
        ("reward/scale", [LARGE, "loss.loss_type=dr_grpo"]),
        ("kl/controller", ["kl.controller={name: pid, target: 1.0e-7}"]),
    ],
)
def test_it_is_the_first_finding_of_a_preflight(code, overrides) -> None:
    check_named_first(code, overrides)


def test_groups_of_earlier_tests_count_from_the_first_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has no completion over the limit, but eight further groups have only such ones."""
    groups = [SimpleNamespace(completions=[None] * 2, logp=far) for far in (0.0,) * 4 + (1.0,) * 8]
    looks = list[bool]()

    def more_groups(setup: Any, code: str, undecided: Any) -> list[Any]:
        looks.append(undecided(groups))
        return groups

    monkeypatch.setattr(limits, "more_groups", more_groups)
    monkeypatch.setattr(
        limits,
        "_log_ratios",
        lambda setup, first, batch, distance: torch.tensor([g.logp for g in batch.groups for _ in g.completions]),
    )
    setup: Any = SimpleNamespace(
        config=schooled_config("kl.collect_max=0.5"),
        thresholds=LIMITS,
        run=SimpleNamespace(reference=object()),
        batch=SimpleNamespace(groups=groups[:4]),
        pack=lambda chosen: SimpleNamespace(groups=chosen),
    )
    first: Any = None
    assert not [*_rejects(setup, first, figures := {})]
    assert figures["rejected"] == pytest.approx(2 / 3)  # far over `rejected_most`, which chance may still explain
    assert looks == [True]


@pytest.mark.parametrize(("shrink", "held"), [(0.5, 1e-4), (0.01, 1.0), (0.01, 1e-4)])
def test_weight_decay_is_measured_against_the_limit_that_it_passes(shrink: float, held: float) -> None:
    setup: Any = SimpleNamespace(config=schooled_config("optim.weight_decay=7"), thresholds=LIMITS)
    figures = {"decay": 0.0, "walk": 1.0, "shrink": shrink, "reach_decayed": held, "reach": 2.0}
    (found,) = _decays(setup, figures, 5.0)
    assert (f"(under {LIMITS['decay_left']:.0%})" in found.evidence) == (shrink < LIMITS["decay_left"])
    assert (f"(under {LIMITS['reach_least']:g})" in found.evidence) == (held < LIMITS["reach_least"])


def test_a_large_weight_decay_is_not_called_larger_than_updates_that_go_further() -> None:
    setup: Any = SimpleNamespace(config=schooled_config("optim.weight_decay=7"), thresholds=LIMITS)
    figures = {"decay": 2.0, "walk": 3.0, "shrink": 0.5, "reach_decayed": 9.0, "reach": 9.0}
    (found,) = _decays(setup, figures, 5.0)
    assert f"(over {5 * LIMITS['kl_over_budget']:.2g})" in found.evidence
