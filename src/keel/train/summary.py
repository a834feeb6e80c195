"""summary.json: the run in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.train.state import State


def summarise(task: str, state: State, findings: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Accuracy before and after, what the other skills retained, and the KL as it was last measured."""
    before = {record["task"]: record for record in state.before}
    after = {record["task"]: record for record in state.evaluated}
    first, last = before.get(task, {}), after.get(task, {})
    retained = [name for name, record in after.items() if record.get("split") == "retention"]
    return {
        "task": task,
        "steps": state.step,
        "accuracy": {
            "before": first.get("pass@1"),
            "after": last.get("pass@1"),
            "ci95_before": first.get("ci95"),
            "ci95_after": last.get("ci95"),
        },
        "retention": {
            name: {"before": before.get(name, {}).get("pass@1"), "after": after[name].get("pass@1")}
            for name in retained
        },
        "kl": final_kl(state.last_kl),
        "beta": state.beta,
        "wall_s": round(state.wall_s, 2),
        "findings": sorted({str(finding["code"]) for finding in findings}),
    }


def final_kl(measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`{"k1": {"mean", "se"}, …}` of the last measured step; what was not measured is left out."""
    found: dict[str, dict[str, float]] = {}
    for name in ("k1", "k2", "k3", "exact", "sequence"):
        kept = {part: measured.get(f"kl/policy_ref/{name}/{part}") for part in ("mean", "se")}
        if kept["mean"] is not None:
            found[name] = {part: value for part, value in kept.items() if value is not None}
    return found
