"""Distillation: whether the student can follow the teacher, whether it does, and whether that helps."""

from __future__ import annotations

import math

from keel.doctor.advice import changes, either, setting
from keel.doctor.checks.base import KL, RECENT, CheckResults, Log, Missing, check, joined, not_shown, percent
from keel.doctor.findings import finding
from keel.doctor.judge import accuracies
from keel.doctor.shapes import course

EXACT = {"kl.estimator": "exact", "kl.placement": "loss", "kl.gradient": "auto", "kl.level": "token"}


@check("teacher/far")
def far(log: Log) -> CheckResults:
    """The probability of the student's tokens under the teacher before the first update, and the shared mass."""
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
                f"{percent(math.exp(-value), '.2g')} of the probability that the student gives them (geometric mean)",
                f"both distributions share {percent(shared, '.2g')} of their probability" if overlap else None,
                by=", and ",
            ),
            "few of the likely tokens are likely to both: the teacher reads another chat template or language, or "
            "writes in another style, and on the student's text its distribution teaches little",
            "read completions of both; SFT on the teacher's samples first (keel sft), or a teacher of the student's "
            "family",
        )


@check("teacher/not-approached")
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
        "kl.allow_biased lets forms through whose expected gradient is zero or wrong: noise alone moves the policy"
        if biased
        else "updates are so large that they lose more than they gain"
        if grown
        else "updates are too small, or the student cannot come nearer",
        either(
            setting("{}", changes(log.config, EXACT) if biased else {}),
            log.rate(0.3, "a third of") if grown else log.rate(3, "three times"),
        ),
        severity="error" if grown else None,
    )


@check("teacher/worse")
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
            f"{tasks} on held-out problems, the intervals do not touch, while {name} goes from {first.mean:.3g} to "
            f"{now.mean:.3g} nats per token",
            "the student comes nearer to a teacher that solves fewer of these problems than it does itself",
            "compare the two before training (keel eval); take another teacher, or leave these problems to the reward "
            "with loss.policy_weight above 0",
        )
