"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

from keel.base.thresholds import Thresholds
from keel.lab.doctor import shapes
from keel.lab.doctor.advice import either, stronger, times
from keel.lab.doctor.checks.base import CheckResults, clear, not_recorded, reward_trend
from keel.lab.doctor.findings import finding
from keel.lab.doctor.history import History, Series
from keel.lab.judge import Accuracy, accuracies


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
    """The same for held-out scores that a trainer logs as metrics: a trend down, or a fall from their best."""
    rewards = history.get("reward/mean")
    up = shapes.trend(rewards) if rewards is not None else None
    if not clear(up, thresholds) or up is None or up.size <= 0:
        return
    for name, series in logged.items():
        if all(len(other.finite) >= 3 and max(map(abs, other.finite.values)) <= 0.01 for other in logged.values()):
            name = name.removeprefix("eval/")
            yield finding(
                "eval/train-gap",
                f"the reward rises from {up.before:.3g} to {up.after:.3g} while held-out {name} stays at 0 "
                f"({len(series.finite)} evaluations, at most {max(series.finite.values):.2g})",
                "nothing that is learned is seen there: another prompt, template, limit or judge than in training, or "
                "problems far harder than those that are trained on",
                "judge held-out completions by the training reward, and read one with its prompt",
            )
            return
        change = shapes.trend(series) or shapes.few_trend(series)
        if clear(change, thresholds) and change is not None and -change.size > thresholds["gap_reward"] * change.before:
            yield finding(
                "eval/train-gap",
                f"the reward rises from {up.before:.3g} to {up.after:.3g} while held-out {name.removeprefix('eval/')} "
                f"falls from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "read the best paid completions; judge held-out problems by the training reward, too",
            )


CHECKS = (retention, train_gap)
