"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

from keel.base.thresholds import Thresholds
from keel.lab.doctor import shapes
from keel.lab.doctor.advice import either, stronger, times
from keel.lab.doctor.checks.base import RECENT, CheckResults, clear, not_recorded, reward_trend
from keel.lab.doctor.findings import finding
from keel.lab.doctor.history import History, Series
from keel.lab.judge import Accuracy, accuracies

PART = "eval/part/"
NOTHING = 0.01  # of what a score may be, at most
MOST = 0.6  # of the highest reward


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
    level = f"rises from {up.before:.3g} to {up.after:.3g}" if up is not None and rises else _paid(history)
    unseen = _at_zero(history, logged) if level else None
    if unseen is not None:
        yield finding(
            "eval/train-gap",
            f"the reward {level} while held-out {unseen.removeprefix('eval/')} stays at 0 "
            f"({len(logged[unseen].finite)} evaluations, at most {max(logged[unseen].finite.values):.2g})",
            "nothing that is learned is seen there: another prompt, template, limit or judge than in training, or "
            "problems far harder than those that are trained on",
            "judge held-out completions by the training reward, and read one with its prompt",
        )
        return
    for name, series in logged.items() if rises else ():
        change = shapes.trend(series) or shapes.few_trend(series)
        if name.startswith(PART) or not clear(change, thresholds) or change is None:
            continue
        if -change.size > thresholds["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward {level} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "read the best paid completions; judge held-out problems by the training reward, too",
            )


def _paid(history: History) -> str:
    """Where most of the highest reward is paid in training, all along, that as text."""
    rewards, highest = history.get("reward/mean"), history.get("reward/max")
    if rewards is None or highest is None:
        return ""
    best, usual = max(highest.finite.values), shapes.median(rewards)
    return f"is {usual:.3g} of {best:.3g} in the middle of the run" if best > 0 and usual > MOST * best else ""


def _at_zero(history: History, logged: dict[str, Series]) -> str | None:
    """A held-out score that is nothing at every evaluation: all of them, or a part of the reward that training pays."""
    rewards = history.get("reward/mean")
    paid = max([1.0, *(rewards.finite.values if rewards is not None else ())])

    def nothing(name: str, size: float) -> bool:
        values = logged[name].finite.values
        return len(values) >= 3 and max(map(abs, values)) <= NOTHING * size

    scores = [name for name in logged if not name.startswith(PART)]
    if scores:
        return scores[0] if all(nothing(name, paid if "reward" in name else 1.0) for name in scores) else None
    for name in logged:
        part = history.get(f"reward/part/{name.removeprefix(PART)}")
        largest = max(part.finite.values) if part is not None else 0.0
        if part is not None and part.tail(RECENT).mean > MOST * largest > 0 and nothing(name, largest):
            return name
    return None


CHECKS = (retention, train_gap)
