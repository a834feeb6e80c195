"""Proofs under every loss: KL penalties in the real objective, on completions of different lengths.

The facts are proven per token. A loss also weights tokens, uses its own ratios and masks completions. These proofs
enumerate every completion of a tabular policy, and the policy term masks half of them. The expected gradient must equal
the one that `check_pairing` states for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keel.base.types import Batch, Scores
from keel.kl import KLOptions, estimate, exact_kl, reward_penalty
from keel.kl.exact import DIRECTIONS
from keel.kl.facts import LENGTH_WEIGHTED, MEANINGS, POLICY_REF, Pairing, divergence_of
from keel.losses import (
    LOSSES,
    Counts,
    Denominators,
    LossOptions,
    objective,
    with_policy_mask,
)
from keel.verify.oracle import EXACT, OFF, ON, STALE, Check, SequenceWorld, relative_error, sequence_world

ONE = Denominators(1.0, 1.0, 1)  # with it, every reduction weights a token by 1 or by 1/length
_SAMPLING = {ON: "on-policy", OFF: "off-policy", STALE: "stale samples"}
# estimator, placement, gradient, level, kl.reduction
PENALTIES = (
    ("k1", "reward", "auto", "sequence", "token_mean"),
    ("k1", "advantage", "auto", "token", "token_mean"),
    ("k1", "advantage", "auto", "sequence", "token_mean"),
    ("k2", "loss", "auto", "token", "loss"),
    ("k2", "loss", "auto", "token", "token_mean"),
    ("k3", "loss", "rho", "token", "loss"),
    ("k3", "loss", "plain", "token", "loss"),
    ("k1", "loss", "auto", "sequence", "token_mean"),
)


@dataclass(frozen=True)
class EnumeratedCompletions:
    """Every completion of a tabular policy: log-probabilities, mask `[N, T]`, and sampling probability `[N]`.

    `old` are the old policy's log-probabilities (None: on-policy). `sample` are the sampler's, for stale samples.
    """

    theta: Tensor
    logp: Tensor
    ref: Tensor
    old: Tensor | None
    sample: Tensor | None
    exact: Tensor
    reverse: Tensor
    mask: Tensor
    weights: Tensor


def completions(world: SequenceWorld, sampling: str, *, end: int | None = 0) -> EnumeratedCompletions:
    """All completions up to and including their first `end` token. With `end` None, all have the maximum length."""
    sequences = world.sequences()
    after_end = (sequences == end).cumsum(-1) - (sequences == end).long() > 0 if end is not None else sequences < 0
    canonical = (~after_end | (sequences == end)).all(-1)  # keep one of the continuations after the end
    sequences, mask = sequences[canonical], ~after_end[canonical]
    theta = world.policy.clone().requires_grad_()
    rows, index = world.rows(sequences), sequences.unsqueeze(-1)

    def token_logp(table: Tensor) -> Tensor:
        return torch.where(mask, table[rows].gather(-1, index).squeeze(-1), 0.0)

    policy, reference = theta.log_softmax(-1), world.reference.log_softmax(-1)
    logp, drawn = token_logp(policy), token_logp(world.sampler.log_softmax(-1)) if sampling != ON else None
    weights = (logp if drawn is None else drawn).sum(-1).exp().detach()
    old, sample = (token_logp(world.proximal.log_softmax(-1)), drawn) if sampling == STALE else (drawn, None)
    exact, reverse = (
        torch.where(mask, exact_kl(policy[rows], reference[rows], direction), 0.0) for direction in DIRECTIONS
    )
    return EnumeratedCompletions(theta, logp, token_logp(reference), old, sample, exact, reverse, mask, weights)


def target(enumerated: EnumeratedCompletions, level: str, divergence: str = POLICY_REF) -> Tensor:
    """The gradient of a divergence, per token at the sampler's prefixes or for the whole sequence."""
    if level == "token":
        value = (
            enumerated.weights.unsqueeze(-1) * (enumerated.exact if divergence == POLICY_REF else enumerated.reverse)
        ).sum()
    else:
        total = enumerated.logp.sum(-1)
        value = (total.exp() * (total - enumerated.ref.sum(-1))).sum()
    return torch.autograd.grad(value, enumerated.theta, retain_graph=True)[0]


def penalty_gradient(enumerated: EnumeratedCompletions, loss: LossOptions, kl: KLOptions, pairing: Pairing) -> Tensor:
    """The expected gradient of the penalty at β = 1 under a loss whose policy term masks half the completions."""
    no_advantage = torch.zeros(len(enumerated.mask), dtype=enumerated.logp.dtype)
    kl_advantages = None
    if kl.placement == "reward":  # rewards are computed once, with the old policy's KL
        old = enumerated.logp.detach() if enumerated.old is None else enumerated.old
        kl_advantages = reward_penalty(
            estimate(kl.estimator, old, enumerated.ref, enumerated.mask, clamp=None), enumerated.mask, 1.0
        )
    leaf = enumerated.logp.detach().requires_grad_()
    batch = Batch(
        action_mask=enumerated.mask,
        advantages=no_advantage,
        old_logp=enumerated.old,
        ref_logp=enumerated.ref,
        sample_logp=enumerated.sample,
        stale=enumerated.sample is not None,
        policy_mask=with_policy_mask(enumerated.mask, torch.arange(len(enumerated.mask)) % 2 == 0),
        kl_advantages=kl_advantages,
    )
    out = objective(Scores(leaf), batch, loss, kl, 1.0, Counts(ONE, ONE), pairing=pairing)
    (coefficient,) = torch.autograd.grad(out.loss, leaf)
    expected = (enumerated.weights.unsqueeze(-1) * coefficient * enumerated.logp).sum()
    return torch.autograd.grad(expected, enumerated.theta, retain_graph=True)[0]


def _cosine(first: Tensor, second: Tensor) -> float:
    return ((first * second).sum() / (first.norm() * second.norm())).item()


def penalty_check(name: str, penalty: tuple[str, str, str, str, str], sampling: str, world: SequenceWorld) -> Check:
    """Check a penalty under one loss against the claim of `check_pairing`.

    An exact pairing is exact at any distance from the reference. A length-weighted pairing is exact if all completions
    have the same length. A pairing that is biased by drift is exact in the limit of a sampler that equals the policy.
    """
    estimator, placement, gradient, level, reduction = penalty
    loss = LossOptions(loss_type=name)
    options = {"estimator": estimator, "gradient": gradient, "placement": placement, "level": level}
    kl = KLOptions.model_validate({**options, "beta": 1.0, "reduction": reduction, "log_ratio_clamp": None})
    pairing = kl.pairing(LOSSES[name].reduction, off_policy=sampling != ON)
    verdict = pairing.expected_gradient
    by_length, drifts = LENGTH_WEIGHTED in verdict, verdict.startswith("near ")

    def measure(world: SequenceWorld, end: int | None = 0) -> tuple[float, float]:
        enumerated = completions(world, sampling, end=end)
        measured = penalty_gradient(enumerated, loss, kl, pairing)
        measured = measured * (world.steps if by_length and end is None else 1)
        truth = target(enumerated, pairing.level, divergence_of(verdict))
        return relative_error(measured, truth), _cosine(measured, truth)

    error, cosine = measure(world)
    close_error, close_cosine = measure(near_reference(world))
    if not (by_length or drifts):
        ok = max(error, close_error) < EXACT
    else:
        limit = world.with_sampler_near() if drifts else world
        ok = error > 1e-3 and min(cosine, close_cosine) > 0.8
        ok = ok and measure(limit, end=None if by_length else 0)[0] < (1e-4 if drifts else EXACT)
    shown = f"cosine {cosine:.3f}" if by_length or drifts else f"error {error:.1e}"
    how = f", gradient {gradient}, reduction {reduction}" if placement == "loss" else ""
    label = f"{name}: {estimator} in the {placement}, {pairing.level} level{how}, {_SAMPLING[sampling]}"
    return Check("losses", label, shown, MEANINGS[verdict].split(":")[0], ok)


def near_reference(world: SequenceWorld, share: float = 0.03) -> SequenceWorld:
    """The same problem, with policy and sampler close to the reference."""
    policy = world.reference + share * (world.policy - world.reference)
    return replace(world, policy=policy, sampler=policy + share * (world.sampler - world.policy))


def _no_longer_zero(world: SequenceWorld) -> Check:
    """Check that the expected gradient of k1 in the loss is 0 under a token mean, but not under 1/length weights."""
    kl = KLOptions(estimator="k1", gradient="plain", reduction="loss", log_ratio_clamp=None, allow_biased=True)
    by_length, alike = (kl.pairing(LOSSES[name].reduction) for name in ("grpo", "dapo"))
    enumerated = completions(world, ON)
    grpo, dapo = LossOptions(loss_type="grpo"), LossOptions(loss_type="dapo")
    size = (penalty_gradient(enumerated, grpo, kl, by_length).norm() / target(enumerated, "token").norm()).item()
    even = penalty_gradient(enumerated, dapo, kl, alike).norm().item()
    fact = "grpo: k1 in the loss, plain gradient: zero under reduction token_mean, not zero under 1/length weights"
    ok = size > 1e-3 and even < EXACT and by_length.expected_gradient == "wrong"
    return Check("losses", fact, f"size {size:.3f}", MEANINGS["wrong"], ok)


def losses() -> list[Check]:
    """Check every built-in loss with every valid penalty, on-policy, off-policy and on stale samples."""
    world = sequence_world()
    rows = [
        penalty_check(name, penalty, sampling, world)
        for name in LOSSES
        for penalty in PENALTIES
        for sampling in (ON, OFF, STALE)
    ]
    return [*rows, _no_longer_zero(world)]
