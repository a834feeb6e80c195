"""Which findings of a diagnosis count: causes before their symptoms (causes.yaml), and none that mean nothing here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.base.yaml_text import load_package_yaml
from keel.doctor.findings import CODES, SEVERITIES, Finding, ranked
from keel.doctor.runs import option_of

_AS_BROAD = 0.9  # of the share that a symptom concerns
_MERE_EFFECTS = {"data/misaligned": "advantage/amplified"}  # of a cause, however mildly that is said


@dataclass(frozen=True)
class Cause:
    """One row: the codes that a cause explains, by when it does, and the sentence that says why."""

    why: str
    explains: tuple[str, ...] = ()
    in_logs: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def at_once(self, log: bool) -> tuple[str, ...]:
        """What it explains from the first step on."""
        return (*self.explains, *(self.in_logs if log else ()))


def _causes() -> dict[str, Cause]:
    rows = load_package_yaml("keel.doctor", "causes.yaml")
    return {
        code: Cause(row.pop("why"), **{key: tuple(codes) for key, codes in row.items()}) for code, row in rows.items()
    }


CAUSES: Mapping[str, Cause] = _causes()


def symptoms(
    code: str,
    among: Collection[str],
    *,
    log: bool,
    from_start: Collection[str] = (),
    holds: Callable[[str, str], bool] = lambda cause, symptom: True,
) -> set[str]:
    """Which codes of `among` a cause explains, directly or through others of them, by edges that hold.

    `log` says that they are of a run, and `from_start` which of them its first step has shown already: no update has
    caused those.
    """
    reached: set[str] = set()
    queue = [code]
    while queue:
        cause = queue.pop()
        row = CAUSES.get(cause)
        if row is None:
            continue
        later = (symptom for symptom in row.later if log and symptom not in from_start)
        fresh = {s for s in (*row.at_once(log), *later) if s in among and holds(cause, s)} - reached
        reached |= fresh
        queue += fresh
    return reached


def explain(findings: Iterable[Finding], *, log: bool, from_start: Collection[str] = ()) -> tuple[Finding, ...]:
    """Findings worst first, those whose cause was found too as notes "explained by CAUSE: …".

    A cause that is a note or a guess explains nothing, nor what is broader than itself, and one that is milder than
    usual nothing that is graver but a mere effect; one that explains is as grave as the gravest of the others.
    """
    listed = ranked(findings)
    serious = {finding.code: finding for finding in reversed(listed) if finding.severity != "note"}
    causes = [code for code, finding in serious.items() if not finding.guess]

    def holds(cause: str, symptom: str) -> bool:
        return not serious[cause].guess and _accounts_for(serious[cause], serious[symptom])

    explained = {code: symptoms(code, serious, log=log, from_start=from_start, holds=holds) for code in causes}
    roots = [code for code in causes if not any(code in explained[other] for other in causes)]
    root_of = {symptom: root for root in roots for symptom in explained[root]}  # the last one is the worst
    return tuple(ranked(_with_cause(finding, root_of, listed) for finding in listed))


def _accounts_for(cause: Finding, symptom: Finding) -> bool:
    """Whether a cause is broad and grave enough, where that is known."""
    if cause.share is not None and symptom.share is not None and cause.share < _AS_BROAD * symptom.share:
        return False
    if _MERE_EFFECTS.get(cause.code) == symptom.code:
        return True
    usual = CODES[cause.code].severity if cause.code in CODES else cause.severity
    cause_rank, symptom_rank, usual_rank = map(SEVERITIES.index, (cause.severity, symptom.severity, usual))
    return cause_rank <= usual_rank or cause_rank <= symptom_rank


def _with_cause(finding: Finding, root_of: Mapping[str, str], listed: Sequence[Finding]) -> Finding:
    """A symptom as the note that it is; a cause as grave as its gravest symptom."""
    if finding.severity == "note":
        return finding
    root = root_of.get(finding.code)
    if root is not None:
        return replace(
            finding,
            severity="note",
            explained_by=root,
            evidence=f"explained by {root}: {CAUSES[root].why}; {finding.evidence}",
            advice=f"mend {root} first; if this stays, {finding.advice}",
        )
    caused = [o for o in listed if root_of.get(o.code) == finding.code and _MERE_EFFECTS.get(finding.code) != o.code]
    severities = [finding.severity, *(other.severity for other in caused)]
    return replace(finding, severity=min(severities, key=SEVERITIES.index))


def covered() -> frozenset[str]:
    """Every code that the graph knows, as a cause or as a symptom."""
    rows = CAUSES.values()
    return frozenset(CAUSES).union(*((*r.explains, *r.in_logs, *r.later) for r in rows))


_OF_THE_POLICY_TERM = (
    "kl/too-strong",
    "kl/not-learning",
    "reward/",
    "advantage/",
    "loss/no-gradient",
    "loss/sign",
    "loss/scale",
    "parse/",
)
_OF_THE_START = ("kl/at-start", "reference/wrong", "kl/over-budget", "kl/unneeded")
_START_FIGURES = ("kl/at_start", "reference/kl_at_start")


def in_scope(findings: Iterable[Finding], config: Mapping[str, Any]) -> list[Finding]:
    """The findings without those that this configuration, as plain data, makes meaningless."""
    prefixes: tuple[str, ...] = ()
    if option_of(config, "loss.policy_weight") == 0:
        prefixes += _OF_THE_POLICY_TERM
    if option_of(config, "reference.model") is not None:
        prefixes += _OF_THE_START
    return [finding for finding in findings if not finding.code.startswith(prefixes)]


def figures_in_scope(figures: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """The figures that decide hypotheses, without the KL at the start where that is the distance to a teacher."""
    left_out = _START_FIGURES if option_of(config, "reference.model") is not None else ()
    return {name: value for name, value in figures.items() if name not in left_out}


__all__ = ["CAUSES", "Cause", "covered", "explain", "figures_in_scope", "in_scope", "symptoms"]
