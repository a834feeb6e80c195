"""Checks on a run's history: pure functions of what was recorded and the thresholds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from keel.base.thresholds import Thresholds, load_thresholds
from keel.lab.doctor.checks import course, episodes, evaluation, kl, optim, output, reward, sampler
from keel.lab.doctor.checks.base import Check, Unchecked
from keel.lab.doctor.diagnosis import Diagnosis, with_threshold_notes
from keel.lab.doctor.findings import Finding, ranked
from keel.lab.doctor.formula import formula_of
from keel.lab.doctor.history import History
from keel.lab.doctor.hypotheses import history_figures, judge_hypotheses

CHECKS: tuple[Check, ...] = (
    *reward.CHECKS,
    *output.CHECKS,
    *episodes.CHECKS,
    *kl.CHECKS,
    *sampler.CHECKS,
    *optim.CHECKS,
    *evaluation.CHECKS,
    *course.CHECKS,
)


def check_history(history: History, thresholds: Thresholds | None = None) -> Diagnosis:
    """All checks on one history: findings worst first, and what could not be decided with the reason."""
    limits = load_thresholds() if thresholds is None else thresholds
    findings: list[Finding] = []
    unchecked: list[str] = []
    for check in CHECKS:
        for result in check(history, limits):
            if isinstance(result, Unchecked):
                unchecked.append(f"{result.code}: {result.why}")
            else:
                findings.append(result)
    merged = merge_by_code(findings)
    diagnosis = Diagnosis(
        merged,
        hypotheses=judge_hypotheses(
            merged, history_figures(history), limits, unchecked, formula_of(history.config, history.source)
        ),
        unchecked=tuple(unchecked),
        notes=(*history.notes, *history.missing),
    )
    return with_threshold_notes(diagnosis, limits)


def merge_by_code(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings under one code become one: the gravest speaks, and the others' evidence is added to it."""
    by_code: dict[str, Finding] = {}
    for finding in ranked(findings):
        first = by_code.get(finding.code)
        by_code[finding.code] = (
            finding if first is None else replace(first, evidence=f"{first.evidence}; {finding.evidence}")
        )
    return tuple(by_code.values())


__all__ = ["CHECKS", "check_history"]
