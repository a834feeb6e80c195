"""The verdict of a study in sentences with statistical tests, and its files: tables, plots and report.html."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean

from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.eval.statistics import (
    MIN_SEEDS,
    Correlation,
    Estimate,
    Winner,
    holm,
    p_value_of,
    paired,
    pareto_frontier,
    pearson,
    spearman,
    winner,
)
from keel.lab.plots.charts import svg
from keel.lab.report.html import block, chart_data, curves, document
from keel.lab.report.sections import table
from keel.lab.report.verdict import Sentence
from keel.lab.studies.grid import Axis, Study
from keel.lab.studies.plots import short_names, study_panels, write_pictures
from keel.lab.studies.results import DONE, FAILED, STOPPED, JobOutcome, jobs, read_result
from keel.lab.studies.table import (
    PointSummary,
    change_sides,
    display_columns,
    forgetting_pairs,
    format_figure,
    frontier_points,
    points_csv,
    skill_columns,
    skill_names,
    summarise,
    table_csv,
    table_md,
)

NAMES = {"accuracy_after": "accuracy", "reward": "reward", "retention_after": "accuracy on the old skills"}
SIGNIFICANT = 0.05


def verdict(summaries: Sequence[PointSummary], baseline: str, metric: str, axes: Sequence[Axis] = ()) -> list[Sentence]:
    """The study in a few sentences."""
    sentences = [*_run_states(summaries), *best(summaries, metric), *against_start(summaries)]
    sentences += against_baseline(summaries, baseline, metric)
    sentences += [sentence for axis in axes if len(axes) > 1 for sentence in _axis_effect(summaries, axis, metric)]
    sentences += correlation(summaries)
    sentences += _frontier(summaries)
    return sentences


def _run_states(summaries: Sequence[PointSummary]) -> list[Sentence]:
    rows = [row for point in summaries for row in point.rows]
    sentences: list[Sentence] = []
    for state, tone, ending in ((FAILED, "bad", "failed"), (STOPPED, "warn", "stopped by a guard")):
        labels = list(dict.fromkeys(row.point for row in rows if row.state == state))
        count = sum(row.state == state for row in rows)
        if count:
            sentences.append((tone, f"{count} of {len(rows)} runs {ending}: {', '.join(labels)}."))
    counts = {point.label: sum(row.state in (DONE, STOPPED) for row in point.rows) for point in summaries}
    few = [f"{label} ({count})" for label, count in counts.items() if count < MIN_SEEDS]
    most = max(counts.values())
    if most < MIN_SEEDS:
        seeds = f"{most} seed{'s' * (most != 1)} a point"
        text = f"{seeds}: too few to test differences; run at least {MIN_SEEDS}."
        sentences.append(("warn", text))
    elif few:
        sentences.append(("warn", f"Not tested, because fewer than {MIN_SEEDS} seeds have a result: {', '.join(few)}."))
    return sentences


def best(summaries: Sequence[PointSummary], metric: str) -> list[Sentence]:
    """The best point, and whether it is significantly better."""
    name, known = NAMES[metric], {point.label: values for point in summaries if (values := point.by_seed(metric))}
    result = winner(known)
    if result is None:
        return [("warn", f"No run has a value for {name}.")]
    missing = [point.label for point in summaries if point.label not in known]
    sentences: list[Sentence] = [("warn", f"Without a value for {name}: {_shortened(missing)}.")] if missing else []
    means = {point.label: estimate for point in summaries if (estimate := point.means[metric]) is not None}
    mean = format_figure(metric, means[result.best])
    tied = [label for label in known if math.isclose(means[label].mean, means[result.best].mean, abs_tol=1e-12)]
    if len(known) == 1:
        remark = "" if len(summaries) == 1 else ", the only point with a result"
        return [*sentences, ("plain", f"{result.best}: {name} {mean}{remark}.")]
    if len(tied) == len(known):
        mean_only = format_figure(metric, replace(means[result.best], low=None, high=None))
        return [*sentences, ("plain", f"No winner in {name}: all {len(known)} points have the same mean, {mean_only}.")]
    if result.name is not None:
        others = [p for p in result.p.values() if p is not None]
        why = f"its interval overlaps no other, and every paired difference has p ≤ {max(others):.2g} (Holm)"
        return [*sentences, ("good", f"{result.name} has the best {name}, {mean}, significantly: {why}.")]
    if max(len(values) for values in known.values()) < MIN_SEEDS:
        return [*sentences, ("plain", f"The highest mean in {name} is that of {_shortened(tied)}, {mean}.")]
    first = f"{_shortened(tied)} {'share' if len(tied) > 1 else 'has'} the highest mean"
    return [*sentences, ("plain", f"No winner in {name}: {first}, {mean}, {_rivals(result, tied)}.")]


def _shortened(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def _rivals(result: Winner, tied: Sequence[str]) -> str:
    rivals = [label for label in result.rivals if label not in tied]
    if not rivals:
        return "above all others"
    why = f"overlapping 95 % intervals, no variance to test, or Holm's p ≥ {SIGNIFICANT:g}"
    return f"not significantly different from {_shortened(rivals)} ({why})"


def against_start(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """Changes since the start of training in accuracy, each old skill and plain text, one sentence each.

    Holm's correction for the skills and the text is over all of them at all points.
    """
    skills = skill_names([row for point in summaries for row in point.rows])
    names = {"accuracy_change": "accuracy", **{f"{skill}:change": skill for skill in skills}}
    names["text_logprob_change"] = "log-probability of plain text"
    known = {figure: changes for figure in names if (changes := _changes(summaries, figure))}
    adjusted: dict[str, float | None] = {}
    for family in (known.keys() & {"accuracy_change"}, known.keys() - {"accuracy_change"}):
        adjusted |= holm({f"{name} {label}": p_value_of(x) for name in family for label, x in known[name].items()})
    sentences: list[Sentence] = []
    for figure, changes in known.items():
        least, most = (end(changes, key=lambda label: changes[label].mean) for end in (min, max))
        ends = [f"{format_figure(figure, changes[label])} at {label}" for label in dict.fromkeys((least, most))]
        tested = max(change.n for change in changes.values()) >= MIN_SEEDS
        p_values = {label: adjusted[f"{figure} {label}"] for label in changes}
        significant = _significant(figure, changes, p_values) if tested else {}
        better, worse = ([text for label, text in significant.items() if s * changes[label].mean > 0] for s in (1, -1))
        parts = [f"{word}: {'; '.join(texts)}" for word, texts in (("better", better), ("worse", worse)) if texts]
        nothing = "none significant" if tested else "too few seeds to test"
        result = "; ".join(parts) or f"{nothing}: {' to '.join(ends)}"
        if worse and len(worse) == len(changes):
            tone = "bad"
        elif worse or changes[most].mean < 0:
            tone = "warn"
        else:
            tone = "good" if better and figure == "accuracy_change" else "plain"
        how = " (paired over seeds, Holm)" if tested else ""
        sentences.append((tone, f"Against the start in {names[figure]}{how}, {result}."))
    return sentences


def _changes(summaries: Sequence[PointSummary], figure: str) -> dict[str, Estimate]:
    return {point.label: change for point in summaries if (change := point.means.get(figure)) is not None}


def against_baseline(summaries: Sequence[PointSummary], baseline: str, metric: str) -> list[Sentence]:
    """The points that differ from the baseline, paired over seeds, after Holm's correction."""
    name = NAMES[metric]
    if len(summaries) > 1 and not any(point.label == baseline and point.by_seed(metric) for point in summaries):
        return [("warn", f"The baseline {baseline} has no value for {name}, so there is no comparison.")]
    differences = {
        point.label: difference
        for point in summaries
        if (difference := point.differences.get(metric)) is not None and difference.n >= MIN_SEEDS
    }
    if not differences:
        return []
    significant = _significant(metric, differences)
    if not significant:
        none = f"none of {len(differences)} points differs"
        text = none if len(differences) > 1 else f"{next(iter(differences))} does not differ"
        return [("plain", f"Against {baseline}, {text} significantly in {name} (paired over seeds, Holm).")]
    return [("plain", f"Against {baseline} in {name} (paired over seeds, Holm): {'; '.join(significant.values())}.")]


def _significant(
    metric: str, differences: Mapping[str, Estimate], adjusted: Mapping[str, float | None] | None = None
) -> dict[str, str]:
    """The significant differences after Holm's correction, and the untested ones that are equal at every seed."""
    if adjusted is None:
        adjusted = holm({label: p_value_of(difference) for label, difference in differences.items()})
    significant = {}
    for label, difference in differences.items():
        p, text = adjusted[label], f"{label} {format_figure(metric, difference, difference=True)}"
        if p is not None and p < SIGNIFICANT:
            significant[label] = f"{text} (p {p:.2g})"
        elif difference.p is None and difference.n >= MIN_SEEDS:
            significant[label] = f"{text} at every seed (no variance, so no test)"
    return significant


def _axis_effect(summaries: Sequence[PointSummary], axis: Axis, metric: str) -> list[Sentence]:
    """The values of an axis that differ from its first one, paired over points that differ only in this axis."""
    others = [name for name in summaries[0].options if name != axis.name]
    by_value: dict[str, dict[tuple[str, ...], dict[int, float]]] = {}
    for point in summaries:
        value = point.options.get(axis.name, "")
        if value:
            by_value.setdefault(value, {})[tuple(point.options[name] for name in others)] = point.by_seed(metric)
    if len(by_value) < 2:
        return []
    first, *rest = by_value
    where = f"{axis.name}, averaged over the other axes and paired with {first}"
    differences: dict[str, Estimate] = {}
    left_out: list[str] = []
    for value in rest:
        difference, missing = _over_cells(by_value[first], by_value[value])
        if difference is not None and difference.n >= MIN_SEEDS:
            differences[value] = difference
        left_out += [" ".join((value, *cell)) for cell in missing]
    note = f" Omitted, because a result is missing: {_shortened(left_out)}." if left_out else ""
    if not differences:
        return [("warn", f"{where}: nothing to compare.{note}")] if left_out else []
    significant = "; ".join(_significant(metric, differences).values()) or "no significant difference"
    return [("plain", f"{where}: {significant} in {NAMES[metric]} (Holm).{note}")]


Cells = Mapping[tuple[str, ...], Mapping[int, float]]


def _over_cells(first: Cells, second: Cells) -> tuple[Estimate | None, list[tuple[str, ...]]]:
    """(paired difference over seeds of the means over the cells that both sides have, the cells that are missing)."""
    shared = [cell for cell in first if cell in second]
    cells = [cell for cell in shared if first[cell] and second[cell]]
    seeds = set.intersection(*(set(first[c]) & set(second[c]) for c in cells)) if cells else set()
    means = [{seed: fmean(side[c][seed] for c in cells) for seed in seeds} for side in (first, second)]
    return paired(*means), [cell for cell in shared if cell not in cells]


def correlation(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """Forgetting against KL on the new task over all runs: the claim of RL's Razor (2509.04259)."""
    rows = [row for point in summaries for row in point.rows if row.state in (DONE, STOPPED)]
    sentences = []
    for figure, name in (("kl_policy_ref", "KL(policy‖start)"), ("kl_ref_policy", "KL(start‖policy)")):
        pairs = forgetting_pairs(rows, figure)
        rank, linear = spearman(*_columns(pairs)), pearson(*_columns(pairs))
        if rank is not None and linear is not None:
            trend = "grows" if rank.value > 0 else "falls"
            relation = f"{trend} with {name}" if rank.excludes_zero else f"is not significantly correlated with {name}"
            text = f"Forgetting {relation} over {len(pairs)} runs"
            figures = f"Spearman {_format_correlation(rank)}, Pearson {_format_correlation(linear)}"
            sentences.append(("plain", f"{text}: {figures} (Fisher's intervals; runs of one seed share their start)."))
    return sentences


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _format_correlation(r: Correlation) -> str:
    if r.p is not None:
        return f"{r.value:.2f} (exact p {r.p:.2g})"
    ci = "" if r.low is None or r.high is None else f" [{r.low:.2f}, {r.high:.2f}]"
    return f"{r.value:.2f}{ci}"


def _frontier(summaries: Sequence[PointSummary]) -> list[Sentence]:
    known = {name: (kl.mean, reward.mean) for name, (kl, reward) in frontier_points(summaries).items()}
    if len(known) < 2:
        return []
    labels = pareto_frontier(known)
    listed = ", ".join(f"{name} ({known[name][1]:.3g} at {known[name][0]:.3g})" for name in labels)
    return [("plain", f"On the frontier of mean reward against KL (nats per token): {listed}.")]


NOT_RUN = JobOutcome(FAILED, "not run")


@dataclass(frozen=True)
class StudyReport:
    """The table and the verdict as text for a terminal, and the files that were written."""

    text: str
    files: tuple[str, ...]


def write_study(study: Study, path: Path, outcomes: Mapping[str, JobOutcome], command: str = "") -> StudyReport:
    """Read every run of the study and write its tables, plots and page."""
    path = path.resolve()
    rows = [read_result(job, outcomes.get(job.label, NOT_RUN), study.measure) for job in jobs(path, study)]
    summaries = summarise(rows, study.baseline)
    sentences = verdict(summaries, study.baseline, study.metric, study.axes)
    verdict_text = "".join(f"- {text}\n" for _, text in sentences)
    table = table_md(summaries, study.baseline)
    page = study_page(study.name, command, summaries, study.baseline, sentences)
    files = {
        "points.csv": points_csv(rows),
        "table.csv": table_csv(summaries),
        "table.md": f"{table}\n{verdict_text}",
        "report.html": page,
    }
    for name, content in files.items():
        write_atomic(path / name, content)
    try:
        pictures = write_pictures(summaries, path, study.name)
    except KeelError as error:
        pictures = [f"no pictures: {error}"]
    return StudyReport(f"{table}\n{verdict_text}", (*files, *pictures))


def study_page(
    title: str, command: str, summaries: Sequence[PointSummary], baseline: str, verdict: Sequence[Sentence]
) -> str:
    """The page as HTML."""
    drawn = [(panel, picture) for panel in study_panels(summaries) if (picture := svg(panel))]
    items = "".join(f"<li class='{tone}'>{escape(text)}</li>" for tone, text in verdict)
    numbered = short_names(summaries)[0] == "1"
    numbering = "<p class='muted'>Charts number the points as the table does.</p>" if numbered else ""
    skills, intervals = skill_columns(summaries), "<p class='muted'>Mean ± half of the 95 % t-interval.</p>"
    body = [
        f"<header><p class='muted'>Keel study</p><h1>{escape(title)}</h1>",
        f"<p><code>{escape(command)}</code></p></header>",
        f"<section class='verdict'><h2>Verdict</h2><ul class='words'>{items}</ul></section>",
        block("Points", _table(summaries, baseline, display_columns(summaries)) + intervals),
        block("Old skills", _table(summaries, baseline, skills) + intervals) if skills else "",
        block("Differences from the baseline", _differences(summaries, baseline)),
        block("Figures", numbering + curves(drawn)),
        block("Runs", _runs(summaries)),
    ]
    return document(title, "".join(body), chart_data([panel for panel, _ in drawn]))


def _table(summaries: Sequence[PointSummary], baseline: str, columns: Mapping[str, str]) -> str:
    rows = [
        [str(number), escape(point.label) + (" <small>baseline</small>" if point.label == baseline else "")]
        + [escape(format_figure(name, point.means.get(name))) for name in columns]
        + [escape(point.states)]
        for number, point in enumerate(summaries, start=1)
    ]
    return table(["", "point", *columns.values(), "runs"], rows)


def _differences(summaries: Sequence[PointSummary], baseline: str) -> str:
    shown = display_columns(summaries)
    # omit `before`, which training does not change, and `change`, whose differences equal those of `after`
    before_or_change = {side for name in shown if (sides := change_sides(name)) for side in (name, sides[0])}
    columns = {name: title for name, title in shown.items() if name not in before_or_change}
    rows = []
    for point in summaries:
        if point.label == baseline:
            continue
        cells = [point.differences.get(name) for name in columns]
        texts = [format_figure(n, e, difference=True) for n, e in zip(columns, cells, strict=True)]
        marked = [f"<b>{text}</b>" if e and e.excludes_zero else text for text, e in zip(texts, cells, strict=True)]
        rows.append([escape(point.label), *marked])
    note = "<p class='muted'>Paired over seeds; bold where the uncorrected 95 % interval excludes 0.</p>"
    return table(["point", *columns.values()], rows) + note if rows else ""


def _runs(summaries: Sequence[PointSummary]) -> str:
    rows = [
        [
            escape(point.label),
            str(row.seed),
            escape(row.state),
            escape(row.reason),
            "" if row.wall_s is None else f"{row.wall_s:.0f} s",
        ]
        for point in summaries
        for row in point.rows
    ]
    return table(["point", "seed", "state", "reason", "time"], rows)
