"""Proofs about off-policy samples: stale samples from an older policy, and filtered samples (top-k).

There are three policies. μ is the sampler, the old policy is the trainer's at the start of the step, and π is the
policy in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.types import Batch, Scores
from keel.kl import KLOptions, k1, k2, k3, kl_score_loss
from keel.kl.facts import POLICY_REF
from keel.kl.measure import MaskIndex, kl_statistics, prefix_gap
from keel.losses import LOSSES, Counts, LossOptions, MismatchOptions, mismatch_ratio, mismatch_weights, objective
from keel.verify.losses import ONE, EnumeratedCompletions, completions
from keel.verify.oracle import (
    EXACT,
    OFF,
    ON,
    STALE,
    Bandit,
    Check,
    random_bandits,
    relative_error,
    sequence_world,
)

CAP = 2.0
UNCAPPED = 1e9
VALUES = {"k1": k1, "k2": k2, "k3": k3}

# -- stale samples -----------------------------------------------------------------------------------------------


def stale() -> list[Check]:
    """Check the policy term under every loss, the KL in the reward, the bias of the cap, and the metrics."""
    enumerated, bandits = completions(sequence_world(), STALE), random_bandits()
    fresh = _drawn_by_old(enumerated)
    now, then, worst = (max(map(error, bandits)) for error in (_reward_now, _reward_then, _cap_bias))
    k1_in_reward = "in the reward, ratio π/μ"
    bias = f"weights capped at {CAP:g}: bias divided by Σ (π − {CAP:g}μ)₊ · max |f|"
    return [
        *(_policy_term(name, enumerated, fresh) for name in LOSSES),
        *(_token_weights(name, enumerated, fresh) for name in LOSSES),
        _equal(f"k1 of the current policy {k1_in_reward}", now, "∇KL(policy‖ref)"),
        _equal(f"k1 of the sampler {k1_in_reward}", then, "∇KL(policy‖ref) − ∇KL(policy‖μ)"),
        Check("stale", bias, f"at most {worst:.3f}", "at most 1", 0 < worst <= 1 + EXACT),
        *_measured(enumerated),
    ]


def _equal(fact: str, error: float, expected: str = "equal") -> Check:
    return Check("stale", fact, f"error {error:.1e}", expected, error < EXACT)


def _drawn_by_old(enumerated: EnumeratedCompletions) -> Tensor:
    """The probability of each completion under the old policy."""
    assert enumerated.old is not None
    return enumerated.old.sum(-1).exp()


def _term_gradient(name: str, enumerated: EnumeratedCompletions, probability: Tensor, level: str | None) -> Tensor:
    """The expected gradient of the policy term over completions drawn with these probabilities.

    `level` is the level of the mismatch weights, or None for samples from the old policy.
    """
    leaf = enumerated.logp.detach().requires_grad_()
    generator = torch.Generator().manual_seed(7)
    advantages = torch.randn(len(enumerated.mask), generator=generator, dtype=leaf.dtype)
    batch = Batch(
        action_mask=enumerated.mask,
        advantages=advantages,
        old_logp=enumerated.old,
        sample_logp=None if level is None else enumerated.sample,
        stale=level is not None,
    )
    mismatch = MismatchOptions.model_validate({"cap": UNCAPPED, "level": level or "token"})
    loss = LossOptions(loss_type=name, mismatch=mismatch)
    out = objective(Scores(leaf), batch, loss, KLOptions(), 0.0, Counts(ONE, ONE))
    (coefficient,) = torch.autograd.grad(out.loss, leaf)
    expected = (probability.unsqueeze(-1) * coefficient * enumerated.logp).sum()
    return torch.autograd.grad(expected, enumerated.theta, retain_graph=True)[0]


def _policy_term(name: str, enumerated: EnumeratedCompletions, fresh: Tensor) -> Check:
    """Check that sequence-level weights on μ's samples give the old policy's gradient, under every loss."""
    measured = _term_gradient(name, enumerated, enumerated.weights, "sequence")
    error = relative_error(measured, _term_gradient(name, enumerated, fresh, None))
    return _equal(f"{name}: policy term on stale samples × the sequence's old/μ, against fresh samples", error)


def _token_weights(name: str, enumerated: EnumeratedCompletions, fresh: Tensor) -> Check:
    """Check that token-level weights are better than none, but not exact: they ignore prefixes and later tokens."""
    truth = _term_gradient(name, enumerated, fresh, None)
    weighted, unweighted = (
        relative_error(_term_gradient(name, enumerated, enumerated.weights, level), truth) for level in ("token", None)
    )
    fact = f"{name}: policy term on stale samples × the token's old/μ, against fresh samples"
    shown = f"error {weighted:.3f}, unweighted {unweighted:.3f}"
    return Check("stale", fact, shown, "biased: prefixes are from μ", 1e-3 < weighted < unweighted)


def _scored(value: Tensor, bandit: Bandit) -> Tensor:
    """The expected gradient of a penalty in the reward, by `kl_score_loss`: Σ_y μ·(π/μ)·value·s."""
    theta, logp = bandit.logp()
    mask = torch.ones_like(logp, dtype=torch.bool)
    mu = bandit.old_logp(OFF)
    loss = kl_score_loss(-value.detach(), logp, mask, old_logp=mu)
    return torch.autograd.grad((mu.exp() * loss).sum(), theta)[0]


def _reward_now(bandit: Bandit) -> float:
    measured = _scored(bandit.old_logp(ON) - bandit.ref_logp, bandit)
    return relative_error(measured, bandit.kl_gradients[POLICY_REF])


def _reward_then(bandit: Bandit) -> float:
    measured = _scored(bandit.old_logp(OFF) - bandit.ref_logp, bandit)
    left_behind = Bandit(bandit.policy, bandit.sampler, bandit.sampler).kl_gradients[POLICY_REF]
    return relative_error(measured, bandit.kl_gradients[POLICY_REF] - left_behind)


def _cap_bias(bandit: Bandit) -> float:
    """|E_μ[min(w, C)·f] − E_π[f]| divided by its bound, for the worst estimator."""
    policy, mu, d = bandit.old_logp(ON), bandit.old_logp(OFF), bandit.ref_logp - bandit.old_logp(ON)
    mask = torch.ones_like(mu, dtype=torch.bool)
    weights = mismatch_weights(policy, mu, mask, MismatchOptions(cap=CAP))
    lost = (policy.exp() - CAP * mu.exp()).clamp_min(0).sum()
    ratios = []
    for estimator in VALUES.values():
        f = estimator(d)
        bias = ((mu.exp() * weights - policy.exp()) * f).sum().abs()
        ratios.append((bias / (lost * f.abs().max())).item() if lost > 0 else 0.0)
    return max(ratios)


def _measured(enumerated: EnumeratedCompletions) -> list[Check]:
    """Check the metric functions on every completion, weighted by μ's probability. The measured policy is π."""
    assert enumerated.sample is not None
    logp, mask = enumerated.logp.detach(), enumerated.mask
    weights = mismatch_ratio(logp, enumerated.sample, mask)
    sums = dict.fromkeys(("k1", "k3", "sequence", "prefix_gap"), 0.0)
    for row, probability in enumerate(enumerated.weights.tolist()):
        part = slice(row, row + 1)
        index, tokens = MaskIndex.of(mask[part]), int(mask[row].sum())
        ref, sample = enumerated.ref[part], enumerated.sample[part]
        numbers = kl_statistics(logp[part], ref, mask[part], index, clamp=None, weights=weights[part])
        numbers |= prefix_gap(logp[part], ref, sample, mask[part], index, clamp=None)
        for name in sums:
            times = tokens if name in VALUES else 1
            sums[name] += probability * times * float(numbers[f"kl/policy_ref/{name}/mean"])
    at_prefixes = (enumerated.weights.unsqueeze(-1) * enumerated.exact.detach()).sum().item()
    total = logp.sum(-1)
    of_sequences = (total.exp() * (total - enumerated.ref.sum(-1))).sum().item()
    whole, share = sums["sequence"] + sums["prefix_gap"], abs(sums["prefix_gap"]) / of_sequences
    return [
        *(
            _equal(f"measured {name} × π/μ is the policy's KL at μ's prefixes", abs(sums[name] / at_prefixes - 1))
            for name in ("k1", "k3", "sequence")
        ),
        _equal("measured sequence + prefix_gap is the KL of the policy's own sequences", abs(whole / of_sequences - 1)),
        Check("stale", "prefix_gap of the same samples", f"{share:.3f} of the KL", "not 0", share > 1e-3),
    ]


# -- filtered samples --------------------------------------------------------------------------------------------


def filtered(bandit: Bandit, top_k: int = 2) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities `[V, 1]` after top-k (−inf for other tokens), and the kept mass M."""
    logp = bandit.old_logp(ON)
    kept = logp >= logp.flatten().topk(top_k).values[-1]
    mass = logp.exp()[kept].sum()
    return torch.where(kept, logp - mass.log(), -torch.inf), mass


def filters() -> list[Check]:
    """Check bounds on the bias for a kept mass M: (1 − M)·max|f| for means weighted by π/q, else twice that."""
    bandits = random_bandits()
    weighted, unweighted, lower, divergences = [], [], [], []
    for bandit in bandits:
        logp, d = bandit.old_logp(ON), bandit.ref_logp - bandit.old_logp(ON)
        q, mass = filtered(bandit)
        inside = q.isfinite()
        mask = torch.ones_like(inside)
        w = torch.where(inside, mismatch_ratio(logp, torch.where(inside, q, logp), mask), 0.0)
        for estimator in VALUES.values():
            f = estimator(d)
            truth, bound = (logp.exp() * f).sum(), (1 - mass) * f.abs().max()
            weighted.append((((q.exp() * w * f).sum() - truth).abs() / bound).item())
            unweighted.append((((q.exp() * f).sum() - truth).abs() / bound).item())
        lower.append(((q.exp() * w * k3(d)).sum() / bandit.kl_values[POLICY_REF]).item())
        variation = 0.5 * (q.exp() - logp.exp()).abs().sum()
        divergence = (q.exp() * torch.where(inside, q - logp, 0.0)).sum()
        divergences.append(max(abs(variation - (1 - mass)).item(), abs(divergence + mass.log()).item()))

    def row(fact: str, shown: str, expected: str, ok: bool) -> Check:
        return Check("filters", fact, shown, expected, ok)

    largest = "(1 − kept mass)·max |f|"
    return [
        row(
            "distance of the kept part from the policy: 1 − M in total variation, −log M in KL",
            f"error {max(divergences):.1e}",
            "equal",
            max(divergences) < EXACT,
        ),
        row(
            f"mean weighted by π/q: bias divided by {largest}",
            f"at most {max(weighted):.3f}",
            "at most 1",
            max(weighted) <= 1 + EXACT,
        ),
        row(
            f"unweighted mean: bias divided by {largest}",
            f"at most {max(unweighted):.3f}",
            "at most 2, can exceed 1",
            1 < max(unweighted) <= 2 + EXACT,
        ),
        row(
            "k3 weighted by π/q, divided by KL(policy‖ref)",
            f"{min(lower):.3f} to {max(lower):.3f}",
            "never above 1",
            max(lower) <= 1 + EXACT,
        ),
    ]
