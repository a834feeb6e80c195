"""The reference of findings: what a code means, how it is decided, what it explains, and the thresholds."""

from __future__ import annotations

import re

from keel.doctor.causes import CAUSES
from keel.doctor.findings import CODES, Code
from keel.doctor.thresholds import shipped_thresholds
from pages.tables import anchored, prose, table

HEAD = """# Findings

What `keel doctor` can name, made from the tables that it goes by; how it works is in [What is wrong, and how that is
decided](../doctor.md). Worst first: errors before warnings before notes, and a cause before what it causes. The
severity is the usual one; a check may find a milder case. A finding that another one explains is still listed, as a
note.

"""
THRESHOLDS = """## Thresholds

Where each alarm lies. Another value goes into a configuration (`doctor.thresholds`) or behind `--threshold
NAME=VALUE`; one that makes an alarm less sensitive is itself a finding.

"""


def findings_page() -> str:
    codes = "\n\n".join(map(_code, CODES.values()))
    rows = ((anchored(t.name), f"{t.alarm} {t.value:g}", prose(t.unit), prose(f"{t.reason} ({t.source})"))
            for t in shipped_thresholds().values())  # fmt: skip
    return f"{HEAD}{codes}\n\n{THRESHOLDS}{table(('threshold', 'alarm', 'unit', 'reason'), rows)}\n"


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
