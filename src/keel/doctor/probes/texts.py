"""The judged text of each turn must be exactly its trained tokens, decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keel.doctor.evidence import SAME
from keel.doctor.findings import Finding, Severity, finding
from keel.doctor.keel_subject import KeelSubject
from keel.rollout.request import Turn
from keel.rollout.stops import StopStrings


@dataclass(frozen=True)
class OtherText:
    """A turn whose text differs from its tokens. `convention`: only in special tokens or outer spaces."""

    turn: Turn
    expected: str
    convention: bool


def text_findings(setup: KeelSubject) -> Iterator[Finding]:
    """The text of every turn must equal its tokens as Keel's own engines decode them.

    If only special tokens or outer spaces differ, the rewards of both texts decide.
    """
    others = _others(setup)
    if not others:
        return
    changed = [other for other in others if not other.convention]
    first = (changed or others)[0]
    if changed:
        severity: Severity = "error"
        shown = f"{len(changed)} of {len(setup.turns)} turns have another text than their tokens"
        cause = "the engine returns text of other tokens: changed, cut, of another completion, or decoded otherwise"
    else:
        severity, judged = _worth(setup, others)
        shown = f"{len(others)} of {len(setup.turns)} turns differ from their tokens by special tokens or outer spaces"
        shown += judged
        cause = "the engine decodes in another way than Keel: special tokens are left out, and nothing is stripped"
    yield finding(
        "output/text",
        f"{shown}: {first.turn.completion.text[:60]!r} is judged where the tokens say {first.expected[:60]!r}",
        cause,
        "set Completion.text to tokenizer.decode(Completion.tokens, skip_special_tokens=True), cut at a stop string "
        "where one ended it",
        severity=severity,
    )


def _others(setup: KeelSubject) -> list[OtherText]:
    stops = StopStrings(setup.policy.tokenizer)
    others = []
    for turn in setup.turns:
        text, tokens = turn.completion.text, list(turn.completion.tokens)
        expected = stops.decode(tokens)
        cut = stops.cut(tokens, setup.sampling.stop) if turn.completion.stop_reason == "stop" else None
        expected = expected if cut is None else cut
        if text != expected:
            whole = stops.decode(tokens, special=True)
            alike = {expected.strip(), stops.decode(tokens).strip(), whole.strip()}
            others.append(OtherText(turn, expected, text.strip() in alike))
    return others


def _worth(setup: KeelSubject, others: Sequence[OtherText]) -> tuple[Severity, str]:
    """The effect of the difference: an error if the right texts earn another reward, otherwise a note."""
    if setup.config.reward.aggregate != "sum" or setup.config.reward.shuffle is not None:
        return "warning", ""
    expected = {id(other.turn): other.expected for other in others}
    problems = {group.problem.key: group.problem for group in setup.groups}
    episodes: dict[tuple[str, int], list[Turn]] = {}
    for turn in setup.turns:
        episodes.setdefault((turn.request.key, turn.sample), []).append(turn)
    differing = 0
    for (key, _), turns in episodes.items():
        given = [turn.completion.text for turn in turns]
        right = [expected.get(id(turn), turn.completion.text) for turn in turns]
        if key in problems and given != right:
            judged = [setup.built.judge.judge(problems[key], [texts]) for texts in (given, right)]
            earned = [rewards[0].total for rewards in judged if rewards]
            differing += len(earned) == 2 and abs(earned[0] - earned[1]) > SAME
    setup.built.judge.drain()
    if not differing:
        return "note", ", and earn the same"
    return "error", f", and {differing} of {len(episodes)} completions earn another reward for it"
