"""The tables of a study: one row per run, one row per point with intervals, and a short one in Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.eval.statistics import Estimate, estimate, paired
from keel.lab.studies.results import DONE, FIGURES, STOPPED, RunResult

PERCENT = (
    "accuracy_before",
    "accuracy_after",
    "accuracy_change",
    "retention_before",
    "retention_after",
    "retention_change",
    "forgetting",
    "share_in_band",
)
BEFORE, AFTER, CHANGE = "before", "after", "change"
_COLUMNS = {
    "accuracy_before": "accuracy before",
    "accuracy_after": "accuracy",
    "accuracy_change": "accuracy change",
    "reward": "reward",
    "kl_policy_ref": "KL(policy‖start)",
    "kl_ref_policy": "KL(start‖policy)",
    "retention_before": "old skills before",
    "retention_after": "old skills",
    "retention_change": "old skills change",
    "text_logprob_before": "text log-prob before",
    "text_logprob_after": "text log-prob",
    "text_logprob_change": "text log-prob change",
    "steps_to_band": "steps to band",
    "share_in_band": "steps in band",
}


@dataclass(frozen=True)
class PointSummary:
    """A point over its seeds: mean and interval of every figure, and paired differences from the baseline."""

    label: str
    options: Mapping[str, str]
    rows: tuple[RunResult, ...]
    means: Mapping[str, Estimate | None]
    differences: Mapping[str, Estimate | None]

    @property
    def states(self) -> str:
        """`done`, or the number of runs by other outcomes."""
        counted = {state: sum(row.state == state for row in self.rows) for state in (r.state for r in self.rows)}
        return DONE if list(counted) == [DONE] else ", ".join(f"{count} {state}" for state, count in counted.items())

    def by_seed(self, figure: str) -> dict[int, float]:
        """The figure's values, without failed runs."""
        return values(self.rows, figure)


def values(rows: Sequence[RunResult], figure: str) -> dict[int, float]:
    """A figure by seed, for runs that were done or stopped by a guard; failed runs have no result."""
    return {
        row.seed: value
        for row in rows
        if row.state in (DONE, STOPPED) and (value := figure_of(row, figure)) is not None
    }


def figure_of(row: RunResult, figure: str) -> float | None:
    """A figure by name; `SKILL:before` and similar names belong to a skill, and a change is after − before."""
    if (sides := change_sides(figure)) is not None:
        before, after = (figure_of(row, side) for side in sides)
        return None if before is None or after is None else after - before
    if figure in row.figures:
        return row.figures[figure]
    name, _, part = figure.rpartition(":")
    skill = row.skills.get(name)
    return None if skill is None else getattr(skill, part)


def change_sides(figure: str) -> tuple[str, str] | None:
    """For a change, the names of its figures before and after training; None for other figures."""
    stem = figure.removesuffix(CHANGE)
    return None if stem == figure or stem[-1:] not in ("_", ":") else (stem + BEFORE, stem + AFTER)


def figure_names(rows: Sequence[RunResult]) -> list[str]:
    """Every figure that some run has."""
    parts = (BEFORE, AFTER, CHANGE, "kl_policy_ref", "kl_ref_policy")
    names = [*FIGURES, *(f"{skill}:{part}" for skill in skill_names(rows) for part in parts)]
    return [name for name in names if any(figure_of(row, name) is not None for row in rows)]


def skill_names(rows: Sequence[RunResult]) -> list[str]:
    """The old skills that some run was evaluated on."""
    return list(dict.fromkeys(name for row in rows for name in row.skills))


def summarise(rows: Sequence[RunResult], baseline: str) -> list[PointSummary]:
    """One summary per point, in the order of the rows."""
    labels = dict.fromkeys(row.point for row in rows)
    by_point = {label: [row for row in rows if row.point == label] for label in labels}
    names = figure_names(rows)
    summaries = []
    for label, own_rows in by_point.items():
        means = {name: _mean(own_rows, name) for name in names}
        differences = {
            name: None if label == baseline else paired(values(by_point[baseline], name), values(own_rows, name))
            for name in names
        }
        summaries.append(PointSummary(label, own_rows[0].options, tuple(own_rows), means, differences))
    return summaries


def _mean(rows: Sequence[RunResult], figure: str) -> Estimate | None:
    """The estimate over seeds; a change is the paired difference between start and end of each run."""
    if (sides := change_sides(figure)) is not None:
        return paired(*(values(rows, side) for side in sides))
    return estimate(list(values(rows, figure).values()))


def forgetting_pairs(rows: Sequence[RunResult], figure: str) -> list[tuple[float, float]]:
    """(KL on the trained task, loss on the old skills) of every run that has both."""
    both = ((figure_of(row, figure), figure_of(row, "forgetting")) for row in rows)
    return [(kl, lost) for kl, lost in both if kl is not None and lost is not None]


def frontier_points(summaries: Sequence[PointSummary]) -> dict[str, tuple[Estimate, Estimate]]:
    """(KL(policy‖start) per token, reward) of every point that has both."""
    return {
        point.label: (kl, reward)
        for point in summaries
        if (kl := point.means.get("kl_policy_ref")) and (reward := point.means.get("reward"))
    }


# ------------------------------------------------------------------------------------------------------ files


def points_csv(rows: Sequence[RunResult]) -> str:
    """One row per run."""
    axes = list(rows[0].options)
    names = figure_names(rows)
    band = ["band_by"] * any(row.band_by for row in rows)
    head = ["point", "seed", *axes, "state", "reason", *names, *band, "wall_s"]
    lines = [
        [row.point, row.seed, *row.options.values(), row.state, row.reason]
        + [_cell(figure_of(row, name)) for name in names]
        + [row.band_by for _ in band]
        + [_cell(row.wall_s)]
        for row in rows
    ]
    return _csv(head, lines)


def table_csv(summaries: Sequence[PointSummary]) -> str:
    """One row per point, without times, so that an interrupted and continued study gives the same bytes."""
    axes = list(summaries[0].options)
    names = list(summaries[0].means)
    parts = ("mean", "low", "high")
    own = [(name, part) for name in names for part in (*parts, *(("p",) if change_sides(name) else ()))]
    head = ["point", *axes, "states", "seeds"]
    head += [f"{name}_{part}" for name, part in own]
    head += [f"{name}_vs_baseline_{part}" for name in names for part in (*parts, "p")]
    lines = []
    for point in summaries:
        line: list[object] = [point.label, *point.options.values(), point.states, len(point.rows)]
        line += [_cell(getattr(point.means[name], part, None)) for name, part in own]
        line += [_cell(getattr(point.differences[name], part, None)) for name in names for part in (*parts, "p")]
        lines.append(line)
    return _csv(head, lines)


def _csv(head: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def table_md(summaries: Sequence[PointSummary], baseline: str) -> str:
    """The tables in Markdown: mean ± half of the 95 % t-interval over seeds; old skills have their own table."""
    tables = [display_columns(summaries), skill_columns(summaries)]
    return "\n".join(_table_md(summaries, baseline, columns) for columns in tables if columns)


def _table_md(summaries: Sequence[PointSummary], baseline: str, columns: Mapping[str, str]) -> str:
    head = ["point", *columns.values(), "runs"]
    lines = [head, ["---"] * len(head)]
    for point in summaries:
        label = f"{point.label} (baseline)" if point.label == baseline else point.label
        runs = str(len(point.rows)) if point.states == DONE else point.states
        lines.append([label, *(format_figure(name, point.means.get(name)) for name in columns), runs])
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def display_columns(summaries: Sequence[PointSummary]) -> dict[str, str]:
    """The main figures that exist, with their headings.

    A figure after training always has the columns before and change, even if they are unknown.
    """
    shown = {name for name in _COLUMNS if any(point.means.get(name) for point in summaries)}
    shown |= {name.removesuffix(AFTER) + part for name in shown if name.endswith(AFTER) for part in (BEFORE, CHANGE)}
    return {name: title for name, title in _COLUMNS.items() if name in shown}


def skill_columns(summaries: Sequence[PointSummary]) -> dict[str, str]:
    """Each old skill before and after training, and the change. A single skill is already in the first table."""
    skills = skill_names([row for point in summaries for row in point.rows])
    headings = {BEFORE: " before", AFTER: "", CHANGE: " change"}
    several = skills if len(skills) > 1 else []
    return {f"{skill}:{part}": skill + heading for skill in several for part, heading in headings.items()}


def format_figure(name: str, estimate: Estimate | None, *, difference: bool = False) -> str:
    """Format a figure: `81.2 % ± 3.4` or `0.0512 ± 0.0031`; changes and differences have a sign.

    Differences of fractions are in percentage points: `+3.4 ± 1.2 points`. A loss on old skills has no sign.
    """
    if estimate is None:
        return "–"
    sign = "+" if difference or change_sides(name) else ""
    if name in PERCENT or name.endswith((f":{BEFORE}", f":{AFTER}", f":{CHANGE}")):
        mean = f"{100 * estimate.mean:{sign}.1f}"
        margin = "" if estimate.margin is None else f" ± {100 * estimate.margin:.1f}"
        return f"{mean}{margin} points" if sign or name == "forgetting" else f"{mean} %{margin}"
    margin = "" if estimate.margin is None else f" ± {estimate.margin:.2g}"
    return f"{estimate.mean:{sign}.3g}{margin}"
