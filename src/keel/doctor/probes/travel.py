"""What travels from the engine to the judge, against what it should be."""

from __future__ import annotations

from keel.doctor.probes.beyond import beyond_findings
from keel.doctor.probes.continued import continued_findings
from keel.doctor.probes.result import ProbeResult
from keel.doctor.probes.texts import text_findings
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds


def probe_travel(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """The text of every turn against its tokens, and what was written against the prompt that it is scored after."""
    continued = [*continued_findings(setup, thresholds)] or beyond_findings(setup, thresholds)
    return ProbeResult("travel", (*text_findings(setup.whole), *continued))
