"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from keel.doctor import shapes
from keel.doctor.advice import either, stronger, times
from keel.doctor.checks.base import RECENT, CheckResults, clear, level, not_recorded, reward_size, reward_trend
from keel.doctor.findings import finding
from keel.doctor.history import History, Series, finite, in_order, step_of
from keel.doctor.judge import Accuracy, accuracies
from keel.doctor.thresholds import Thresholds

PART = "eval/part/"


def _measured_twice(history: History, *, retention: bool) -> list[Accuracy]:
    rows = accuracies(history.evaluations, retention=retention).values()
    return [row for row in rows if row.before is not None and row.after is not None]


def retention(history: History, thresholds: Thresholds) -> CheckResults:
    """Skills that are not trained, before and after."""
    skills = _measured_twice(history, retention=True)
    if not skills:
        yield not_recorded("retention/dropping", "accuracy on other tasks (eval.tasks) at the start and later")
        return
    lost = [
        f"{row.task} {row.before:.3g} → {row.after:.3g}"
        for row in skills
        if row.fell and row.change(thresholds) == "dropped"
    ]
    if lost:
        step = max(int(row.steps[1] or 0) for row in skills)
        yield finding(
            "retention/dropping",
            f"at step {step}: {', '.join(lost)}; the intervals do not touch",
            "the policy gives up what it is not paid for",
            either(
                stronger(history.config, history.source),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
                "those skills in the task mix",
            ),
        )


def train_gap(history: History, thresholds: Thresholds) -> CheckResults:
    """Reward up while held-out accuracy of the same task goes down."""
    trained, trend = _measured_twice(history, retention=False), reward_trend(history)
    logged = {name: series for name in history.series if name.startswith("eval/") and (series := history.get(name))}
    if logged and not trained:
        yield from _logged_gap(history, logged, thresholds)
        return
    if not trained or trend is None:
        yield not_recorded("eval/train-gap", "held-out accuracy of the trained task, twice, beside the reward")
        return
    yield from _nothing_held_out(history, _recorded(history), thresholds)
    yield from _perfect(history, _recorded(history), thresholds)
    yield from _by_heart(history, _recorded(history), thresholds)
    yield from _stuck(history, _recorded(history), thresholds)
    rewards = history.series["reward/mean"].finite.values
    range_ = max(rewards) - min(rewards)
    gained = trend.after - trend.before
    rising = trend.z_score > thresholds["flat_reward"] and gained > thresholds["gap_reward"] * max(range_, 1e-9)
    for row in trained:
        if rising and row.fell:
            yield finding(
                "eval/train-gap",
                f"{trend.text} while held-out {row.task} fell {row.before:.3g} → {row.after:.3g} "
                f"(step {row.steps[0]} → {row.steps[1]}), beyond its interval",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "keel doctor on the configuration renders both prompts; read the best paid completions in the report",
            )


def _logged_gap(history: History, logged: dict[str, Series], thresholds: Thresholds) -> CheckResults:
    """The same for held-out scores that a trainer logs as metrics: nothing at all, or a trend down."""
    nothing = list(_nothing_held_out(history, logged, thresholds))
    yield from nothing
    yield from _perfect(history, logged, thresholds)
    scores = {name: series for name, series in logged.items() if any(word in name for word in SCORES)}
    yield from _by_heart(history, scores, thresholds)
    yield from _stuck(history, scores, thresholds)
    rises = _rises(history, thresholds)
    if nothing or not rises:
        return
    for name, series in logged.items():
        change = shapes.trend(series) or shapes.few_trend(series)
        if not clear(change, thresholds) and _is_share(name):
            change = fallen_share(series)
        if not _rises(history, thresholds, _trained(name)) or not clear(change, thresholds) or change is None:
            continue
        if -change.size > thresholds["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward {rises} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "read the best paid completions; judge held-out problems by the training reward, too",
            )


def _stuck(history: History, logged: dict[str, Series], thresholds: Thresholds) -> CheckResults:
    """A held-out score that is the same to the last digit each time, not nothing nor all, while the reward moves.

    So few completions that their sum may well be the same by chance tell nothing.
    """
    rewards = history.get("reward/mean")
    change = shapes.course(rewards) if rewards is not None else None
    if not clear(change, thresholds) or change is None:
        return
    if abs(change.size) <= thresholds["gap_reward"] * reward_size(history):
        return
    for name, series in logged.items():
        values = series.finite.values
        if len(set(values)) != 1 or not 0 < values[0] < thresholds["held_out_all"]:
            continue
        times = _evaluations(history, name, series)
        if times >= STUCK and _chance_of_same(history, series, times) <= level(thresholds):
            yield finding(
                "eval/train-gap",
                f"held-out {name.removeprefix('eval/')} is {values[0]:.6g} at each of {times} evaluations, while "
                f"the reward goes from {change.before:.3g} to {change.after:.3g}",
                "what is evaluated does not change with training: an engine that keeps its first weights, a checkpoint "
                "that is loaded each time, or a cached result",
                "compare held-out completions of the first and the last evaluation, and sync the weights before each",
            )
            return


def _evaluations(history: History, name: str, series: Series) -> int:
    """How many evaluations these points are.

    A log that has them on most of its lines may repeat the last one: there as many as another figure of theirs tells.
    """
    rewards, points = history.get("reward/mean"), len(series.finite)
    if name not in history.series or rewards is None or 2 * points <= len(rewards.finite):
        return points
    others = [s.finite.values for n, s in history.series.items() if n != name and n.startswith(EVALUATED)]
    changes = [sum(a != b for a, b in pairwise(values)) for values in others]
    return min(points, 1 + max(changes, default=0))


def _chance_of_same(history: History, series: Series, times: int) -> float:
    """That as many coins as an evaluation has completions have one and the same sum so many times."""
    from scipy.special import bdtr

    value = series.finite.values[0]
    count = max(_completions(history, series), coins([value]))
    sums = [float(bdtr(k, count, min(1.0, value))) for k in range(count + 1)]
    return sum((high - low) ** times for low, high in pairwise([0.0, *sums]))


def fallen_share(series: Series) -> shapes.Change | None:
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
    return shapes.Change(before, after, int(series.finite.steps[-third]), chance)


def coins(values: Sequence[float]) -> int:
    """The fewest completions whose shares these can be, to their last digit; no more than `FEW_COINS`.

    More than those are not told from a mean over sets of different sizes, whose noise is that of the small ones.
    """
    digits = max(len(repr(value).partition(".")[2]) for value in values)
    rounding = 0.5 * 10.0 ** -min(digits, 6)
    fits = (n for n in range(1, FEW_COINS) if all(abs(v - round(v * n) / n) <= rounding for v in values))
    return next(fits, FEW_COINS)


def _perfect(history: History, logged: dict[str, Series], thresholds: Thresholds) -> CheckResults:
    """Held-out problems that are all solved from the first evaluation on, while training pays far from all."""
    shares = {n: s for n, s in logged.items() if _is_share(n) and len(s.finite) >= 3}
    parts = [text for n in shares if n.startswith(PART) and (text := _unpaid(history, n, thresholds))]
    scores = [s for n, s in shares.items() if n.startswith(PART) == bool(parts)]
    rewards, missed = history.get("reward/mean"), parts[0] if parts else _missed(history, thresholds)
    if not scores or rewards is None or not missed:
        return
    early = min(s.finite.steps[0] for s in scores) <= rewards.steps[0] + (rewards.steps[-1] - rewards.steps[0]) / 2
    if early and all(1 >= v >= thresholds["held_out_all"] for s in scores for v in s.finite.values):
        yield finding(
            "eval/train-gap",
            f"all of {len(scores[0].finite)} evaluations solve {100 * min(scores[0].finite.values):.4g} % or more of "
            f"the held-out problems, from step {scores[0].finite.steps[0]:.0f} on, while in training {missed}",
            "held-out problems are not those of the task: known to the model, with the answer in the prompt, or judged "
            "by something that all completions pass",
            "read some held-out prompts and completions with their scores; compare them with those of training",
        )


def _by_heart(history: History, logged: dict[str, Series], thresholds: Thresholds) -> CheckResults:
    """Training that comes to be solved, to the last problem, while held-out ones stay far from that and do not gain."""
    rewards = history.get("reward/mean")
    gain = shapes.course(rewards) if rewards is not None else None
    learned = gain is not None and clear(gain, thresholds) and gain.size > thresholds["flat_gain"] * abs(gain.after)
    if gain is None or not learned or not _all_solved(history, thresholds):
        return
    for name, series in logged.items():
        values = series.finite.values
        if not _is_share(name) or name.startswith(PART) or len(values) < STUCK or min(values) <= 0:
            continue
        third = max(1, len(values) // 3)
        before, after = (statistics.fmean(part) for part in (values[:third], values[-third:]))
        room = thresholds["flat_gain"] * (1 - before)
        if max(values) < thresholds["mostly_paid"] and abs(after - before) < room:
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


def _all_solved(history: History, thresholds: Thresholds) -> bool:
    """Whether all of the highest reward is paid, of 1 where it is not logged; or completions now earn the same."""
    rewards, highest, spread = (history.get(name) for name in ("reward/mean", "reward/max", "reward/std"))
    if rewards is None:
        return False
    best, now = 1.0 if highest is None else max(highest.finite.values), rewards.tail(RECENT).mean
    left = spread.tail(RECENT).mean / spread.head(3).mean if spread is not None and spread.head(3).mean > 0 else 1.0
    alike = left < 1 - thresholds["zero_variance_groups"]
    return alike or best >= now >= thresholds["held_out_all"] * best > 0


def _unpaid(history: History, name: str, thresholds: Thresholds) -> str:
    """That training pays little of a part, of 1 as a share is, as text; "" where it pays more or is not logged."""
    part = history.get(_trained(name))
    little = part is not None and 0 <= min(part.finite.values) <= max(part.finite.values) < thresholds["mostly_paid"]
    return f"{name.removeprefix(PART)} is {shapes.median(part):.3g}" if part is not None and little else ""


def _missed(history: History, thresholds: Thresholds) -> str:
    """What shows that much of the reward is missed in training, in the middle of the run, as text; "" if nothing does.

    By its place between the lowest and the highest that is paid; or by its spread: of rewards that are never negative
    at least 1 − m²/(m² + s²) would be 0 if they had two values. By groups: where 19 of 20 completions are right, at
    most 1 − 0.95^G of the groups of G are not all alike.
    """
    mean, spread = history.get("reward/mean"), history.get("reward/std")
    highest, lowest = history.get("reward/max"), history.get("reward/min")
    if mean is None:
        return ""
    usual = shapes.median(mean)
    if highest is not None and lowest is not None:
        low, high = min(lowest.finite.values), max(highest.finite.values)
        missed = usual - low < thresholds["mostly_paid"] * (high - low)
        return f"the reward is {usual:.3g}, of {low:.3g} to {high:.3g}" if missed else ""
    none = history.get("reward/solved_none_fraction")
    if none is not None:
        share = shapes.median(none)
        return f"{100 * share:.0f} % of the groups hold no right completion" if share > 0.1 else ""
    if spread is not None and min(mean.finite.values) >= 0:
        width = shapes.median(spread)
        if usual**2 < thresholds["mostly_paid"] * (usual**2 + width**2):
            return f"rewards are {usual:.3g} ± {width:.2g} a completion"
    alike, size = history.get("reward/zero_variance_fraction"), history.figure("rollout.num_generations")
    if alike is None or size is None:
        return ""
    mixed = 1 - shapes.median(alike)
    sure = 1 - MOSTLY_RIGHT**size < mixed < 1  # rewards that are graded finely are never alike
    return f"{100 * mixed:.0f} % of the groups of {size:.0f} hold rewards that differ" if sure else ""


def _trained(name: str) -> str:
    """The figure of training that a held-out one is compared with."""
    return f"reward/part/{name.removeprefix(PART)}" if name.startswith(PART) else "reward/mean"


def _is_share(name: str) -> bool:
    """Whether a held-out figure is a share of problems by its name; a reward may have any size."""
    return "reward" not in name or (name.startswith(PART) and any(w in name for w in SCORES if w != "reward"))


def _rises(history: History, thresholds: Thresholds, name: str = "reward/mean") -> str:
    """That the reward rises, as text; "" where it does not."""
    rewards = history.get(name)
    up = shapes.course(rewards) if rewards is not None else None
    rises = clear(up, thresholds) and up is not None and up.size > 0
    return f"rises from {up.before:.3g} to {up.after:.3g}" if up is not None and rises else ""


def _recorded(history: History) -> dict[str, Series]:
    """Held-out accuracy of the trained tasks as series, from the evaluations of a run of Keel's."""
    rows: dict[str, list[tuple[float, Any]]] = {}
    for record in history.evaluations:
        if record.get("split") != "retention":
            rows.setdefault(f"eval/{record.get('task', 'task')}", []).append((step_of(record), record.get("pass@1")))
    series = {name: in_order(points) for name, points in rows.items()}
    return {name: row for name, row in series.items() if len(row.finite)}


def _nothing_held_out(history: History, logged: dict[str, Series], thresholds: Thresholds) -> CheckResults:
    """Held-out scores of nothing at every evaluation, while training is paid."""
    course = _rises(history, thresholds) or _paid(history, thresholds)
    unseen = _at_zero(history, logged, thresholds) if course else None
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
            severity="warning" if chance <= level(thresholds) else "note",
        )


def _paid(history: History, thresholds: Thresholds) -> str:
    """Where most of the highest reward is paid in training, all along, that as text."""
    rewards, highest = history.get("reward/mean"), history.get("reward/max")
    if rewards is None or highest is None:
        return ""
    best, usual = max(highest.finite.values), shapes.median(rewards)
    mostly = best > 0 and usual > thresholds["mostly_paid"] * best
    return f"is {usual:.3g} of {best:.3g} in the middle of the run" if mostly else ""


def _at_zero(history: History, logged: dict[str, Series], thresholds: Thresholds) -> tuple[str, float] | None:
    """A held-out score that is nothing at every evaluation, and the chance of that at training's level.

    All of the scores, or a part of the reward that training pays.
    """
    rewards, highest = history.get("reward/mean"), history.get("reward/max")
    if rewards is None:
        return None
    paid = max(1.0, *rewards.finite.values)
    best = max(paid, *highest.finite.values) if highest is not None else paid

    def nothing(name: str, size: float) -> bool:
        values = logged[name].finite.values
        return len(values) >= 3 and max(map(abs, values)) <= thresholds["held_out_nothing"] * size

    sizes = {name: paid if "reward" in name else 1.0 for name in logged if not name.startswith(PART)}
    if sizes and all(nothing(name, size) for name, size in sizes.items()):
        name, size = next(iter(sizes.items()))
        return name, _chance_of_nothing(history, logged[name].scaled(1 / size), rewards.mean / best)
    for name in (name for name in logged if name.startswith(PART)):
        part = history.get(f"reward/part/{name.removeprefix(PART)}")
        largest = max(part.finite.values) if part is not None else 0.0
        if part is None or not part.tail(RECENT).mean > thresholds["mostly_paid"] * largest > 0:
            continue
        if nothing(name, largest):
            return name, _chance_of_nothing(history, logged[name].scaled(1 / largest), part.mean / max(1.0, largest))
    return None


def _chance_of_nothing(history: History, scores: Series, share: float) -> float:
    """Of scores this low where a share is right: of one completion an evaluation, unless the log tells how many."""
    from scipy.special import bdtr

    count = _completions(history, scores)
    right = max(0.0, count * sum(scores.finite.values))
    return float(bdtr(right, count * len(scores.finite), min(1.0, max(0.0, share))))


def _completions(history: History, scores: Series) -> int:
    """How many an evaluation has at least: as recorded, by its time, or by the smallest share that one of them is."""
    counts = [count for record in history.evaluations if (count := finite(record.get("n"))) is not None]
    seconds, rate = history.get("other/eval_runtime"), history.get("other/eval_samples_per_second")
    if counts:
        return _counted(min(counts), MOST_RECORDED)
    if seconds is not None and rate is not None:
        return _counted(seconds.mean * rate.mean, MOST_RECORDED)
    smallest = min((value for value in scores.finite.values if value > 0), default=1.0)
    return _counted(1 / smallest, MOST_COMPLETIONS)


def _counted(value: float, most: int) -> int:
    """The nearest count, whatever a log says: what is no number is one."""
    return round(min(max(value, 1.0), most)) if not math.isnan(value) else 1


MOSTLY_RIGHT = 0.95
SCORES = (
    "acc",
    "reward",
    "score",
    "pass",
    "success",
    "correct",
    "solve",
    "@",
)  # in names: other figures may be settings
STUCK = 4  # evaluations at least: what hardly learns may be judged alike two or three times
EVALUATED = ("eval/", "other/eval")  # how names of held-out figures begin
FEW_COINS = 100  # completions that a share is taken to be of where its digits tell of as many
MOST_COMPLETIONS = 1000  # that a share of a score is taken to tell
MOST_RECORDED = 10**9  # of a log that says more
CHECKS = (retention, train_gap)
