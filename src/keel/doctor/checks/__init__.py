"""Checks on a run's history: pure functions of the history and the thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from keel.doctor.causes import explain, figures_in_scope, in_scope
from keel.doctor.checks.base import CHECKS, Log, Unchecked
from keel.doctor.findings import Diagnosis, Finding, ranked, with_threshold_notes
from keel.doctor.formula import formula_of
from keel.doctor.history import History
from keel.doctor.suspects import history_figures, judge_suspects
from keel.doctor.thresholds import Thresholds, load_thresholds

for _area in iter_modules(__path__):
    import_module(f"{__name__}.{_area.name}")  # importing an area registers its checks


def check_history(history: History, thresholds: Thresholds | None = None) -> Diagnosis:
    """Run all checks on one history: findings worst first, then undecided codes with the reason."""
    limits = load_thresholds() if thresholds is None else thresholds
    log = Log.of(history, limits)
    by_check: list[tuple[str, list[Finding | Unchecked | None]]] = [
        (area, [*check(log)] or [None] * len(codes[:1])) for check, (area, codes) in CHECKS.items()
    ]
    results = [result for _, row in by_check for result in row]
    unchecked = [f"{result.code}: {result.why}" for result in results if isinstance(result, Unchecked)]
    found = in_scope((result for result in results if isinstance(result, Finding)), history.config)
    merged = merge_by_code(found)
    first = _first_step(log)
    from_start = {result.code for check in CHECKS for result in check(first) if isinstance(result, Finding)}
    diagnosis = Diagnosis(
        explain(merged, log=True, from_start=from_start),
        hypotheses=judge_suspects(
            merged,
            figures_in_scope(history_figures(history), history.config),
            limits,
            unchecked,
            formula_of(history.config, history.source),
        ),
        unchecked=tuple(unchecked),
        notes=(*history.notes, *history.missing),
        sound=_sound([row for row in by_check if _concerned(row[0], log)]),
    )
    return with_threshold_notes(diagnosis, limits)


def _sound(by_check: Sequence[tuple[str, Sequence[Finding | Unchecked | None]]]) -> tuple[str, ...]:
    """Areas without findings in which at least half of the codes were decided, with the fraction if not all were.

    A check that could not run counts once for each of its codes; a check without results counts once.
    """
    areas: dict[str, list[Finding | Unchecked | None]] = {}
    for area, row in by_check:
        areas.setdefault(area, []).extend(row)
    names = []
    for area, results in areas.items():
        decided, total = results.count(None), len(results)
        if 2 * decided >= total and not any(isinstance(result, Finding) for result in results):
            names.append(area if decided == total else f"{area} ({decided} of {total})")
    return tuple(names)


def _concerned(area: str, log: Log) -> bool:
    """Whether the area applies to the run: distillation needs a teacher; episodes need tools, answers or turns."""
    if area == "distillation":
        return log.has_teacher
    return area != "episodes" or any(name.startswith(("answer/", "tool/", "turn/")) for name in log.series)


def _first_step(log: Log) -> Log:
    """The part of the log before the first update."""
    series = {name: series.head(1) for name, series in log.series.items()}
    return replace(log, series=series, events=(), evaluations=(), rollouts=())


def merge_by_code(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings with one code: keep the most severe and add the evidence of the others."""
    by_code: dict[str, Finding] = {}
    for finding in ranked(findings):
        first = by_code.get(finding.code)
        by_code[finding.code] = (
            finding if first is None else replace(first, evidence=f"{first.evidence}; {finding.evidence}")
        )
    return tuple(by_code.values())


__all__ = ["CHECKS", "check_history"]
