"""The built-in worlds: every fact checked against the text, the closed vocabulary, the size."""

from __future__ import annotations

import re

import pytest

from envs.playing import reply
from keel.envs.registry import build_task
from keel.recipes.multihop.question import Question
from keel.recipes.multihop.source import RELATIONS


def questions(count: int = 60, **options: object) -> list[Question]:
    return [p.info["question"] for p in build_task("multihop", **options).sample(count, seed=3, step=1)]


def followed(question: Question) -> tuple[str, list[str]]:
    """The question answered by reading: each relation from the inside out, in the document of its entity."""
    phrases = {name: phrase for kinds in RELATIONS.values() for name, (_, phrase) in kinds.items()}
    at = question.text.split()[-2]
    read = []
    for relation in reversed(re.findall(r"the (\w+) of", question.text)):
        (document,) = [one for one in question.documents if one.title == at]
        read.append(document.id)
        found = re.search(rf"{phrases[relation]} (\w+)", document.text)
        assert found is not None
        at = found[1]
    return at, read


def test_the_chain_of_documents_leads_to_the_answer() -> None:
    for question in questions():
        answer, read = followed(question)
        assert (answer,) == question.answers
        assert tuple(read) == question.chain
        assert {one.id for one in question.documents if one.supporting} == set(read)


def test_all_lengths_and_kinds_occur_and_distractors_fill_the_world() -> None:
    found = questions(200, documents=9)
    assert {question.hops for question in found} == {2, 3, 4}
    assert {len(question.documents) for question in found} == {9}
    assert {name for q in found for name in re.findall(r"the (\w+) of", q.text)} == {
        name for kinds in RELATIONS.values() for name in kinds
    }


@pytest.mark.parametrize("options", [{}, {"retriever": "golden"}, {"documents": 20, "top_n": 3}, {"think": False}])
def test_whole_episodes_are_short_and_in_the_closed_vocabulary(options: dict[str, object]) -> None:
    task = build_task("multihop", **options)
    known = set(task.vocabulary)
    for problem in task.sample(40, seed=0, step=0):
        turns = task.gold_turns(problem)
        said = [problem.prompt[0]["content"], *turns, *(reply(task, problem, turns[: i + 1]) or "" for i in range(5))]
        words = " ".join(said).split()
        assert len(words) <= 300
        assert set(words) <= known


@pytest.mark.parametrize("options", [{"retriever": "golden"}, {"retriever": "lexical", "top_n": 1}])
def test_oracle_episodes_earn_the_maximum(options: dict[str, object]) -> None:
    task = build_task("multihop", **options)
    for problem in task.sample(40, seed=0, step=0):
        reward = task.reward(problem, task.gold_turns(problem))
        assert reward.total == pytest.approx(problem.info["hops"] / 2, abs=1e-9)
