"""The expected gradient of a KL term at given states: an exact sum over the vocabulary, without sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keel.kl import KLOptions, Pairing, estimate, exact_kl
from keel.kl.exact import penalty_divergence
from keel.kl.facts import JSD, MEANINGS, POLICY_REF, REF_POLICY, TOPK, over_vocabulary
from keel.kl.placement import kl_loss, kl_score_loss

TARGET_KL = 0.3  # nats per token; estimators that agree to first order differ at this KL
LEAST = 1e-6  # smallest factor of the displacement
# nats; a tighter clamp (ratios under about 150) takes effect at every step and is part of the term
LOOSE = 5.0
REVERSED = "reversed k3"
GRADIENT_MEANINGS = {**MEANINGS, REVERSED: "½∇χ²(policy‖ref), as of k3 with a reversed log-ratio"}


@dataclass(frozen=True)
class MeasuredGradient:
    """The term's expected gradient against ∇KL(policy‖ref): cosine, size ratio, and the matching target, if any."""

    name: str | None
    cosine: float
    size: float
    value: float
    kl: float
    states: int
    factor: float = 1.0
    cosines: Mapping[str, float] = field(default_factory=dict)  # cosine with each target's gradient

    @property
    def meaning(self) -> str:
        return GRADIENT_MEANINGS[self.name] if self.name else "no divergence's gradient"

    def figures(self) -> dict[str, float]:
        return {"cosine": self.cosine, "size": self.size, "value": self.value, "exact_kl": self.kl}


def measure_term(
    policy: Tensor,
    reference: Tensor,
    kl: KLOptions,
    pairing: Pairing,
    *,
    named: float = 0.05,
    target: float = TARGET_KL,
) -> MeasuredGradient:
    """Measure the configured term at states with these logits `[N, V]`, scaled until the KL is about the target.

    If the log-ratio clamp would take effect, as for a policy with near-certain tokens, a smaller KL is used. The
    gradient is fitted to a multiple of each target. It gets the name of the target with the smallest residual if that
    is less than the share `named`.
    """
    reference = reference.double()
    direction = policy.double() - reference
    ref_logp = reference.log_softmax(-1)
    factor = spread_factor(reference, direction, target)
    while clamped_share(reference + factor * direction, ref_logp, kl.log_ratio_clamp) > named / 10 and factor > LEAST:
        factor /= 2
    logits = reference + factor * direction
    gradient, value = term_gradient(logits, ref_logp, kl, pairing)
    targets = target_gradients(logits, ref_logp, kl)
    exact = targets[POLICY_REF]
    size = (gradient.norm() / exact.norm().clamp_min(1e-300)).item()
    factors = {
        name: (gradient * t).sum().item() / t.square().sum().clamp_min(1e-300).item() for name, t in targets.items()
    }
    residuals = {name: (gradient - factors[name] * t).norm().item() for name, t in targets.items()}
    nearest = min(residuals, key=residuals.__getitem__)
    name = "zero" if size < named / 10 else nearest if residuals[nearest] < named * gradient.norm().item() else None
    apart = exact_kl(logits.log_softmax(-1), ref_logp).mean().item()
    factor = factors[nearest] if name == nearest else 1.0
    cosines = {target: cosine(gradient, theirs) for target, theirs in targets.items()}
    return MeasuredGradient(name, cosine(gradient, exact), size, value, apart, len(logits), factor, cosines)


def clamped_share(logits: Tensor, ref_logp: Tensor, clamp: float | None) -> float:
    """The share of Σ (p + q)·|log p − log q| that comes from log-ratios above the clamp.

    A tight clamp is part of the term: its share is 0.
    """
    if clamp is None or clamp < LOOSE:
        return 0.0
    logp = logits.log_softmax(-1)
    distance = (logp - ref_logp).abs()
    parts, over = (logp.exp() + ref_logp.exp()) * distance, distance > clamp
    return float(parts[over].sum() / parts.sum().clamp_min(1e-300))


def spread_factor(reference: Tensor, direction: Tensor, target: float = TARGET_KL) -> float:
    """The factor of a logit displacement at which the mean KL equals the target, by bisection; 1 for zero."""

    ref_logp = reference.log_softmax(-1)

    def apart(factor: float) -> float:
        return exact_kl((reference + factor * direction).log_softmax(-1), ref_logp).mean().item()

    if not bool(direction.any()):
        return 1.0
    low, high = 0.0, 1.0
    while apart(high) < target and high < 2.0**20:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if apart(middle) < target else (low, middle)
    return low


def cosine(first: Tensor, second: Tensor) -> float:
    return ((first * second).sum() / (first.norm() * second.norm()).clamp_min(1e-300)).item()


def term_gradient(
    logits: Tensor, ref_logp: Tensor, kl: KLOptions, pairing: Pairing, sampler_logp: Tensor | None = None
) -> tuple[Tensor, float]:
    """∂E[term]/∂logits `[N, V]` over samples from the policy (or from `sampler_logp`), and E[term]."""
    logits = logits.detach().requires_grad_()
    logp = logits.log_softmax(-1)
    old = logp.detach() if sampler_logp is None else sampler_logp
    values = _enumerated(logp, ref_logp, old, kl, pairing)
    mean = (old.exp() * values).sum(-1).mean()
    (gradient,) = torch.autograd.grad(mean, logits, allow_unused=True)
    return (torch.zeros_like(logits) if gradient is None else gradient), mean.item()


def _enumerated(logp: Tensor, ref_logp: Tensor, old: Tensor, kl: KLOptions, pairing: Pairing) -> Tensor:
    """The term for every possible token `[N, V]`, at the configured placement."""
    mask = torch.ones_like(logp, dtype=torch.bool)
    if kl.placement != "loss":
        at = old if kl.placement == "reward" else logp.detach()  # a reward is computed once, under the sampling policy
        if over_vocabulary(kl.estimator):
            penalty = _by_vocabulary(at, ref_logp, kl)
        else:
            penalty = estimate(kl.estimator, at, ref_logp, mask, clamp=kl.log_ratio_clamp)
        return -kl_score_loss(penalty, logp, mask, old_logp=old, ratio_cap=kl.ratio_cap)
    exact = _by_vocabulary(logp, ref_logp, kl)
    shape = (-1, 1) if pairing.level == "sequence" else logp.shape  # each state is then a sequence of one token
    values = kl_loss(
        pairing,
        logp.reshape(shape),
        ref_logp.reshape(shape),
        mask.reshape(shape),
        old_logp=old.reshape(shape),
        exact_kl=exact.reshape(shape),
        clamp=kl.log_ratio_clamp,
        ratio_cap=kl.ratio_cap,
    )
    return values.reshape(logp.shape)


def _by_vocabulary(logp: Tensor, ref_logp: Tensor, kl: KLOptions) -> Tensor:
    """The estimator's divergence at each state, repeated for every token `[N, V]`."""
    divergence = penalty_divergence(kl)
    if divergence is None:
        values = exact_kl(logp, ref_logp, "ref_policy" if kl.estimator == "exact_reverse" else "policy_ref")
    else:
        values = divergence(logp, ref_logp, torch.arange(logp.shape[-1], device=logp.device).expand(logp.shape))
    return values if values.dim() == logp.dim() else values.unsqueeze(-1).expand_as(logp)


def target_gradients(logits: Tensor, ref_logp: Tensor, kl: KLOptions) -> dict[str, Tensor]:
    """The gradients that a KL term may have in expectation, from closed forms."""
    logits = logits.detach().requires_grad_()
    logp = logits.log_softmax(-1)
    forms = {
        POLICY_REF: exact_kl(logp, ref_logp),
        REF_POLICY: exact_kl(logp, ref_logp, "ref_policy"),
        "total-variation": (logp.exp() - ref_logp.exp()).abs().sum(-1),
        REVERSED: 0.5 * (2 * logp - ref_logp).exp().sum(-1),
    }
    if kl.estimator in (JSD, TOPK):
        forms[kl.estimator] = _by_vocabulary(logp, ref_logp, kl)[:, 0]
    return {name: torch.autograd.grad(form.mean(), logits, retain_graph=True)[0] for name, form in forms.items()}
