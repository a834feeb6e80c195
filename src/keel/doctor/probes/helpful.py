"""Whether what a tool returns helps: gold answers after an episode's own result, and after those of others.

A result that belongs to its call makes the answer likelier than results of other questions do. That says something of
the tool only where the call is about its own question, and the model believes what it is told in the result's place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from statistics import median

from keel.base.types import Completion, Group, Problem
from keel.doctor.evidence import between, chance_above, level, single_ones
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import Gold, answer_tokens, gold_or_none
from keel.doctor.probes.leaks import answer_of
from keel.doctor.probes.replayed import Replayed, Wrong
from keel.doctor.probes.replies import is_useless
from keel.doctor.rendering import words
from keel.doctor.thresholds import Thresholds

OTHERS = 5  # results of other episodes that stand in the place of an episode's own
FEWEST = 16  # episodes
BELIEVED = 1.0  # nats by which the gold answer is likelier where it stands in the result's place itself
SHORT = 3  # words of a result that is an answer
IN_VAIN = 0.8  # of the answers that were copied from results are not the gold ones
SECONDS = 6.0

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """An episode that a result was told before its last turn."""

    problem: Problem
    before: Tokens  # what was said up to there, with the prompt
    result: Tokens
    call: frozenset[str]  # the words of it
    gold: Tokens  # the last turn that would be right
    result_words: frozenset[str]
    answer_words: frozenset[str]  # those after the result
    gold_words: frozenset[str]  # those of the gold answer
    earned: float | None  # None where it was not judged

    @property
    def question(self) -> frozenset[str]:
        return frozenset(words(str(self.problem.prompt)))

    def about(self, other: Told) -> int:
        """How many words of the call stand in the question of an episode."""
        return len(self.call & other.question)


def unhelpful(setup: KeelSubject, rows: Sequence[Replayed], thresholds: Thresholds) -> Wrong | None:
    """Own results after which gold answers are less likely than after most of other episodes'."""
    if setup.run.task.prompts_only or not rows or not all(row.is_result for row in rows):
        return None
    limit, episodes = thresholds["results_against"], _told(setup, setup.groups)
    if len(episodes) < len(setup.groups) / 2:
        return None
    episodes = _told(setup, single_ones(setup))
    if vain := _copied_in_vain(episodes, setup.shared.get("gold size", 1.0), thresholds):
        return vain
    shares, began = list[float](), time.monotonic()
    for told in episodes:
        others = [other for other in episodes if other.result != told.result and other.gold != told.gold]
        if len(others) >= OTHERS and time.monotonic() - began < SECONDS:
            shares += _against(setup, told, Random(told.problem.key).sample(others, OTHERS))
    if len(shares) < FEWEST or chance_above(shares, limit) > level(thresholds, 1):
        return None
    return Wrong(
        f"in {between(shares)} of {len(shares)} episodes the gold answer is less likely after the episode's own result "
        "than after most results of other episodes, although its call is about its own question and the model believes "
        "what it reads there",
        "the tool returns what another call asked for (another row, argument, unit, tool), something that says nothing "
        "to the model, or the contrary; or its calls are answered by a search that does not find",
        "warning",
        "; make some calls by hand, with their questions and gold answers beside what they return",
    )


def _copied_in_vain(episodes: Sequence[Told], most: float, thresholds: Thresholds) -> Wrong | None:
    """Results that were asked for with all that a question is about, and said as the answer: hardly one is right.

    What earns half of the `most` that a gold answer does is right in another form.
    """
    if not episodes:
        return None
    frame = frozenset.intersection(*(told.result_words for told in episodes))
    everywhere = frozenset.intersection(*(told.question for told in episodes))
    copied = [
        told
        for told in episodes
        if told.earned is not None
        and told.question - everywhere
        and told.question - everywhere <= told.call
        and 0 < len(told.result_words - frame) <= SHORT
        and told.result_words - frame <= told.answer_words
    ]
    wrong = [float(not told.gold_words <= told.result_words and (told.earned or 0.0) < most / 2) for told in copied]
    if len(copied) < FEWEST or chance_above(wrong, IN_VAIN) > level(thresholds, 1):
        return None
    first = next(told for told, is_wrong in zip(copied, wrong, strict=True) if is_wrong)
    return Wrong(
        f"in {between(wrong)} of {len(copied)} episodes whose call holds all that their question is about, and whose "
        f"answer is what it returned, that is not the gold answer: {' '.join(sorted(first.result_words - frame))!r} "
        f"for {' '.join(sorted(first.gold_words))!r}",
        "the tool returns something else than what is asked for (another unit, a count from zero, another column), the "
        "gold answers are in another form than its results, or the question asks for more than this call",
        "warning",
        "; make some calls by hand, with their questions and gold answers beside what they return",
    )


def _told(setup: KeelSubject, groups: Sequence[Group]) -> list[Told]:
    """Of each problem the first episode with one result, after which it went on and ended by itself."""
    tokenizer, found = setup.policy.tokenizer, dict[str, Told]()

    def read(tokens: Sequence[int]) -> frozenset[str]:
        return frozenset(words(str(tokenizer.decode(list(tokens), skip_special_tokens=True))))

    for group, number in [(own, i) for own in groups for i in range(len(own.completions))]:
        completion = group.completions[number]
        place, gold = _only_result(completion), gold_or_none(setup.run.task, group.problem)
        if group.problem.key in found or place is None or completion.stop_reason != "eos" or not gold:
            continue
        start, end = place
        before, result = completion.tokens[:start], completion.tokens[start:end]
        call = read(before)
        answer = tuple(tokenizer.encode(gold[-1], add_special_tokens=False))
        if answer and not is_useless(str(tokenizer.decode(list(result), skip_special_tokens=True))):
            found[group.problem.key] = Told(
                group.problem,
                (*group.prompt_tokens, *before),
                tuple(result),
                call,
                answer,
                read(result),
                read(completion.tokens[end:]),
                frozenset(words(answer_of(setup, group.problem))),
                group.rewards[number].total if group.rewards else None,
            )
    return list(found.values())


def _only_result(completion: Completion) -> tuple[int, int] | None:
    """Where all that the environment said begins and ends; None where it spoke more than once, or last."""
    said = [place for place, action in enumerate(completion.action) if not action]
    if not said or len(said) < said[-1] + 1 - said[0] or said[-1] + 1 == len(completion.action):
        return None
    return said[0], said[-1] + 1


def _against(setup: KeelSubject, told: Told, others: Sequence[Told]) -> list[float]:
    """1 where the gold answer is less likely than after most of the others' results, 0 where not; [] of no use."""
    if told.about(told) <= median(told.about(other) for other in others):
        return []
    results = [told.result, _with_answer(setup, told, others), *(other.result for other in others)]
    rows = [Gold((*told.before, *result), told.gold) for result in results]
    if max(len(row.prompt) + len(row.answer) for row in rows) > (setup.policy.context_length or 1 << 30):
        return []
    own, right, *wrong = (float(logp.sum()) for logp in answer_tokens(setup, rows))
    return [float(own < median(wrong))] if right > median(wrong) + BELIEVED else []


def _with_answer(setup: KeelSubject, told: Told, others: Sequence[Told]) -> Tokens:
    """The answer in the place of a result: between what all results begin with and what they end with."""
    tokenizer = setup.policy.tokenizer
    results = [told.result, *(other.result for other in others)]
    head = _alike(results)
    tail = _alike([result[len(head) :][::-1] for result in results])[::-1]
    return (*head, *tokenizer.encode(answer_of(setup, told.problem), add_special_tokens=False), *tail)


def _alike(rows: Sequence[Tokens]) -> Tokens:
    """What all of them begin with."""
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))
