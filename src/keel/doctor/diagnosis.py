"""What the doctor hands back, whatever it looked at."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from keel.doctor.findings import Finding, finding, ranked
from keel.doctor.thresholds import Thresholds

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal


@dataclass(frozen=True)
class SuspectVerdict:
    """One suspected cause of a failed run and what became of it."""

    name: str  # as suspects.yaml has it
    title: str
    verdict: str  # confirmed | ruled out | not testable here
    figure: str  # the figure that decides
    priority: str  # high | medium | low
    interacts: str
    action: str
    options: tuple[tuple[str, ...], ...] = ()  # what the action proposes to set, as a finding's


@dataclass(frozen=True)
class Diagnosis:
    """Findings worst first, what was tested and what could not be, and every alarm that was made less sensitive."""

    findings: tuple[Finding, ...] = ()
    hypotheses: tuple[SuspectVerdict, ...] = ()
    unchecked: tuple[str, ...] = ()  # "code: why it could not be evaluated"
    notes: tuple[str, ...] = ()  # what was read and done, and pictures such as the coloured masks
    raised_thresholds: tuple[str, ...] = ()  # "threshold x raised from a to b"
    sound: tuple[str, ...] = ()  # what was tried, by name, and gave neither error nor warning
    cut: str | None = None  # how much of its warm start the policy has had, where there was no time for all of it

    @property
    def healthy(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0 healthy, 1 findings."""
        return 0 if self.healthy else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it; findings.json holds its findings."""
        return {
            "findings": [finding.as_dict() for finding in ranked(self.findings)],
            "hypotheses": [asdict(hypothesis) for hypothesis in self.hypotheses],
            "unchecked": list(self.unchecked),
            "notes": [_ESCAPES.sub("", line) for line in self.notes],
            "raised_thresholds": list(self.raised_thresholds),
        }


def with_threshold_notes(diagnosis: Diagnosis, thresholds: Thresholds) -> Diagnosis:
    """Ranked, and with a note for every alarm that was made less sensitive, so that no report can hide it."""
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
