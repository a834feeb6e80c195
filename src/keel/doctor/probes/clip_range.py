"""The limits of the ratio, where a batch is used several times: what they cut of one update, and far from ratio 1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from keel.base.imports import is_import_path
from keel.doctor.findings import Advice, Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.objective import loss_gradient
from keel.doctor.probes.update import FirstUpdate, moved
from keel.doctor.thresholds import Thresholds
from keel.losses import LossOptions

CLIPS = ("epsilon", "epsilon_high", "delta")  # limits of the ratio
GATES = {"sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}}  # soft ones, and the loss's own values
CUT = 0.01  # of a token's push at ratio 1: what is left where a limit cuts
FAR_RATIO = 1.0  # nats of log-ratio that every clip range should cut
NARROW, HALF, NEXT_TO_NONE = 0.01, 0.5, 0.05  # a range far below all recipes' for tokens: that the median is cut tells
LEAST_MOVE = 1e-3  # nats that an update moves a token by
MANY_PASSES = 8  # over a batch, more than recipes have
STANDING = 0.01  # of the largest move
FEW_MOVED = 20  # tokens that one update has moved, of one side
HUGE_RATIO = 4.0  # and that every limit of a weight should bound
RATIO_ROUNDING = 1e-4  # of a push: far over fp32's, far under what any ratio of e does


def _several_updates(setup: KeelSubject) -> bool:
    run = setup.run
    return run.loss.num_iterations * run.optim.minibatches > 1 or run.rollout.max_staleness > 0


def clipped_side(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """What a loss does to tokens far from ratio 1: one that has gone the wrong way must keep its gradient.

    −min(ρA, clip(ρ)A) cuts who has gone far enough the way of its advantage, and nobody else.
    """
    if not _several_updates(setup):
        return
    signs = torch.tensor([1.0, -1.0], device=setup.mask.device).repeat(len(setup.mask))[: len(setup.mask)]
    far = FAR_RATIO * signs[:, None].expand_as(setup.mask)
    back = figures["clipped_back"] = _clipped(setup, signs, -far, setup.run.loss, setup.mask)
    limit, loss_name = thresholds["clipped_moved"], f"loss.loss_type={setup.config.loss.loss_type}"
    if not back > limit:
        if is_import_path(setup.config.loss.loss_type):
            yield from [*_unbounded(setup, signs, figures, loss_name)] or _blind(setup, signs, figures, loss_name)
        return
    ahead = _clipped(setup, signs, far, setup.run.loss, setup.mask)
    yield finding(
        "loss/clip",
        f"at ratios of e and 1/e the gradient of {back:.0%} of the tokens is cut that have gone against their "
        f"advantage (over {limit:.0%}), and of {ahead:.0%} of those that have gone the way of it",
        f"{loss_name} cuts the wrong side: updates that overshoot go on, and what went wrong stays"
        if ahead < 1 - limit
        else f"{loss_name} clips the ratio alone: a token that one update has pushed the wrong way never comes back",
        "take the smaller of ρA and clip(ρ)A, as −torch.minimum(ρA, clip(ρ)A), or use a loss of Keel's own",
        severity=None if ahead < 1 - limit else "warning",
    )


def _unbounded(setup: KeelSubject, signs: Tensor, figures: dict[str, float], loss_name: str) -> Iterator[Finding]:
    """A loss of one's own whose push grows with the ratio for as long as that grows."""
    up = setup.mask & (signs > 0)[:, None]
    near, far = (loss_gradient(setup, signs, step=step)[up] for step in (0.0, HUGE_RATIO))
    figures["pushed_far"] = float((far / near).nan_to_num(0.0).median())
    if not figures["pushed_far"] > 0.9 * math.exp(HUGE_RATIO):
        return
    yield finding(
        "loss/clip",
        f"tokens of a positive advantage are pushed {figures['pushed_far']:.3g} times as hard at a ratio of "
        f"{math.exp(HUGE_RATIO):.3g} as at 1, although a batch is used several times",
        f"{loss_name} has a ratio and no limit to it: what has been learned from a batch is learned again, and harder",
        "clip the ratio, as −torch.minimum(ρA, clip(ρ)A), or use a loss of Keel's own",
        severity="warning",
    )


def _blind(setup: KeelSubject, signs: Tensor, figures: dict[str, float], loss_name: str) -> Iterator[Finding]:
    """A loss of one's own whose push is the same at every ratio, to the rounding of a pass."""
    sampled = loss_gradient(setup, signs)[setup.mask]
    steps = (FAR_RATIO, -FAR_RATIO, HUGE_RATIO, -HUGE_RATIO)
    moved_by = [loss_gradient(setup, signs, step=step)[setup.mask] for step in steps]
    scale = float(sampled.abs().max())
    figures["pushed_apart"] = max(float((push - sampled).abs().max()) for push in moved_by) / max(scale, 1e-30)
    if not scale > 0 or figures["pushed_apart"] > RATIO_ROUNDING:
        return
    yield finding(
        "loss/clip",
        f"every token is pushed as hard at ratios from {math.exp(-HUGE_RATIO):.2g} to {math.exp(HUGE_RATIO):.3g} as at "
        f"1 (to {figures['pushed_apart']:.1g}), although a batch is used several times",
        f"{loss_name} does not see the ratio: it is taken to the policy of the moment, or left out, so that no limit "
        "ever cuts and later updates of a batch take its samples for new ones",
        "take the ratio to inputs.old_logp and clip it, as −torch.minimum(ρA, clip(ρ)A), or use every batch once",
        severity="warning",
    )


def clip_options(
    setup: KeelSubject, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Clip options of the user's against the loss's own: after one update of a batch, and far from ratio 1."""
    usual_values: dict[str, float | None] = {**dict.fromkeys(CLIPS), **GATES.get(setup.config.loss.loss_type, {})}
    chosen = {n: value for n, usual in usual_values.items() if (value := getattr(setup.config.loss, n)) != usual}
    if not chosen or not _several_updates(setup):
        return
    mask = setup.mask
    before = setup.logp()
    with moved(setup, first.gradients, first.loss, 1.0, weight_decay=0.0):
        step = setup.logp() - before
    advantage = first.batch.rows.advantages
    assert advantage is not None
    signs = torch.where(advantage == 0, 1.0, advantage.sign())
    near, far = step * (step * signs[:, None] > 0), FAR_RATIO * signs[:, None].expand_as(step)
    own = setup.run.loss.model_copy(update=usual_values)
    figures["clipped"] = _clipped(setup, signs, near, setup.run.loss, mask & (near != 0))
    figures["clipped_far"] = _clipped(setup, signs, far, setup.run.loss, mask)
    own_far = _clipped(setup, signs, far, own, mask)
    options = ", ".join(f"loss.{name}={value:g}" for name, value in chosen.items())
    mend = propose("set {}, the loss's own", {f"loss.{name}": usual_values[name] for name in chosen})
    limit = thresholds["clipped_moved"]
    narrow = min(chosen.values()) < NARROW
    up = torch.ones_like(signs)
    sides = {"it moved the right way": (signs, near)}
    if int((mask & (step != 0)).sum()) >= FEW_MOVED:  # the other side may have room
        sides |= {"go up by as much as it moved them": (up, step.abs())}
        sides |= {"go down by as much as it moved them": (-up, -step.abs())}
    shares = {
        way: [_clipped(setup, advantages, steps, loss, mask & _moving(steps)) for loss in (setup.run.loss, own)]
        for way, (advantages, steps) in sides.items()
    }
    all_cut = [way for way, (clipped, usual) in shares.items() if clipped > limit and usual < limit / 2]
    most_cut = [way for way, (clipped, usual) in shares.items() if narrow and clipped > HALF and usual < NEXT_TO_NONE]
    for way in (all_cut or most_cut)[:1]:
        clipped, usual = shares[way]
        yield finding(
            "loss/clip",
            f"after one update of a batch {clipped:.0%} of the tokens that {way} have no gradient left (over "
            f"{limit if all_cut else HALF:.0%}), {usual:.0%} with the loss's own range",
            f"{options}: the range is narrower than one update, so that all further ones of a batch are cut",
            mend,
            severity=None if all_cut else "warning",
        )
        return
    if narrow and not _of_sequences(setup):
        yield from _next_to_none(setup, own, options, mend, limit)
        return
    huge = HUGE_RATIO * torch.ones_like(step)
    pushed, usually = (_pushed(setup, up, huge, loss, mask) for loss in (setup.run.loss, own))
    if pushed > 0.9 * math.exp(HUGE_RATIO) > 2 * usually:
        yield finding(
            "loss/clip",
            f"tokens of a positive advantage are pushed {pushed:.3g} times as hard at a ratio of "
            f"{math.exp(HUGE_RATIO):.3g} as at 1, {usually:.3g} times with the loss's own limit",
            f"{options}: the limit bounds nothing, so that what a batch has taught is taught again, and harder",
            mend,
            severity="warning",
        )
    elif figures["clipped_far"] < 1 - limit and own_far > limit:
        yield finding(
            "loss/clip",
            f"at a ratio of e the gradient of {figures['clipped_far']:.0%} of the tokens is cut, {own_far:.0%} with "
            "the loss's own range",
            f"{options}: the range cuts nothing, so that several updates of a batch are not held near what sampled it",
            mend,
            severity="warning",
        )


def _next_to_none(setup: KeelSubject, own: LossOptions, options: str, mend: Advice, limit: float) -> Iterator[Finding]:
    """A side that has no room for a move of a token that every update makes, whatever this one does."""
    ones = torch.ones(len(setup.mask), device=setup.mask.device)
    for way, sign in (("up", 1.0), ("down", -1.0)):
        step = sign * LEAST_MOVE * ones[:, None].expand_as(setup.mask)
        clipped, usual = (_clipped(setup, sign * ones, step, loss, setup.mask) for loss in (setup.run.loss, own))
        if clipped > limit and usual < limit / 2:
            yield finding(
                "loss/clip",
                f"of tokens that have gone {way} by {LEAST_MOVE:g} nats {clipped:.0%} have no gradient left (over "
                f"{limit:.0%}), {usual:.0%} with the loss's own range",
                f"{options}: the range has next to no room on that side, so that further updates of a batch are cut",
                mend,
                severity="warning",
            )
            return


def _of_sequences(setup: KeelSubject) -> bool:
    """Whether others' moves cut a token that has not moved: the range is of sequences, whose ratios are nearer to 1.

    Completions of one token do not tell the two apart.
    """
    ones, mask = torch.ones(len(setup.mask), device=setup.mask.device), setup.mask
    first = mask & (mask.cumsum(-1) == 1)
    if not bool((mask & ~first).any()):
        return True
    longer = first & (mask.sum(-1) > 1)[:, None]
    return _clipped(setup, ones, FAR_RATIO * (mask & ~first), setup.run.loss, longer) > NEXT_TO_NONE


def own_range(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """A loss of one's own that cuts tokens by a range of its own, far below all recipes'."""
    if not is_import_path(setup.config.loss.loss_type) or not _several_updates(setup):
        return
    ones, mask = torch.ones(len(setup.mask), device=setup.mask.device), setup.mask
    narrow = NARROW * ones[:, None].expand_as(mask)
    cut = figures["clipped_next"] = min(
        _clipped(setup, signs, step, setup.run.loss, mask) for signs, step in ((ones, narrow), (-ones, -narrow))
    )
    if not cut > thresholds["clipped_moved"] or _of_sequences(setup):
        return
    yield finding(
        "loss/clip",
        f"where tokens have gone the way of their advantage by {NARROW:g} nats, {cut:.0%} of them have no gradient "
        f"left (over {thresholds['clipped_moved']:.0%}), although batches are used after an update",
        f"loss.loss_type={setup.config.loss.loss_type} has a range for the ratio of a token that one update leaves, as "
        "one that is made for ratios of whole sequences: all further updates of a batch are cut",
        "take inputs.limits for the ratio of a token, or use every batch once",
        severity="warning",
    )


def idle_passes(setup: KeelSubject, first: FirstUpdate, figures: dict[str, float]) -> Iterator[Finding]:
    """A batch that is used so often that its clip range is used up half way, were its updates to point one way."""
    passes, advantage = setup.run.loss.num_iterations, first.batch.rows.advantages
    if passes < MANY_PASSES or advantage is None:
        return
    before = setup.logp()
    with moved(setup, first.gradients, first.loss, passes / 2, weight_decay=0.0):
        step = setup.logp() - before
    signs = torch.where(advantage == 0, 1.0, advantage.sign())
    right = step * (step * signs[:, None] > 0)
    figures["clipped_passes"] = _clipped(setup, signs, right, setup.run.loss, setup.mask & _moving(right))
    if not figures["clipped_passes"] > HALF:
        return
    yield finding(
        "loss/clip",
        f"after half of the {passes} passes over a batch {figures['clipped_passes']:.0%} of the tokens that they moved "
        f"the right way have no gradient left (over {HALF:.0%})",
        f"loss.num_iterations={passes}: the policy has left what sampled the batch long before the last pass, and the "
        "others are cut, or go where nothing was measured",
        propose("set {}", {"loss.num_iterations": 2}),
        severity="warning",
    )


def _moving(steps: Tensor) -> Tensor:
    """Tokens that move at all beside those that move most: what is certain stays where it is, in any range."""
    return steps.abs() > STANDING * steps.abs().max()


def _clipped(setup: KeelSubject, advantage: Tensor, step: Tensor, loss: LossOptions, where: Tensor) -> float:
    """The share of tokens that have next to no gradient left after a step."""
    gradient, sampled = (loss_gradient(setup, advantage, step=s, loss=loss).abs() for s in (step, 0.0))
    return float((gradient <= CUT * sampled)[where].double().mean()) if bool(where.any()) else 0.0


def _pushed(setup: KeelSubject, advantage: Tensor, step: Tensor, loss: LossOptions, where: Tensor) -> float:
    """How much harder the median token is pushed after a step than at ratio 1."""
    gradient, sampled = (loss_gradient(setup, advantage, step=s, loss=loss)[where] for s in (step, 0.0))
    return float((gradient / sampled).nan_to_num(0.0).median()) if bool(where.any()) else 0.0
