"""Write summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.base.files import read_records
from keel.loggers.rundir import EVENTS
from keel.trainer.state import State


def summarise(
    task: str,
    state: State,
    findings: Sequence[Mapping[str, Any]] | None = None,
    reward_failures: Mapping[str, int] | None = None,
    kl: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Accuracy and held-out reward before and after, retention on other tasks, and the final policy's KL.

    `kl` are the metrics of the final policy. The default is the metrics of the last step, which describe the weights
    before its update. Accuracy is null for problems without answers. `findings` is null if the run was not judged.
    `reward_failures` is the number of failed calls per reward.
    """
    first, last = _trained(state.before), _trained(state.evaluated)
    before, after = _retention(state.before), _retention(state.evaluated)
    return {
        "task": task,
        "steps": state.step,
        "accuracy": {
            "before": first.get("pass@1"),
            "after": last.get("pass@1"),
            "ci95_before": first.get("ci95"),
            "ci95_after": last.get("ci95"),
        },
        "reward": {"before": first.get("reward"), "after": last.get("reward")},
        "retention": {
            name: {"before": before.get(name, {}).get("pass@1"), "after": after[name].get("pass@1")} for name in after
        },
        "kl": final_kl(kl or state.last_kl),
        "beta": state.beta,
        "wall_s": round(state.wall_s, 2),
        "findings": None if findings is None else sorted({str(finding["code"]) for finding in findings}),
        "reward_failures": dict(reward_failures or {}),
    }


def reward_failures(folder: Path) -> dict[str, int]:
    """The number of failed calls per reward, from the run's events, which also cover interrupted runs."""
    failed = [event for event in read_records(folder / EVENTS) if event.get("kind") == "reward/failed"]
    return dict(Counter(str(event["function"]) for event in failed if "function" in event))


def _trained(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The trained task's record. It is found by its split, because a retention task may have the same name."""
    return next((record for record in records if record.get("split") == "trained"), {})


def _retention(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(record["task"]): record for record in records if record.get("split") == "retention"}


def final_kl(measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`{"k1": {"mean", "se"}, …}` of a measurement; missing metrics are left out."""
    figures: dict[str, dict[str, float]] = {}
    for name in ("k1", "k2", "k3", "exact", "sequence"):
        statistics = {part: measured.get(f"kl/policy_ref/{name}/{part}") for part in ("mean", "se")}
        if statistics["mean"] is not None:
            figures[name] = {part: value for part, value in statistics.items() if value is not None}
    return figures
