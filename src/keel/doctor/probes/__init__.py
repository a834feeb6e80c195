"""The experiments of the preflight, in the order in which they run: what breaks others comes first."""

from __future__ import annotations

from keel.doctor.probes.advantage import probe_advantage
from keel.doctor.probes.kl_term import probe_kl_term
from keel.doctor.probes.outcome import Outcome, Probe
from keel.doctor.probes.reference import probe_reference
from keel.doctor.probes.truncation import probe_truncation
from keel.doctor.probes.update import probe_update

PROBES: list[tuple[str, Probe]] = [
    ("reference", probe_reference),
    ("advantage", probe_advantage),
    ("kl_term", probe_kl_term),
    ("update", probe_update),
    ("truncation", probe_truncation),
]

__all__ = ["PROBES", "Outcome", "Probe"]
