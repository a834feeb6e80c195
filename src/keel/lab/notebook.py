"""`keel.Run`: metrics and evaluations of a run as DataFrames, rollouts as records, the report as HTML."""

from __future__ import annotations

import logging
import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError
from keel.doctor.judge import describe_state
from keel.doctor.runs import ROLLOUT_BYTES, Record, RunReader, RunRecord, number
from keel.lab.report import sections as tables
from keel.lab.report.html import block, charts, document, verdict
from keel.lab.report.rollouts import read_step
from keel.loggers.build import flat_numbers
from keel.loggers.rundir import EVAL, METRICS

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("keel")


class Run:
    """A run folder. Every access reads it again, so that it also works for a running run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = RunReader(self.path, ROLLOUT_BYTES)
        self._reader.read()  # raises if the folder is not a run

    @property
    def record(self) -> RunRecord:
        """The current contents of the folder."""
        return self._reader.read()

    def _logged(self, file: str) -> RunRecord:
        """The record; the logger `keel` warns if lines of the file are missing."""
        record = self.record
        for note in record.missing:
            if file in note:
                logger.warning("%s: %s", self.path, note)
        return record

    @property
    def config(self) -> Record:
        """The resolved configuration, secrets masked."""
        return self.record.config

    @property
    def summary(self) -> Record | None:
        """summary.json of a run that has ended."""
        return self.record.summary

    @property
    def metrics(self) -> DataFrame:
        """One row per step, one column per metric (`reward/mean`, `kl/policy_ref/k3/mean`); NaN for missing values."""
        pandas = _pandas("Run.metrics")
        lines = self._logged(METRICS).metrics
        names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "nonfinite"]
        columns = {name: [_or_nan(line.get(name)) for line in lines] for name in names if name != "step"}
        steps = pandas.Index([int(line["step"]) for line in lines], name="step", dtype="int64")
        return pandas.DataFrame(columns, index=steps)

    @property
    def evaluations(self) -> DataFrame:
        """One row per task and evaluation: `pass@1`, its interval `ci95/low` to `ci95/high`, and further metrics."""
        pandas = _pandas("Run.evaluations")
        lines = self._logged(EVAL).evaluations
        rows = [{name: line.get(name) for name in ("step", "task", "split")} | flat_numbers(line) for line in lines]
        return pandas.DataFrame(rows)

    def rollouts(self, step: int | None = None) -> list[Record]:
        """The rollout records of `step` (default: the last step with rollouts)."""
        return read_step(self.path, step)[1]

    def __repr__(self) -> str:
        return f"keel.Run({str(self.path)!r}): {describe_state(self.record)}"

    def _repr_html_(self) -> str:
        """The report's verdict, findings and curves, in a frame that isolates styles and scripts from the notebook."""
        run = self.record
        shown, data = charts([run])
        body = verdict(run, 0, 1) + block("Findings", tables.findings(run)) + block("Curves", shown)
        page = document(run.name, body, data).encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded
        style = "width:100%;height:640px;border:0"
        return f"<iframe sandbox='allow-scripts' style='{style}' srcdoc='{escape(page)}'></iframe>"


def _or_nan(value: Any) -> float:
    known = number(value)
    return math.nan if known is None else known


def _pandas(who: str) -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise KeelError(f"{who} needs {error.name}: pip install 'keel-rl[notebook]'") from None
    return pandas
