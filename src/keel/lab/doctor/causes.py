"""Causes before their symptoms: what causes.yaml says explains what, applied to the findings of one diagnosis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import yaml

from keel.lab.doctor.findings import SEVERITIES, Finding, ranked

_UNSURE = re.compile(r"\b(could|may|might) be\b")


@dataclass(frozen=True)
class Cause:
    """One row: the codes that a cause explains, by when it does, and the sentence that says why."""

    why: str
    explains: tuple[str, ...] = ()
    in_preflight: tuple[str, ...] = ()
    in_logs: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def at_once(self, log: bool) -> tuple[str, ...]:
        """What it explains from the first step on."""
        return (*self.explains, *(self.in_logs if log else self.in_preflight))


def _causes() -> dict[str, Cause]:
    rows = yaml.safe_load(files("keel.lab.doctor").joinpath("causes.yaml").read_text(encoding="utf-8"))
    return {
        code: Cause(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for code, row in rows.items()
    }


CAUSES: Mapping[str, Cause] = _causes()


def symptoms(code: str, among: Collection[str], *, log: bool, from_start: Collection[str] = ()) -> set[str]:
    """Which codes of `among` a cause explains, directly or through others of them.

    `log` says that they are of a run, and `from_start` which of them its first step has shown already: no update has
    caused those.
    """
    reached: set[str] = set()
    queue = [code]
    while queue:
        row = CAUSES.get(queue.pop())
        if row is None:
            continue
        later = (symptom for symptom in row.later if log and symptom not in from_start)
        fresh = {symptom for symptom in (*row.at_once(log), *later) if symptom in among} - reached
        reached |= fresh
        queue += fresh
    return reached


def explain(findings: Iterable[Finding], *, log: bool, from_start: Collection[str] = ()) -> tuple[Finding, ...]:
    """Findings worst first, those whose cause was found too as notes "explained by CAUSE: …".

    A cause that is a note, or that says what it only could be, explains nothing; one that does is as grave as the
    gravest that it explains.
    """
    listed = ranked(findings)
    serious = {finding.code: finding for finding in reversed(listed) if finding.severity != "note"}
    causes = [code for code, finding in serious.items() if not _UNSURE.search(finding.cause)]
    explained = {code: symptoms(code, serious, log=log, from_start=from_start) for code in causes}
    roots = [code for code in causes if not any(code in explained[other] for other in causes)]
    root_of = {symptom: root for root in roots for symptom in explained[root]}  # the last one is the worst
    return tuple(ranked(_with_cause(finding, root_of, listed) for finding in listed))


def _with_cause(finding: Finding, root_of: Mapping[str, str], listed: Sequence[Finding]) -> Finding:
    """A symptom as the note that it is; a cause as grave as its gravest symptom."""
    if finding.severity == "note":
        return finding
    root = root_of.get(finding.code)
    if root is not None:
        return replace(
            finding,
            severity="note",
            evidence=f"explained by {root}: {CAUSES[root].why}; {finding.evidence}",
            advice=f"mend {root} first; if this stays, {finding.advice}",
        )
    severities = [finding.severity, *(other.severity for other in listed if root_of.get(other.code) == finding.code)]
    return replace(finding, severity=min(severities, key=SEVERITIES.index))


def covered() -> frozenset[str]:
    """Every code that the graph knows, as a cause or as a symptom."""
    rows = CAUSES.values()
    return frozenset(CAUSES).union(*((*r.explains, *r.in_preflight, *r.in_logs, *r.later) for r in rows))


__all__ = ["CAUSES", "Cause", "covered", "explain", "symptoms"]
