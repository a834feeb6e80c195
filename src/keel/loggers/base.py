"""The Logger interface, and MultiLogger, which drops a failing logger instead of stopping the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keel.base.redact import redact_data


class Logger:
    """Receives a run's records in order. Every method does nothing by default."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one step."""

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Completions recorded at a step."""

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """One evaluated task."""

    def event(self, kind: str, **fields: Any) -> None:
        """An event such as a resume, a guard or a checkpoint. `step` and `time` are among the fields."""

    def progress(self, label: str, done: int, total: int, detail: str) -> None:
        """Progress of a phase without steps, such as an SFT warm start; for display only, not recorded."""

    def close(self) -> None:
        """Close the logger; no calls follow."""


class MultiLogger(Logger):
    """Several loggers as one. `primary` (JSONL) must succeed; any other that raises is reported once and dropped."""

    def __init__(
        self, primary: Logger, others: Mapping[str, Logger] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._primary = primary
        self._others = dict(others or {})
        self._clock = clock
        self._step = 0

    @property
    def names(self) -> list[str]:
        """The names of the secondary loggers that still work."""
        return list(self._others)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one step."""
        self._step = step
        self._forward("step", step, metrics)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Completions recorded at a step."""
        self._forward("rollouts", step, records)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """One evaluated task."""
        self._forward("evaluation", step, record)

    def event(self, kind: str, **fields: Any) -> None:
        """Add the last step and the time (seconds since 1970), so that all loggers record the same."""
        fields = {"step": self._step, "time": round(self._clock(), 3), **redact_data(fields)}
        self._forward("event", kind, **fields)

    def progress(self, label: str, done: int, total: int, detail: str) -> None:
        """Progress of a phase without steps."""
        self._forward("progress", label, done, total, detail)

    def close(self) -> None:
        """Close the primary logger last, so that it can record failures of the others."""
        for name in list(self._others):
            self._guarded(name, "close")
        self._others.clear()
        self._primary.close()

    def _forward(self, method: str, *args: Any, **fields: Any) -> None:
        getattr(self._primary, method)(*args, **fields)
        for name in list(self._others):
            self._guarded(name, method, *args, **fields)

    def _guarded(self, name: str, method: str, *args: Any, **fields: Any) -> None:
        logger = self._others.get(name)
        if logger is None:  # dropped while logging another logger's failure
            return
        try:
            getattr(logger, method)(*args, **fields)
        except Exception as error:
            del self._others[name]
            self.event("logger/dropped", logger=name, during=method, error=f"{type(error).__name__}: {error}"[:500])
            if method != "close":
                try:
                    logger.close()
                except Exception:  # reported already
                    return
