"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from keel.doctor.advice import either
from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown
from keel.doctor.findings import finding
from keel.doctor.history import Series, finite, in_order, step_of
from keel.doctor.judge import Accuracy, accuracies
from keel.doctor.shapes import Change, few_trend, median, trend

PART = "eval/part/"
SCORES = ("acc", "reward", "score", "pass", "success", "correct", "solve", "@")  # other figures may be settings
STUCK = 4  # evaluations at least: what hardly learns may be judged alike two or three times
EVALUATED = ("eval/", "other/eval")  # how names of held-out figures begin
FEW_COINS = 100  # completions that a share is taken to be of where its digits tell of as many
MOST_COMPLETIONS = 1000  # that a share of a score is taken to tell
MOST_RECORDED = 10**9  # of a log that says more
Scores = Mapping[str, Series]


def _measured_twice(log: Log, *, retention: bool) -> list[Accuracy]:
    rows = accuracies(log.evaluations, retention=retention).values()
    return [row for row in rows if row.before is not None and row.after is not None]


@check("retention/dropping")
def retention(log: Log) -> CheckResults:
    """Skills that are not trained, before and after."""
    skills = _measured_twice(log, retention=True)
    if not skills:
        raise not_shown("accuracy on other tasks (eval.tasks) at the start and later")
    lost = [row for row in skills if row.fell and row.change(log.limits) == "dropped"]
    if lost:
        changes = ", ".join(f"{row.task} {row.before:.3g} → {row.after:.3g}" for row in lost)
        yield finding(
            "retention/dropping",
            f"at step {max(int(row.steps[1] or 0) for row in skills)}: {changes}; the intervals do not touch",
            "the policy gives up what it is not paid for",
            either(log.stronger, log.rate(0.5, "half of"), "those skills in the task mix"),
        )


@check("eval/train-gap")
def train_gap(log: Log) -> CheckResults:
    """Reward up while held-out accuracy of the same task goes down, or another sign that it is not what is trained."""
    trained, gain = _measured_twice(log, retention=False), log.trend
    logged = {name: series for name in log.series if name.startswith("eval/") and (series := log.get(name))}
    if not (trained and gain) and (trained or not logged):
        raise not_shown("held-out accuracy of the trained task, twice, beside the reward")
    held_out = _recorded(log) if trained else logged
    scores = held_out if trained else {n: s for n, s in logged.items() if any(word in n for word in SCORES)}
    nothing = list(_nothing_held_out(log, held_out))
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
                f"(step {row.steps[0]} → {row.steps[1]}), beyond its interval",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "keel doctor on the configuration renders both prompts; read the best paid completions in the report",
            )


def _recorded(log: Log) -> dict[str, Series]:
    """Held-out accuracy of the trained tasks as series, from the evaluations of a run of Keel's."""
    rows: dict[str, list[tuple[float, Any]]] = {}
    for record in log.evaluations:
        if record.get("split") != "retention":
            rows.setdefault(f"eval/{record.get('task', 'task')}", []).append((step_of(record), record.get("pass@1")))
    series = {name: in_order(points) for name, points in rows.items()}
    return {name: row for name, row in series.items() if len(row.finite)}


def _falling(log: Log, logged: Scores) -> CheckResults:
    """A trend down of held-out scores that a trainer logs as metrics, while the reward rises."""
    rises = _rises(log)
    for name, series in logged.items() if rises else ():
        change = trend(series) or few_trend(series)
        if not log.clear(change) and _is_share(name):
            change = fallen_share(series)
        if change is None or not log.clear(change) or not _rises(log, _trained(name)):
            continue
        if -change.size > log.limits["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward {rises} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "read the best paid completions; judge held-out problems by the training reward, too",
            )


def _rises(log: Log, name: str = "reward/mean") -> str:
    """That the reward rises, as text; "" where it does not."""
    up = log.course(name)
    return f"rises from {up.before:.3g} to {up.after:.3g}" if up is not None and up.size > 0 else ""


def _trained(name: str) -> str:
    """The figure of training that a held-out one is compared with."""
    return f"reward/part/{name.removeprefix(PART)}" if name.startswith(PART) else "reward/mean"


def _is_share(name: str) -> bool:
    """Whether a held-out figure is a share of problems by its name; a reward may have any size."""
    return "reward" not in name or (name.startswith(PART) and any(w in name for w in SCORES if w != "reward"))


def fallen_share(series: Series) -> Change | None:
    """The fall of a share from its first evaluations to its last, with the chance of it where problems stay the same.

    The same problems are asked each time, so that the noise of a share is at most that of as many coins as there are
    completions, however alike those of one problem are. None where the values are no shares, or lie in no such order.
    """
    from scipy.special import ndtr

    values = series.finite.values
    third = len(values) // 3
    if third < 1 or min(values) < 0 or max(values) > 1 or max(values[-third:]) >= min(values[:third]):
        return None
    before, after = (statistics.fmean(part) for part in (values[:third], values[-third:]))
    both, middle = (before + after) / 2, (len(values) - 1) / 2
    line = sum((number - middle) * value for number, value in enumerate(values))  # all of them tell
    error = (sum((n - middle) ** 2 for n in range(len(values))) * both * (1 - both) / coins(values)) ** 0.5
    chance = 2 * float(ndtr(line / error)) if error > 0 else 1.0  # a fall alone; the second of two looks
    return Change(before, after, int(series.finite.steps[-third]), chance)


def coins(values: Sequence[float]) -> int:
    """The fewest completions whose shares these can be, to their last digit; no more than `FEW_COINS`.

    More than those are not told from a mean over sets of different sizes, whose noise is that of the small ones.
    """
    digits = max(len(repr(value).partition(".")[2]) for value in values)
    rounding = 0.5 * 10.0 ** -min(digits, 6)
    fits = (n for n in range(1, FEW_COINS) if all(abs(v - round(v * n) / n) <= rounding for v in values))
    return next(fits, FEW_COINS)


def _stuck(log: Log, logged: Scores) -> CheckResults:
    """A held-out score that is the same to the last digit each time, not nothing nor all, while the reward moves.

    So few completions that their sum may well be the same by chance tell nothing.
    """
    change = log.course("reward/mean")
    if change is None or abs(change.size) <= log.limits["gap_reward"] * log.size:
        return
    for name, series in logged.items():
        values = series.finite.values
        if len(set(values)) != 1 or not 0 < values[0] < log.limits["held_out_all"]:
            continue
        times = _evaluations(log, name, series)
        if times >= STUCK and _chance_of_same(log, series, times) <= log.level:
            yield finding(
                "eval/train-gap",
                f"held-out {name.removeprefix('eval/')} is {values[0]:.6g} at each of {times} evaluations, while "
                f"the reward goes from {change.before:.3g} to {change.after:.3g}",
                "what is evaluated does not change with training: an engine that keeps its first weights, a checkpoint "
                "that is loaded each time, or a cached result",
                "compare held-out completions of the first and the last evaluation, and sync the weights before each",
            )
            return


def _evaluations(log: Log, name: str, series: Series) -> int:
    """How many evaluations these points are.

    A log that has them on most of its lines may repeat the last one: there as many as another figure of theirs tells.
    """
    rewards, points = log.get("reward/mean"), len(series.finite)
    if name not in log.series or rewards is None or 2 * points <= len(rewards.finite):
        return points
    others = [s.finite.values for n, s in log.series.items() if n != name and n.startswith(EVALUATED)]
    return min(points, 1 + max((sum(a != b for a, b in pairwise(values)) for values in others), default=0))


def _chance_of_same(log: Log, series: Series, times: int) -> float:
    """That as many coins as an evaluation has completions have one and the same sum so many times."""
    from scipy.special import bdtr

    value = series.finite.values[0]
    count = max(_completions(log, series), coins([value]))
    sums = [float(bdtr(k, count, min(1.0, value))) for k in range(count + 1)]
    return sum((high - low) ** times for low, high in pairwise([0.0, *sums]))


def _nothing_held_out(log: Log, logged: Scores) -> CheckResults:
    """Scores of nothing at every evaluation while training is paid: all of them, or a part that training pays."""
    rewards, highest, mostly = log.get("reward/mean"), log.get("reward/max"), log.limits["mostly_paid"]
    if rewards is None:
        return
    paid, usual = max(1.0, *rewards.finite.values), median(rewards)
    top = max(highest.finite.values) if highest is not None else 0.0
    course = f"is {usual:.3g} of {top:.3g} in the middle of the run" if top > 0 and usual > mostly * top else ""
    course = _rises(log) or course
    # (the size of a score, the share of it that training is paid)
    whole = {
        n: (paid if "reward" in n else 1.0, rewards.mean / max(paid, top)) for n in logged if not n.startswith(PART)
    }
    parts = {n: part for n in logged if n.startswith(PART) and (part := log.get(_trained(n))) is not None}
    sizes = {
        name: (most, part.mean / max(1.0, most))
        for name, part in parts.items()
        if part.tail(RECENT).mean > mostly * (most := max(part.finite.values)) > 0
    }
    nothing = {
        name
        for name, (size, _) in (whole | sizes).items()
        if len(values := logged[name].finite.values) >= 3
        and max(map(abs, values)) <= log.limits["held_out_nothing"] * size
    }
    unseen = whole if whole and whole.keys() <= nothing else {n: row for n, row in sizes.items() if n in nothing}
    for name, (size, share) in [*unseen.items()][:1] if course else ():
        chance, scores = _chance_of_nothing(log, logged[name].scaled(1 / size), share), logged[name].finite
        yield finding(
            "eval/train-gap",
            f"the reward {course} while held-out {name.removeprefix('eval/')} stays at 0 ({len(scores)} evaluations, "
            f"at most {max(scores.values):.2g}; chance at training's level: {chance:.1g})",
            "nothing that is learned is seen there: another prompt, template, limit or judge than in training, or "
            "problems far harder than those that are trained on",
            "judge held-out completions by the training reward, and read one with its prompt",
            severity="warning" if chance <= log.level else "note",
        )


def _chance_of_nothing(log: Log, scores: Series, share: float) -> float:
    """Of scores this low where a share is right: of one completion an evaluation, unless the log tells how many."""
    from scipy.special import bdtr

    count = _completions(log, scores)
    right = max(0.0, count * sum(scores.finite.values))
    return float(bdtr(right, count * len(scores.finite), min(1.0, max(0.0, share))))


def _completions(log: Log, scores: Series) -> int:
    """How many an evaluation has at least: as recorded, by its time, or by the smallest share that one of them is."""
    counts = [count for record in log.evaluations if (count := finite(record.get("n"))) is not None]
    seconds, rate = log.get("other/eval_runtime"), log.get("other/eval_samples_per_second")
    if counts:
        return _counted(min(counts), MOST_RECORDED)
    if seconds is not None and rate is not None:
        return _counted(seconds.mean * rate.mean, MOST_RECORDED)
    smallest = min((value for value in scores.finite.values if value > 0), default=1.0)
    return _counted(1 / smallest, MOST_COMPLETIONS)


def _counted(value: float, most: int) -> int:
    """The nearest count, whatever a log says: what is no number is one."""
    return round(min(max(value, 1.0), most)) if not math.isnan(value) else 1
