"""Hand-made episodes against rewards and counts computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.playing import counts, reply
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.registry import build_task
from keel.envs.tools import tool

from .rows import row, three_hops, written

PARTS = ("exact_match", "f1", "retrieval_recall", "retrieval_precision", "citation_recall", "format")
SHARES = (1.0, 0.9, 1.0, 0.4, 0.6, 0.1)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    return {"path": written(tmp_path / "rows.jsonl", row(), three_hops())}


def opened(data: dict[str, Any], hops: int = 2, **options: Any) -> tuple[Any, Problem]:
    task = build_task("multihop", data=data, held_out=1, **options)
    problems = [*task.sample(1, seed=0, step=0), *task.held_out(1)]
    return task, next(problem for problem in problems if problem.info["hops"] == hops)


def final(answer: str, cited: str) -> str:
    return f"<think> so </think> <cite>{cited}</cite> <answer>{answer}</answer>"


# Documents of the rows: 0 and 3 are distractors in the first, 1 and 2 support it; top_n is 2.
EPISODES = [
    # golden finds both at once; the answer is an alias in other spelling
    ("golden", 2, ["<retrieve>Amber Hall</retrieve>", final("Town of old ASHFORD!", "2, 1")], (1, 1, 1, 1, 1, 1)),
    # half of the words, one citation of two
    ("golden", 2, ["<retrieve>Amber</retrieve>", final("Ashford", "2")], (0, 2 / 3, 1, 1, 0.5, 1)),
    # BM25: "harbour" finds document 0 alone, "novel" finds document 2 alone
    (
        "lexical",
        2,
        ["<retrieve>harbour</retrieve><retrieve>novel</retrieve>", final("x", "0 2")],
        (0, 0, 0.5, 0.5, 0.5, 1),
    ),
    # never retrieved, never thought, right all the same
    ("golden", 2, ["<cite>1</cite><answer>Old Ashford</answer>"], (1, 1, 0, 0, 0.5, 0)),
    # two answers: the last is read, the form is broken
    ("golden", 2, [final("x", "") + final("Old Ashford", "1 2")], (1, 1, 0, 0, 1, 0)),
    # gave up without an answer
    ("golden", 2, ["<retrieve>Miria</retrieve>", "I do not know"], (0, 0, 1, 1, 0, 0)),
    # three hops: 2 documents of 3, 2 citations of 3; the total is multiplied by 3/2
    ("golden", 3, ["<retrieve>Miria</retrieve>", final("Bo", "1, 3, 99")], (0, 2 / 3, 2 / 3, 1, 2 / 3, 1)),
    # nothing at all
    ("golden", 2, [""], (0, 0, 0, 0, 0, 0)),
]


@pytest.mark.parametrize(("retriever", "hops", "turns", "values"), EPISODES)
def test_rewards_by_hand(
    data: dict[str, Any], retriever: str, hops: int, turns: list[str], values: tuple[float, ...]
) -> None:
    task, problem = opened(data, hops, retriever=retriever)
    reward = task.reward(problem, turns)
    assert [reward.parts[name] for name in PARTS] == pytest.approx(values, abs=1e-9)
    assert reward.parts["correct"] == values[0]
    expected = hops / 2 * sum(w * v for w, v in zip(SHARES, values, strict=True)) / 4.0
    assert reward.total == pytest.approx(expected, abs=1e-9)
    assert reward.parsed == ("<answer>" in turns[-1])


def test_one_total_in_figures(data: dict[str, Any]) -> None:
    """(1·0 + 0.9·⅔ + 1·⅔ + 0.4·1 + 0.6·⅔ + 0.1·1) / 4 × 3/2 = 0.8125."""
    task, problem = opened(data, 3, retriever="golden")
    assert task.reward(problem, EPISODES[6][2]).total == pytest.approx(0.8125, abs=1e-9)


def test_weights_and_the_hop_factor_are_options(data: dict[str, Any]) -> None:
    weights = dict.fromkeys(PARTS, 0.0) | {"f1": 1.0, "format": 1.0}
    task, problem = opened(data, 3, retriever="golden", weights=weights, hop_factor=False)
    assert task.reward(problem, [final("Bo", "")]).total == pytest.approx((2 / 3 + 1) / 2, abs=1e-9)


def completed(answer: Any, cited: Any = ("1", "2"), **more: Any) -> str:
    arguments = {"reasoning": "so", "final_answer": answer, "cited_doc_ids": cited, **more}
    return f"<tool_call>{json.dumps({'name': 'complete', 'arguments': arguments})}</tool_call>"


def asked(query: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'retrieve_documents', 'arguments': {'query': query}})}</tool_call>"


JSON = {"tool_format": "json", "answer_style": "complete", "retriever": "golden"}


def test_the_complete_call_ends_the_episode_and_is_judged(data: dict[str, Any]) -> None:
    task, problem = opened(data, **JSON)
    assert reply(task, problem, [asked("Amber Hall")]) is not None
    turns = [asked("Amber Hall"), completed("Old Ashford", [1, 2])]
    assert reply(task, problem, turns) is None
    reward = task.reward(problem, turns)
    assert reward.total == pytest.approx(1.0, abs=1e-9)
    assert task.reward(problem, [*turns, completed("x")]) == reward  # what is said afterwards does not count


def test_the_tools_output_is_the_documents(data: dict[str, Any]) -> None:
    task, problem = opened(data, **JSON)
    (message,) = reply(task, problem, [asked("Amber Hall")])
    assert message["content"] == (
        "Document ID: 2\n# Amber Hall\nAmber Hall is a novel by Miria Vane.\n\n"
        "Document ID: 1\n# Miria Vane\nMiria Vane was born in Old Ashford."
    )
    assert [offered["function"]["name"] for offered in problem.tools] == ["retrieve_documents", "complete"]


@pytest.mark.parametrize(
    ("turn", "count"),
    [
        (completed("Old Ashford", ["1", "77", "x"]), {"answer/unknown_document": 2.0}),
        (completed(["Old Ashford"]), {"answer/list": 1.0}),
        (completed(["Old Ashford", "London"]), {"answer/list": 1.0}),
        (completed({"a": 1}), {"tool/errors": 1.0, "tool/bad_arguments": 1.0, "answer/missing": 1.0}),
        (completed("x", page=1), {"tool/errors": 1.0, "tool/bad_arguments": 1.0, "answer/missing": 1.0}),
        ("<tool_call>{complete</tool_call>", {"tool/errors": 1.0, "tool/malformed": 1.0, "answer/missing": 1.0}),
        (
            '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
            {"tool/errors": 1.0, "tool/unknown_tool": 1.0, "answer/missing": 1.0},
        ),
    ],
)
def test_bad_calls_are_counted(data: dict[str, Any], turn: str, count: dict[str, float]) -> None:
    task, problem = opened(data, **JSON)
    counted = {name: value for name, value in counts(task, problem, [turn]).items() if value}
    assert counted == {"tool/calls": 1.0, **count}
    assert 0.0 <= task.reward(problem, [turn]).total <= 1.0


def test_an_answer_that_is_a_list_is_one_answer(data: dict[str, Any]) -> None:
    """A list of one is that answer; a list of guesses is all of them together, so that guessing does not pay."""
    task, problem = opened(data, **JSON)
    assert task.reward(problem, [completed(["Old Ashford"])]).parts["correct"] == 1.0
    many = task.reward(problem, [completed(["Old Ashford", "London"])])
    assert many.parts["correct"] == 0.0
    assert many.parts["f1"] == pytest.approx(4 / 5)
    tags, problem = opened(data, retriever="golden")
    assert tags.reward(problem, [final('["Old Ashford"]', "1")]).parts["correct"] == 1.0
    assert counts(tags, problem, [final("['Old Ashford', 'x']", "1")])["answer/list"] == 1.0


@pytest.mark.parametrize("tool_format", ["json", "tags"])
@pytest.mark.parametrize("answer_style", ["tags", "complete"])
def test_oracle_episodes_earn_the_maximum(data: dict[str, Any], tool_format: str, answer_style: str) -> None:
    for hops in (2, 3):
        task, problem = opened(data, hops, retriever="golden", tool_format=tool_format, answer_style=answer_style)
        turns = task.gold_turns(problem)
        assert task.reward(problem, turns).total == pytest.approx(hops / 2, abs=1e-9)
        assert reply(task, problem, turns) is None
        assert all(reply(task, problem, turns[:n]) is not None for n in range(1, len(turns)))
        assert counts(task, problem, turns)["tool/errors"] == 0.0


def test_a_users_own_tool_stands_beside_the_retrieval(data: dict[str, Any]) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    task, problem = opened(data, retriever="golden", tools=[add])
    assert reply(task, problem, ["<tool>add(2, b=3)</tool>"]) == "\n<result>\n5\n</result>\n"
    with pytest.raises(KeelError, match="two tools have the name 'complete'"):
        build_task("multihop", tools=[tool(add, name="complete")])


def test_only_documents_that_were_shown_are_paid_for(data: dict[str, Any]) -> None:
    """The result has document 2, then document 1: one character less than both cuts through the second."""
    turns = ["<retrieve>Amber Hall</retrieve>", final("Old Ashford", "2, 1")]
    for limit, recall in ((200, 1.0), (len(BOTH), 1.0), (len(BOTH) - 1, 0.5), (20, 0.0)):
        task, problem = opened(data, retriever="golden", max_characters=limit)
        assert task.reward(problem, turns).parts["retrieval_recall"] == recall, limit
        assert counts(task, problem, turns)["tool/too_long"] == float(limit < len(BOTH))


BOTH = (
    "Document ID: 2\n# Amber Hall\nAmber Hall is a novel by Miria Vane.\n\n"
    "Document ID: 1\n# Miria Vane\nMiria Vane was born in Old Ashford."
)


def test_a_retrieval_that_no_turn_follows_is_not_paid_for(data: dict[str, Any]) -> None:
    task, problem = opened(data, retriever="golden", top_n=1)
    first, second = "<retrieve>Amber Hall</retrieve>", "<retrieve>Miria Vane</retrieve>"
    for turns, recall in (([first], 0.0), ([first, second], 0.5), ([first, second, "hm"], 1.0)):
        parts = task.reward(problem, turns).parts
        assert (parts["retrieval_recall"], parts["retrieval_precision"]) == (recall, float(recall > 0)), turns
    task, problem = opened(data, **JSON)
    both_at_once = asked("Amber Hall") + completed("Old Ashford")
    assert task.reward(problem, [both_at_once]).parts["retrieval_recall"] == 0.0


def test_gold_turns_ask_until_all_is_shown(data: dict[str, Any]) -> None:
    """With both documents asked for and room for one, the second takes a call of its own."""
    task, problem = opened(data, retriever="golden", max_characters=len(BOTH) - 1)
    turns = task.gold_turns(problem)
    assert len(turns) == 3
    assert task.reward(problem, turns).total == pytest.approx(1.0, abs=1e-9)
    with pytest.raises(KeelError, match="max_characters is 0"):
        opened(data, max_characters=0)


@pytest.mark.parametrize(
    ("cited", "recall", "unknown"),
    [
        ("Document ID: 2, Document ID: 1", 1.0, 0.0),
        ("Document ID:2", 0.5, 0.0),
        ("(1) and (2)", 1.0, 0.0),
        ("#1 #2", 1.0, 0.0),
        ("1. 2.", 1.0, 0.0),
        ("docs 1, 2", 1.0, 0.0),
        ("Doc #2; [1]", 1.0, 0.0),
        ("(Doc 2)", 0.5, 0.0),
        ("doc2 1", 0.5, 1.0),
        ("Amber Hall", 0.0, 2.0),
    ],
)
def test_citations_as_they_are_written(data: dict[str, Any], cited: str, recall: float, unknown: float) -> None:
    task, problem = opened(data, retriever="golden")
    turn = final("Old Ashford", cited)
    assert task.reward(problem, [turn]).parts["citation_recall"] == recall
    assert counts(task, problem, [turn])["answer/unknown_document"] == unknown
    task, problem = opened(data, **JSON)
    assert task.reward(problem, [completed("Old Ashford", cited)]).parts["citation_recall"] == recall


@pytest.mark.parametrize("empty", ["", "  ", "[]"])
def test_an_empty_answer_is_missing_and_has_no_form(data: dict[str, Any], empty: str) -> None:
    for options, turn in (({"retriever": "golden"}, final(empty, "1 2")), (JSON, completed(empty))):
        task, problem = opened(data, **options)
        reward = task.reward(problem, [turn])
        assert (reward.parsed, reward.parts["format"], reward.parts["f1"]) == (False, 0.0, 0.0)
        assert reward.parts["citation_recall"] == 1.0
        assert counts(task, problem, [turn])["answer/missing"] == 1.0
        assert reply(task, problem, [turn]) is None


def test_a_tag_of_no_tool_is_a_call_of_an_unknown_one(data: dict[str, Any]) -> None:
    task, problem = opened(data, retriever="golden")

    def counted(turn: str) -> tuple[float, ...]:
        found = counts(task, problem, [turn])
        return tuple(found[f"tool/{name}"] for name in ("calls", "errors", "unknown_tool"))

    assert counted("<find>x</find>") == (1.0, 1.0, 1.0)
    assert counted("<think> a </think> <find> x </find> and <look>y</look>") == (1.0, 1.0, 1.0)
    for turn in (final("x", "1"), "<think> hm </think>", "<find> not closed", "a < b > c", "<retrieve>x</retrieve>"):
        assert counted(turn)[2] == 0.0, turn
    assert counted("<find>x</find> " + final("x", "1")) == (0.0, 0.0, 0.0)
