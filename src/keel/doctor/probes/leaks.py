"""Answers inside prompts: in a slot that all problems share, under words that call them so or told by a system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.rendering import messages_of
from keel.doctor.thresholds import Thresholds

_CUES = re.compile(r"answer|solution|result|gold|label|target|correct|expected|truth|hint|####|boxed|key\b", re.I)
# What a text to copy or to extract from is called as well: only right before an answer, and no proof.
_VAGUE_CUES = re.compile(r"\b(?:final|response|output)\W*(?:(?:is|was)\b\W*)?$", re.I)
_SLOT = 24  # characters before an answer in which it may be called one
_TAIL = 6  # of them, as many as all problems must share
_INSTRUCTING = ("system", "developer")
_HOLE = "\0"


def leak_findings(
    setup: KeelSubject, prompts: Sequence[tuple[Problem, str]], thresholds: Thresholds, of: str = "prompts"
) -> Iterator[Finding]:
    """An answer that stands among a problem's operands or choices is no leak: it comes after no fixed words.

    A slot is the text right before an answer. Other problems' answers must not stand in it as often (one-sided exact
    binomial test), and its words must call what follows an answer.
    """
    pairs = _read_pairs(setup, prompts)
    if not pairs:
        return
    if sure := [*_in_slots(pairs, _CUES, thresholds, of)]:
        yield from sure
        return
    for leak in _in_slots(pairs, _VAGUE_CUES, thresholds, of):
        yield replace(leak, severity="warning", advice=f"{leak.advice}; nothing, if the task is to find or to copy it")


def system_leaks(setup: KeelSubject, problems: Sequence[Problem], thresholds: Thresholds) -> Iterator[Finding]:
    """System messages that say the same to all problems but for each one's own answer, in whatever words.

    A passage to read differs in more than the answer, and other problems' answers leave no such text behind (one-sided
    exact binomial test). What a user says may be what is asked for.
    """
    if setup.run.task.prompts_only:
        return
    told = [
        ("\n".join(m["content"] for m in messages_of(problem) if m["role"] in _INSTRUCTING).strip(), problem)
        for problem in problems
    ]
    rows = [(text, answers) for text, problem in told if text and (answers := _answers(setup, problem))]
    holes = Counter(hole for text, answers in rows for hole in _holed(answers, text))
    if not holes:
        return
    hole, own = holes.most_common(1)[0]
    if len({text for text, answers in rows if hole in _holed(answers, text)}) < 2:
        return  # one text for all, which names the answers to choose from
    others = [hole in _holed(other, text) for text, answers in rows for _, other in rows if not other & answers]
    rate = (sum(others) + 1) / (len(others) + 2)
    chance = _at_least(own, len(problems), rate)
    if own < thresholds["leak_share"] * len(problems) or chance > thresholds["travel_chance"]:
        return
    bare = not hole.strip(f"{_HOLE} .") or _CUES.search(hole)
    yield finding(
        "prompt/answer-leak",
        f"{own} of {len(problems)} system messages are {hole.replace(_HOLE, '…')[:80]!r} with their problem's own "
        f"answer in it (of others' answers {100 * rate:.0f} %; chance {chance:.1g})",
        "the system message is made of the column that holds the answer, so that copying it earns the reward",
        "give the column of system messages in data.columns, or leave it out"
        + ("" if bare else "; nothing, if the task is to say what it says"),
        severity=None if bare else "warning",
    )


def _answers(setup: KeelSubject, problem: Problem) -> set[str]:
    """What is compared, and the gold text."""
    return {answer_of(setup, problem), (gold_or_none(setup.run.task, problem) or [""])[-1].strip()} - {""}


def _holed(answers: Collection[str], text: str) -> set[str]:
    """A text with a hole where one of the answers stands as a word of its own."""
    places = (rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\w)" for answer in answers)
    return {holed for place in places if (holed := re.sub(place, _HOLE, text)) != text}


def _in_slots(
    pairs: Sequence[tuple[str, str]], cues: re.Pattern[str], thresholds: Thresholds, of: str
) -> Iterator[Finding]:
    """Answers and texts: whether enough answers stand in one slot that a cue calls so."""
    slots = Counter(
        slot for answer, text in pairs for slot in {s[-_TAIL:] for s in _before(answer, text) if cues.search(s)}
    )
    if not slots:
        return
    slot, own = slots.most_common(1)[0]
    rate = _of_others(pairs, lambda other, i: slot in {s[-_TAIL:] for s in _before(other, pairs[i][1])})
    chance = _at_least(own, len(pairs), rate)
    if own < thresholds["leak_share"] * len(pairs) or chance > thresholds["travel_chance"]:
        return
    shown = next(text for answer, text in pairs if slot in {s[-_TAIL:] for s in _before(answer, text)})
    yield finding(
        "prompt/answer-leak",
        f"{own} of {len(pairs)} {of} hold their own answer right after {slot!r} (of others' answers "
        f"{100 * rate:.0f} %; chance {chance:.1g}), such as {shown[-80:]!r}",
        "the prompt is made of a row that holds the answer, so that copying earns the reward",
        "leave the answer out of the prompt (task.sample, or the columns that the prompt is made of)",
    )


def _read_pairs(setup: KeelSubject, prompts: Sequence[tuple[Problem, str]]) -> list[tuple[str, str]]:
    """Answers and the texts of their prompts; none where there is one answer for all, or no answer."""
    if setup.run.task.prompts_only:
        return []
    pairs = [(answer, text) for problem, text in prompts if (answer := answer_of(setup, problem))]
    return pairs if len({answer for answer, _ in pairs}) > 1 else []


def _of_others(pairs: Sequence[tuple[str, str]], holds: Callable[[str, int], bool]) -> float:
    """How often something holds of another problem's answer and the text of this number, not the text's own."""
    others = [holds(other, i) for i, (answer, _) in enumerate(pairs) for other, _ in pairs if other != answer]
    return (sum(others) + 1) / (len(others) + 2)


def answer_of(setup: KeelSubject, problem: Problem) -> str:
    """What is compared, where the problem says it; else the gold text; empty where there is none."""
    if isinstance(problem.answer, str | int | float) and str(problem.answer).strip():
        return str(problem.answer).strip()
    return (gold_or_none(setup.run.task, problem) or [""])[-1].strip()


def _before(answer: str, text: str) -> list[str]:
    """What stands right before each place where an answer stands as a word of its own."""
    places = re.finditer(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\w)", text)
    return [text[max(0, place.start() - _SLOT) : place.start()] for place in places]


def _at_least(count: int, total: int, rate: float) -> float:
    """The chance of `count` or more of `total` at this rate."""
    from scipy.special import bdtrc

    return float(bdtrc(count - 1, total, rate)) if count else 1.0
