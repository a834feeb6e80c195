"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from keel.doctor.advice import either
from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown, percent
from keel.doctor.findings import finding
from keel.doctor.history import Series, finite, in_order, step_of
from keel.doctor.judge import Accuracy, accuracies
from keel.doctor.shapes import Change, few_trend, median, trend

PART = "eval/part/"
MOSTLY_RIGHT = 0.95
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
    yield from _perfect(log, held_out)
    yield from _by_heart(log, scores)
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


def _perfect(log: Log, logged: Scores) -> CheckResults:
    """Held-out problems that are all solved from the first evaluation on, while training pays far from all."""
    shares = {n: s.finite for n, s in logged.items() if _is_share(n) and len(s.finite) >= 3}
    parts = [text for n in shares if n.startswith(PART) and (text := _little_paid(log, n))]
    scores = [s for n, s in shares.items() if n.startswith(PART) == bool(parts)]
    rewards, missed = log.get("reward/mean"), parts[0] if parts else _missed(log)
    if not scores or rewards is None or not missed:
        return
    early = min(s.steps[0] for s in scores) <= (rewards.steps[0] + rewards.steps[-1]) / 2
    if early and all(1 >= v >= log.limits["held_out_all"] for s in scores for v in s.values):
        yield finding(
            "eval/train-gap",
            f"all of {len(scores[0])} evaluations solve {percent(min(scores[0].values), '.4g')} or more of the "
            f"held-out problems, from step {scores[0].steps[0]:.0f} on, while in training {missed}",
            "held-out problems are not those of the task: known to the model, with the answer in the prompt, or judged "
            "by something that all completions pass",
            "read some held-out prompts and completions with their scores; compare them with those of training",
        )


def _little_paid(log: Log, name: str) -> str:
    """That training pays little of a part, of 1 as a share is, as text; "" where it pays more or is not logged."""
    part = log.get(_trained(name))
    little = part is not None and 0 <= min(part.finite.values) <= max(part.finite.values) < log.limits["mostly_paid"]
    return f"{name.removeprefix(PART)} is {median(part):.3g}" if part is not None and little else ""


def _missed(log: Log) -> str:
    """What shows that much of the reward is missed in training, in the middle of the run, as text; "" if nothing does.

    By its place between the lowest and the highest that is paid; or by its spread: of rewards that are never negative
    at least 1 − m²/(m² + s²) would be 0 if they had two values. By groups: where 19 of 20 completions are right, at
    most 1 − 0.95^G of the groups of G are not all alike.
    """
    mean, spread = log.get("reward/mean"), log.get("reward/std")
    highest, lowest = log.get("reward/max"), log.get("reward/min")
    none, alike = log.get("reward/solved_none_fraction"), log.get("reward/zero_variance_fraction")
    mostly, size = log.limits["mostly_paid"], log.figure("rollout.num_generations")
    if mean is None:
        return ""
    usual = median(mean)
    if highest is not None and lowest is not None:
        low, high = min(lowest.finite.values), max(highest.finite.values)
        return f"the reward is {usual:.3g}, of {low:.3g} to {high:.3g}" if usual - low < mostly * (high - low) else ""
    if none is not None:
        return f"{percent(median(none))} of the groups hold no right completion" if median(none) > 0.1 else ""
    if spread is not None and min(mean.finite.values) >= 0 and usual**2 < mostly * (usual**2 + median(spread) ** 2):
        return f"rewards are {usual:.3g} ± {median(spread):.2g} a completion"
    mixed = 1 - median(alike) if alike is not None and size is not None else 0.0
    if 1 - MOSTLY_RIGHT ** (size or 0) < mixed < 1:  # rewards that are graded finely are never alike
        return f"{percent(mixed)} of the groups of {size:.0f} hold rewards that differ"
    return ""


def _by_heart(log: Log, logged: Scores) -> CheckResults:
    """Training that comes to be solved, to the last problem, while held-out ones stay far from that and do not gain."""
    gain, flat = log.course("reward/mean"), log.limits["flat_gain"]
    if gain is None or gain.size <= flat * abs(gain.after) or not _all_solved(log):
        return
    for name, series in logged.items():
        values = series.finite.values
        if not _is_share(name) or name.startswith(PART) or len(values) < STUCK or min(values) <= 0:
            continue
        third = max(1, len(values) // 3)
        before, after = (statistics.fmean(part) for part in (values[:third], values[-third:]))
        if max(values) < log.limits["mostly_paid"] and abs(after - before) < flat * (1 - before):
            yield finding(
                "eval/train-gap",
                f"the reward goes from {gain.before:.3g} to {gain.after:.3g}, as far as it goes, while held-out "
                f"{name.removeprefix('eval/')} is {before:.3g} at first and {after:.3g} at the end ({len(values)} "
                "evaluations)",
                "what is trained on is learned by heart, or by a trait that held-out problems lack: too few problems, "
                "asked too often, or another kind than those that are held out",
                "more problems, or fewer steps; judge held-out completions by the training reward, too",
            )
            return


def _all_solved(log: Log) -> bool:
    """Whether all of the highest reward is paid, of 1 where it is not logged; or completions now earn the same."""
    highest, spread = log.get("reward/max"), log.get("reward/std")
    best = 1.0 if highest is None else max(highest.finite.values)
    first = spread.head(3).mean if spread is not None else 0.0
    alike = first > 0 and log.now("reward/std") / first < 1 - log.limits["zero_variance_groups"]
    return alike or best >= log.now("reward/mean") >= log.limits["held_out_all"] * best > 0


def _nothing_held_out(log: Log, logged: Scores) -> CheckResults:
    """Held-out scores of nothing at every evaluation, while training is paid."""
    course = _rises(log) or _paid(log)
    unseen = _at_zero(log, logged) if course else None
    if unseen is not None:
        name, chance = unseen
        yield finding(
            "eval/train-gap",
            f"the reward {course} while held-out {name.removeprefix('eval/')} stays at 0 "
            f"({len(logged[name].finite)} evaluations, at most {max(logged[name].finite.values):.2g}; "
            f"chance at training's level: {chance:.1g})",
            "nothing that is learned is seen there: another prompt, template, limit or judge than in training, or "
            "problems far harder than those that are trained on",
            "judge held-out completions by the training reward, and read one with its prompt",
            severity="warning" if chance <= log.level else "note",
        )


def _paid(log: Log) -> str:
    """Where most of the highest reward is paid in training, all along, that as text."""
    rewards, highest = log.get("reward/mean"), log.get("reward/max")
    if rewards is None or highest is None:
        return ""
    best, usual = max(highest.finite.values), median(rewards)
    mostly = best > 0 and usual > log.limits["mostly_paid"] * best
    return f"is {usual:.3g} of {best:.3g} in the middle of the run" if mostly else ""


def _at_zero(log: Log, logged: Scores) -> tuple[str, float] | None:
    """A held-out score that is nothing at every evaluation, and the chance of that at training's level.

    All of the scores, or a part of the reward that training pays.
    """
    rewards, highest = log.get("reward/mean"), log.get("reward/max")
    if rewards is None:
        return None
    paid = max(1.0, *rewards.finite.values)
    best = max(paid, *highest.finite.values) if highest is not None else paid

    def nothing(name: str, size: float) -> bool:
        values = logged[name].finite.values
        return len(values) >= 3 and max(map(abs, values)) <= log.limits["held_out_nothing"] * size

    sizes = {name: paid if "reward" in name else 1.0 for name in logged if not name.startswith(PART)}
    if sizes and all(nothing(name, size) for name, size in sizes.items()):
        name, size = next(iter(sizes.items()))
        return name, _chance_of_nothing(log, logged[name].scaled(1 / size), rewards.mean / best)
    for name in (name for name in logged if name.startswith(PART)):
        part = log.get(_trained(name))
        largest = max(part.finite.values) if part is not None else 0.0
        if part is None or not part.tail(RECENT).mean > log.limits["mostly_paid"] * largest > 0:
            continue
        if nothing(name, largest):
            return name, _chance_of_nothing(log, logged[name].scaled(1 / largest), part.mean / max(1.0, largest))
    return None


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
