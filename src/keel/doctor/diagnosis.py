"""The doctor's result: a diagnosis of a log or of a configuration."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from keel.doctor.findings import Finding, finding, ranked
from keel.doctor.thresholds import Thresholds

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal


@dataclass(frozen=True)
class SuspectVerdict:
    """The verdict on one suspected cause of a failed run."""

    name: str  # the suspect's name in suspects.yaml
    title: str
    verdict: str  # confirmed | ruled out | not testable here
    figure: str  # the figure that the verdict is based on
    priority: str  # high | medium | low
    interacts: str
    action: str
    options: tuple[tuple[str, ...], ...] = ()  # options that the action proposes, as in a finding


@dataclass(frozen=True)
class Diagnosis:
    """Findings worst first, what was tested, what could not be tested, and thresholds that were made less sensitive."""

    findings: tuple[Finding, ...] = ()
    hypotheses: tuple[SuspectVerdict, ...] = ()
    unchecked: tuple[str, ...] = ()  # "code: why it could not be evaluated"
    notes: tuple[str, ...] = ()  # what was read and done, and displays such as the coloured masks
    raised_thresholds: tuple[str, ...] = ()  # "threshold x raised from a to b"
    sound: tuple[str, ...] = ()  # names of tests without an error or a warning
    cut: str | None = None  # how much of the warm start the policy got, if it was cut for time

    @property
    def healthy(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0 if healthy, otherwise 1."""
        return 0 if self.healthy else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data as printed by `--json`. findings.json contains its findings."""
        return {
            "findings": [finding.as_dict() for finding in ranked(self.findings)],
            "hypotheses": [asdict(hypothesis) for hypothesis in self.hypotheses],
            "unchecked": list(self.unchecked),
            "notes": [_ESCAPES.sub("", line) for line in self.notes],
            "raised_thresholds": list(self.raised_thresholds),
        }


def with_threshold_notes(diagnosis: Diagnosis, thresholds: Thresholds) -> Diagnosis:
    """The diagnosis with ranked findings and one note for each threshold that was made less sensitive."""
    notes = [
        finding(
            "doctor/threshold-raised",
            sentence,
            "a threshold was overridden",
            "judge the run by the shipped value too: leave the override out",
        )
        for sentence in thresholds.raised
    ]
    return replace(
        diagnosis, findings=tuple(ranked([*diagnosis.findings, *notes])), raised_thresholds=thresholds.raised
    )
