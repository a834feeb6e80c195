"""The reference of findings: codes, thresholds, experiments and hypotheses."""

from __future__ import annotations

import re

from keel.doctor.causes import CAUSES
from keel.doctor.findings import CODES, Code
from keel.doctor.preflight import MEASURES
from keel.doctor.suspects import SUSPECTS, Suspect
from keel.doctor.thresholds import shipped_thresholds
from pages.tables import anchored, prose, table

HEAD = """# Findings

What `keel doctor` can find ([guide](../doctor.md)). Errors come before warnings and notes, and a cause comes before
its symptoms. The listed severity is the usual one; a mild case may be reported with a lower one.

"""
THRESHOLDS = """## Thresholds

Change a threshold with `doctor.thresholds` in the configuration or with `--threshold NAME=VALUE`. A less sensitive
alarm is itself reported as a finding.

"""
EXPERIMENTS = """## Experiments

What the preflight of a configuration runs, in this order.

"""
HYPOTHESES = """## Hypotheses

A finding of the third column confirms a hypothesis. A measured figure on the safe side rules it out.

"""


def findings_page() -> str:
    codes = "\n\n".join(map(_code, CODES.values()))
    rows = ((anchored(t.name), f"{t.alarm} {t.value:g}", prose(t.unit), prose(f"{t.reason} ({t.source})"))
            for t in shipped_thresholds().values())  # fmt: skip
    thresholds = table(("threshold", "alarm", "unit", "reason"), rows)
    experiments = table(
        ("experiment", "what it does"),
        ((measure.name, prose(measure.about)) for measure in MEASURES),
    )
    hypotheses = table(
        ("hypothesis", "priority", "confirmed by", "ruled out by", "interacts with"),
        ((f"{s.name} {s.title}", s.priority, _codes(s.codes), _ruled_out_by(s), s.interacts) for s in SUSPECTS),
    )
    sections = (codes, THRESHOLDS + thresholds, EXPERIMENTS + experiments, HYPOTHESES + hypotheses)
    return HEAD + "\n\n".join(sections) + "\n"


def _ruled_out_by(suspect: Suspect) -> str:
    """Alternatives, each a list of figures that must all be on the safe side."""
    ways = [
        " and ".join(f"`{name}` {side} {_limit(limit)}" for name, side, limit in way.figures)
        for way in suspect.ruled_out_by
    ]
    return "; or ".join(["a formula whose gradient is ∇KL(policy‖ref)"] * suspect.by_formula + ways)


def _limit(limit: str | float) -> str:
    return f"[`{limit}`](#{limit})" if isinstance(limit, str) else f"{limit:g}"


def _code(code: Code) -> str:
    explains = [c for c, cause in CAUSES.items() if code.name in (*cause.explains, *cause.in_logs, *cause.later)]
    cause = CAUSES.get(code.name)
    lines = [
        f"## {code.name} {{ #{code.name} }}",
        f"**{code.severity}** · {prose(code.meaning)}",
        f"*How it is decided:* {_linked(prose(code.decided))}",
    ]
    if explains:
        lines.append(f"*May be explained by:* {_codes(explains)}.")
    if cause is not None:
        explained = _codes((*cause.explains, *cause.in_logs, *cause.later))
        lines.append(f"*Explains:* {explained}: {prose(cause.why)}.")
    return "\n\n".join(lines)


def _codes(codes: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"[`{code}`](#{code})" for code in dict.fromkeys(codes))


def _linked(text: str) -> str:
    """Names of thresholds lead to their rows."""
    known = shipped_thresholds()
    return re.sub(r"`(\w+)`", lambda m: f"[`{m[1]}`](#{m[1]})" if m[1] in known else m[0], text)
