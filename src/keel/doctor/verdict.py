"""The result of a measure: found, sound, undecided or unchecked, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from keel.base.errors import first_line
from keel.doctor.findings import Finding, finding
from keel.trainer.memory import is_out_of_memory


@dataclass(frozen=True)
class Verdict:
    """One decision: the codes that it is about, and the measured figures."""

    state: Literal["found", "sound", "undecided", "unchecked"]
    codes: tuple[str, ...]
    reason: str
    finding: Finding | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def found(cls, finding: Finding, **figures: float) -> Verdict:
        return cls("found", (finding.code,), finding.evidence, finding, figures)

    @classmethod
    def sound(cls, reason: str, **figures: float) -> Verdict:
        return cls("sound", (), reason, None, figures)

    @classmethod
    def undecided(cls, code: str, reason: str, **figures: float) -> Verdict:
        return cls("undecided", (code,), reason, None, figures)

    @classmethod
    def unchecked(cls, codes: Iterable[str], reason: str) -> Verdict:
        return cls("unchecked", tuple(codes), reason)

    @property
    def line(self) -> str:
        """`code, code: why`, the format of unchecked lines."""
        return f"{', '.join(self.codes)}: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """The findings of a measure, its figures, lines to print, and what could not be tested with the reason.

    `undecided` are tests whose sample was too small for a decision.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, verdicts: Iterable[Verdict], lines: tuple[str, ...] = ()) -> Outcome:
        """Combine the verdicts of one measure."""
        given = tuple(verdicts)
        figures = {key: value for verdict in given for key, value in verdict.figures.items()}
        unchecked, undecided = (
            tuple(verdict.line for verdict in given if verdict.state == state) for state in ("unchecked", "undecided")
        )
        findings = tuple(verdict.finding for verdict in given if verdict.finding is not None)
        return cls(name, findings, figures, lines, unchecked, undecided)

    @property
    def sound(self) -> bool:
        """Whether something was tested and nothing worse than a note was found."""
        tried = not self.undecided and (bool(self.figures) or not self.unchecked)
        return tried and all(finding.severity == "note" for finding in self.findings)


def failed_measure(name: str, error: Exception) -> Outcome:
    """The outcome of a measure that raised: a finding, or an unchecked line if memory was short."""
    if is_out_of_memory(error):
        return Outcome(name, unchecked=(no_memory_for(name, error),))
    reason = _reason(error)
    failure = finding(
        "doctor/probe-failed",
        f"the probe of {name} ended in {reason}",
        "a part that it tried raised an error; training would most likely meet the same one",
        "fix that part, and run the doctor again: what depends on this probe is not known",
    )
    return Outcome(name, (failure,), unchecked=(f"{name}: {reason}",))


def no_memory_for(what: str, error: Exception) -> str:
    """The unchecked line for a lack of memory."""
    return f"{what}: no memory left for it beside the run ({_reason(error)})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
