"""Demonstrations are what a policy could do: no query holds a name that the episode has not read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.playing import reply
from keel.base.types import Problem
from keel.envs.registry import build_task
from keel.envs.validity import check
from keel.recipes.multihop.score import normalise
from keel.recipes.multihop.source import RELATIONS, draw_question

from .rows import row, written

WORLDS = [{}, {"top_n": 1, "documents": 20}, {"retriever": "golden", "top_n": 1}, {"top_n": 3, "noise_rate": 0.5}]


def terms(text: str) -> set[str]:
    return set(normalise(text).split())


def is_name(word: str) -> bool:
    return word != word.lower() or any(letter.isdigit() for letter in word)


def query_of(turn: str) -> str:
    return turn.removeprefix("<retrieve>").removesuffix("</retrieve>").strip()


def unread_names(task: Any, problem: Problem, turns: Sequence[str]) -> list[str]:
    """The words of the queries that some document writes as a name and that nothing before the query has shown.

    A capital or a digit makes a name inside a query too; its first word may be capitalised as a sentence is.
    """
    question = problem.info["question"]
    written_as_names = {
        term for one in question.documents for word in str(one).split() if is_name(word) for term in terms(word)
    }
    unread = []
    for number, turn in enumerate(turns[:-1]):
        seen = terms(question.text).union(*(terms(reply(task, problem, turns[:n])) for n in range(1, number + 1)))
        for position, word in enumerate(query_of(turn).split()):
            named = terms(word) & written_as_names or (position and is_name(word))
            unread += [word] if named and not terms(word) <= seen else []
    return unread


def cited(turn: str) -> list[str]:
    return turn.partition("<cite>")[2].partition("</cite>")[0].split()


def world_row(number: int) -> dict[str, Any]:
    """A world as a row, with sub-questions as people write them: by relation, in lower case, with names of their own.

    Titles are replaced by numbers that no text has, or by what is only in their own paragraph.
    """
    rng = random.Random(number)
    world = draw_question(rng, (2, 3, 4), 12)
    relations = [name for kinds in RELATIONS.values() for name in kinds]
    asked = [relation for relation in reversed(world.text.split()) if relation in relations]
    titles = {
        one.id: rng.choice([one.title, f"Article {one.id}", f"{one.title} of Norland"]) for one in world.documents
    }
    subjects = [next(one.title for one in world.documents if one.id == id) for id in world.chain]
    steps = []
    for hop, (id, relation) in enumerate(zip(world.chain, asked, strict=True)):
        subject = subjects[0] if not hop else f"#{hop}"
        secret = rng.choice([titles[id], "Zuzu", "in 1912", relation])
        question = rng.choice(
            [f"{subject} >> {relation}", f"who is the {relation} of {subject.lower()} {secret}", f"Which {secret}?"]
        )
        answer = [*subjects[1:], world.answers[0]][hop]
        steps.append({"question": question, "answer": answer, "paragraph_support_idx": int(id)})
    return {
        "id": f"w{number}",
        "question": world.text,
        "answer": world.answers[0],
        "paragraphs": [
            {"idx": int(one.id), "title": titles[one.id], "paragraph_text": one.text, "is_supporting": one.supporting}
            for one in world.documents
        ],
        "question_decomposition": steps,
    }


@pytest.mark.parametrize("options", WORLDS)
def test_worlds_are_asked_about_with_names_that_were_read(options: dict[str, Any]) -> None:
    task: Any = build_task("multihop", **options)
    for problem in task.sample(24, seed=3, step=0):
        turns = task.gold_turns(problem)
        assert unread_names(task, problem, turns) == []
        question = problem.info["question"]
        assert cited(turns[-1]) == list(question.chain)
        # without a decomposition each document is asked for by its title, which the one before it has named
        titles = [question.document(id).title for id in question.chain]
        assert [query_of(turn) for turn in turns[:-1]] == [
            title for title in titles if f"<retrieve> {title} <" in str(turns)
        ]


@pytest.mark.parametrize(
    "options", [{"top_n": 1}, {"top_n": 2}, {"top_n": 3, "max_characters": 150}, {"retriever": "golden"}]
)
def test_no_query_of_a_row_holds_a_name_that_nobody_has_read(tmp_path: Path, options: dict[str, Any]) -> None:
    path = written(tmp_path / "rows.jsonl", *map(world_row, range(60)))
    task: Any = build_task("multihop", data={"path": path}, held_out=10, **options)
    incomplete = 0
    for problem in [*task.sample(50, seed=0, step=0), *task.held_out(10)]:
        turns, chain = task.gold_turns(problem), problem.info["question"].chain
        assert len(turns) > 1
        assert unread_names(task, problem, turns) == []
        judged = task.reward(problem, turns).parts
        # what was retrieved is cited, and nothing else; the answer is right either way
        assert judged["citation_recall"] == judged["retrieval_recall"] == len(cited(turns[-1])) / len(chain)
        assert judged["correct"] == judged["format"] == 1.0
        incomplete += judged["retrieval_recall"] < 1.0
    assert 0 < incomplete < 30  # the rows are made so that some cannot be reached


def test_the_check_sees_a_query_made_of_an_unread_paragraph(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", row(), row(id="b", question="Who?"))
    task: Any = build_task("multihop", data={"path": path}, held_out=1)
    for problem in (*task.sample(1, seed=0, step=0), *task.held_out(1)):
        turns = ["<retrieve> Miria Vane Miria Vane was born in Old Ashford. </retrieve>", "done"]
        assert set(unread_names(task, problem, turns)) >= {"Miria", "Vane", "Old", "Ashford."}


def demonstration(tmp_path: Path, record: dict[str, Any], **options: Any) -> list[str]:
    path = written(tmp_path / "rows.jsonl", record, row(id="other", question="Another one?"))
    task: Any = build_task("multihop", data={"path": path}, held_out=1, **options)
    problems = [*task.sample(1, seed=0, step=0), *task.held_out(1)]
    turns = task.gold_turns(next(problem for problem in problems if problem.key == record["id"]))
    return [*map(query_of, turns[:-1]), turns[-1]]


def test_a_reference_is_replaced_by_the_answer_that_was_read(tmp_path: Path) -> None:
    *queries, answer = demonstration(tmp_path, row(), top_n=1)
    assert queries == ["Amber Hall author", "Where was Miria Vane born?"]
    assert (
        answer
        == "<think> Amber Hall , Miria Vane , Old Ashford </think> <cite> 2 1 </cite> <answer> Old Ashford </answer>"
    )


def loaded(tmp_path: Path, *records: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Problem]]:
    """A task over rows, and its problems by key."""
    task: Any = build_task("multihop", data={"path": written(tmp_path / "r.jsonl", *records)}, held_out=1, **options)
    problems = [*task.sample(len(records) - 1, seed=0, step=0), *task.held_out(1)]
    return task, {problem.key: problem for problem in problems}


def test_only_an_answer_that_was_shown_is_a_demonstration(tmp_path: Path) -> None:
    unreached = row(id="unreached", question="Whence the author of Amber Hall?")
    unreached["paragraphs"][2]["paragraph_text"] = "Amber Hall is a novel."
    unreached["question_decomposition"] = None
    records = [
        row(id="read"),
        unreached,
        row(id="alias", question="Alias of Amber Hall?", answer="Ashford the Old", answer_aliases=["OLD Ashford!"]),
        row(id="asked", question="Is Amber Hall by the Quillmaster?", answer="Quillmaster", answer_aliases=[]),
        row(id="part", question="A part of Amber Hall?", answer="Ash", answer_aliases=["ford", "the"]),
    ]
    task, problems = loaded(tmp_path, *records, top_n=1)
    fit = {key: task.usable_for_sft(problem) for key, problem in problems.items()}
    assert fit == {"read": True, "unreached": False, "alias": True, "asked": True, "part": False}
    # of the answer and its aliases, what was read is what is stated; where none was, the answer, so that gold is right
    stated = {key: task.gold(problem).partition("<answer>")[2] for key, problem in problems.items()}
    assert stated["alias"] == " OLD Ashford! </answer>"
    assert stated["unreached"] == " Old Ashford </answer>"
    assert all(task.reward(p, task.gold_turns(p)).parts["correct"] == 1.0 for p in problems.values())


@pytest.mark.parametrize("options", [*WORLDS, {"hops": [2, 3, 4], "curriculum_steps": 3}])
def test_every_world_is_a_demonstration(options: dict[str, Any]) -> None:
    task: Any = build_task("multihop", **options)
    assert all(task.usable_for_sft(problem) for step in range(4) for problem in task.sample(16, seed=1, step=step))


def test_rows_without_a_decomposition_are_asked_about_by_title_and_question(tmp_path: Path) -> None:
    *queries, answer = demonstration(tmp_path, row(question_decomposition=None), top_n=1)
    # in the paragraphs' order: of 1 nothing has been read until 2, which the question names, has been shown
    assert queries == ["Amber Hall", "Miria Vane"]
    assert cited(answer) == ["1", "2"]


def test_rows_are_sound_under_a_retriever_that_returns_distractors(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *map(world_row, range(40)))
    check(build_task("multihop", data={"path": path}, held_out=8, top_n=1), count=8)


def test_a_run_may_go_on_with_rows_whose_decomposition_is_reworded(tmp_path: Path) -> None:
    """Sub-questions are for demonstrations: they are no part of what a run's digest of its data guards."""
    reworded = [{**step, "question": "?"} for step in row()["question_decomposition"]]
    others = row(id="b", question="Who?")
    paths = [
        written(tmp_path / f"{number}.jsonl", record, others)
        for number, record in enumerate([row(), row(question_decomposition=reworded)])
    ]
    assert len({build_task("multihop", data={"path": path}, held_out=1).fingerprint() for path in paths}) == 1
