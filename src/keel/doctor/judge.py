"""Assess a run's metrics: KL limit, accuracy changes, state, worst finding. Used by the doctor and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.doctor.runs import Record, RunRecord, interval, number, option_of
from keel.doctor.thresholds import Thresholds

Interval = tuple[float, float]


@dataclass(frozen=True)
class KLLimit:
    """The largest accepted KL(policy‖reference) in nats per token, and the option that sets it."""

    value: float
    set_by: str


def kl_limit(config: Mapping[str, Any], thresholds: Thresholds) -> KLLimit:
    """The run's per-token KL budget, or else the threshold kl_over_budget."""
    budget = number(option_of(config, "kl.budget.max"))
    if budget is not None and option_of(config, "kl.budget.unit") != "per_sequence":
        return KLLimit(budget, "kl.budget.max of the configuration")
    return KLLimit(thresholds["kl_over_budget"], "the threshold kl_over_budget")


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy of a task at its first and last evaluation, with 95 % intervals if known."""

    task: str
    before: float | None
    after: float | None
    ci_before: Interval | None
    ci_after: Interval | None
    steps: tuple[Any, Any] = (None, None)

    @property
    def overlap(self) -> bool | None:
        """Whether the intervals overlap, or None if one is missing."""
        if self.ci_before is None or self.ci_after is None:
            return None
        return self.ci_before[0] <= self.ci_after[1] and self.ci_after[0] <= self.ci_before[1]

    @property
    def fell(self) -> bool:
        """Whether the last interval is entirely below the first."""
        return self.ci_before is not None and self.ci_after is not None and self.ci_after[1] < self.ci_before[0]

    def change(self, thresholds: Thresholds) -> str:
        """One of dropped, improved, held, not measured.

        A drop must exceed `retention_drop` times the first accuracy. Overlapping intervals count as held.
        """
        if self.before is None or self.after is None:
            return "not measured"
        if self.before - self.after > thresholds["retention_drop"] * self.before and self.overlap is not True:
            return "dropped"
        sure = self.after - self.before > UNSURE if self.overlap is None else not self.overlap
        return "improved" if sure and self.after > self.before else "held"


UNSURE = 0.05  # without intervals, a smaller gain may be chance


def accuracies(evaluations: Iterable[Mapping[str, Any]], *, retention: bool) -> dict[str, Accuracy]:
    """Accuracy by task, of trained or of retention tasks; `after` is None if there is only one evaluation."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for line in evaluations:
        if (line.get("split") == "retention") == retention:
            grouped.setdefault(str(line.get("task", "task")), []).append(line)
    return {task: _accuracy(task, lines) for task, lines in grouped.items()}


def _accuracy(task: str, lines: list[Mapping[str, Any]]) -> Accuracy:
    first, last = lines[0], lines[-1] if len(lines) > 1 else {}
    return Accuracy(
        task,
        number(first.get("pass@1")),
        number(last.get("pass@1")),
        interval(first.get("ci95")),
        interval(last.get("ci95")),
        (first.get("step"), last.get("step")),
    )


def state(run: RunRecord) -> tuple[str, str]:
    """(kind, text), with a kind of completed, stopped, aborted, running or interrupted."""
    done = f"{run.steps} of {run.max_steps} steps" if run.max_steps else f"{run.steps} steps"
    kinds = [str(event.get("kind", "")) for event in run.events]
    status = str((run.summary or {}).get("status", ""))
    if "abort" in status or (kinds and any("abort" in kind for kind in kinds[-3:])):
        return "aborted", f"aborted after {done}"
    if run.summary is not None:
        if (run.steps < run.max_steps) if run.max_steps else guard_stop(run) is not None:
            return "stopped", f"stopped after {done}"
        return "completed", f"completed, {done}"
    if run.running:
        return "running", f"still running, {done}"
    return "interrupted", f"interrupted: {done}, no summary, and no process is running it"


Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


def worst_first(findings: Iterable[Record]) -> list[Record]:
    """Findings by severity, those of one severity in the order given."""
    order: dict[str, int] = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return sorted(findings, key=lambda finding: order.get(str(finding.get("severity")), len(order)))


def worst_finding(findings: Iterable[Record] | None) -> Record | None:
    """The worst error or warning, or None."""
    serious = [finding for finding in findings or () if finding.get("severity") in ("error", "warning")]
    return next(iter(worst_first(serious)), None)


def finding_name(finding: Record) -> str:
    """`error loss/no-gradient`."""
    return f"{finding.get('severity')} {finding.get('code', '?')}"


def finding_sentence(finding: Record) -> str:
    """Such as `error loss/no-gradient: the gradient norm is 0.`, with its evidence in one line."""
    evidence = " ".join(str(finding.get("evidence") or "").split()).rstrip(".")
    return f"{finding_name(finding)}{': ' if evidence else ''}{evidence}."


def describe_state(run: RunRecord) -> str:
    """The worst error or warning, if any, and the state of the run."""
    worst = worst_finding(run.findings)
    return state(run)[1] if worst is None else f"{finding_name(worst)}; {state(run)[1]}"


def guard_stop(run: RunRecord) -> str | None:
    """The reason why a guard stopped the run, from its last events, or None."""
    ending = [event for event in run.events if event.get("kind") in ("stop", "resume")]
    if not ending or ending[-1].get("kind") == "resume" or (run.max_steps and run.steps >= run.max_steps):
        return None
    at = number(ending[-1].get("step"))
    if at is not None and at < run.steps:
        return None  # the run went on
    return " ".join(str(ending[-1].get("message", "")).split())
