"""A run in a notebook: its metrics as a table, its curves as a figure, its report and rollouts as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, unknown
from keel.lab.judge import state
from keel.lab.plots.charts import svg
from keel.lab.report import samples
from keel.lab.report import sections as tables
from keel.lab.report.html import block, chart_data, curves, document, verdict
from keel.lab.report.panels import panels
from keel.lab.report.rollouts import choose, facts, read_step
from keel.lab.runs import ROLLOUT_BYTES, Record, RunReader, RunRecord, number
from keel.loggers.tensorboard import flat_numbers

if TYPE_CHECKING:
    from pandas import DataFrame

    from keel.lab.plots.figure import PanelFigure

PLOTTED = (
    "Accuracy on held-out problems",
    "Reward",
    "KL(policy‖reference)",
    "KL penalty weight",
    "Entropy",
    "Gradient norm",
    "Completion length",
)
NEEDS = "needs {}: pip install 'keel-rl[notebook]'"


@dataclass(frozen=True)
class Html:
    """Something to look at: a page in a frame of its own in a notebook, a line anywhere else."""

    line: str
    document: str
    height: int

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        """In a frame, so that neither style nor script of the page meets those of the notebook."""
        style = f"width:100%;height:{self.height}px;border:0"
        page = self.document.encode("utf-8", "replace").decode()  # half a character of a cut text fits no file
        return f"<iframe sandbox='allow-scripts' style='{style}' srcdoc='{escape(page)}'></iframe>"


class Rollouts(Sequence[Record]):
    """Completions that were recorded at one step, as lines of rollouts.jsonl have them."""

    def __init__(self, run: str, step: int, records: Sequence[Record]) -> None:
        self.run = run
        self.step = step
        self._records = list(records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __repr__(self) -> str:
        lines = [f"{record.get('completion', '')!r}: {', '.join(facts(record))}" for record in self._records]
        return "\n".join([f"{self.run}, step {self.step}, {len(self)} completion(s)", *lines])

    def _repr_html_(self) -> str:
        """Every completion under its prompt, each token coloured by its KL to the reference."""
        body = samples.completions(self._records)
        return Html(repr(self), document(self.run, body), min(640, 160 + 120 * len(self)))._repr_html_()


class Run:
    """A run's folder. What is asked of it is read anew, so that a run that goes on can be looked at again and again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = RunReader(self.path, ROLLOUT_BYTES)
        self._reader.read()  # a folder that is no run is refused now

    @property
    def record(self) -> RunRecord:
        """Everything that is in the folder now."""
        return self._reader.read()

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
        """A row a step, a column a metric (`reward/mean`, `kl/policy_ref/k3/mean`); NaN where there is no number."""
        pandas = _pandas("Run.metrics")
        lines = self.record.metrics
        names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "nonfinite"]
        columns = {name: [_or_nan(line.get(name)) for line in lines] for name in names if name != "step"}
        steps = pandas.Index([int(number(line.get("step")) or 0) for line in lines], name="step", dtype="int64")
        return pandas.DataFrame(columns, index=steps)

    @property
    def evaluations(self) -> DataFrame:
        """A row for each task at each evaluation: `pass@1`, its interval `ci95/low` to `ci95/high`, and the rest."""
        pandas = _pandas("Run.evaluations")
        lines = self.record.evaluations
        rows = [{name: line.get(name) for name in ("step", "task", "split")} | flat_numbers(line) for line in lines]
        return pandas.DataFrame(rows)

    def rollouts(
        self,
        step: int | None = None,
        *,
        problem: str | None = None,
        group: int | None = None,
        order: str | None = None,
        limit: int | None = None,
    ) -> Rollouts:
        """Completions of `step`, or of the last that has some; `order` best or worst sorts them by reward."""
        if order not in (None, "best", "worst"):
            raise unknown("order", str(order), ("best", "worst"))
        shown_step, records = read_step(self.path, step)
        chosen = choose(records, problem=problem, group=group, order=order, limit=limit)
        return Rollouts(self.record.name, shown_step, chosen)

    def plot(self, *charts: str, beside: Sequence[Run] = ()) -> PanelFigure:
        """The report's charts of these titles as a figure, or the most important ones; `beside` are runs to compare."""
        runs = [self.record, *(run.record for run in beside)]
        drawn = {panel.title: panel for panel in panels(runs)}
        for chart in charts:
            if not any(_is_chart(title, chart) for title in drawn):
                raise unknown("chart", chart, drawn)
        titles = [title for chart in charts or PLOTTED for title in drawn if _is_chart(title, chart)]
        if not titles:
            raise KeelError(f"{self.path} has nothing to plot yet: wait for its first step")
        try:
            from keel.lab.plots.figure import figure_of
        except ModuleNotFoundError as error:
            raise KeelError(f"plot {NEEDS.format(error.name)}") from None
        return figure_of([drawn[title] for title in titles], ", ".join(run.name for run in runs))

    def doctor(self) -> Html:
        """What the doctor finds in the log, and what it looked at."""
        from keel.lab.doctor.display import verdict as in_words
        from keel.lab.doctor.examine import examine_run
        from keel.lab.doctor.page import summary

        record = self.record
        diagnosis = examine_run(record)
        line = in_words(diagnosis, record.name)
        return Html(line, document(line, summary(diagnosis, line)), 420)

    def __repr__(self) -> str:
        return f"keel.Run({str(self.path)!r}): {state(self.record)[1]}"

    def _repr_html_(self) -> str:
        """The upper part of the report: verdict, findings, curves."""
        run = self.record
        drawn = [(panel, picture) for panel in panels([run]) if (picture := svg(panel))]
        body = verdict(run, 0, 1) + block("Findings", tables.findings(run)) + block("Curves", curves(drawn))
        page = document(run.name, body, chart_data([panel for panel, _ in drawn]))
        return Html(repr(self), page, 640)._repr_html_()


def _is_chart(title: str, chart: str) -> bool:
    """Whether a chart has this title; of several runs there is one for each estimator, named after a comma."""
    return title == chart or title.startswith(f"{chart}, ")


def _or_nan(value: Any) -> float:
    known = number(value)
    return math.nan if known is None else known


def _pandas(who: str) -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise KeelError(f"{who} {NEEDS.format(error.name)}") from None
    return pandas
