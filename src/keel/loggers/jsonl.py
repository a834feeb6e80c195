"""The logger that is always there: the run directory's own lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.loggers.base import Logger
from keel.loggers.rundir import EVAL, EVENTS, METRICS, ROLLOUTS, RunDirectory


class JsonlLogger(Logger):
    """One object a line; every line is complete, and valid JSON whatever the numbers were."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Onto metrics.jsonl."""
        self._run.append(METRICS, {"step": step, **metrics})

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Onto rollouts.jsonl, a line a completion."""
        for record in records:
            self._run.append(ROLLOUTS, {"step": step, **record})

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Onto eval.jsonl."""
        self._run.append(EVAL, {"step": step, **record})

    def event(self, kind: str, **fields: Any) -> None:
        """Onto events.jsonl."""
        details = {name: value for name, value in fields.items() if name not in ("step", "time")}
        self._run.append(EVENTS, {"step": fields.get("step"), "kind": kind, "time": fields.get("time"), **details})
