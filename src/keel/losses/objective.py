"""The objective: policy term + β · KL term − entropy bonus, each with its own reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.metrics import EffectiveSampleSize, Max, Mean, Metric, Number, Share, Sum
from keel.base.types import Batch, Scores
from keel.kl.estimators import estimate
from keel.kl.facts import Pairing, over_vocabulary
from keel.kl.measure import metric_of
from keel.kl.options import KLTermOptions
from keel.kl.placement import advantage_penalty, kl_loss, kl_score_loss
from keel.kl.ratios import check_mask, importance_ratio, select
from keel.losses.mismatch import (
    behaviour_logp,
    kl_behaviour_logp,
    mismatch_metrics,
    mismatch_weights,
    sampled_off_policy,
)
from keel.losses.options import LossOptions, MismatchOptions
from keel.losses.policy import LossInputs, PolicyTerm
from keel.losses.recipes import declared_options, get_loss, resolve_limits
from keel.losses.reductions import Denominators, count_denominators, divide, get_reduction, token_mean


@dataclass(frozen=True)
class Counts:
    """The denominators of both terms. They differ if tokens are left out of the policy term but not the KL term."""

    policy: Denominators
    kl: Denominators


def global_denominators(batch: Batch, max_completion_length: int | None = None) -> Counts:
    """Count a minibatch's denominators before its microbatch loop."""
    policy_mask = batch.action_mask if batch.policy_mask is None else batch.policy_mask
    return Counts(
        count_denominators(policy_mask, max_completion_length, batch.weight),
        count_denominators(batch.action_mask, max_completion_length, batch.weight),
    )


@dataclass(frozen=True)
class KLTerm:
    """An additional KL term: the anchor's name, its options and β, and the scores and batch for that anchor."""

    anchor: str
    kl: KLTermOptions
    beta: float
    pairing: Pairing
    scores: Scores
    batch: Batch


@dataclass(frozen=True)
class Objective:
    """The loss for backward, and its metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


def policy_term(
    loss: LossOptions, logp: Tensor, old_logp: Tensor | None, advantages: Tensor, mask: Tensor
) -> PolicyTerm:
    """The per-token policy loss `[B, T]`. On the batch's first update `old_logp` is None."""
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    if advantages.shape[0] != logp.shape[0] or advantages.shape[-1] not in (1, logp.shape[-1]):
        raise KeelError(f"advantages has shape {tuple(advantages.shape)}, logp {tuple(logp.shape)}: give [B] or [B, T]")
    old_logp = logp.detach() if old_logp is None else old_logp
    advantages = advantages.to(logp.device).expand_as(logp)
    inputs = LossInputs(logp, old_logp, advantages, mask, resolve_limits(loss))
    return get_loss(loss.loss_type).term(inputs, declared_options(loss))


def kl_term(
    kl: KLTermOptions, pairing: Pairing, loss_reduction: str, scores: Scores, batch: Batch, by: Denominators
) -> Tensor:
    """The reduced KL term of the loss, before β.

    `token_mean` divides by all action tokens of the global batch, or at sequence level by all sequences, so that β has
    the same meaning under every loss. `loss` uses the policy loss's own reduction, like TRL.
    """
    values = kl_loss(
        pairing,
        scores.logp,
        batch.ref_logp,
        batch.action_mask,
        old_logp=kl_behaviour_logp(batch, scores.logp, pairing.level),
        exact_kl=vocabulary_kl(kl, scores) if over_vocabulary(pairing.estimator) else None,
        clamp=kl.log_ratio_clamp,
        ratio_cap=kl.ratio_cap,
    )
    if pairing.level == "sequence":
        return divide(values.sum(), by.sequences)
    return get_reduction(kl.effective_reduction(loss_reduction), batch.weight)(values, batch.action_mask, by)


def kl_penalty(
    kl: KLTermOptions,
    pairing: Pairing | None,
    loss_reduction: str,
    beta: float,
    scores: Scores,
    batch: Batch,
    by: Denominators,
    mismatch: MismatchOptions,
) -> tuple[Tensor, Number]:
    """The contribution of the KL to the loss under any placement, including β, and its logged value (`loss/kl`)."""
    penalty = batch.kl_advantages
    if beta != 0.0 and kl.placement == "advantage":
        # This is the KL of the current policy, not of the policy that drew the samples.
        penalty = advantage_penalty(kl_values(kl, scores, batch), batch.action_mask, beta, level=kl.level)
    if penalty is not None:
        behaviour = kl_behaviour_logp(batch, scores.logp)
        per_token = kl_score_loss(penalty, scores.logp, batch.action_mask, old_logp=behaviour, ratio_cap=kl.ratio_cap)
        old = scores.logp if batch.old_logp is None else batch.old_logp
        sampled = behaviour_logp(batch, old, mismatch.level)
        if sampled is not None and not sampled_off_policy(batch):  # for off-policy samples the ratio is already π/μ
            per_token = per_token * mismatch_weights(old, sampled, batch.action_mask, mismatch, mask_out=False)
        value = get_reduction(loss_reduction, batch.weight)(per_token, batch.action_mask, by)
        return value, beta * mean_penalty(kl, scores, batch, by)
    value = scores.logp.new_zeros(())
    if pairing is not None and beta != 0.0 and kl.placement == "loss":
        value = beta * kl_term(kl, pairing, loss_reduction, scores, batch, by)
    return value, value.detach().double()


def kl_values(kl: KLTermOptions, scores: Scores, batch: Batch) -> Tensor:
    """The estimator's KL `[B, T]` of the current policy, detached."""
    if over_vocabulary(kl.estimator):
        return vocabulary_kl(kl, scores).detach()
    if batch.ref_logp is None:
        raise KeelError(f"kl.estimator={kl.estimator} needs ref_logp: score the batch with the reference first")
    logp, clamp, behaviour = scores.logp.detach(), kl.log_ratio_clamp, kl_behaviour_logp(batch, scores.logp)
    return estimate(kl.estimator, logp, batch.ref_logp, batch.action_mask, clamp, old_logp=behaviour)


def mean_penalty(kl: KLTermOptions, scores: Scores, batch: Batch, by: Denominators) -> Number:
    """The mean KL of a penalty in the reward or the advantage, per token or per sequence."""
    if batch.ref_logp is None and not over_vocabulary(kl.estimator):
        return 0.0  # the caller computed the penalty
    values, behaviour = kl_values(kl, scores, batch), kl_behaviour_logp(batch, scores.logp)
    if behaviour is not None and sampled_off_policy(batch) and not over_vocabulary(kl.estimator):
        values = values * importance_ratio(scores.logp.detach(), behaviour, batch.action_mask, cap=kl.ratio_cap)
    total = select(values, batch.action_mask).sum()
    per_sequence = kl.placement == "reward" or kl.level == "sequence"
    return divide(total, by.sequences if per_sequence else by.tokens).double()


def vocabulary_kl(kl: KLTermOptions, scores: Scores) -> Tensor:
    """The divergence over the vocabulary `[B, T]` that the estimator names."""
    by_name = {"exact": scores.exact_kl, "exact_reverse": scores.ref_policy_kl}
    values = by_name.get(kl.estimator, scores.divergence)
    if values is None:
        raise KeelError(
            f"kl.estimator={kl.estimator} needs the full distributions: score with exact_kl=True and `divergence`"
        )
    return values


def objective(
    scores: Scores,
    batch: Batch,
    loss: LossOptions,
    kl: KLTermOptions,
    beta: float,
    counts: Counts | None = None,
    *,
    pairing: Pairing | None = None,
    more: Sequence[KLTerm] = (),
    max_completion_length: int | None = None,
) -> Objective:
    """loss = policy_weight·policy + Σ β·KL − entropy_coef·H on a microbatch, divided by the minibatch's `counts`.

    The sum over microbatches and ranks is the minibatch's loss. Without `counts` the microbatch is the minibatch.
    A KL in the advantage or the reward (`batch.kl_advantages`, including β) is a separate policy-gradient term over all
    action tokens. `policy_mask` and the loss's ratio and clip do not change it. `more` are the terms of further
    anchors; `loss/kl` is the sum of all terms. `loss.mismatch` applies if the batch has `sample_logp`. For stale or
    filtered samples, the KL term's ratio is relative to the sampler and limited by `kl.ratio_cap`, not `loss.mismatch`.
    """
    check_mask(batch.action_mask, scores.logp.shape)
    if batch.advantages is None:
        raise KeelError("the objective needs batch.advantages: compute them with keel.losses.advantages")
    policy_mask = batch.action_mask if batch.policy_mask is None else batch.policy_mask
    check_mask(policy_mask, scores.logp.shape, "policy_mask")
    if counts is None and bool((policy_mask & ~batch.action_mask).any()):  # training passes counts and so avoids a sync
        raise KeelError("policy_mask contains tokens outside action_mask: only sampled tokens can be trained on")
    if not (math.isfinite(beta) and beta >= 0):
        raise KeelError(f"kl.beta must be finite and not negative, got {beta}")
    if batch.kl_advantages is not None and kl.placement != "reward":
        raise KeelError(f"batch.kl_advantages needs kl.placement=reward, got {kl.placement}: leave it out")
    counts = counts or global_denominators(batch, max_completion_length)
    recipe = get_loss(loss.loss_type)
    reduce = get_reduction(recipe.reduction, batch.weight)
    if beta != 0.0 and pairing is None:
        off_policy = batch.stale or batch.old_logp is not None or batch.filtered_logp is not None
        pairing = kl.pairing(recipe.reduction, off_policy=off_policy, acts=True)
    old = scores.logp if batch.old_logp is None else batch.old_logp
    sampled = behaviour_logp(batch, old, loss.mismatch.level)

    policy_part = policy_term(loss, scores.logp, batch.old_logp, batch.advantages, policy_mask)
    per_token = policy_part.loss
    if sampled is not None:
        per_token = per_token * mismatch_weights(old, sampled, policy_mask, loss.mismatch)
    policy_loss = per_token.new_zeros(())
    if loss.policy_weight != 0.0:
        policy_loss = loss.policy_weight * reduce(per_token, policy_mask, counts.policy)

    kl_loss_value, kl_part = kl_penalty(kl, pairing, recipe.reduction, beta, scores, batch, counts.kl, loss.mismatch)
    total, by_anchor = policy_loss + kl_loss_value, {}
    for term in more:
        value, part = kl_penalty(
            term.kl, term.pairing, recipe.reduction, term.beta, term.scores, term.batch, counts.kl, loss.mismatch
        )
        total, kl_part, by_anchor[metric_of("loss/kl", term.anchor)] = total + value, kl_part + part, Sum(part)
    if loss.entropy_coef != 0.0:
        if scores.entropy is None:
            raise KeelError("loss.entropy_coef needs the entropy of the scores: score with entropy=True")
        total = total - loss.entropy_coef * token_mean(scores.entropy, policy_mask, counts.policy)
    policy = policy_loss.detach().double()
    metrics: dict[str, Metric] = {
        "loss/total": Sum(total.detach().double()),
        "loss/policy": Sum(policy),
        "loss/kl": Sum(kl_part),
        **by_anchor,
        "loss/kl_share": Share(kl_part, policy),
        **_ratio_metrics(policy_part, policy_mask),
        **mismatch_metrics(old, sampled, policy_mask, loss.mismatch),
    }
    if scores.entropy is not None:
        entropy = select(scores.entropy.detach(), batch.action_mask).sum()
        metrics["entropy/mean"] = Mean(entropy.double(), batch.action_mask.sum())
    return Objective(total, metrics)


def _ratio_metrics(term: PolicyTerm, mask: Tensor) -> dict[str, Metric]:
    """Statistics of the policy term's ratios, as tensors, to avoid a device synchronisation."""
    tokens, ratio, (low, high) = mask.sum(), term.ratio.detach().double(), term.clipped()
    weights = select(ratio, mask)
    return {
        "ratio/clip_low_fraction": Mean((low & mask).sum(), tokens),
        "ratio/clip_high_fraction": Mean((high & mask).sum(), tokens),
        "ratio/max": Max(ratio.masked_fill(~mask, -math.inf).max() if mask.numel() else -math.inf),
        "ratio/ess": EffectiveSampleSize(weights.sum(), weights.square().sum(), tokens),
    }


def with_policy_mask(action_mask: Tensor, keep: Tensor) -> Tensor:
    """The policy term's mask: the action mask of the completions that are true in `keep` `[B]`."""
    if keep.dtype != torch.bool or keep.shape != action_mask.shape[:1]:
        raise KeelError(f"keep must be boolean [B], got {keep.dtype} {tuple(keep.shape)}")
    return action_mask & keep.unsqueeze(-1)
