"""Held-out accuracy: the trained task against the reward, and other tasks against the start."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from keel.doctor.advice import either
from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown
from keel.doctor.findings import finding
from keel.doctor.history import Series, finite, in_order, step_of
from keel.doctor.judge import Accuracy, accuracies
from keel.doctor.shapes import few_trend, median, trend

PART = "eval/part/"
SCORES = ("acc", "reward", "score", "pass", "success", "correct", "solve", "@")  # other metrics may be settings
STUCK = 4  # least number of evaluations; a slow learner may score the same two or three times
MISMATCH = "the reward does not measure the same as the evaluation, or training and evaluation use different prompts"
MOST = 1000  # largest number of completions that is inferred from a score
Scores = Mapping[str, Series]


def _measured_twice(log: Log, *, retention: bool) -> list[Accuracy]:
    rows = accuracies(log.evaluations, retention=retention).values()
    return [row for row in rows if row.before is not None and row.after is not None]


@check("retention/dropping")
def retention(log: Log) -> CheckResults:
    """Accuracy on tasks that are not trained is lower than at the start."""
    skills = _measured_twice(log, retention=True)
    if not skills:
        raise not_shown("accuracy on other tasks (eval.tasks) at the start and later")
    lost = [row for row in skills if row.fell and row.change(log.limits) == "dropped"]
    if lost:
        changes = ", ".join(f"{row.task} {row.before:.3g} → {row.after:.3g}" for row in lost)
        yield finding(
            "retention/dropping",
            f"at step {max(int(row.steps[1] or 0) for row in skills)}: {changes}; the intervals do not touch",
            "the policy loses skills that the reward does not pay for",
            either(log.stronger, log.rate(0.5, "half of"), "add these tasks to the training mixture"),
        )


@check("eval/train-gap")
def train_gap(log: Log) -> CheckResults:
    """The reward rises while held-out accuracy of the same task falls, stays constant, or stays at 0."""
    trained, gain = _measured_twice(log, retention=False), log.trend
    logged = {name: series for name in log.series if name.startswith("eval/") and (series := log.get(name))}
    if not (trained and gain) and (trained or not logged):
        raise not_shown("the reward and two values of held-out accuracy of the trained task")
    scores = _recorded(log) if trained else {n: s for n, s in logged.items() if any(word in n for word in SCORES)}
    nothing = [*_at_nothing(log, _recorded(log) if trained else logged)]
    yield from nothing
    yield from _stuck(log, scores)
    if not trained:
        yield from _falling(log, logged) if not nothing else ()
        return
    rewards = log.series["reward/mean"].finite.values
    least = log.limits["gap_reward"] * max(max(rewards) - min(rewards), 1e-9)
    for row in trained:
        if gain is not None and log.rose and gain.after - gain.before > least and row.fell:
            yield finding(
                "eval/train-gap",
                f"{gain.text} while held-out {row.task} fell {row.before:.3g} → {row.after:.3g} "
                f"(step {row.steps[0]} → {row.steps[1]}), without overlap of the intervals",
                MISMATCH,
                "run keel doctor on the configuration, which compares both prompts; read the completions with the "
                "highest rewards in the report",
            )


def _recorded(log: Log) -> dict[str, Series]:
    """Held-out accuracy of the trained tasks as series, from the evaluations of a Keel run."""
    rows: dict[str, list[tuple[float, Any]]] = {}
    for record in log.evaluations:
        if record.get("split") != "retention":
            rows.setdefault(f"eval/{record.get('task', 'task')}", []).append((step_of(record), record.get("pass@1")))
    series = {name: in_order(points) for name, points in rows.items()}
    return {name: row for name, row in series.items() if len(row.finite)}


def _falling(log: Log, logged: Scores) -> CheckResults:
    """A falling trend of held-out scores that a trainer logs as metrics, while the reward rises."""
    rises = _rises(log)
    for name, series in logged.items() if rises else ():
        change = trend(series) or few_trend(series)
        if change is None or not log.clear(change) or not _rises(log, _trained(name)):
            continue
        if -change.size > log.limits["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward {rises} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                MISMATCH,
                "read the completions with the highest rewards; evaluate held-out problems with the training reward, "
                "too",
            )


def _rises(log: Log, name: str = "reward/mean") -> str:
    """Evidence that a metric rises; "" if it does not."""
    up = log.course(name)
    return f"rises from {up.before:.3g} to {up.after:.3g}" if up is not None and up.size > 0 else ""


def _trained(name: str) -> str:
    """The training metric to compare a held-out one with."""
    return f"reward/part/{name.removeprefix(PART)}" if name.startswith(PART) else "reward/mean"


def _stuck(log: Log, logged: Scores) -> CheckResults:
    """A held-out score that is exactly the same at every evaluation, neither 0 nor 1, while the reward changes.

    A score on most lines of the log is skipped, because each line may repeat the last evaluation. Evaluations on so few
    completions that equal scores may be chance are skipped, too.
    """
    from scipy.special import bdtr

    change, rewards = log.course("reward/mean"), log.get("reward/mean")
    if change is None or rewards is None or abs(change.size) <= log.limits["gap_reward"] * log.size:
        return
    for name, series in logged.items():
        value, times = series.finite.values[0], len(series.finite)
        repeats = name in log.series and 2 * times > len(rewards.finite)
        if len(set(series.finite.values)) > 1 or times < STUCK or repeats or not 0 < value < log.limits["held_out_all"]:
            continue
        count = _completions(log, series)
        sums = [0.0, *(float(bdtr(right, count, value)) for right in range(count + 1))]
        if sum((high - low) ** times for low, high in pairwise(sums)) <= log.level:
            yield finding(
                "eval/train-gap",
                f"held-out {name.removeprefix('eval/')} is {value:.6g} at each of {times} evaluations, while "
                f"the reward goes from {change.before:.3g} to {change.after:.3g}",
                "the evaluation does not use the trained weights: the engine keeps its first weights, one checkpoint "
                "is "
                "loaded each time, or a result is cached",
                "compare held-out completions of the first and the last evaluation, and sync the weights before each",
            )
            return


def _at_nothing(log: Log, logged: Scores) -> CheckResults:
    """Scores of 0 at every evaluation although training completions earn rewards: all scores, or one reward part."""
    from scipy.special import bdtr

    rewards, highest, mostly = log.get("reward/mean"), log.get("reward/max"), log.limits["mostly_paid"]
    if rewards is None:
        return
    paid, usual = max(1.0, *rewards.finite.values), median(rewards)
    top = max(highest.finite.values) if highest is not None else 0.0
    course = _rises(log) or (
        f"is {usual:.3g} of {top:.3g} in the middle of the run" if usual > mostly * top > 0 else ""
    )
    # (scale of the score, the share of it that training earns)
    whole = {
        n: (paid if "reward" in n else 1.0, rewards.mean / max(paid, top)) for n in logged if not n.startswith(PART)
    }
    parts = {
        name: (most, part.mean / max(1.0, most))
        for name in logged
        if name.startswith(PART) and (part := log.get(_trained(name))) is not None
        if part.tail(RECENT).mean > mostly * (most := max(part.finite.values)) > 0
    }
    nothing = {
        name
        for name, (size, _) in (whole | parts).items()
        if len(values := logged[name].finite.values) >= 3
        and max(map(abs, values)) <= log.limits["held_out_nothing"] * size
    }
    unseen = whole if whole and whole.keys() <= nothing else {n: row for n, row in parts.items() if n in nothing}
    for name, (size, share) in [*unseen.items()][:1] if course else ():
        scores = logged[name].finite.scaled(1 / size)
        count = _completions(log, scores)
        chance = float(bdtr(max(0.0, count * sum(scores.values)), count * len(scores), min(1.0, max(0.0, share))))
        yield finding(
            "eval/train-gap",
            f"the reward {course} while held-out {name.removeprefix('eval/')} stays at 0 ({len(scores)} evaluations, "
            f"at most {max(logged[name].finite.values):.2g}; chance at training's level: {chance:.1g})",
            "the evaluation differs from training in prompt, template, limit or reward, or its problems are far harder",
            "evaluate held-out completions with the training reward, and read one with its prompt",
            severity="warning" if chance <= log.level else "note",
        )


def _completions(log: Log, scores: Series) -> int:
    """The least number of completions per evaluation: recorded, from run time, or the smallest that fits the scores."""
    counts = [count for record in log.evaluations if (count := finite(record.get("n"))) is not None]
    seconds, rate = log.get("other/eval_runtime"), log.get("other/eval_samples_per_second")
    count = min(counts) if counts else seconds.mean * rate.mean if seconds is not None and rate is not None else 0.0
    if count >= 1:
        return round(min(count, 1e9))
    shares = [value for value in scores.finite.values if 0 < value < 1]
    rounding = 0.5 * 10.0 ** -min(6, max((len(repr(value).partition(".")[2]) for value in shares), default=0))
    fits = (n for n in range(1, MOST) if all(abs(v - round(v * n) / n) <= rounding for v in shares))
    return next(fits, MOST)
