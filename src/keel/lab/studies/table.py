"""The tables of a study: a row a run, a row a point with intervals, and one in Markdown to paste."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.eval.statistics import Estimate, estimate, paired
from keel.lab.studies.folder import DONE, STOPPED
from keel.lab.studies.results import FIGURES, RunResult

PERCENT = ("accuracy_before", "accuracy_after", "retention_before", "retention_after", "forgetting", "share_in_band")
_SHOWN = {
    "accuracy_after": "accuracy",
    "reward": "reward",
    "kl_policy_ref": "KL(policy‖start)",
    "kl_ref_policy": "KL(start‖policy)",
    "retention_after": "old skills",
    "forgetting": "forgotten",
    "text_logprob_after": "text log-prob",
    "steps_to_band": "steps to band",
    "share_in_band": "steps in band",
}


@dataclass(frozen=True)
class Summary:
    """A point over its seeds: the mean and interval of every figure, and the paired difference from the baseline."""

    label: str
    options: Mapping[str, str]
    rows: tuple[RunResult, ...]
    means: Mapping[str, Estimate | None]
    differences: Mapping[str, Estimate | None]

    @property
    def states(self) -> str:
        """`done`, or how many ended otherwise."""
        counted = {state: sum(row.state == state for row in self.rows) for state in (r.state for r in self.rows)}
        return DONE if list(counted) == [DONE] else ", ".join(f"{count} {state}" for state, count in counted.items())

    def by_seed(self, figure: str) -> dict[int, float]:
        """The figure's values of runs that count."""
        return values(self.rows, figure)


def values(rows: Sequence[RunResult], figure: str) -> dict[int, float]:
    """A figure by seed, of the runs that were done or stopped by a guard; a failed run's last state is no result."""
    return {
        row.seed: found
        for row in rows
        if row.state in (DONE, STOPPED) and (found := figure_of(row, figure)) is not None
    }


def figure_of(row: RunResult, figure: str) -> float | None:
    """A figure by name; `SKILL:before` and the like are a skill's own."""
    if figure in row.figures:
        return row.figures[figure]
    name, _, part = figure.rpartition(":")
    skill = row.skills.get(name)
    found: float | None = None if skill is None else getattr(skill, part)
    return found


def figure_names(rows: Sequence[RunResult]) -> list[str]:
    """Every figure that some run has."""
    skills = dict.fromkeys(name for row in rows for name in row.skills)
    parts = ("before", "after", "kl_policy_ref", "kl_ref_policy")
    names = [*FIGURES, *(f"{skill}:{part}" for skill in skills for part in parts)]
    return [name for name in names if any(figure_of(row, name) is not None for row in rows)]


def summarise(rows: Sequence[RunResult], baseline: str) -> list[Summary]:
    """A summary a point, in the order of the rows."""
    labels = dict.fromkeys(row.point for row in rows)
    of = {label: [row for row in rows if row.point == label] for label in labels}
    names = figure_names(rows)
    found = []
    for label, mine in of.items():
        means = {name: estimate(list(values(mine, name).values())) for name in names}
        against = {
            name: None if label == baseline else paired(values(of[baseline], name), values(mine, name))
            for name in names
        }
        found.append(Summary(label, mine[0].options, tuple(mine), means, against))
    return found


def forgetting_pairs(rows: Sequence[RunResult], figure: str) -> list[tuple[float, float]]:
    """(KL on the trained task, loss on the old skills) of every run that has both."""
    both = ((figure_of(row, figure), figure_of(row, "forgetting")) for row in rows)
    return [(kl, lost) for kl, lost in both if kl is not None and lost is not None]


def frontier_points(summaries: Sequence[Summary]) -> dict[str, tuple[Estimate, Estimate]]:
    """(KL(policy‖start) per token, reward) of every point that has both."""
    return {
        one.label: (kl, reward)
        for one in summaries
        if (kl := one.means.get("kl_policy_ref")) is not None and (reward := one.means.get("reward")) is not None
    }


# ------------------------------------------------------------------------------------------------------ files


def points_csv(rows: Sequence[RunResult]) -> str:
    """A row a run."""
    axes = list(rows[0].options)
    names = figure_names(rows)
    band = ["band_by"] * any(row.band_by for row in rows)
    head = ["point", "seed", *axes, "state", "reason", *names, *band, "wall_s"]
    lines = [
        [row.point, row.seed, *row.options.values(), row.state, row.reason]
        + [_exact(figure_of(row, name)) for name in names]
        + [row.band_by for _ in band]
        + [_exact(row.wall_s)]
        for row in rows
    ]
    return _csv(head, lines)


def table_csv(summaries: Sequence[Summary]) -> str:
    """A row a point; no times, so that a study that was killed and started again has the same bytes."""
    axes = list(summaries[0].options)
    names = list(summaries[0].means)
    parts = ("mean", "low", "high")
    head = ["point", *axes, "states", "seeds"]
    head += [f"{name}_{part}" for name in names for part in parts]
    head += [f"{name}_vs_baseline_{part}" for name in names for part in (*parts, "p")]
    lines = []
    for one in summaries:
        line: list[object] = [one.label, *one.options.values(), one.states, len(one.rows)]
        line += [_exact(getattr(one.means[name], part, None)) for name in names for part in parts]
        line += [_exact(getattr(one.differences[name], part, None)) for name in names for part in (*parts, "p")]
        lines.append(line)
    return _csv(head, lines)


def _csv(head: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return out.getvalue()


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def table_md(summaries: Sequence[Summary], baseline: str) -> str:
    """The table to paste: mean ± half of the 95 % t-interval over seeds."""
    names = shown_columns(summaries)
    head = ["point", *names.values(), "runs"]
    lines = [head, ["---"] * len(head)]
    for one in summaries:
        label = f"{one.label} (baseline)" if one.label == baseline else one.label
        runs = str(len(one.rows)) if one.states == DONE else one.states
        lines.append([label, *(shown(name, one.means.get(name)) for name in names), runs])
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def shown_columns(summaries: Sequence[Summary]) -> dict[str, str]:
    """The figures that a person reads first, as far as there are any, with their headings."""
    return {name: title for name, title in _SHOWN.items() if any(one.means.get(name) for one in summaries)}


def shown(name: str, found: Estimate | None) -> str:
    """`81.2 % ± 3.4` or `0.0512 ± 0.0031`."""
    if found is None:
        return "–"
    if name in PERCENT or name.endswith((":before", ":after")):
        margin = "" if found.margin is None else f" ± {100 * found.margin:.1f}"
        return f"{100 * found.mean:.1f} %{margin}"
    margin = "" if found.margin is None else f" ± {found.margin:.2g}"
    return f"{found.mean:.3g}{margin}"
