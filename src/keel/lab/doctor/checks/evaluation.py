"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

from keel.base.thresholds import Thresholds
from keel.lab.doctor import shapes
from keel.lab.doctor.advice import either, stronger, times
from keel.lab.doctor.checks.base import RECENT, CheckResults, clear, level, not_recorded, reward_trend
from keel.lab.doctor.findings import finding
from keel.lab.doctor.history import History, Series
from keel.lab.judge import Accuracy, accuracies

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
    rewards = history.get("reward/mean")
    up = shapes.trend(rewards) if rewards is not None else None
    rises = clear(up, thresholds) and up is not None and up.size > 0
    course = f"rises from {up.before:.3g} to {up.after:.3g}" if up is not None and rises else _paid(history, thresholds)
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
        return
    for name, series in logged.items() if rises else ():
        change = shapes.trend(series) or shapes.few_trend(series)
        if name.startswith(PART) or not clear(change, thresholds) or change is None:
            continue
        if -change.size > thresholds["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward {course} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "read the best paid completions; judge held-out problems by the training reward, too",
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

    seconds, rate = history.get("other/eval_runtime"), history.get("other/eval_samples_per_second")
    count = max(1, round(seconds.mean * rate.mean)) if seconds is not None and rate is not None else 1
    right = max(0.0, count * sum(scores.finite.values))
    return float(bdtr(right, count * len(scores.finite), min(1.0, max(0.0, share))))


CHECKS = (retention, train_gap)
