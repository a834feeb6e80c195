"""What can be found: one row a code, worst first, each with what it means and how it is decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.base.errors import unknown
from keel.base.yaml_text import dump, load_package_yaml
from keel.doctor.judge import SEVERITIES, Severity

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """What to change: a text with a `{}` for every proposal, each of which is options to set together.

    Proposals are data, so that a test can follow them; any of them alone is worth trying.
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
    """Quoted where a shell would split it."""
    return f"'{override}'" if " " in override else override


def overrides(options: Options) -> tuple[str, ...]:
    """Options as one types them: `kl.beta=0.1` of Keel's, `beta=0.1` of a trainer that is configured in Python."""

    def typed(name: str, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:g}"
        return dump(value) if "." in name else repr(value)

    return tuple(f"{name}={typed(name, value)}" for name, value in options.items())


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the figures and steps that show it, the likely cause, the exact option to change.

    `options` are the advice's proposals as overrides, one tuple for each. The others are for the doctor itself: whether
    the cause is only a guess, how much of what was looked at it concerns, and which code explains it.
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
        """Plain data for others."""
        return {name: getattr(self, name) for name in ("code", "severity", "evidence", "cause", "advice", "options")}


@dataclass(frozen=True)
class Code:
    """What a code means, how it is decided, its usual severity, and its rank among equals.

    `rank` puts causes before their symptoms: of two errors the one with the lower rank is named first. `skill` says
    that it depends on how much the policy has learned.
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
    """A finding under a known code, as severe as its row says unless `severity` does."""
    if code not in CODES:
        raise unknown("finding code", code, CODES)
    options = tuple(overrides(proposal) for proposal in advice.proposals) if isinstance(advice, Advice) else ()
    return Finding(code, severity or CODES[code].severity, evidence, cause, str(advice), options, guess, share)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first: by severity, then causes before their symptoms; equal ones keep their order."""
    return sorted(
        findings,
        key=lambda finding: (
            SEVERITIES.index(finding.severity),
            CODES[finding.code].rank if finding.code in CODES else len(CODES),
        ),
    )
