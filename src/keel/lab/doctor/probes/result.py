"""What a probe is and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding
from keel.lab.doctor.setup import ProbeSetup


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


Probe = Callable[[ProbeSetup, Thresholds], ProbeResult]
