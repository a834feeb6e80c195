"""What travels from the engine to the judge, against what it should be."""

from __future__ import annotations

from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.beyond import beyond_findings
from keel.doctor.probes.continued import continued_findings
from keel.doctor.probes.texts import text_findings
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome


def probe_travel(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The text of every turn against its tokens, and what was written against the prompt that it is scored after."""
    continued = [*continued_findings(setup, thresholds)] or beyond_findings(setup, thresholds)
    return Outcome("travel", (*text_findings(setup.whole), *continued))
