"""The table of finding codes, findings, and the diagnosis that lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from keel.base.errors import unknown
from keel.base.yaml_text import dump, load_package_yaml
from keel.doctor.judge import SEVERITIES, Severity
from keel.doctor.thresholds import Thresholds

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """A text with one `{}` per proposal. A proposal is a set of options to change together.

    Proposals are data, so that tests can apply them. Each proposal is an independent alternative.
    """

    text: str
    proposals: tuple[Options, ...] = ()

    def __str__(self) -> str:
        if not self.proposals:
            return self.text
        return self.text.format(*(" ".join(map(_typed, overrides(options))) for options in self.proposals))


def propose(text: str, *proposals: Options) -> Advice:
    """Short for `Advice(text, proposals)`."""
    return Advice(text, proposals)


def _typed(override: str) -> str:
    """The override, quoted if a shell would split it."""
    return f"'{override}'" if " " in override else override


def overrides(options: Options) -> tuple[str, ...]:
    """Options as a user types them: `kl.beta=0.1` for Keel, `beta=0.1` for a trainer that is configured in Python."""

    def typed(name: str, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:g}"
        return dump(value) if "." in name else repr(value)

    return tuple(f"{name}={typed(name, value)}" for name, value in options.items())


@dataclass(frozen=True)
class Finding:
    """One problem: the evidence with figures and steps, the likely cause, and the advice.

    `options` are the advice's proposals as overrides, one tuple per proposal. The remaining fields are internal:
    whether the cause is a guess, the affected share of the data, and the code that explains the finding.
    """

    code: str
    severity: Severity
    evidence: str
    cause: str
    advice: str
    options: tuple[tuple[str, ...], ...] = ()
    guess: bool = False
    share: float | None = None
    explained_by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {name: getattr(self, name) for name in ("code", "severity", "evidence", "cause", "advice", "options")}


@dataclass(frozen=True)
class Code:
    """A code: its meaning, how it is decided, its default severity, and its rank.

    Causes have a lower `rank` than their symptoms. Among equal severities, lower ranks are listed first. `skill`:
    whether the finding depends on how much the policy has learned.
    """

    name: str
    meaning: str
    decided: str
    severity: Severity
    rank: int
    skill: bool = False


def _codes() -> dict[str, Code]:
    rows = load_package_yaml("keel.doctor", "findings.yaml")
    return {name: Code(name, rank=rank, **row) for rank, (name, row) in enumerate(rows.items())}


CODES = _codes()


def finding(
    code: str,
    evidence: str,
    cause: str,
    advice: str | Advice,
    severity: Severity | None = None,
    *,
    guess: bool = False,
    share: float | None = None,
) -> Finding:
    """A finding under a known code. Its severity is that of the code unless `severity` is given."""
    if code not in CODES:
        raise unknown("finding code", code, CODES)
    options = tuple(overrides(proposal) for proposal in advice.proposals) if isinstance(advice, Advice) else ()
    return Finding(code, severity or CODES[code].severity, evidence, cause, str(advice), options, guess, share)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Findings worst first: by severity, then by rank. Equal ones keep their order."""
    return sorted(
        findings,
        key=lambda finding: (
            SEVERITIES.index(finding.severity),
            CODES[finding.code].rank if finding.code in CODES else len(CODES),
        ),
    )


# ------------------------------------------------------------------------ the diagnosis

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal


@dataclass(frozen=True)
class SuspectVerdict:
    """The verdict on one suspected cause of a failed run."""

    name: str  # the suspect's name in suspects.yaml
    title: str
    verdict: str  # confirmed | ruled out | not testable here
    figure: str  # the figure that the verdict is based on
    priority: str  # high | medium | low
    interacts: str
    action: str
    options: tuple[tuple[str, ...], ...] = ()  # options that the action proposes, as in a finding


@dataclass(frozen=True)
class Diagnosis:
    """Findings worst first, hypotheses, tests that could not run, and thresholds that were made less sensitive."""

    findings: tuple[Finding, ...] = ()
    hypotheses: tuple[SuspectVerdict, ...] = ()
    unchecked: tuple[str, ...] = ()  # "code: why it could not be evaluated"
    notes: tuple[str, ...] = ()  # what was read and done, and displays such as the coloured masks
    raised_thresholds: tuple[str, ...] = ()  # "threshold x raised from a to b"
    sound: tuple[str, ...] = ()  # names of tests without an error or a warning
    cut: str | None = None  # the completed part of a warm start that was stopped for time

    @property
    def healthy(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0 if healthy, otherwise 1."""
        return 0 if self.healthy else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data as printed by `--json`. findings.json contains its findings."""
        return {
            "findings": [finding.as_dict() for finding in ranked(self.findings)],
            "hypotheses": [asdict(hypothesis) for hypothesis in self.hypotheses],
            "unchecked": list(self.unchecked),
            "notes": [_ESCAPES.sub("", line) for line in self.notes],
            "raised_thresholds": list(self.raised_thresholds),
        }


def with_threshold_notes(diagnosis: Diagnosis, thresholds: Thresholds) -> Diagnosis:
    """The diagnosis with ranked findings and one note for each threshold that was made less sensitive."""
    notes = [
        finding(
            "doctor/threshold-raised",
            sentence,
            "a threshold was overridden",
            "check the run with the default threshold, too: remove the override",
        )
        for sentence in thresholds.raised
    ]
    return replace(
        diagnosis, findings=tuple(ranked([*diagnosis.findings, *notes])), raised_thresholds=thresholds.raised
    )
