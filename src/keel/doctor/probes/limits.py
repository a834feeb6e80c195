"""Limits that are too tight: rejected completions, skipped updates, KL budgets, old samples, reference thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.advice import either
from keel.doctor.evidence import at_least, chance_above, level, more_groups
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.clip_range import clip_findings
from keel.doctor.probes.update import FirstUpdate, moved, one_digit
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.losses.mismatch import behaviour_logp, mismatch_weights
from keel.trainer.batch import StepBatch

SCATTER = 0.1  # least step-to-step variation of gradient norms


def probe_limits(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The effect of the configured limits on a policy after the least movement that learning needs."""
    first: FirstUpdate | None = setup.of_batch.pop("update", None)  # the last probe that uses its gradients
    if first is None or not (math.isfinite(first.loss) and first.peak_kl > 0):
        codes = "kl/rejects-all, loss/clip, guard/skips-all, sampler/too-old"
        return Outcome("limits", unchecked=(f"{codes}: no update could be tried",))
    figures: dict[str, float] = {}
    findings = (
        *_rejects(setup, first, figures, thresholds),
        *clip_findings(setup, figures, thresholds),
        *_skips(setup, figures, thresholds),
        *_budget(setup, first, thresholds),
        *_too_old(setup, first, figures, thresholds),
        *_triggered(setup, first),
        *_left_out(setup, figures, thresholds),
    )
    return Outcome("limits", findings, figures)


def _rejects(
    setup: KeelSubject, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """The share of completions over kl.collect_max after the policy has moved by `kl_not_learning`.

    Samples of the old policy under the moved one stand for samples of the moved one under the reference. Both are
    samples of a policy at that distance. More are drawn while the result is not significant; a problem is one
    observation.
    """
    limit = setup.config.kl.collect_max
    if limit is None or setup.run.reference is None:
        return
    distance, most = thresholds["kl_not_learning"], thresholds["rejected_most"]
    ratios: list[Tensor] = []  # [completions] for each group

    def shares(groups: Sequence[Group]) -> list[float]:
        if more := groups[len(ratios) :]:
            batch = setup.pack(more) if ratios else setup.batch
            values = _log_ratios(setup, first, batch, distance)
            ratios.extend(values.split([len(group.completions) for group in batch.groups]))
        return [float((values > limit).double().mean()) for values in ratios]

    def chance_of(groups: Sequence[Group]) -> float:
        return chance_above(shares(groups), most)

    def undecided(groups: Sequence[Group]) -> bool:
        return fmean(shares(groups)) > most and chance_of(groups) > level(thresholds)

    groups = more_groups(setup, "kl/rejects-all", undecided)
    chance, values = chance_of(groups), torch.cat(ratios)
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


def _log_ratios(setup: KeelSubject, first: FirstUpdate, batch: StepBatch, level: float) -> Tensor:
    """The mean log-ratio of each completion between the policy and itself after an update of `level` nats per token.

    For cut completions, deviations from the mean are scaled to those of full ones, by the square root of the length.
    """
    mask, before = batch.rows.action_mask, setup.logp(batch)
    with moved(setup, first.gradients, first.loss, math.sqrt(level / first.peak_kl), weight_decay=0.0):
        ratio = before - setup.logp(batch)
    values = ratio.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp_min(1)
    if setup.cut_from is None:
        return values
    shorter = float(mask.sum()) / len(mask) / setup.completion_length
    return values.mean() + math.sqrt(min(1.0, shorter)) * (values - values.mean())


def _skips(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """The spike guard's skip rate on log-normal gradient norms with the least usual variation."""
    guards, spike = setup.config.guards, setup.run.limits.grad_spike
    if guards.on_spike != "skip":
        return
    figures["skipped"] = 0.5 * math.erfc(math.log(max(spike, 1e-9)) / SCATTER / math.sqrt(2))
    if not figures["skipped"] > thresholds["skipped_most"]:
        return
    yield finding(
        "guard/skips-all",
        f"where gradient norms scatter by {SCATTER:.0%} from step to step, guards.grad_spike={spike:g} with "
        f"on_spike=skip skips {figures['skipped']:.0%} of the updates (over {thresholds['skipped_most']:.0%})",
        "ordinary norms count as spikes; what is skipped leaves the running median, which then falls further",
        propose("set {}, or {}", {"guards.grad_spike": 10.0}, {"guards.on_spike": "warn"}),
    )


def _budget(setup: KeelSubject, first: FirstUpdate, thresholds: Thresholds) -> Iterator[Finding]:
    """A KL budget that stops or rolls back the run before anything can be learned."""
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
    setup: KeelSubject, first: FirstUpdate, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Samples so old that updates have moved the policy too far from the one that drew them.

    Over a few steps, updates are a random walk. Over many, their directions add up.
    """
    run = setup.run
    age = min(run.rollout.max_staleness, setup.config.run.max_steps)
    per_step = first.peak_kl * run.loss.num_iterations * run.optim.minibatches
    deep = age > thresholds["sample_age"]  # one or two steps are about one update, which has its own limit
    # over many steps, distances add up and the KL grows quadratically
    figures["sample_age_kl"] = (age * age if deep else age) * per_step
    limit = thresholds["sampler_kl_error" if deep else "kl_per_update_peak"]
    if age == 0 or not figures["sample_age_kl"] > limit or first.peak_kl > thresholds["kl_per_update_peak"]:
        return  # too large updates have a finding of their own
    younger = min(int(thresholds["sample_age"]) // 2, int(limit / thresholds["update_margin"] / per_step))
    slower = math.sqrt(limit / thresholds["update_margin"] / figures["sample_age_kl"])
    yield finding(
        "sampler/too-old",
        f"samples may be {age} steps old, and in these the policy goes {figures['sample_age_kl']:.2g} nats per token "
        f"{'where its updates' if deep else 'as a random walk of updates'} of {first.peak_kl:.2g} each"
        f"{' point one way' if deep else ''} (over {limit:g})",
        f"rollout.max_staleness={run.rollout.max_staleness}: what is trained on was drawn by another policy, further "
        "away than weights can repair",
        propose(
            "set {}, or {}",
            {"rollout.max_staleness": younger},
            {"optim.learning_rate": one_digit(run.optimizer.learning_rate * slower)},
        ),
    )


def _triggered(setup: KeelSubject, first: FirstUpdate) -> Iterator[Finding]:
    """A kl_triggered reference whose threshold a single step exceeds."""
    run = setup.run
    if run.reference is None or run.reference.kind != "kl_triggered":
        return
    threshold = float(setup.config.reference.params.get("threshold", math.inf))
    update = first.peak_kl * run.loss.num_iterations * run.optim.minibatches
    if threshold >= update:
        return
    yield finding(
        "reference/follows",
        f"one step moves the policy by {update:.2g} nats per token, and the reference is replaced from "
        f"reference.threshold={threshold:g} on",
        "the reference takes the policy over at every step: the KL stays near 0 and holds nothing",
        either(
            propose("set {}, or {}", {"reference.threshold": 0.1}, {"reference": {"kind": "auto"}}),
            "nothing, if the KL is meant to hold single steps, as in mirror descent",
            joined="; ",
        ),
    )


def _left_out(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """Tokens whose importance weight lies outside the limits of loss.mismatch, which sets it to 0."""
    options, logp = setup.run.loss.mismatch, setup.logp()
    sampled = behaviour_logp(setup.batch.rows, logp, options.level)
    if options.kind not in ("mask", "icepop") or sampled is None:
        return
    zero = (mismatch_weights(logp, sampled, setup.mask, options) == 0) & setup.mask
    shares = (zero.sum(-1) / setup.mask.sum(-1).clamp(min=1)).tolist()  # completions are independent, tokens are not
    figures["left_out"] = float(zero.sum() / setup.mask.sum().clamp(min=1))
    most = thresholds["sampler_rejected"] / 2
    if figures["left_out"] <= most:
        return
    yield finding(
        "loss/no-gradient",
        f"{figures['left_out']:.0%} of the sampled tokens weigh 0 before anything was trained: policy over sampler "
        f"lies outside of [{options.floor or 0:g}, {options.cap:g}] for them",
        f"loss.mismatch.kind={options.kind} leaves out what should be trained: its limits are narrower than what the "
        "sampler differs by, be it rounding or a fault of its own",
        propose("set {}", {"loss.mismatch.kind": "truncate", "loss.mismatch.cap": 2.0, "loss.mismatch.floor": None}),
        severity=None if at_least(shares, level(thresholds)) > most else "warning",
    )
