"""The experiments of the preflight, in the order in which they run: what breaks others comes first."""

from __future__ import annotations

from keel.doctor.probes.outcome import Outcome, Probe

PROBES: list[tuple[str, Probe]] = []

__all__ = ["PROBES", "Outcome", "Probe"]
