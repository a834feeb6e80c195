"""A run that is distilled: a teacher that is near enough to be followed, that is followed, and that is worth it."""

from __future__ import annotations

import math

from keel.doctor.advice import changes, either, setting, times
from keel.doctor.checks.base import KL, RECENT, CheckResults, Unchecked, clear, has_teacher, not_recorded
from keel.doctor.findings import finding
from keel.doctor.history import History
from keel.doctor.judge import accuracies
from keel.doctor.shapes import course
from keel.doctor.thresholds import Thresholds

EXACT = {"kl.estimator": "exact", "kl.placement": "loss", "kl.gradient": "auto", "kl.level": "token"}


def far(history: History, thresholds: Thresholds) -> CheckResults:
    """What probability the teacher gives the student's tokens before the first update, and how much both share."""
    code = "teacher/far"
    if not has_teacher(history):
        return
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    name, series = history.kl
    step, value = series.finite.steps[0], series.finite.values[0]
    overlap = history.get("kl/policy_ref/overlap")
    shared = 1.0 if overlap is None else overlap.finite.values[0]
    if step > 1:
        yield Unchecked(code, f"{KL} was first recorded at step {step:.0f}, after updates")
    elif value > thresholds["teacher_far"] or shared < thresholds["teacher_overlap"]:
        yield finding(
            code,
            f"{name} is {value:.3g} nats per token at step {step:.0f}: the teacher gives the student's tokens "
            f"{100 * math.exp(-value):.2g} % of the probability that the student gives them (geometric mean)"
            + ("" if overlap is None else f", and both distributions share {100 * shared:.2g} % of their probability"),
            "few of the likely tokens are likely to both: the teacher reads another chat template or language, or "
            "writes in another style, and on the student's text its distribution teaches little",
            "read completions of both; SFT on the teacher's samples first (keel sft), or a teacher of the student's "
            "family",
        )


def not_approached(history: History, thresholds: Thresholds) -> CheckResults:
    """A KL to the teacher that does not fall although it alone is trained."""
    code, least = "teacher/not-approached", int(thresholds["steps_to_judge"])
    if not has_teacher(history) or history.option("loss.policy_weight") != 0:
        return
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    name, series = history.kl
    if len(series.finite) < least:
        yield Unchecked(
            code, f"{len(series.finite)} steps are too few to tell whether {name} falls: {least} are needed"
        )
        return
    first, now, change = series.finite.head(RECENT), series.finite.tail(RECENT), course(series)
    size = change.size if change is not None and clear(change, thresholds) else 0.0
    near = max(thresholds["kl_not_learning"], thresholds["teacher_approached"] * first.mean)
    if size < 0 or now.mean <= near or first.mean < thresholds["kl_not_learning"]:
        return
    biased, rate, grown = history.option("kl.allow_biased"), "optim.learning_rate", size > 0
    if biased:
        cause = (
            "kl.allow_biased lets forms through whose expected gradient is zero or wrong: noise alone moves the policy"
        )
    elif grown:
        cause = "updates are so large that they lose more than they gain"
    else:
        cause = "updates are too small, or the student cannot come nearer"
    yield finding(
        code,
        f"{name} is {first.mean:.3g} nats per token over {first.span} and {now.mean:.3g} over {now.span}",
        cause,
        either(
            setting("{}", changes(history.config, EXACT) if biased else {}),
            times(history.config, rate, 0.3, "a third of") if grown else times(history.config, rate, 3, "three times"),
        ),
        severity="error" if grown else None,
    )


def worse(history: History, thresholds: Thresholds) -> CheckResults:
    """Held-out accuracy that falls while the student comes nearer to the teacher."""
    code = "teacher/worse"
    if not has_teacher(history):
        return
    rows = [row for row in accuracies(history.evaluations, retention=False).values() if row.after is not None]
    if history.kl is None or not rows:
        yield not_recorded(code, f"{KL} and held-out accuracy of the trained task, twice,")
        return
    name, series = history.kl
    first, now = series.finite.head(RECENT), series.finite.tail(RECENT)
    lost = [row for row in rows if row.fell and row.change(thresholds) == "dropped"]
    if lost and now.mean < first.mean:
        tasks = ", ".join(f"{row.task} {row.before:.3g} → {row.after:.3g}" for row in lost)
        yield finding(
            code,
            f"{tasks} on held-out problems, the intervals do not touch, while {name} goes from {first.mean:.3g} to "
            f"{now.mean:.3g} nats per token",
            "the student comes nearer to a teacher that solves fewer of these problems than it does itself",
            "compare the two before training (keel eval); take another teacher, or leave these problems to the reward "
            "with loss.policy_weight above 0",
        )


CHECKS = (far, not_approached, worse)
