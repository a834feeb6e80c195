"""Puzzles, mate in one, and boards: figures against positions whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import chess
import pytest

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.envs.registry import build_task
from keel.envs.registry import build_task as registered
from keel.lab.report.samples import completion
from keel.recipes.chess.format import PADDINGS, Analysis, policy_completion, policy_prompt
from keel.recipes.chess.policy import chess_puzzles
from keel.recipes.chess.rules import mating_moves
from keel.recipes.chess.task import answer_picture, mate_in_one

# After 1... Ra8 no move mates; after 1... Kh8 either rook does.
BACK_RANK = "3r2k1/5ppp/8/8/8/8/5PPP/3R2K1 b - - 0 1"
TWO_ROOKS = "6k1/5ppp/8/8/8/8/8/R3R1K1 b - - 0 1"
HEAD = "PuzzleId,FEN,Moves,Rating\n"
LINES = f"one,{BACK_RANK},d8a8 d1d8 a8d8,800\ntwo,{TWO_ROOKS},g8h8 a1a8,600\n"


def answer(move: str) -> str:
    return policy_completion(Analysis((move,), (0.5,), move))


def group(problem: Problem, texts: Sequence[str]) -> Group:
    made = tuple(Completion((1,), (True,), (0.0,), (0.0,), text, "eos") for text in texts)
    return Group(problem, (1,), made)


@pytest.fixture
def puzzles(tmp_path: Path) -> Path:
    path = tmp_path / "puzzles.csv"
    path.write_text(HEAD + LINES)
    return path


def test_the_first_move_is_the_opponents_and_the_second_the_answer(puzzles: Path) -> None:
    first = {p.key: p for p in registered("chess_puzzles", path=str(puzzles)).held_out(10)}["puzzles.csv:2"]
    board = chess.Board(BACK_RANK)
    board.push_uci("d8a8")
    assert first.info["fen"] == board.fen()
    assert first.prompt == policy_prompt(board.fen())
    assert first.answer == ("d1d8",)


def test_any_mate_is_right_where_the_answer_mates(puzzles: Path) -> None:
    task = chess_puzzles(path=str(puzzles))
    second = {p.key: p for p in task.held_out(10)}["puzzles.csv:3"]
    assert set(second.answer) == {"a1a8", "e1e8"}
    assert [task.reward(second, [answer(move)]).total for move in ("a1a8", "e1e8", "a1a2", "a1b8")] == [1, 1, 0.1, 0]
    assert task.reward(second, [task.gold(second)]).total == 1
    assert task.reward(second, [""]).total == task.reward(second, ["Ra8#"]).total == -0.3


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (" a1a1 E: 0.00 B: a1a1", 0.0),  # the form alone
        (" d1h5 E: 0.00 B: d1h5", 0.0),  # no way for a rook
        (" g1f1 E: 0.00 B: g1f1", 0.1),  # legal and wrong
        (" d1d8 g1f1 d1d7 E: 9.00 0.00 0.00 B: g1f1", 0.1),  # the answer among others, another as the best
        (" d1d8 g1f1 E: 9.00 0.00 B: a1a1", 0.0),  # legal moves around a best one that is not
        (" g1f1 E: 0.00 B: g1f1 d1d8 d1d7", 0.1),  # several best moves: the first counts
        (" g1f1 E: 0.00 B: g1f1 E: 0.00 B: d1d8", 0.1),
        (" d1d8 E: 9.00", -0.3),  # none is called the best
        (" d1d8" * 200, -0.3),
        (f"P: {BACK_RANK} M:", -0.3),
        ("", -0.3),
    ],
)
def test_what_a_puzzles_answer_without_the_solution_earns(text: str, total: float, puzzles: Path) -> None:
    task = chess_puzzles(path=str(puzzles))
    first = {p.key: p for p in task.held_out(10)}["puzzles.csv:2"]
    assert task.reward(first, [text]).total == total


def test_puzzle_figures(puzzles: Path) -> None:
    task = chess_puzzles(path=str(puzzles))
    problems = {p.key: p for p in task.held_out(10)}
    groups = [
        group(problems["puzzles.csv:2"], [answer("d1d8"), answer("d1d7"), answer("d1h5"), ""]),
        group(problems["puzzles.csv:3"], [answer("e1e8"), answer("e1e7"), answer("g1g2"), answer("a1a8")]),
    ]
    found = task.extra_metrics(groups)
    assert found["puzzle_accuracy"] == 3 / 8
    assert found["legal_move_rate"] == 6 / 8
    assert found["mate_in_one"] == 2 / 4  # of the second puzzle alone: in the first Rd8+ is answered by Rxd8
    assert found["truncated_without_eos"] == 0


def test_mating_moves_by_hand() -> None:
    assert mating_moves("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1") == ("d1d8",)
    assert mating_moves(chess.STARTING_FEN) == ()
    fools = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
    assert mating_moves(fools) == ("d8h4",)
    problem = Problem("x", "", info={"fen": chess.STARTING_FEN})
    assert mate_in_one([group(problem, [answer("e2e4")])], PADDINGS["source"]) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PuzzleId,FEN,Rating\none,x,800\n", "no column Moves"),
        ("a,b\n1,2\n", "no column FEN and Moves"),
        (HEAD + LINES + "bad,not a fen,e2e4 e7e5,1\n", "puzzles.csv:4: the FEN 'not a fen' is broken"),
        (HEAD + f"bad,{BACK_RANK},d8a8,1\n", "at least the opponent's move"),
        (HEAD + f"bad,{BACK_RANK},Ra8 Rd8,1\n", "UCI notation"),
        (HEAD + f"bad,{BACK_RANK},d8a8 d1e8,1\n", "d1e8 is not legal"),
        (HEAD + f"bad,{BACK_RANK},d8d8 d1d8,1\n", "puzzles.csv:2: the move 'd8d8' does not change the square"),
        (HEAD + f"bad,{BACK_RANK},d8a8 d1d1,1\n", "puzzles.csv:2: the move 'd1d1' does not change the square"),
    ],
)
def test_broken_puzzles_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "puzzles.csv"
    path.write_text(text)
    with pytest.raises(KeelError, match=said):
        chess_puzzles(path=str(path))


def test_environment_figures_over_known_answers() -> None:
    task = build_task("chess_env", pieces=3)
    problem = task.held_out(1)[0]
    gold = task.gold(problem)
    wrong = gold.replace(gold.split("+")[0], "8/8/8/4k3/8/8/8/4K3 w - - 0 1")
    groups = [group(problem, [gold, wrong, "", gold + "+1"])]
    found = task.extra_metrics(groups)
    assert found["fen_exact"] == 2 / 4
    assert found["parsed"] == 3 / 4
    assert found["structure"] == 2 / 4


def test_a_record_cannot_bring_markup_of_its_own_into_the_report() -> None:
    evil = "<img src=x onerror=alert(1)>"
    assert "onerror" not in completion({"completion": "x", "reward": 1.0, "picture": evil}, 1.0)
    script = "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    page = completion({"completion": "x", "reward": 1.0, "picture": script}, 1.0)
    assert "<script" not in page
    assert "<img class='picture'" in page


def test_a_move_that_stays_on_its_square_is_drawn_and_stops_nothing() -> None:
    problem = Problem("x", "", info={"fen": chess.STARTING_FEN, "lines": (("e2e4", 0.3),)})
    drawn = answer_picture(problem, answer("e2e2"))
    assert drawn is not None
    ElementTree.fromstring(drawn)
    assert "#c0392b" in drawn
    step = Problem("y", "", answer=(chess.STARTING_FEN, -1.0, False, True), info={**problem.info, "move": "e2e2"})
    shown = answer_picture(step, f"{chess.STARTING_FEN}+-1.0+0+1")
    assert shown is not None
    ElementTree.fromstring(shown)
