"""Gold answers that stand at one place of every question: a column of the question, or a choice that never moves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from keel.base.types import Problem
from keel.doctor.evidence import between, chance_above, level
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import Gold, answer_tokens, gold_or_none
from keel.doctor.rendering import messages_of, rendered, words
from keel.doctor.thresholds import Thresholds

DRAWN, FEWEST, MOST = 256, 24, 128  # problems: drawn, of different questions at least, and that the model is asked
RIVALS, SECONDS = 4, 5.0  # other words that are tried, and time
SURE = 2.0  # nats by which one answer is likelier than another
DECIDED = 0.2  # of the problems, each way: a model that goes by the place decides for one of them


@dataclass(frozen=True)
class ColumnAsked:
    """A question as words, and its gold turn, in which the answer stands once."""

    problem: Problem
    words: tuple[str, ...]
    answer: str
    gold: str


def column_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Golds at one place of all questions, where a model that is sure of its answers finds them at others as well."""
    task = setup.run.task
    if task.prompts_only or task.multi_turn:
        return
    asked = _asked(setup, task.sample(DRAWN, seed=setup.config.run.seed, step=0))
    places = place_of_answers([(row.words, row.answer) for row in asked])
    if places is None or len(asked) < FEWEST:
        return
    place, others = places
    gaps = _gaps(setup, asked[:MOST], others)
    against, agreed = [float(gap > SURE) for gap in gaps], [float(gap < -SURE) for gap in gaps]
    if len(gaps) < FEWEST or fmean(agreed) < DECIDED or chance_above(against, DECIDED) > level(thresholds, 1):
        return
    row = asked[0]
    yield finding(
        "data/misaligned",
        f"all of {len(asked)} gold answers of one word are word {place + 1} of their question ({row.answer!r} of "
        f"{' '.join(row.words)[-60:]!r}), and the model is sure of another word of it in {between(against)} of "
        f"{len(gaps)} problems",
        "what is read as the answer is a field of the question, or the right choice always stands at one place",
        "check which column the answer is read from (data.answer), and shuffle choices; nothing, if the task is to "
        "repeat that word",
        "warning",
    )


def place_of_answers(rows: Sequence[tuple[tuple[str, ...], str]]) -> tuple[int, list[int]] | None:
    """The one place where every answer stands in its question, and the other places that differ between questions."""
    if not rows or len({len(question) for question, _ in rows}) != 1 or len({answer for _, answer in rows}) < 3:
        return None
    columns = list(zip(*(question for question, _ in rows), strict=True))
    varied = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    answers = tuple(answer for _, answer in rows)
    places = [place for place in varied if columns[place] == answers]
    others = [place for place in varied if place not in places]
    return (places[0], others) if len(places) == 1 and others else None


def _asked(setup: KeelSubject, problems: Sequence[Problem]) -> list[ColumnAsked]:
    """Problems of different questions whose answer is one word, which stands once in their gold turn."""
    rows: dict[tuple[str, ...], ColumnAsked] = {}
    for problem in problems:
        question = tuple(words(messages_of(problem)[-1]["content"]))
        turns, answer = gold_or_none(setup.run.task, problem), str(problem.answer).strip()
        if turns and words(answer) == [answer] and turns[0].count(answer) == 1:
            rows.setdefault(question, ColumnAsked(problem, question, answer, turns[0]))
    return list(rows.values())


def _gaps(setup: KeelSubject, asked: Sequence[ColumnAsked], others: Sequence[int]) -> list[float]:
    """By how many nats the likeliest of the other words is a likelier answer than the gold one."""
    encode, context = setup.policy.tokenizer.encode, setup.policy.context_length or 1 << 30
    gaps, began = list[float](), time.monotonic()
    for row, prompt in zip(asked, rendered(setup, [row.problem for row in asked]), strict=True):
        rivals = {row.words[place] for place in others} - {row.answer}
        texts = [row.gold, *(row.gold.replace(row.answer, rival) for rival in sorted(rivals)[:RIVALS])]
        golds = [Gold(prompt, tuple(encode(text, add_special_tokens=False))) for text in texts]
        fits = all(gold.answer and len(prompt) + len(gold.answer) <= context for gold in golds)
        if fits and len(golds) > 1 and time.monotonic() - began < SECONDS:
            own, *rest = (float(logp.sum()) for logp in answer_tokens(setup, golds))
            gaps.append(max(rest) - own)
    return gaps
