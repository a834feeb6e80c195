"""Proofs about gradients: every row of `keel.kl.facts` by exact enumeration, per token and per sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keel import kl
from keel.kl.exact import Divergence, penalty_divergence
from keel.kl.facts import FACTS, MEANINGS, POLICY_REF, REF_POLICY, Fact, over_vocabulary, parse_gradient
from keel.verify.oracle import (
    EXACT,
    JSD_WEIGHT,
    OFF,
    ON,
    TOP_K,
    Bandit,
    Check,
    Formula,
    SequenceLoss,
    SequenceWorld,
    close,
    gradient_in_loss,
    gradient_in_reward,
    random_bandits,
    relative_error,
    sequence_gradient,
    sequence_quality,
    sequence_value,
    sequence_world,
)
from keel.verify.values import correct_k3

# -- §2 expected gradients ----------------------------------------------------------------------------------------


def formula_of(fact: Fact, by_vocabulary: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    """The per-token term of a fact."""
    form = parse_gradient("plain" if fact.gradient == "score" else fact.gradient)
    if over_vocabulary(fact.estimator):
        return lambda logp, ref, old: kl.with_form(
            by_vocabulary(logp, ref).expand_as(logp), form, logp, ref, old, clamp=None
        )
    return lambda logp, ref, old: kl.weighted_estimate(fact.estimator, form, logp, ref, old, clamp=None)


def _divergence(estimator: str) -> Divergence:
    """The divergence over the vocabulary of an estimator, by the function that training calls."""
    top: dict[str, float] = {"topk": TOP_K}
    settings: dict[str, dict[str, float]] = {"jsd": {"jsd_weight": JSD_WEIGHT}, "topk": top, "topk_unbiased": top}
    options = kl.KLOptions.model_validate({"estimator": estimator, **settings.get(estimator, {})})
    direction = "ref_policy" if estimator == "exact_reverse" else "policy_ref"
    return penalty_divergence(options) or (lambda policy, ref, tokens: kl.exact_kl(policy, ref, direction))


def _term(fact: Fact) -> Formula:
    def by_vocabulary(logp: Tensor, ref: Tensor) -> Tensor:
        last = (logp.transpose(0, -1), ref.transpose(0, -1))
        values = _divergence(fact.estimator)(*last, torch.arange(len(logp)).unsqueeze(0))
        return values.unsqueeze(-1) if values.dim() < logp.dim() else values.transpose(0, -1)  # else one per token

    return formula_of(fact, by_vocabulary)


def measured_gradient(fact: Fact, bandit: Bandit) -> Tensor:
    """The expected gradient of a token-level fact's term on a bandit, by enumeration."""
    if fact.placement == "loss":
        return gradient_in_loss(_term(fact), bandit, fact.sampling)
    return gradient_in_reward(_term(fact), bandit, fact.sampling, placement=fact.placement)


def fact_error(fact: Fact, bandit: Bandit) -> tuple[float, bool]:
    """The error of the enumerated gradient against the fact's claim, and whether the claim is proven."""
    return judge(
        fact.expected_gradient, measured_gradient(fact, bandit), bandit.kl_gradients, lambda: _near(fact, bandit)
    )


def judge(
    verdict: str, measured: Tensor, targets: dict[str, Tensor], near: Callable[[], tuple[Tensor, dict[str, Tensor]]]
) -> tuple[float, bool]:
    """The error against the claimed target, and whether the claim is proven.

    The claim "zero" means that the gradient is 0. The name of a target means that the gradient equals it. "near X"
    means that the gradient differs from X, but equals X in the limit of a sampler that equals the policy; `near`
    measures this limit. "wrong" means that the gradient is neither 0 nor that of a KL.
    """
    size = (measured.norm() / targets[POLICY_REF].norm()).item()
    if verdict == "zero":
        return size, size < EXACT
    if verdict in targets:
        error = relative_error(measured, targets[verdict])
        return error, error < EXACT
    if verdict.startswith("near "):
        name = verdict.removeprefix("near ")
        limit, limit_targets = near()
        error = relative_error(measured, targets[name])
        return error, error > 1e-3 and relative_error(limit, limit_targets[name]) < 1e-4
    error = min(relative_error(measured, targets[name]) for name in (POLICY_REF, REF_POLICY))
    return error, error > 1e-3 and size > 1e-3


def _near(fact: Fact, bandit: Bandit) -> tuple[Tensor, dict[str, Tensor]]:
    close_by = bandit.with_sampler_near()
    return measured_gradient(fact, close_by), close_by.kl_gradients


def value_holds(fact: Fact, bandit: Bandit) -> bool:
    """Whether the mean of the value is the KL that the fact names; for "none", whether it is neither KL.

    In the reward and the advantage, the value is weighted by the policy term's ratio.
    """
    term = _term(fact)
    old = bandit.old_logp(fact.sampling)
    values = term(bandit.old_logp(ON), bandit.ref_logp, old)
    if fact.placement != "loss":
        values = values * (bandit.old_logp(ON) - old).exp()
    return _value_is(fact.value, (old.exp() * values).sum().item(), bandit.kl_values)


def _value_is(claim: str, mean: float, truths: dict[str, float]) -> bool:
    errors = {name: abs(mean - truth) / truth for name, truth in truths.items()}
    return errors[claim] < EXACT if claim in errors else min(errors.values()) > 1e-3


def _row(label: str, fact: Fact, errors: list[float], proven: bool) -> Check:
    claims_equality = fact.expected_gradient != "wrong" and not fact.expected_gradient.startswith("near")
    shown = f"error {max(errors):.1e}" if claims_equality else f"off by {min(errors):.1e}"
    return Check("gradients", label, shown, MEANINGS[fact.expected_gradient].split(":")[0], proven)


def gradients() -> list[Check]:
    """Check value and gradient of every token-level fact on eight random distributions, and four identities."""
    bandits = random_bandits()
    rows = []
    for fact in FACTS:
        if fact.level != "token":
            continue
        results = [fact_error(fact, bandit) for bandit in bandits]
        proven = all(ok for _, ok in results) and all(value_holds(fact, bandit) for bandit in bandits)
        label = f"{fact.estimator} in the {fact.placement}, {fact.sampling}-policy, gradient {fact.gradient}"
        rows.append(_row(label, fact, [error for error, _ in results], proven))
    return rows + [_identity(name, holds, bandits) for name, holds in IDENTITIES.items()]


def _identity(name: str, error: Callable[[Bandit], float], bandits: list[Bandit]) -> Check:
    worst = max(error(bandit) for bandit in bandits)
    return Check("gradients", name, f"error {worst:.1e}", "equal", worst < EXACT)


def _k3_reward_identity(bandit: Bandit) -> float:
    targets = bandit.kl_gradients
    return relative_error(gradient_in_reward(correct_k3, bandit), targets[POLICY_REF] - targets[REF_POLICY])


def _k3_both_identity(bandit: Bandit) -> float:
    both = gradient_in_reward(correct_k3, bandit) + gradient_in_loss(correct_k3, bandit)
    return relative_error(both, bandit.kl_gradients[POLICY_REF])


def _per_sample_identity(bandit: Bandit) -> float:
    """The difference of the gradients of ρ·k3 and sg(ρ)·k2 with respect to each outcome's own logp."""
    ref, old = bandit.ref_logp, bandit.old_logp(OFF)
    sides = []
    for estimator, form in (("k3", "rho"), ("k2", "sg_rho")):
        logp = bandit.old_logp(ON).clone().requires_grad_()
        term = kl.weighted_estimate(estimator, parse_gradient(form), logp, ref, old, clamp=None)
        sides.append(torch.autograd.grad(term.sum(), logp)[0])
    return relative_error(sides[0], sides[1])


def _scored_kl_identity(bandit: Bandit) -> float:
    """E_π[u·s] = ∇KL(π‖p), the basis of the other identities."""
    return relative_error(gradient_in_reward(lambda p, r, o: p - r, bandit), bandit.kl_gradients[POLICY_REF])


IDENTITIES: dict[str, Callable[[Bandit], float]] = {
    "E[u·s] is ∇KL(policy‖ref)": _scored_kl_identity,
    "k3 in the reward is ∇KL(policy‖ref) − ∇KL(ref‖policy)": _k3_reward_identity,
    "k3 in reward and loss, each at full β, is ∇KL(policy‖ref)": _k3_both_identity,
    "ρ·k3 and sg(ρ)·k2 have the same gradient on every sample": _per_sample_identity,
}


# -- §3 the sequence level ----------------------------------------------------------------------------------------


def _per_token(logp: Tensor, ref: Tensor, old: Tensor | None, values: Tensor) -> Tensor:
    return values.sum(-1)


def _with_future(logp: Tensor, ref: Tensor, old: Tensor | None, values: Tensor) -> Tensor:
    return kl.rao_blackwell(values, logp, old_logp=old)


# name: (the loss, the estimator of the per-token values that it receives)
SEQUENCE_LOSSES: dict[str, tuple[SequenceLoss, str]] = {
    "per-token k2": (lambda logp, ref, old, exact: kl.estimate("k2", logp, ref, clamp=None).sum(-1), "exact"),
    "exact per-token KL": (_per_token, "exact"),
    "per-token k3": (lambda logp, ref, old, exact: kl.estimate("k3", logp, ref, clamp=None).sum(-1), "exact"),
    "exact per-token KL(ref‖policy)": (_per_token, "exact_reverse"),
    "per-token JSD": (_per_token, "jsd"),
    "per-token top 2 and a bucket": (_per_token, "topk"),
    "per-token unbiased top 2": (_per_token, "topk_unbiased"),
    "k1 reward-to-go": (lambda logp, ref, old, exact: kl.k1_to_go(logp, ref, old_logp=old, clamp=None), "exact"),
    "½(Σu)²": (lambda logp, ref, old, exact: kl.k2_sequence(logp, ref, old_logp=old, clamp=None), "exact"),
    "Rao-Blackwell": (_with_future, "exact"),
    "unbiased top 2 and its future": (_with_future, "topk_unbiased"),
}
# name: (relative error, cosine, variance); an error of None means zero up to rounding
SEQUENCE_TABLE: dict[str, tuple[float | None, float, float]] = {
    "per-token k2": (0.468, 0.912, 2.37),
    "exact per-token KL": (0.468, 0.912, 0.32),
    "per-token k3": (0.635, 0.806, 14.58),
    "exact per-token KL(ref‖policy)": (0.635, 0.806, 0.46),
    "per-token JSD": (0.841, 0.847, 0.01),
    "per-token top 2 and a bucket": (0.693, 0.741, 0.39),
    "per-token unbiased top 2": (0.468, 0.912, 1.50),
    "k1 reward-to-go": (None, 1.0, 6.72),
    "½(Σu)²": (None, 1.0, 9.60),
    "Rao-Blackwell": (None, 1.0, 2.11),
    "unbiased top 2 and its future": (None, 1.0, 4.16),
}


def weighted_token_k3(logp: Tensor, ref: Tensor, old: Tensor | None, exact: Tensor) -> Tensor:
    """Σ_t ρ_t·k3_t, the token-weighted form that other trainers use."""
    return kl.weighted_estimate("k3", parse_gradient("rho"), logp, ref, old, clamp=None).sum(-1)


def sequence() -> list[Check]:
    """Compare each estimator with ∇KL_seq on a 3-step, 4-token policy: relative error, cosine and variance."""
    world = sequence_world()
    rows = []
    for name, (loss, estimator) in SEQUENCE_LOSSES.items():
        error, cosine, variance = SEQUENCE_TABLE[name]
        got = sequence_quality(world, loss, divergence=_divergence(estimator))
        right = got.relative_error < EXACT if error is None else close(got.relative_error, error, 3)
        ok = right and close(got.cosine, cosine, 3) and close(got.variance, variance, 2)
        measured = f"{got.relative_error:.3g}, {got.cosine:.3f}, {got.variance:.2f}"
        expected = f"{'0' if error is None else error}, {cosine:.3f}, {variance:.2f}"
        rows.append(Check("sequence", f"{name}: error, cosine, variance", measured, expected, ok))
    for name in ("k1 reward-to-go", "½(Σu)²", "Rao-Blackwell", "unbiased top 2 and its future"):
        loss, estimator = SEQUENCE_LOSSES[name]
        got = sequence_quality(world, loss, OFF, _divergence(estimator))
        fact = f"off-policy, {name} × the sequence's ratio"
        rows.append(Check("sequence", fact, f"error {got.relative_error:.1e}", "0", got.relative_error < EXACT))
    token = sequence_quality(world, weighted_token_k3, OFF).relative_error
    rows.append(Check("sequence", "off-policy, Σ ρ_t·k3_t per token", f"error {token:.3f}", "biased", token > 1e-2))
    small = sequence_world(steps=2, vocabulary=2, seed=396, scale=2.0)
    sampled, blackwell = (
        sequence_quality(small, SEQUENCE_LOSSES[name][0]).variance for name in ("k1 reward-to-go", "Rao-Blackwell")
    )
    fact = "Rao-Blackwell can have the higher variance: against k1 reward-to-go in a 2-step world"
    rows.append(Check("sequence", fact, f"{blackwell:.3f} > {sampled:.3f}", "higher", blackwell > sampled))
    return rows


def _sequence_term(fact: Fact) -> SequenceLoss:
    """The loss of a sequence-level fact: the KL term, or the policy term −ρ_t·A_t with the penalty in A."""
    if fact.placement == "loss":
        return lambda logp, ref, old, exact: kl.sequence_estimate(
            fact.estimator, logp, ref, old_logp=old, exact_kl=exact, clamp=None
        )

    def scored(logp: Tensor, ref: Tensor, old: Tensor | None, exact: Tensor) -> Tensor:
        penalty = _values(fact, logp, ref, exact)
        mask = torch.ones_like(logp, dtype=torch.bool)
        if fact.placement == "reward":
            advantage = kl.reward_penalty(penalty, mask, 1.0).unsqueeze(-1)
        else:
            advantage = kl.advantage_penalty(penalty, mask, 1.0, level="sequence")
        rho = torch.ones_like(logp) if old is None else (logp - old).exp()
        return (rho.detach() * -advantage * logp).sum(-1)

    return scored


def _values(fact: Fact, logp: Tensor, ref: Tensor, over: Tensor) -> Tensor:
    return over if over_vocabulary(fact.estimator) else kl.estimate(fact.estimator, logp, ref, clamp=None)


def _divergence_of(fact: Fact) -> Divergence | None:
    return _divergence(fact.estimator) if over_vocabulary(fact.estimator) else None


def _sequence_value_holds(fact: Fact, world: SequenceWorld) -> bool:
    """Whether the mean value is the KL_seq that the fact names. Off-policy, the sequence's ratio weights the value."""

    def value(logp: Tensor, ref: Tensor, old: Tensor | None, exact: Tensor) -> Tensor:
        if fact.placement == "loss":
            return _sequence_term(fact)(logp, ref, old, exact)
        return _values(fact, logp, ref, exact).sum(-1) * (1.0 if old is None else (logp - old).sum(-1).exp())

    mean, truths = sequence_value(world, value, fact.sampling, _divergence_of(fact))
    return _value_is(fact.value, mean, truths)


def sequence_facts() -> list[Check]:
    """Check value and gradient of every sequence-level fact, on the same tabular policy."""
    world = sequence_world()
    rows = []
    for fact in FACTS:
        if fact.level != "sequence":
            continue
        term = _sequence_term(fact)

        def near(term: SequenceLoss = term) -> tuple[Tensor, dict[str, Tensor]]:
            truths, measured, _ = sequence_gradient(world.with_sampler_near(), term, OFF)  # claimed only for k1
            return measured, truths

        truths, measured, _ = sequence_gradient(world, term, fact.sampling, _divergence_of(fact))
        error, proven = judge(fact.expected_gradient, measured, truths, near)
        label = f"{fact.estimator} in the {fact.placement}, {fact.sampling}-policy, sequence level"
        rows.append(_row(label, fact, [error], proven and _sequence_value_holds(fact, world)))
    return rows
