"""Which texts an engine continues beyond the run's first prompts: in later turns, and after any other kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from keel.base.types import Group
from keel.doctor.findings import Finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.continued import (
    Continued,
    added,
    continued,
    doubt_of,
    gap_of,
    other_prompt,
    other_prompt_finding,
    rounded,
)
from keel.doctor.strange import STRANGE_STEPS, strange_turns
from keel.doctor.thresholds import Thresholds

_LATER = 32  # turns that are looked at


def beyond_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Nothing where the texts that were given explain what was written after them; else the ones that do."""
    named = _of_later_turns(setup, thresholds) or _of_strange_texts(setup, thresholds)
    if named is not None:
        setup.shared["other prompt"] = True
        yield named


def _of_later_turns(setup: KeelSubject, thresholds: Thresholds) -> Finding | None:
    """Turns after the first: each has a text of its own before it, with what the environment said.

    What no prompt explains is named where reports are off by far more than any rounding, and the first turns are right.
    """
    problems = {group.problem.key: group.problem for group in setup.groups}
    later = [turn for turn in setup.turns if turn.request.start > 0 and turn.request.key in problems][:_LATER]
    groups = [Group(problems[t.request.key], t.request.tokens, (t.completion,)) for t in later]
    named = _named(setup, groups, "turns after the first", thresholds)
    if named is not None or setup.shared.get("first turns off"):
        return named
    turns = continued(setup, groups, [(turn.completion, i) for i, turn in enumerate(later)])
    gap = gap_of(setup, turns.draws(setup, turns.prompts())) if turns.turns else 0.0
    if gap <= thresholds["foreign_gap"]:
        return None
    return other_prompt_finding(
        f"in turns after the first the engine's log-probabilities are off by {gap:.3g} nats on average, while those of "
        "the first are right; none of the prompts that were tried is it"
    )


def _of_strange_texts(setup: KeelSubject, thresholds: Thresholds) -> Finding | None:
    """Random texts, where the engine is right after the run's own prompts: what is wrong there is wrong after any."""
    if setup.shared.get("first turns off"):
        return None
    return _named(setup, strange_turns(setup, STRANGE_STEPS[0]), "random texts", thresholds)


def _named(setup: KeelSubject, groups: Sequence[Group], where: str, thresholds: Thresholds) -> Finding | None:
    """The prompts that explain what was written where the given ones do not."""
    pairs = [(completion, i) for i, group in enumerate(groups) for completion in group.completions]
    turns: Continued = continued(setup, groups, pairs)
    if not turns.turns:
        return None
    scored = turns.draws(setup, turns.prompts())
    doubt = doubt_of(setup, scored, thresholds)
    if not doubt or (doubt == "small" and rounded(setup, turns, scored, thresholds)):
        return None
    finding = other_prompt(setup, turns, scored, thresholds, brief=False) or added(setup, turns, scored, thresholds)
    return None if finding is None else replace(finding, evidence=f"in {where}: {finding.evidence}")
