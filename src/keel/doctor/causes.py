"""Turn symptoms of a found cause into notes (causes.yaml), and remove findings that are out of scope."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.base.yaml_text import load_package_yaml
from keel.doctor.findings import CODES, SEVERITIES, Finding, ranked
from keel.doctor.runs import option_of

_AS_BROAD = 0.9  # a cause explains a symptom if its affected share is at least this multiple of the symptom's
# cause: a symptom that it explains even if the cause is less severe, and whose severity it does not take
_MERE_EFFECTS = {"data/misaligned": "advantage/amplified"}


@dataclass(frozen=True)
class Cause:
    """A row of causes.yaml: the codes that a cause explains, by condition, and the reason as a sentence."""

    why: str
    explains: tuple[str, ...] = ()
    in_logs: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def at_once(self, log: bool) -> tuple[str, ...]:
        """The codes that the cause explains from the first step on."""
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
    """The codes of `among` that a cause explains, directly or through other symptoms, along edges that hold.

    `log`: whether the findings are from a run's log. `from_start`: codes that the log's first step already shows, which
    no update can have caused.
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
    """Findings worst first. Findings with a found cause become notes "explained by CAUSE: …".

    A note or a guess explains nothing. A cause does not explain a symptom that affects a larger share. A cause below
    its usual severity explains a more severe symptom only if `_MERE_EFFECTS` lists it. A cause gets the highest
    severity of its symptoms.
    """
    listed = ranked(findings)
    serious = {finding.code: finding for finding in reversed(listed) if finding.severity != "note"}
    causes = [code for code, finding in serious.items() if not finding.guess]

    def holds(cause: str, symptom: str) -> bool:
        return not serious[cause].guess and _accounts_for(serious[cause], serious[symptom])

    explained = {code: symptoms(code, serious, log=log, from_start=from_start, holds=holds) for code in causes}
    roots = [code for code in causes if not any(code in explained[other] for other in causes)]
    # later entries are more severe and take precedence
    root_of = {symptom: root for root in roots for symptom in explained[root]}
    return tuple(ranked(_with_cause(finding, root_of, listed) for finding in listed))


def _accounts_for(cause: Finding, symptom: Finding) -> bool:
    """Whether a cause affects a large enough share and is severe enough. Unknown shares are not compared."""
    if cause.share is not None and symptom.share is not None and cause.share < _AS_BROAD * symptom.share:
        return False
    if _MERE_EFFECTS.get(cause.code) == symptom.code:
        return True
    usual = CODES[cause.code].severity if cause.code in CODES else cause.severity
    cause_rank, symptom_rank, usual_rank = map(SEVERITIES.index, (cause.severity, symptom.severity, usual))
    return cause_rank <= usual_rank or cause_rank <= symptom_rank


def _with_cause(finding: Finding, root_of: Mapping[str, str], listed: Sequence[Finding]) -> Finding:
    """A symptom becomes a note. A cause gets the severity of its most severe symptom."""
    if finding.severity == "note":
        return finding
    root = root_of.get(finding.code)
    if root is not None:
        return replace(
            finding,
            severity="note",
            explained_by=root,
            evidence=f"explained by {root}: {CAUSES[root].why}; {finding.evidence}",
            advice=f"fix {root} first; if this stays, {finding.advice}",
        )
    caused = [o for o in listed if root_of.get(o.code) == finding.code and _MERE_EFFECTS.get(finding.code) != o.code]
    severities = [finding.severity, *(other.severity for other in caused)]
    return replace(finding, severity=min(severities, key=SEVERITIES.index))


def covered() -> frozenset[str]:
    """Every code in the graph, as a cause or as a symptom."""
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
)
_OF_THE_START = ("kl/at-start", "reference/wrong", "kl/over-budget", "kl/unneeded")
_START_FIGURES = ("kl/at_start", "reference/kl_at_start")


def in_scope(findings: Iterable[Finding], config: Mapping[str, Any]) -> list[Finding]:
    """The findings that apply to this configuration, given as plain data."""
    prefixes: tuple[str, ...] = ()
    if option_of(config, "loss.policy_weight") == 0:
        prefixes += _OF_THE_POLICY_TERM
    if option_of(config, "reference.model") is not None:
        prefixes += _OF_THE_START
    return [finding for finding in findings if not finding.code.startswith(prefixes)]


def figures_in_scope(figures: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """The figures that decide hypotheses; with a teacher, without the initial KL, the distance to the teacher."""
    left_out = _START_FIGURES if option_of(config, "reference.model") is not None else ()
    return {name: value for name, value in figures.items() if name not in left_out}


__all__ = ["CAUSES", "Cause", "covered", "explain", "figures_in_scope", "in_scope", "symptoms"]
