"""What a probe is and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from keel.base.errors import first_line
from keel.doctor.findings import Finding, finding
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.trainer.memory import is_out_of_memory


@dataclass(frozen=True)
class ProbeResult:
    """One probe's findings, the figures that it measured, lines to show, and what it could not test (and why).

    `undecided` are tests that were made, on a sample that is too small for either answer.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether something was tried, with a result, and nothing worse than a note was found."""
        tried = not self.undecided and (bool(self.figures) or not self.unchecked)
        return tried and all(finding.severity == "note" for finding in self.findings)


def failed_probe(name: str, error: Exception) -> ProbeResult:
    """What is left of a probe that ended in an error: a finding, or a line where memory was short."""
    if is_out_of_memory(error):
        return ProbeResult(name, unchecked=(no_memory_for(name, error),))
    reason = _reason(error)
    failure = finding(
        "doctor/probe-failed",
        f"the probe of {name} ended in {reason}",
        "a part that it tried raised an error; training would most likely meet the same one",
        "mend that part, and run the doctor again: what depends on this probe is not known",
    )
    return ProbeResult(name, (failure,), unchecked=(f"{name}: {reason}",))


def no_memory_for(what: str, error: Exception) -> str:
    """The line of what is not known because memory was short."""
    return f"{what}: no memory left for it beside the run ({_reason(error)})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


Probe = Callable[[ProbeSetup, Thresholds], ProbeResult]
