"""Held-out accuracy: of what is trained against the reward, of what is not against the start."""

from __future__ import annotations

from typing import Any

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import either, stronger, times
from keel.lab.doctor.checks.base import Answers, not_recorded, reward_trend
from keel.lab.doctor.findings import found
from keel.lab.doctor.history import History, Record


def _before_after(history: History, split: str) -> dict[str, tuple[Record, Record]]:
    """First and last evaluation of every task of a split."""
    found: dict[str, list[Record]] = {}
    for record in history.evaluations:
        if record.get("split") == split and isinstance(record.get("pass@1"), int | float):
            found.setdefault(str(record.get("task")), []).append(record)
    return {task: (records[0], records[-1]) for task, records in found.items() if len(records) > 1}


def _apart(lower: Record, upper: Record) -> bool:
    """Whether `lower`'s 95 % interval ends below the beginning of `upper`'s."""
    low, high = _interval(lower), _interval(upper)
    return low is not None and high is not None and low[1] < high[0]


def _interval(record: Record) -> tuple[float, float] | None:
    value: Any = record.get("ci95")
    if isinstance(value, list | tuple) and len(value) == 2:
        return float(value[0]), float(value[1])
    return None


def retention(history: History, thresholds: Thresholds) -> Answers:
    """Skills that are not trained, before and after."""
    skills = _before_after(history, "retention")
    if not skills:
        yield not_recorded("retention/dropping", "accuracy on other tasks (eval.tasks) at the start and later")
        return
    lost = [
        f"{task} {before['pass@1']:.3g} → {after['pass@1']:.3g}"
        for task, (before, after) in skills.items()
        if before["pass@1"] - after["pass@1"] > thresholds["retention_drop"] * before["pass@1"]
        and _apart(after, before)
    ]
    if lost:
        step = max(int(after.get("step") or 0) for _, after in skills.values())
        yield found(
            "retention/dropping",
            f"at step {step}: {', '.join(lost)}; the intervals do not touch",
            "the policy gives up what it is not paid for",
            either(
                stronger(history.config, history.source),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
                "those skills in the task mix",
            ),
        )


def train_gap(history: History, thresholds: Thresholds) -> Answers:
    """Reward up while held-out accuracy of the same task goes down."""
    trained, trend = _before_after(history, "trained"), reward_trend(history)
    if not trained or trend is None:
        yield not_recorded("eval/train-gap", "held-out accuracy of the trained task, twice, beside the reward")
        return
    rewards = history.series["reward/mean"].finite.values
    range_ = max(rewards) - min(rewards)
    gained = trend.after - trend.before
    rising = trend.errors > thresholds["flat_reward"] and gained > thresholds["gap_reward"] * max(range_, 1e-9)
    for task, (before, after) in trained.items():
        if rising and _apart(after, before):
            yield found(
                "eval/train-gap",
                f"{trend.words} while held-out {task} fell {before['pass@1']:.3g} → {after['pass@1']:.3g} "
                f"(step {before.get('step')} → {after.get('step')}), beyond its interval",
                "the reward pays for something else than the evaluation asks, or both see different prompts",
                "keel doctor on the configuration renders both prompts; read the best paid completions in the report",
            )


CHECKS = (retention, train_gap)
