"""What every built-in task and reward pays for answers that do not solve anything: figures worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.base.types import Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.attacks import Attack, Form, GoldBatch, attacks_on, form_of
from keel.envs.exploits import FREE_SHARE, MAX_REQUESTS, Exploits, exploit
from keel.envs.judge import Judge
from keel.envs.registry import TASKS, build_task
from keel.envs.rewards import REWARDS, TASK, http
from recipes.chess.fake_engine import fake_engine

COUNT = 6  # problems
# the form once, without the answer
FORM = ("form only", "one word, endless", "refusal", "not a number", "every number to 100")
WRONG = ("another problem's answer", "every answer in one form", "two answers in two notations")
REPEATED = ("form only, endless", "every answer in a form of its own", "another problem's answer, endless")
EVERY = ("empty", "blank", "every answer without the form", *FORM, *WRONG, *REPEATED)
CALLS = ("calls, endless", "calls with the question, then the form", "calls with the question, then every number")


def look(query: str) -> str:
    """Look something up.

    Args:
        query: What to look for.
    """
    return "nothing"


def rows_of(kind: str) -> list[dict[str, str]]:
    if kind == "worded":
        return [{"question": f"{i} and {i + 2}?", "answer": f"So {i} + {i + 2}.\n#### {2 * i + 2}"} for i in range(40)]
    if kind == "fractions":
        return [{"question": f"Half of {i}?", "answer": f"\\frac{{{i}}}{{2}}"} for i in range(3, 83, 2)]
    if kind == "letters":
        return [{"question": f"Letter {i}?", "answer": chr(97 + i)} for i in range(26)]
    return [{"question": f"Twice {i}?", "answer": str(2 * i)} for i in range(200, 240)]


def same(value: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, value)


# Task, its parameters, and the mean reward that each attack earns where the gold answer earns 1; what is not named
# earns nothing. Answers that may be right by chance (prompts, zeros, the commonest answer) have a test of their own.
PAID: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("arithmetic", {}, {}),
    ("arithmetic", {"skill": "sort", "digits": 6}, {}),
    ("arithmetic", {"style": "words"}, {}),
    # 0.1 for the tag around anything; the last of several counts
    ("arithmetic", {"style": "words", "format": "answer_tag"}, same(0.1, *FORM, *WRONG, *REPEATED)),
    ("capitals", {}, {}),
    ("countdown", {}, same(0.1, *FORM, *WRONG, *REPEATED)),
    ("countdown", {"format": "plain"}, {"another problem's answer": 0.1}),  # 0.1 for an expression
    ("dataset", {"data": "numbers"}, {}),
    ("dataset", {"data": "numbers", "tag": "answer"}, {}),
    ("dataset", {"data": "letters"}, {}),
    ("dataset", {"data": "fractions", "answer": "math", "tag": "answer"}, {}),
    ("gsm8k", {"data": "worded"}, {}),
    # three of the six problems are countdown's
    ("mixture", {"tasks": [{"name": "arithmetic"}, {"name": "countdown"}]}, same(0.05, *FORM, *WRONG, *REPEATED)),
    ("tools", {"task": {"name": "arithmetic"}, "tools": [look]}, {}),
]


def built(name: str, params: Mapping[str, Any], folder: Path) -> Any:
    if "data" not in params:
        return build_task(name, **params)
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_of(params["data"]))))
    return build_task(name, **{**params, "data": {"path": str(path)}})


def shares(exploits: Exploits, *, lucky: bool = False) -> dict[str, float]:
    """The mean share of each attack."""
    return {row.name: round(row.mean, 3) for row in exploits.rows if row.lucky == lucky}


def earned(exploits: Exploits) -> dict[str, float]:
    """The mean reward of each attack, as it was paid."""
    return {row.name: round(row.mean_reward, 3) for row in exploits.rows if not row.lucky}


@pytest.mark.parametrize(("name", "params", "paid"), PAID, ids=[name for name, _, _ in PAID])
def test_what_a_task_pays_for_nothing(
    name: str, params: dict[str, Any], paid: dict[str, float], tmp_path: Path
) -> None:
    exploits = exploit(built(name, params, tmp_path), count=COUNT)
    expected = {**dict.fromkeys((*EVERY, *(CALLS if name == "tools" else ())), 0.0), **paid}
    assert earned(exploits) == shares(exploits) == expected
    assert all(row.gold_reward == 1.0 for row in exploits.rows)
    assert all(check.ok for check in exploits.checks)
    assert not exploits.warnings
    assert all(row.correct == 0 for row in exploits.rows if not row.lucky)


# The parts' weights sum to 4. A call of the golden retriever brings both documents (1.0 + 0.4), every number cites them
# (0.6), the form is 0.1; a list of answers cites them and has some words of the right one (F1, at most 0.9 of half).
MULTIHOP = {
    "empty": 0.0,
    "blank": 0.0,
    "form only": 0.1 / 4,
    "refusal": 0.1 / 4,
    "not a number": 0.1 / 4,
    "one word, endless": 0.1 / 4,
    "form only, endless": 0.0,
    "every number to 100": 0.7 / 4,
    "calls, endless": 1.4 / 4,
    "calls with the question, then the form": 1.5 / 4,
    "calls with the question, then every number": 2.1 / 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"tool_format": "json", "answer_style": "complete"}], ids=["tags", "json"])
def test_multihop_pays_for_retrieval_and_citations_without_an_answer(form: dict[str, str]) -> None:
    exploits = exploit(build_task("multihop", retriever="golden", hops=2, **form), count=COUNT)
    # a call of `complete` ends the episode: behind the first nothing is read
    expected = {**MULTIHOP, **({"form only, endless": 0.1 / 4} if form else {})}
    assert {name: earned(exploits)[name] for name in expected} == pytest.approx(expected, abs=6e-4)
    assert all(row.gold_reward == 1.0 for row in exploits.rows)
    assert all(check.ok for check in exploits.checks)
    assert all(row.highest < 0.6 and row.correct == 0 for row in exploits.rows if not row.lucky)
    assert {row.name for row in exploits.rows if row.verdict == "pays"} >= set(CALLS)
    assert any("'calls, endless' earns 0.35" in warning and "to call tools" in warning for warning in exploits.warnings)


def test_reasoning_gym_pays_for_what_contains_the_answer_by_length() -> None:
    exploits = exploit(build_task("reasoning_gym", dataset="leg_counting"), count=COUNT)
    assert all(check.ok for check in exploits.checks)
    paid = {name: share for name, share in shares(exploits).items() if share > 0}
    lists = {"every answer in one form", "every answer without the form", "two answers in two notations"}
    assert paid.keys() <= {*lists, "every number to 100", "every answer in a form of its own"}
    assert max(paid.values()) < 0.4


def puzzle_rows() -> list[dict[str, str]]:
    """A rook that takes a pawn, on each rank from the second to the seventh but one."""
    ranks = [["8"] * row + ["p6R"] + ["8"] * (4 - row) for row in range(5)]
    return [
        {"FEN": f"7k/8/{'/'.join(rows)}/4K3 b - - 0 1", "Moves": f"h8g8 h{6 - i}a{6 - i}"}
        for i, rows in enumerate(ranks)
    ]


# The reward of gold, of what cannot be read, and of each attack that can: on six random positions, and the first five
# legal moves, as an engine of the test gives them.
READABLE = ("another problem's answer, endless", "every answer in a form of its own")
LISTS = {"every answer without the form": 0.078, "another problem's answer": 0.01, **same(0.0, *READABLE)}
MIXED = {  # two positions of six are of chess_env
    "every answer in one form": -0.066,
    "every answer without the form": -0.048,
    "another problem's answer": 0.044,
    **same(0.004, *READABLE),
}
CHESS: list[tuple[str, dict[str, Any], float, float, dict[str, float]]] = [
    ("chess_env", {}, 1.5, -0.3, {"another problem's answer": 0.113, **same(0.013, *READABLE)}),
    ("chess_env", {"system": "binary"}, 1.0, -1.0, {"another problem's answer": 0.0}),
    ("chess_policy", {}, 1.0, -0.3, {**LISTS, "every answer in one form": 0.044}),
    ("chess_policy", {"system": "binary"}, 1.0, -1.0, {"another problem's answer": 0.0}),
    ("chess_puzzles", {}, 1.0, -0.3, same(0.0, *WRONG, *READABLE)),
    ("chess", {}, 7 / 6, -0.3, MIXED),
]


@pytest.mark.parametrize(("name", "params", "gold", "unreadable", "paid"), CHESS, ids=[row[0] for row in CHESS])
def test_what_chess_pays_for_nothing(
    name: str, params: dict[str, Any], gold: float, unreadable: float, paid: dict[str, float], tmp_path: Path
) -> None:
    if name in ("chess_policy", "chess"):
        engine = {"path": fake_engine(tmp_path), "cache": str(tmp_path / "cache.sqlite"), "workers": 1}
        params = {**params, "engine": engine}
    if name == "chess_puzzles":
        path = tmp_path / "puzzles.jsonl"
        path.write_text("\n".join(map(json.dumps, puzzle_rows())))
        params = {**params, "path": str(path)}
    exploits = exploit(build_task(name, **params), count=COUNT)
    assert earned(exploits) == {**dict.fromkeys(EVERY, unreadable), **paid}
    assert {row.verdict for row in exploits.rows} == {"fine"}
    assert exploits.rows[0].gold_reward == pytest.approx(gold)


class Unanswered(TaskWrapper):
    name = "prompts_only"
    inner = build_task("arithmetic")

    def gold_turns(self, problem: Problem) -> list[str]:
        raise LookupError("no gold answer")


def test_nothing_is_said_about_attacks_that_could_not_be_made() -> None:
    judged, earn_less = exploit(Unanswered(), count=COUNT).checks
    assert (judged.ok, judged.detail) == (False, "raised LookupError: no gold answer")
    assert (earn_less.ok, earn_less.detail) == (True, "skipped: the attacks could not be built")


# test_code.py; above; what a server pays is the server's
ELSEWHERE = {"code", "multihop", "reasoning_gym", "http", "openenv"}


def test_every_task_has_its_figures() -> None:
    assert {row[0] for row in (*PAID, *CHESS)} | ELSEWHERE == set(TASKS)


# Rewards by name, on `<answer>129</answer>`: what is not named earns nothing.
RUNGS = [
    {"tag": "answer", "value": 0.1},
    {"pattern": r"<answer>\s*\d+\s*</answer>", "value": 0.2},
    {"reward": {"name": "numeric", "tag": "answer"}, "value": 0.7},
]
DIGITS = (*WRONG, "every number to 100", "every answer without the form", *REPEATED[1:])
PARTS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"name": TASK}, same(0.1, *FORM, *WRONG, *REPEATED)),
    ({"name": "exact"}, {}),
    ({"name": "numeric"}, {}),
    ({"name": "numeric", "tag": "answer"}, {}),
    ({"name": "math"}, {}),
    ({"name": "math", "tag": "answer"}, {}),
    # by definition: the form, once, is all that they look at
    ({"name": "format"}, same(1.0, *FORM, *WRONG)),
    ({"name": "format", "pattern": r"<answer>\d+</answer>"}, {"another problem's answer": 1.0}),
    ({"name": "tag_count", "tags": ["answer"]}, same(1.0, *FORM, *WRONG)),
    ({"name": "regex", "pattern": r"\d"}, same(1.0, *DIGITS)),
    ({"name": "regex", "pattern": r"(\d+)", "group": 1}, {}),
    ({"name": "regex", "pattern": r"<answer>(\d+)</answer>", "group": 1, "full": True}, {}),
    # the first rung, and for a number in the tag the second
    ({"name": "ladder", "rungs": RUNGS}, {**same(0.1, *FORM, *WRONG), "another problem's answer": 0.3}),
]


def judged(entries: list[dict[str, Any]], count: int = COUNT, **options: Any) -> Exploits:
    format = "plain" if entries[0]["name"] == "exact" else "answer_tag"
    task = build_task("arithmetic", style="words", format=format)
    return exploit(task, Judge.of(task, entries, **options), count=count)


@pytest.mark.parametrize(("entry", "paid"), PARTS, ids=[entry["name"] for entry, _ in PARTS])
def test_what_a_reward_pays_for_nothing(entry: dict[str, Any], paid: dict[str, float]) -> None:
    exploits = judged([entry], 2 if entry["name"] == "math" else COUNT)
    assert earned(exploits) == shares(exploits) == {**dict.fromkeys(EVERY, 0.0), **paid}
    holes = {row.name for row in exploits.rows if row.verdict == "hole" and not row.lucky}
    assert holes == {name for name, share in paid.items() if share == 1.0}
    assert all(check.ok == (not holes) for check in exploits.checks if check.name == "attacks earn less")


def test_cosine_punishes_a_long_wrong_text_less_by_definition() -> None:
    """From -1 to -0.5, which is below 0 and no pay."""
    exploits = judged([{"name": "cosine"}])
    paid = earned(exploits)
    endless = {name: paid.pop(name) for name in ("form only, endless", "one word, endless", REPEATED[2])}
    assert endless == pytest.approx(dict.fromkeys(endless, -0.5), abs=1e-3)
    assert paid["empty"] == -1.0
    assert max(paid.values()) < -0.8
    assert not exploits.warnings
    exceeded = earned(judged([{"name": "cosine", "exceeded": -1.0}]))
    assert all(exceeded[name] == -1.0 for name in endless)


def test_length_pays_for_no_attack() -> None:
    assert not judged([{"name": "length"}]).rows  # an empty answer earns most: alone it is no reward for a task
    exploits = judged([{"name": "numeric"}, {"name": "length", "weight": 0.1}])
    paid = earned(exploits)
    assert (max(paid.values()), paid["empty"], min(paid.values())) == (0.0, 0.0, -0.1)
    assert shares(exploits)["empty"] == pytest.approx(0.1 / 1.1, abs=0.01)  # from the longest, -0.1, to gold
    assert not exploits.warnings


def test_a_judge_elsewhere_is_attacked_on_few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def generous(url: str, body: Any, **options: Any) -> Any:
        """Likes whatever is not empty."""
        text = body["completion"] if "completion" in body else body["messages"][0]["content"].split("=>")[1]
        asked.append(text)
        return {"score": float(bool(text)), "choices": [{"message": {"content": f"Score: {10 * bool(text)}"}}]}

    monkeypatch.setattr(http, "ask", generous)
    for entry in (
        {"name": "http", "url": "http://127.0.0.1:1/judge"},
        {"name": "chat_judge", "url": "http://127.0.0.1:1/v1", "model": "m", "template": "{prompt}=>{completion}"},
    ):
        for options in ({}, {"concurrency": 1}):
            asked.clear()
            exploits = judged([{**entry, **options}])
            assert earned(exploits) == {**dict.fromkeys(EVERY, 1.0), "empty": 0.0}
            assert {row.problems for row in exploits.rows} == {1}
            assert 30 < len(asked) <= MAX_REQUESTS == 42
        asked.clear()
        exploits = judged([entry, {"name": "numeric"}], aggregate="normalised_sum")
        assert len(exploits.rows) >= 8
        assert 30 < len(asked) <= MAX_REQUESTS


def test_every_reward_has_its_figures() -> None:
    elsewhere = {"none", "code", "cosine", "length", "http", "chat_judge"}
    assert {entry["name"] for entry, _ in PARTS} | elsewhere == {TASK, *REWARDS}


def test_normalised_parts_are_compared_in_groups_of_three() -> None:
    """Of gold, empty and attack, whatever the parts' scale: a tag for every text moves nothing but itself."""
    parts = [{"name": "numeric", "tag": "answer"}, {"name": "length", "weight": 0.1}]
    exploits = judged(parts, aggregate="normalised_sum")
    assert all(row.verdict == "fine" for row in exploits.rows if not row.lucky)
    assert len(exploits.rows) >= len(EVERY)


@pytest.mark.parametrize(
    ("params", "share"),
    [({"skill": "max"}, 0.5), ({"skill": "add"}, 0.0)],
)
def test_copies_of_the_prompt_that_are_right_by_chance_are_a_warning_and_no_hole(
    params: dict[str, str], share: float
) -> None:
    exploits = exploit(build_task("arithmetic", style="words", **params), count=32)
    assert shares(exploits, lucky=True)["prompt"] == pytest.approx(share, abs=0.25)
    assert all(check.ok for check in exploits.checks)
    assert ["to copy the prompt" in warning for warning in exploits.warnings] == [True] * (2 if share else 0)


def test_copies_are_no_attack_where_the_prompt_asks_for_a_copy() -> None:
    exploits = exploit(build_task("arithmetic", style="words", skill="copy"), count=32)
    assert not {"prompt", "prompt in the form"} & {row.name for row in exploits.rows}
    assert all(check.ok for check in exploits.checks)
    assert not exploits.warnings


class Paying(TaskWrapper):
    """Arithmetic whose reward is of the test."""

    name = "paying"

    def __init__(self, pay: Callable[[str, bool], float], **params: Any) -> None:
        self.inner, self.pay = build_task("arithmetic", **params), pay

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        right = self.inner.gold(problem) == turns[-1].strip()
        return Reward(self.pay(turns[-1], right), {"correct": float(right)})


def test_what_silence_pays_is_seen_and_judged() -> None:
    exploits = exploit(Paying(lambda text, right: 1.0 if right else 0.9), count=COUNT)
    assert set(earned(exploits).values()) == {0.9}
    assert shares(exploits) == {**dict.fromkeys(earned(exploits), 0.0), "empty": 0.9}
    (warning,) = exploits.warnings
    assert warning.startswith("'empty' earns 0.90 of the gold answer's reward")
    assert "(a reward of 0.9 where gold earns 1): a policy learns to stop at once" in warning


@pytest.mark.parametrize(("silence", "warned"), [(0.24, False), (0.25, True), (0.26, True)])
def test_silence_that_earns_a_quarter_is_a_warning(silence: float, warned: bool) -> None:
    exploits = exploit(Paying(lambda text, right: float(right) if text else silence), count=COUNT)
    assert shares(exploits)["empty"] == silence
    assert [row.name for row in exploits.rows if row.verdict == "pays"] == ["empty"] * warned


def test_silence_is_judged_from_the_least_that_is_paid() -> None:
    """A wrong answer costs 1, silence nothing, gold earns 1: half of the way for stopping at once."""
    exploits = exploit(Paying(lambda text, right: 1.0 if right else -float(bool(text))), count=COUNT)
    assert (earned(exploits)["empty"], shares(exploits)["empty"]) == (0.0, 0.5)
    assert [row.name for row in exploits.rows if row.verdict == "pays"] == ["empty"]


def test_a_penalty_that_is_avoided_is_no_pay() -> None:
    """Malformed -1, wrong 0, right 1: a wrong answer in the right form earns nothing."""
    exploits = exploit(Paying(lambda text, right: float(right) if text.isdigit() else -1.0), count=COUNT)
    assert (earned(exploits)["empty"], earned(exploits)["another problem's answer"]) == (-1.0, 0.0)
    assert (shares(exploits)["empty"], shares(exploits)["another problem's answer"]) == (0.0, 0.0)
    assert {row.verdict for row in exploits.rows} == {"fine"}


def test_what_is_paid_above_a_penalty_is_counted_from_0() -> None:
    exploits = exploit(Paying(lambda text, right: max(right, 0.3) if text.isdigit() else -1.0), count=COUNT)
    assert shares(exploits)["another problem's answer"] == 0.3
    assert "another problem's answer" in {row.name for row in exploits.rows if row.verdict == "pays"}


def test_rewards_that_are_never_above_0_are_counted_from_silence() -> None:
    exploits = exploit(Paying(lambda text, right: 0.0 if right else -1.0 + 0.5 * text.isdigit()), count=COUNT)
    assert shares(exploits)["another problem's answer"] == 0.5
    assert "another problem's answer" in {row.name for row in exploits.rows if row.verdict == "pays"}


class Contained(TaskWrapper):
    """The choices stand in the prompt, and a text that contains the right one is judged correct."""

    name = "contained"
    inner = build_task("arithmetic", skill="max", style="words")

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        right = self.inner.gold(problem) in turns[-1]
        return Reward(float(right), {"correct": float(right)})


def test_a_copy_of_the_prompt_that_is_always_right_is_a_hole() -> None:
    exploits = exploit(Contained(), count=32)
    verdicts = {row.name: (row.verdict, row.correct) for row in exploits.rows}
    assert verdicts["prompt"] == verdicts["prompt in the form"] == ("hole", 16)
    assert "'prompt' earns 1.00" in exploits.checks[1].detail
    few = exploit(Contained(), count=4)  # so few may be luck
    assert {row.verdict for row in few.rows if row.name == "prompt"} == {"pays"}


def test_what_is_near_to_anything_is_a_hole() -> None:
    """`not (abs(x - gold) > 0.1)` holds for nan."""

    def near(text: str, right: bool) -> float:
        return 1.0 if text.strip() == "nan" else float(right)

    exploits = exploit(Paying(near), count=COUNT)
    assert [row.name for row in exploits.rows if row.verdict == "hole"] == ["not a number"]


@pytest.mark.parametrize("gold", ["I do not know.", "<a>I do not know</a>", "<a> I DO NOT KNOW. </a>"])
def test_a_refusal_that_is_the_gold_answer_is_no_attack_on_its_problem(gold: str) -> None:
    form = "<a>{}</a>" if gold.startswith("<") else "{}"
    batch = batch_of(gold, form.format("Paris"), form.format("Rome"))
    assert "refusal" not in [attack.name for attack in attacks_on(batch, 0, batch.neighbours(0))]
    assert "refusal" in [attack.name for attack in attacks_on(batch, 1, batch.neighbours(1))]


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        (["12", "7"], ("", "")),
        (["yes"], ("", "")),
        (["<answer>1</answer>", "<answer>2</answer>"], ("<answer>", "</answer>")),
        (["so 3.\n#### 4", "it is 5 or 7.\n#### 12"], ("", ".\n#### ", "")),
        (["a2a4 E: 0.1 B: a2a4", "h7h8q E: -3.2 B: e2e4"], ("", " E: ", " B: ", "")),
        (['{"a": "x", "b": [1]}', '{"a": "y z", "b": [2]}'], ('{"a": "', '", "b": [', "]}")),
    ],
)
def test_the_form_is_what_gold_answers_share(texts: list[str], pieces: tuple[str, ...]) -> None:
    assert form_of(texts).pieces == pieces


def test_slots_that_may_be_empty_stay_empty() -> None:
    form = form_of(['["1", "2"]', '["3", "4", "5"]', '["6", "7"]'])
    assert form.fill("x") == '["x", "x"]'
    assert form.fill("") == '["", ""]'


def test_what_stands_in_a_form() -> None:
    form = Form(("<think>", "</think><answer>", "</answer>"))
    assert form.contents("<think>1+1</think><answer> 2 </answer>") == ("1+1", "2")
    assert form.fill(("a", "b")) == "<think>a</think><answer>b</answer>"


def batch_of(*answers: str) -> GoldBatch:
    problems = tuple(Problem(str(i), f"question {i}\nthe last line", answer) for i, answer in enumerate(answers))
    return GoldBatch(problems, tuple((answer,) for answer in answers))


def attack_called(name: str, batch: GoldBatch, index: int = 0) -> Attack:
    return next(attack for attack in attacks_on(batch, index, batch.neighbours(index)) if attack.name == name)


def test_attacks_are_made_of_what_is_visible() -> None:
    batch = batch_of("<a>3</a>", "<a>5</a>", "<a>7</a>")
    assert attack_called("form only", batch).ways == ((("<a></a>",),), (("<a>answer</a>",),), (("<a>",),))
    assert attack_called("prompt", batch).ways[1] == (("the last line",),)
    (first, *_) = attack_called("every answer in one form", batch).ways
    assert first == (("<a>5 3 7</a>",), ("<a>3 5 7</a>",), ("<a>5 7 3</a>",))  # in the middle, first, last
    boxed = attack_called("two answers in two notations", batch).ways[0]
    assert boxed == (("<a>\\boxed{3} 5</a>",), ("<a>\\boxed{5} 3</a>",))
    names = [attack.name for attack in attacks_on(batch, 0, ())]
    assert "another problem's answer" not in names  # none that is wrong here


def moves(*values: str) -> str:
    """Five moves, five evaluations and a best move, in one form."""
    return f"M: {' '.join(values)} E: {' '.join(f'0.{i + 1}' for i in range(len(values)))} B: {values[-1]}"


def test_a_form_of_several_values_is_filled_with_one() -> None:
    batch = batch_of(moves("e2e4", "d2d4"), moves("g1f3", "c2c4"), moves("b1c3", "f2f4"))
    assert attack_called("form of one value", batch).ways == (
        (("M: g1f3 g1f3 E: 0.1 0.1 B: c2c4",),),
        (("M: g1f3 g1f3 E: g1f3 g1f3 B: g1f3",),),
    )
    single = batch_of("<a>3</a>", "<a>5</a>")
    assert "form of one value" not in [attack.name for attack in attacks_on(single, 0, single.neighbours(0))]


class Lines(Task):
    """Pays 0.6 for five moves, five evaluations and a best move that can be read, legal or not."""

    name = "lines"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        files, row = "abcdefgh", step + 1
        answers = [moves(*(f"{files[(i + k) % 8]}{1 + i // 8}{files[k]}{row}" for k in range(5))) for i in range(count)]
        return [Problem(f"{step}/{i}", f"position {step}/{i}", answer) for i, answer in enumerate(answers)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self.sample(count, seed=seed, step=7)

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        right = turns[-1] == problem.answer
        readable = re.fullmatch(r"M:( [a-h]\d[a-h]\d){5} E:( \d\.\d){5} B: [a-h]\d[a-h]\d", turns[-1])
        return Reward(1.0 if right else 0.6 * bool(readable), {"correct": float(right)})


def test_what_is_paid_for_a_form_that_can_be_read_is_seen_as_form() -> None:
    exploits = exploit(Lines(), count=16)
    row = next(row for row in exploits.rows if row.name == "form of one value")
    assert (row.family, row.verdict, round(row.mean_reward, 9)) == ("form", "pays", 0.6)
    assert any(
        "'form of one value' earns 0.60" in warning and "to write the form" in warning for warning in exploits.warnings
    )
    assert earned(exploits)["form only"] == 0.0  # nothing in it can be read


def test_one_answer_to_every_problem_is_a_warning_and_no_hole() -> None:
    batch = batch_of("yes", "yes", "yes")
    assert attack_called("commonest answer", batch).is_gold
    assert not attack_called("zeros", batch).is_gold


def test_the_commonest_answer_is_that_of_the_others() -> None:
    batch = batch_of("yes", "yes", "no", "yes")
    assert attack_called("commonest answer", batch, 2).ways == ((("yes",),),)
    assert batch_of("1", "2", "3").most_common_gold(0) is None


def test_a_text_that_is_the_gold_answer_is_no_attack() -> None:
    batch = batch_of("I do not know.", "Paris")
    assert all("I do not know." not in turns for way in attack_called("form only", batch).ways for turns in way)
    assert "refusal" not in [attack.name for attack in attacks_on(batch, 0, batch.neighbours(0))]
    assert FREE_SHARE == 0.25  # the figure in docs/rewards.md


def test_the_tasks_of_a_mixture_have_forms_of_their_own() -> None:
    task = build_task("mixture", tasks=[{"name": "arithmetic"}, {"name": "capitals"}, {"name": "countdown"}])
    problems = task.sample(12, seed=0, step=0)
    batch = GoldBatch(tuple(problems), tuple(tuple(task.gold_turns(problem)) for problem in problems))
    for index, problem in enumerate(problems):
        tagged = problem.info["mixture"] == 2
        assert batch.form(index).pieces[0] == ("<think>" if tagged else "")
        assert all((turns[-1][0] == "<") == tagged for turns in batch.neighbours(index))
        assert all(turns[-1].isdigit() for turns in batch.neighbours(index) if problem.info["mixture"] == 0)
