"""Gradients: zero, not finite, spiking, always clipped, or skipped by guards."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from keel.doctor.advice import either, setting
from keel.doctor.checks.base import RECENT, CheckResults, Log, advantage_size, check, not_shown, percent
from keel.doctor.findings import CODES, finding
from keel.doctor.history import Series, step_of
from keel.doctor.shapes import LEAST, course, median

TRAINERS = ("TRL", "verl", "OpenRLHF", "NeMo-RL", "prime-rl")  # each clips at 1 by default
RATE, NORM = "optim/learning_rate", "grad/norm"


@check("loss/no-gradient")
def no_gradient(log: Log) -> CheckResults:
    """A gradient of 0 at steps whose groups differ in reward."""
    norms, differing = log.need(NORM, "the gradient norm").finite, _differing(log)
    if differing is None:
        raise not_shown("whether the groups' rewards differ")
    live = [(int(s), v) for s, v in zip(norms.steps, norms.values, strict=True) if s in differing]
    zero = [s for s, v in live if v <= log.limits["grad_zero"]]
    if len(zero) >= 3 and len(zero) > log.limits["idle_share"] * len(live):
        rates = log.get(RATE)
        yield finding(
            "loss/no-gradient",
            f"the gradient norm is at most {log.limits['grad_zero']:g} at {len(zero)} of {len(live)} logged steps "
            f"whose groups differ in reward, first at step {zero[0]}"
            + (f"; the learning rate is {median(rates):.3g}" if rates is not None else ""),
            "the loss does not depend on the trained weights: it is detached, all tokens are masked, advantages are "
            "lost, "
            "or no trainable parameter is used",
            "compute the gradient of the loss on one batch; check the loss mask, requires_grad, and the product with "
            "the "
            "advantages",
        )


def _differing(log: Log) -> set[int] | None:
    """The steps at which rewards differ within groups; None if the log does not show it."""
    silent = log.get("reward/zero_variance_fraction")
    if silent is not None:
        return set(silent.where(lambda share: share < log.limits["zero_variance_groups"]))
    spread = log.get("reward/within_group_std") or log.get("advantage/max")
    if spread is None:
        return None
    rows = [row.where(lambda value: value > 0) for row in (spread, log.ranges) if row is not None]
    return set(rows[0]).intersection(*rows)


@check("optim/non-finite")
def non_finite(log: Log) -> CheckResults:
    """Steps with a non-finite loss or gradient. Updates that were skipped as spikes do not count."""
    watched = [log.series[name] for name in ("loss/total", "loss/policy", NORM) if name in log.series]
    skipped = log.get("guard/nonfinite") or log.get("guard/skipped")
    if not watched and skipped is None:
        raise not_shown("loss, gradient norm or skipped updates")
    bad_steps = {step for series in watched for step in series.bad_steps}
    for name in ("loss/total", NORM):
        bad_steps.update(log.omitted(name, RATE))
    if skipped is not None:
        bad_steps.update(skipped.where(lambda share: share > 0))
        watched.append(skipped)
        overflow = log.get("guard/overflow")  # fp16: these updates only lower the loss scale
        if overflow is not None:
            bad_steps -= set(overflow.where(lambda share: share > 0)) - set(skipped.where(lambda share: share > 0))
    # includes attempts that a rollback abandoned
    skips = [event for event in log.events if event.get("kind") == "guard/skipped"]
    bad = bad_steps | {step_of(event) for event in skips if event.get("cause") != "spike"}
    if not bad:
        return
    steps = max(map(len, watched))
    lasting = len(bad_steps) > log.limits["skipped_share"] * steps or max(bad_steps, default=-1) >= log.steps
    full = {"model.dtype": "float32"} if log.source == "keel" and log.option("model.dtype") != "float32" else {}
    precise = setting("{} to rule out precision", full, "full precision to rule out rounding")
    yield finding(
        "optim/non-finite",
        f"{len(bad)} steps had a loss or gradient that is not finite (steps {', '.join(map(str, sorted(bad)[:5]))}"
        f"{' …' if len(bad) > 5 else ''}), {len(bad_steps)} of them among the {steps} steps of the final attempt",
        "a reward is NaN, a log-probability is −inf, half precision overflowed, or the run exploded before",
        either(
            either(precise, log.rate(0.1, "a tenth of")),
            "the saved batch of a skipped step shows which value became non-finite first",
            joined="; ",
        ),
        severity="error" if bad_steps and lasting else "warning",
    )


@check("optim/spike")
def spike(log: Log) -> CheckResults:
    """Gradient norms far above those of earlier updates; a note if they are rare, since clipping limits them."""
    series, least = log.need(NORM, "the gradient norm"), log.limits["grad_spike"]
    skipped = log.get("guard/skipped")  # a step without any update must not count towards the usual norm
    none_made = set(skipped.where(lambda share: share >= 1)) if skipped is not None else set()
    live = [(int(s), v) for s, v in zip(series.finite.steps, series.finite.values, strict=True) if v > 0]
    # in log space, exponential growth is linear
    made = [(step, math.log(value)) for step, value in live if step not in none_made]
    growth = course(Series.of(made))
    leap = max((after - before for (_, before), (_, after) in pairwise(made)), default=0.0)
    if growth is not None and log.clear(growth) and growth.size > max(math.log(least), 2 * leap):
        yield finding(
            "optim/spike",
            f"the gradient norm grows from {math.exp(growth.before):.3g} to {math.exp(growth.after):.3g} over "
            f"{series.span} (chance under noise: {growth.chance:.1g})",
            "updates become larger, or rewards and log-ratios more extreme, during the run",
            log.rate(0.3, "a third of"),
        )
        return
    spikes: list[tuple[float, int, float, float]] = []
    applied: list[float] = []
    for step, norm in live:
        usual = statistics.median(applied[-50:]) if len(applied) >= 10 else math.inf
        if norm > least * usual:
            spikes.append((norm / usual, step, norm, usual))
        if step not in none_made:
            applied.append(norm)
    if not spikes:
        return
    times, step, norm, usual = max(spikes, key=lambda row: row[0])
    left_out = sum(step in none_made for _, step, *_ in spikes)
    many = len(spikes) >= 3 and len(spikes) > log.limits["spike_share"] * len(live)
    # the usual norm as clipping limit, if it is below the current limit
    now, limit = log.option("optim.max_grad_norm"), float(f"{usual:.2g}")
    loose = now is None or (isinstance(now, int | float) and now > limit)
    clipped = setting("{}, the running median", {log.opt("optim.max_grad_norm"): limit} if loose else {})
    yield finding(
        "optim/spike",
        f"{len(spikes)} of {len(live)} steps spike; the largest is {norm:.3g} at step {step}, "
        f"{times:.0f} times the running median of {usual:.3g}"
        + (f"; {left_out} of them were skipped" if left_out else ""),
        "a rare completion with a large advantage or a large log-ratio dominates the update",
        either(either(clipped, log.keel({"guards.on_spike": "skip"})), "read the rollouts of that step", joined="; "),
        severity="warning" if many or (log.source == "keel" and now is None and log.config) else "note",
    )


@check("loss/scale")
def cut_down(log: Log) -> CheckResults:
    """Gradient norms far above the clipping limit from the first step to the last."""
    norms, known = log.need(NORM, "the gradient norm"), log.figure("optim.max_grad_norm")
    if known is None and log.source not in TRAINERS:
        raise not_shown("the limit on the gradient norm")
    limit, lowest = 1.0 if known is None else known, min(norms.finite.values)
    if limit <= 0 or len(norms.finite) < LEAST or lowest <= log.limits["grad_cut_down"] * max(limit, 1.0):
        return
    size, text = advantage_size(log) or (0.0, "")
    large, name = size > log.limits["reward_scale"], log.opt("optim.max_grad_norm")
    cause = "the scale of the reward multiplies the gradient" if large else "the loss is a sum instead of a mean"
    yield finding(
        "reward/scale" if large else "loss/scale",
        f"the gradient norm is {median(norms):.3g} (median over {norms.span}) and never under {lowest:.3g}: "
        f"{name} = {limit:g}{', the usual default,' if known is None else ''} divides every update by "
        f"{median(norms) / limit:.3g}" + (f"; {text} {size:.3g}" if large else ""),
        f"{cause}, and clipping keeps only the direction of the gradient, so every batch moves the policy equally far",
        "divide the reward, or let advantages be divided by their deviation"
        if large
        else f"check the divisor of the loss (tokens, completions, accumulation steps), and set {name} near the "
        "usual norm",
        severity="warning",
    )


@check("guard/skips-all")
def skips(log: Log) -> CheckResults:
    """The share of updates that guards skipped."""
    skipped = log.need("guard/skipped", "the share of skipped updates")
    overflow = log.get("guard/overflow")
    if overflow is not None:  # fp16: these updates only lower the loss scale
        skipped = Series.of((step, share - lowered) for step, share, lowered in skipped.beside(overflow))
    if len(skipped.finite) >= RECENT and skipped.mean > log.limits["skipped_most"]:
        yield finding(
            "guard/skips-all",
            f"guards skipped {percent(skipped.mean)} of the updates over {skipped.span}",
            "the guard is meant for rare updates, but its limit lies within the range of ordinary ones",
            either(
                log.keel({"guards.on_spike": "warn"}),
                "a looser limit of the guard; events.jsonl names the guard",
            ),
        )


@check()
def guards(log: Log) -> CheckResults:
    """The guards' own messages."""
    if any(event.get("kind") in ("stop", "rollback") for event in log.events):
        from keel.trainer.rollback import guard_findings

        for fields in guard_findings(log.events):
            if fields["code"] in CODES:  # a hand-made log may contain any code
                yield finding(**fields)
