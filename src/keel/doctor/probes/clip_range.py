"""The clip range of a batch that is used several times: the remaining gradient of tokens at ratios other than 1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from keel.base.imports import is_import_path
from keel.doctor.findings import Finding, Severity, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.objective import loss_gradient
from keel.doctor.thresholds import Thresholds
from keel.losses import LossOptions

CLIPS = ("epsilon", "epsilon_high", "delta")  # limits of the ratio
# losses with soft limits and their default values
GATES = {"sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}}
CUT = 0.01  # share of the gradient at ratio 1 below which a token counts as clipped
# log-ratios in nats that every clip range should clip, and that every limit of weights should bound
FAR_RATIO, HUGE_RATIO = 1.0, 4.0
# least change of log p in every update, in nats: of a token, and of the mean of a sequence
LEAST_MOVE, OF_SEQUENCE = 1e-3, 1e-5
RATIO_ROUNDING = 1e-4  # of a token's gradient: far above fp32 rounding, far below the effect of a ratio of e


def clip_findings(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """The gradient at ratios other than 1, for the configured loss and for the same loss with default limits.

    −min(ρA, clip(ρ)A) clips a token only if it has moved far enough in the direction of its advantage. At most one
    finding.
    """
    run, config, limit = setup.run, setup.config.loss, thresholds["clipped_moved"]
    if run.loss.num_iterations * run.optim.minibatches == 1 and run.rollout.max_staleness == 0:
        return
    up = torch.ones(len(setup.mask), device=setup.mask.device)
    both = torch.where(torch.arange(len(up), device=up.device) % 2 == 0, up, -up)
    back, ahead = (_cut(setup, run.loss, both, way * FAR_RATIO) for way in (-1, 1))
    figures |= {"clipped_back": back, "clipped_far": ahead}
    loss_name, users_own = f"loss.loss_type={config.loss_type}", is_import_path(config.loss_type)
    right = "take the smaller of ρA and clip(ρ)A, as −torch.minimum(ρA, clip(ρ)A), or use a loss of Keel's own"
    if back > limit:
        yield finding(
            "loss/clip",
            f"at ratios of e and 1/e the gradient of {back:.0%} of the tokens is cut that have gone against their "
            f"advantage (over {limit:.0%}), and of {ahead:.0%} of those that have gone the way of it",
            f"{loss_name} cuts the wrong side: updates that overshoot go on, and what went wrong stays"
            if ahead < 1 - limit
            else f"{loss_name} clips the ratio alone: a token that was once pushed the wrong way never comes back",
            right,
            severity=None if ahead < 1 - limit else "warning",
        )
        return
    usual: dict[str, float | None] = {**dict.fromkeys(CLIPS), **GATES.get(config.loss_type, {})}
    chosen = {name: getattr(config, name) for name in usual if not users_own and getattr(config, name) != usual[name]}
    if not chosen and not users_own:
        return
    own = run.loss.model_copy(update=usual) if chosen else None
    least = OF_SEQUENCE if _of_sequences(setup) else LEAST_MOVE
    tight = [
        way
        for way, signs in (("up", up), ("down", -up))
        if _cut(setup, run.loss, signs, least) > limit and not (own and _cut(setup, own, signs, least) > limit / 2)
    ]
    pushed, usually = (0.0 if loss is None else _pushed(setup, loss, up) for loss in (run.loss, own))
    evidence = cause = ""
    severity: Severity = "warning"
    if tight:
        evidence = (
            f"of tokens that have gone {' or '.join(tight)} by {least:g} nats over {limit:.0%} have no gradient left"
        )
        cause = "the range has next to no room on that side, so that further updates of a batch are cut"
        severity = "error" if len(tight) == 2 else "warning"
    elif pushed > 0.9 * math.exp(HUGE_RATIO) > 2 * usually:
        evidence = (
            f"tokens of a positive advantage are pushed {pushed:.3g} times as hard at a ratio of "
            f"{math.exp(HUGE_RATIO):.3g} as at 1"
        )
        cause = "the ratio has no limit: what a batch has taught is taught again, and harder"
    elif own is not None and ahead < 1 - limit < limit < _cut(setup, own, both, FAR_RATIO):
        evidence = f"at a ratio of e the gradient of {ahead:.0%} of the tokens is cut"
        cause = "the range cuts nothing, so that several updates of a batch are not held near what sampled it"
    elif users_own and _is_blind(setup, both):
        evidence = (
            f"every token is pushed as hard at ratios from {math.exp(-HUGE_RATIO):.2g} to {math.exp(HUGE_RATIO):.3g} "
            "as at 1, although a batch is used several times"
        )
        cause = "the loss does not see the ratio: later updates of a batch take its samples for new ones"
    if evidence:
        options = ", ".join(f"loss.{name}={value:g}" for name, value in chosen.items())
        yield finding(
            "loss/clip",
            evidence + (", unlike with the loss's own limits" if own else ""),
            f"{options or loss_name}: {cause}",
            propose("set {}, the loss's own", {f"loss.{name}": usual[name] for name in chosen}) if chosen else right,
            severity=severity,
        )


def _of_sequences(setup: KeelSubject) -> bool:
    """Whether the clip range applies to sequences: then other tokens' ratios clip a token whose own ratio is 1.

    Completions of one token cannot distinguish the two.
    """
    ones, mask = torch.ones(len(setup.mask), device=setup.mask.device), setup.mask
    first = mask & (mask.cumsum(-1) == 1)
    others, longer = mask & ~first, first & (mask.sum(-1) > 1)[:, None]
    moved, sampled = (loss_gradient(setup, ones, step=FAR_RATIO * where).abs()[longer] for where in (others, 0 * mask))
    return not bool(longer.any()) or float((moved <= CUT * sampled).double().mean()) > 0.05


def _gradients(setup: KeelSubject, loss: LossOptions, signs: Tensor, nats: float) -> tuple[Tensor, Tensor]:
    """∂loss/∂logp `[N]` of tokens that have moved `nats` in the direction of their advantage, and at ratio 1."""
    step = nats * signs[:, None].expand(setup.mask.shape)
    return tuple(loss_gradient(setup, signs, step=by, loss=loss)[setup.mask] for by in (step, 0.0))  # type: ignore[return-value]


def _cut(setup: KeelSubject, loss: LossOptions, signs: Tensor, nats: float) -> float:
    """The share of tokens with almost no gradient there."""
    moved, sampled = _gradients(setup, loss, signs, nats)
    return float((moved.abs() <= CUT * sampled.abs()).double().mean())


def _pushed(setup: KeelSubject, loss: LossOptions, signs: Tensor) -> float:
    """The gradient of the median token at a very large ratio over that at ratio 1."""
    moved, sampled = _gradients(setup, loss, signs, HUGE_RATIO)
    return float((moved / sampled).nan_to_num(0.0).median())


def _is_blind(setup: KeelSubject, signs: Tensor) -> bool:
    """Whether the gradient is equal at every ratio, up to rounding."""
    pairs = [_gradients(setup, setup.run.loss, signs, by) for by in (FAR_RATIO, -FAR_RATIO, HUGE_RATIO, -HUGE_RATIO)]
    scale = float(pairs[0][1].abs().max())
    return scale > 0 and all(float((moved - sampled).abs().max()) <= RATIO_ROUNDING * scale for moved, sampled in pairs)
