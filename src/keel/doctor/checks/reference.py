"""The reference: one that follows the policy or is replaced during the run, and a teacher as reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.doctor.advice import changes, either, setting
from keel.doctor.checks.base import KL, RECENT, CheckResults, Log, Missing, check, joined, not_shown, percent
from keel.doctor.checks.course import rewritten
from keel.doctor.findings import finding
from keel.doctor.history import Series
from keel.doctor.judge import accuracies
from keel.doctor.shapes import LEAST, course, jitter

OUTRUN = 1.5  # factor over the inequality's bound, because KL and length are batch means
# range of rewards in standard deviations; two-valued rewards exceed it only if one value is rarer than 1 in 15
DEVIATIONS = 4.0
PULLED_BACK, LATELY = 10.0, 30  # factor by which β grew, within this many steps
SMALL = 10.0  # factor over `kl_at_start`: a KL that a strong β can remove at once
NATS = 50.0  # entropy bound in nats at a total variation of 1: ln V is up to 13, and contexts change as well
SCORED = "score the reference with the weights at the start of training, and with the adapter off if there is one; "


@check("reference/follows")
def follows(log: Log) -> CheckResults:
    """No KL to a reference although the policy changes, or less KL than the change requires."""
    name, series = log.need_kl
    most = max(abs(value) for value in series.finite.values)
    if len(series.finite) < LEAST:
        return
    if most > log.limits["kl_no_move"]:
        yield from _outrun(log, name, series)
        return
    moving = log.movement or ("the reference moves by configuration" if log.moves_reference else None)
    if log.beta == 0 or moving is None:
        return
    unsure = most == 0 and log.unpenalized
    yield finding(
        "reference/follows",
        f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps, while {moving}"
        + ("; but a run without a KL term logs 0, too" if unsure else ""),
        "the reference is the policy itself: it has the same weights, is scored with the adapter on, or is copied at "
        "every step",
        SCORED + "if the reference is synced on purpose, sync it partially and only about every hundred steps",
        severity="note" if unsure else None,
    )


def _outrun(log: Log, name: str, series: Series) -> CheckResults:
    """A policy that has changed more than its KL to the reference permits, by the KL at both ends of the log.

    |ΔE[r]| ≤ range · √(KL/2) (Pinsker), with the KL of a completion. For the entropy |ΔH| ≤ ln V · √(KL/2), with the KL
    of a token, plus a term for different prefixes. The range of rewards cannot be estimated from step means, which
    hardly vary.
    """
    ends = [max(0.0, *part.values) for part in (series.finite.head(RECENT), series.finite.tail(RECENT))]
    lengths, rewards, spread = log.get("length/mean"), log.get("reward/mean"), log.get("reward/std")
    far = sum(math.sqrt(kl / 2) for kl in ends)
    ranges = [*log.ranges.finite.values] if log.ranges is not None else []
    ranges += [DEVIATIONS * value for value in spread.finite.values] if spread is not None else []
    bounds = {"entropy": NATS * far}
    if ranges and lengths is not None and rewards is not None:
        values = rewards.finite.values
        widest = max(*ranges, max(values) - min(0.0, *values), 1.0)
        bounds = {"reward": widest * far * math.sqrt(max(lengths.finite.values)), **bounds}
    for what, most in bounds.items() if not log.moves_reference else ():
        change = log.course(f"{what}/mean")
        if change is not None and abs(change.size) > OUTRUN * most:
            yield finding(
                "reference/follows",
                f"the {what} goes from {change.before:.3g} to {change.after:.3g} (chance under noise: "
                f"{change.chance:.1g}); {name} is {ends[1]:.2g} nats per token over {series.tail(RECENT).span}, and a "
                f"policy this close to its start could differ by {most:.2g} at most",
                "the logged KL is not the distance from the start of training: the reference follows the policy, is "
                "scored with the policy's adapter on, or the KL is that of one update; or problems have become easier",
                SCORED + "change nothing if the problems change during the run",
            )
            return


@check("reference/moving")
def replaced(log: Log) -> CheckResults:
    """A KL that falls to almost 0 from one step to the next: the reference was replaced."""
    name, series = log.need_kl
    if log.moves_reference or log.has_teacher:  # the policy approaches a teacher
        return
    least = max(log.limits["kl_at_start"], (6 if name.endswith("k1") else 3) * jitter(series))
    drops = _drops(log, series.finite, 5, least)
    short = _drops(log, series.finite, 2, least)  # also finds drops every few values; a single one may be noise
    often = [drop for drop in short if drop[2] <= log.limits["kl_at_start"]]
    drops = often if len(often) >= max(3, len(drops)) else drops
    # otherwise the policy changed its text, or a growing β pulled it back
    drops = [drop for drop in drops if not rewritten(log, drop[0]) and not _pulled_back(log, *drop[:2])]
    if drops:
        step, usual, after = drops[0]
        yield finding(
            "reference/moving",
            f"{name} falls from {usual:.3g} to {after:.2g} nats per token at step {step}"
            + (f"; it falls like this at {len(drops)} steps" if len(drops) > 1 else ""),
            "the reference was replaced by the current policy: a resume used the checkpoint as the reference, or the "
            "reference is synced",
            "load the reference from the start of training, also after a resume; change nothing if it is synced on "
            "purpose",
            severity=None if log.config or len(drops) == 1 else "warning",
        )


def _pulled_back(log: Log, step: int, before: float) -> bool:
    """Whether β grew by a large factor before a small KL fell; a larger KL would need more steps."""
    betas = log.get("kl/beta")
    if betas is None or before > SMALL * log.limits["kl_at_start"]:
        return False
    lately = betas.finite.since(step - LATELY)
    known = [beta for at, beta in zip(lately.steps, lately.values, strict=True) if at <= step and beta > 0]
    return bool(known) and known[-1] > PULLED_BACK * known[0]


def _drops(log: Log, kl: Series, before: int, least: float) -> Sequence[tuple[int, float, float]]:
    """(step, KL before, KL after) of each fall to almost 0 after `before` values, if the KL then stays low."""
    found = []
    for index in range(before, len(kl) - before // 2):
        high, low = kl.values[index - before : index], kl.values[index : index + before // 2 + 1]
        usual = sorted(high)[before // 2] if before > 2 else min(high)
        if usual > least and low[0] <= log.limits["reference_follows"] * usual and max(low) < 0.5 * min(high):
            found.append((int(kl.steps[index]), usual, low[0]))
    return found


# ------------------------------------------------------------------------ a teacher as reference

EXACT = {"kl.estimator": "exact", "kl.placement": "loss", "kl.gradient": "auto", "kl.level": "token"}


@check("teacher/far", area="distillation")
def far(log: Log) -> CheckResults:
    """Before any update, the student's tokens are improbable under the teacher, or both share little probability."""
    if not log.has_teacher:
        return
    name, series = log.need_kl
    step, value = series.finite.steps[0], series.finite.values[0]
    overlap = log.get("kl/policy_ref/overlap")
    shared = 1.0 if overlap is None else overlap.finite.values[0]
    if step > 1:
        raise Missing(f"{KL} was first recorded at step {step:.0f}, after updates")
    if value > log.limits["teacher_far"] or shared < log.limits["teacher_overlap"]:
        yield finding(
            "teacher/far",
            joined(
                f"{name} is {value:.3g} nats per token at step {step:.0f}: the teacher gives the student's tokens "
                f"{percent(math.exp(-value), '.2g')} of the student's probability (geometric mean)",
                f"both distributions share {percent(shared, '.2g')} of their probability" if overlap else None,
                by=", and ",
            ),
            "student and teacher give probability to different tokens: the teacher expects another chat template or "
            "language, or writes in another style, so the student learns little from it",
            "read completions of both; train on the teacher's samples first (keel sft), or use a teacher of the "
            "student's model family",
        )


@check("teacher/not-approached", area="distillation")
def not_approached(log: Log) -> CheckResults:
    """The KL to the teacher does not fall although it is the only training signal."""
    if not log.has_teacher or log.option("loss.policy_weight") != 0:
        return
    (name, series), least = log.need_kl, int(log.limits["steps_to_judge"])
    if len(series.finite) < least:
        raise Missing(f"{len(series.finite)} steps are too few to tell whether {name} falls: {least} are needed")
    first, now, change = series.finite.head(RECENT), series.finite.tail(RECENT), course(series)
    size = change.size if change is not None and log.clear(change) else 0.0
    near = max(log.limits["kl_not_learning"], log.limits["teacher_approached"] * first.mean)
    if size < 0 or now.mean <= near or first.mean < log.limits["kl_not_learning"]:
        return
    biased, grown = log.option("kl.allow_biased"), size > 0
    yield finding(
        "teacher/not-approached",
        f"{name} is {first.mean:.3g} nats per token over {first.span} and {now.mean:.3g} over {now.span}",
        "kl.allow_biased permits a KL term whose expected gradient is zero or wrong, so only noise moves the policy"
        if biased
        else "updates are so large that they move the student away from the teacher"
        if grown
        else "updates are too small, or the student cannot come closer",
        either(
            setting("{}", changes(log.config, EXACT) if biased else {}),
            log.rate(0.3, "a third of") if grown else log.rate(3, "three times"),
        ),
        severity="error" if grown else None,
    )


@check("teacher/worse", area="distillation")
def worse(log: Log) -> CheckResults:
    """Held-out accuracy falls while the student approaches the teacher."""
    if not log.has_teacher:
        return
    rows = [row for row in accuracies(log.evaluations, retention=False).values() if row.after is not None]
    if log.kl is None or not rows:
        raise not_shown(f"{KL} and held-out accuracy of the trained task, twice,")
    name, series = log.kl
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    lost = [row for row in rows if row.fell and row.change(log.limits) == "dropped"]
    if lost and now.mean < first.mean:
        tasks = ", ".join(f"{row.task} {row.before:.3g} → {row.after:.3g}" for row in lost)
        yield finding(
            "teacher/worse",
            f"{tasks} on held-out problems, without overlap of the intervals, while {name} goes from {first.mean:.3g} "
            f"to {now.mean:.3g} nats per token",
            "the student approaches a teacher that solves fewer of these problems than the student did",
            "compare both before training (keel eval); use another teacher, or train these problems by the reward with "
            "loss.policy_weight above 0",
        )
