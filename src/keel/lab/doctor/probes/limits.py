"""Limits that cut, or do not: completions left out for their KL, clipped ratios, skipped updates, old samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from keel.base.imports import is_import_path
from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.findings import Finding, finding, propose
from keel.lab.doctor.probes.evidence import chance_above, level, more_groups
from keel.lab.doctor.probes.objective import loss_gradient
from keel.lab.doctor.probes.reach import gradient_norm
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.probes.update import FirstUpdate, loss_gradients, moved, one_digit
from keel.lab.doctor.setup import ProbeSetup
from keel.losses import LossOptions
from keel.trainer.batch import StepBatch
from keel.trainer.guards import WINDOW, spike_limit

STEPS = 400  # of a simulated guard
CLOSE_SPIKE = 3.0  # times the median: from here on a spike guard cannot meet ordinary norms
CLIPS = ("epsilon", "epsilon_high", "delta")  # limits of the ratio
FAR_RATIO = 1.0  # nats of log-ratio that every clip range should cut
HUGE_RATIO = 4.0  # and that every limit of a weight should bound


def probe_limits(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """What the configured limits do to a policy that has moved as far as one that learns must."""
    first: FirstUpdate | None = setup.of_batch.pop("update", None)  # the last that needs its gradients
    if first is None or not (math.isfinite(first.loss) and first.peak_kl > 0):
        codes = "kl/rejects-all, loss/clip, guard/skips-all, sampler/too-old"
        return ProbeResult("limits", unchecked=(f"{codes}: no update could be tried",))
    figures: dict[str, float] = {}
    findings = (
        *_rejects(setup, first, figures, thresholds),
        *([*clipped_side(setup, figures, thresholds)] or _clips(setup, first, figures, thresholds)),
        *_skips(setup, first, figures, thresholds),
        *_budget(setup, first, thresholds),
        *_too_old(setup, first, figures, thresholds),
    )
    return ProbeResult("limits", findings, figures)


def _rejects(
    setup: ProbeSetup, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Completions over kl.collect_max once the policy is `kl_not_learning` away from where it was.

    Samples of the old policy against the moved one stand for samples of the moved one against the reference: both are
    a policy's own tokens at that distance. More are drawn while chance may decide; a problem is one observation.
    """
    limit = setup.config.kl.collect_max
    if limit is None or setup.run.reference is None:
        return
    distance, most = thresholds["kl_not_learning"], thresholds["rejected_most"]
    ratios: list[Tensor] = []  # [completions] of each group

    def shares(groups: Sequence[Group]) -> list[float]:
        if more := groups[len(ratios) :]:
            batch = setup.pack(more) if ratios else setup.batch
            values = _log_ratios(setup, first, batch, distance)
            ratios.extend(values.split([len(group.completions) for group in batch.groups]))
        return [float((values > limit).double().mean()) for values in ratios]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(shares(groups), most) > level(thresholds)

    groups = more_groups(setup, "kl/rejects-all", lambda groups: fmean(shares(groups)) > most and by_chance(groups))
    chance, values = chance_above(shares(groups), most), torch.cat(ratios)
    over, count = int((values > limit).sum()), len(values)
    figures["rejected"] = over / count
    if chance > level(thresholds):
        return
    usual = float(f"{max(10 * distance, 5 * float(values.abs().quantile(0.9))):.1g}")
    yield finding(
        "kl/rejects-all",
        f"at {distance:g} nats per token from the reference, which every policy that learns passes, {over} of {count} "
        f"completions of {len(groups)} problems are over kl.collect_max={limit:g} (over {most:.0%}; by chance once in "
        f"{1 / max(chance, 1e-300):.1g})",
        "a completion's own KL is mostly noise: what the policy has just learned to prefer leaves the policy term, and "
        "the KL penalty stays",
        propose("set {}, or {}", {"kl.collect_max": usual}, {"kl.collect_max": None}),
    )


def _log_ratios(setup: ProbeSetup, first: FirstUpdate, batch: StepBatch, level: float) -> Tensor:
    """Mean log-ratio of each completion between the policy and itself after an update of `level` nats per token.

    Where completions were cut it scatters about its mean as that of whole ones would: by the root of their length.
    """
    mask, before = batch.rows.action_mask, setup.logp(batch)
    with moved(setup, first.gradients, first.loss, math.sqrt(level / first.peak_kl), weight_decay=0.0):
        ratio = before - setup.logp(batch)
    values = ratio.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp_min(1)
    if setup.cut_from is None:
        return values
    shorter = float(mask.sum()) / len(mask) / setup.completion_length
    return values.mean() + math.sqrt(min(1.0, shorter)) * (values - values.mean())


def _several_updates(setup: ProbeSetup) -> bool:
    run = setup.run
    return run.loss.num_iterations * run.optim.minibatches > 1 or run.rollout.max_staleness > 0


def clipped_side(setup: ProbeSetup, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
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
            yield from _unbounded(setup, signs, figures, loss_name)
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


def _unbounded(setup: ProbeSetup, signs: Tensor, figures: dict[str, float], loss_name: str) -> Iterator[Finding]:
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


def _clips(
    setup: ProbeSetup, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Clip options of the user's against the loss's own: after one update of a batch, and far from ratio 1."""
    chosen = {name: value for name in CLIPS if (value := getattr(setup.config.loss, name)) is not None}
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
    own = setup.run.loss.model_copy(update=dict.fromkeys(CLIPS))
    figures["clipped"] = _clipped(setup, signs, near, setup.run.loss, mask & (near != 0))
    figures["clipped_far"] = _clipped(setup, signs, far, setup.run.loss, mask)
    own_near = _clipped(setup, signs, near, own, mask & (near != 0))
    own_far = _clipped(setup, signs, far, own, mask)
    options = ", ".join(f"loss.{name}={value:g}" for name, value in chosen.items())
    mend = propose("set {}, the loss's own", {f"loss.{name}": None for name in chosen})
    limit = thresholds["clipped_moved"]
    if figures["clipped"] > limit and own_near < 1 - limit:
        yield finding(
            "loss/clip",
            f"after one update of a batch {figures['clipped']:.0%} of the tokens that it moved the right way have no "
            f"gradient left (over {limit:.0%}), {own_near:.0%} with the loss's own range",
            f"{options}: the range is narrower than one update, so that all further ones of a batch are cut",
            mend,
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


def _clipped(setup: ProbeSetup, advantage: Tensor, step: Tensor, loss: LossOptions, where: Tensor) -> float:
    gradient = loss_gradient(setup, advantage, step=step, loss=loss)
    return float((gradient == 0)[where].double().mean()) if bool(where.any()) else 0.0


def _skips(
    setup: ProbeSetup, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """The spike guard on gradient norms that scatter as those of this batch's groups do."""
    guards, spike = setup.config.guards, setup.run.thresholds["grad_spike"]
    if guards.on_spike != "skip" or spike >= CLOSE_SPIKE:
        return
    scatter = _norm_scatter(setup, first)
    figures |= {"norm_scatter": scatter, "skipped": simulated_skips(scatter, setup.run.thresholds)}
    if not figures["skipped"] > thresholds["skipped_most"]:
        return
    yield finding(
        "guard/skips-all",
        f"gradient norms scatter by {scatter:.0%} from step to step: guards.grad_spike={spike:g} with on_spike=skip "
        f"would skip {figures['skipped']:.0%} of the updates (over {thresholds['skipped_most']:.0%})",
        "ordinary norms count as spikes; what is skipped leaves the running median, which then falls further",
        propose("set {}, or {}", {"guards.grad_spike": 10.0}, {"guards.on_spike": "warn"}),
    )


def _norm_scatter(setup: ProbeSetup, first: FirstUpdate) -> float:
    """The relative scatter of a step's gradient norm: that of single groups, over the root of their number."""
    rows = first.batch.rows
    assert rows.group is not None
    assert rows.advantages is not None
    norms = []
    for number in range(len(setup.groups)):
        only = torch.where(rows.group == number, rows.advantages, torch.zeros_like(rows.advantages))
        batch = first.batch.with_rows(advantages=only, kl_advantages=None)
        norms.append(gradient_norm(loss_gradients(setup, batch, beta=0.0, entropy_coef=0.0)[0]))
    values = torch.tensor([norm for norm in norms if norm > 0], dtype=torch.float64)
    if len(values) < 2:
        return 0.0
    return float(values.std() / values.mean()) / math.sqrt(setup.config.rollout.prompts_per_step)


def simulated_skips(scatter: float, thresholds: Thresholds) -> float:
    """The share of updates that the loop's own guard would skip on log-normal norms of that scatter."""
    draw, skipped = random.Random(0), 0
    norms: list[float] = []
    for _ in range(STEPS):
        norm, limit = math.exp(scatter * draw.gauss(0, 1)), spike_limit(norms[-WINDOW:], thresholds)
        if limit is not None and norm > limit:
            skipped += 1
        else:
            norms.append(norm)
    return skipped / STEPS


def _budget(setup: ProbeSetup, first: FirstUpdate, thresholds: Thresholds) -> Iterator[Finding]:
    """A budget that ends the run, or takes it back, before anything can be learned within it."""
    budget = setup.config.kl.budget
    if budget is None or budget.action == "warn":
        return
    length = setup.completion_length
    allowed = budget.max * (length if budget.unit == "per_token" else 1.0)
    update = first.peak_kl * setup.run.optimizer.schedule(0) ** 2 * length
    least = thresholds["reach_least"]
    if allowed >= max(least, update):
        return
    advised = float(f"{thresholds['kl_over_budget'] * (1.0 if budget.unit == 'per_token' else length):.1g}")
    yield finding(
        "guard/skips-all",
        f"kl.budget.max={budget.max:g} allows {allowed:.2g} nats per completion; the first update alone takes "
        f"{update:.2g}, and under {least:g} nothing can be seen to change",
        f"kl.budget.action={budget.action} ends every attempt to learn as soon as it begins",
        propose("set {}", {"kl.budget.max": advised}),
    )


def _too_old(
    setup: ProbeSetup, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Samples so old that the updates of those steps, as a random walk, have left the policy that drew them."""
    run = setup.run
    age = min(run.rollout.max_staleness, setup.config.run.max_steps)
    per_step = first.peak_kl * run.loss.num_iterations * run.optim.minibatches
    figures["sample_age_kl"] = age * per_step
    deep = age > thresholds["sample_age"]  # a step or two is one update's distance, which has its own limit
    limit = thresholds["sampler_kl_error" if deep else "kl_per_update_peak"]
    if age == 0 or not figures["sample_age_kl"] > limit or first.peak_kl > thresholds["kl_per_update_peak"]:
        return  # where one update is too long its own finding says so
    younger = int(limit / thresholds["update_margin"] / per_step)
    slower = math.sqrt(limit / thresholds["update_margin"] / figures["sample_age_kl"])
    yield finding(
        "sampler/too-old",
        f"samples may be {age} steps old, and in these the policy goes {figures['sample_age_kl']:.2g} nats per token "
        f"as a random walk of updates of {first.peak_kl:.2g} each (over {limit:g})",
        f"rollout.max_staleness={run.rollout.max_staleness}: what is trained on was drawn by another policy, further "
        "away than weights can repair",
        propose(
            "set {}, or {}",
            {"rollout.max_staleness": younger},
            {"optim.learning_rate": one_digit(run.optimizer.learning_rate * slower)},
        ),
    )
