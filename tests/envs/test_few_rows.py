"""Files of 1, 2, 5 and 11 rows: both sides get problems, or one line says what is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chess
import pytest
from typer.testing import CliRunner

from keel.base.errors import KeelError
from keel.cli import app
from keel.envs.problems import is_held_out, split_held_out
from keel.envs.registry import build_task
from keel.envs.validity import check
from recipes.multihop.rows import row

COUNTS = (1, 2, 5, 11)


def puzzles(count: int) -> list[dict[str, Any]]:
    """A rook that takes a pawn, on a board that the white king makes different each time."""
    board = chess.Board("7k/8/8/8/8/8/p6R/8 b - - 0 1")
    rows = []
    for square in list(chess.SquareSet(chess.BB_RANK_4 | chess.BB_RANK_5))[:count]:
        board.set_piece_at(square, chess.Piece.from_symbol("K"))
        rows.append({"FEN": board.fen(), "Moves": "h8g8 h2a2"})
        board.remove_piece_at(square)
    return rows


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path = folder / "few.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in rows), encoding="utf-8")
    return {"data": {"path": str(path)}}


def dataset(folder: Path, count: int) -> dict[str, Any]:
    return as_jsonl(folder, [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(count)])


def gsm8k(folder: Path, count: int) -> dict[str, Any]:
    rows = [{"question": f"What is {i} and 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(count)]
    return as_jsonl(folder, rows)


def multihop(folder: Path, count: int) -> dict[str, Any]:
    rows = [row(id=str(i), question=f"Where was the author of Amber Hall ({i}) born?") for i in range(count)]
    return as_jsonl(folder, rows) | {"retriever": "golden"}


def chess_puzzles(folder: Path, count: int) -> dict[str, Any]:
    return as_jsonl(folder, puzzles(count)) | {"held_out": 0.5}


def chess_env(folder: Path, count: int) -> dict[str, Any]:
    return as_jsonl(folder, [{"fen": puzzle["FEN"], "move": "h8g8"} for puzzle in puzzles(count)])


def reasoning_gym(folder: Path, count: int) -> dict[str, Any]:
    return {"dataset": "chain_sum", "size": count}


BACKED: list[Callable[[Path, int], dict[str, Any]]] = [
    dataset,
    gsm8k,
    multihop,
    chess_puzzles,
    chess_env,
    reasoning_gym,
]


@pytest.mark.parametrize("options", BACKED)
@pytest.mark.parametrize("count", COUNTS[1:])
def test_few_rows_are_on_both_sides(tmp_path: Path, options: Callable[[Path, int], dict[str, Any]], count: int) -> None:
    task = build_task(options.__name__, **options(tmp_path, count))
    train, held = task.sample(count, seed=0, step=0), task.held_out(count)
    prompts = [{str(problem.prompt) for problem in side} for side in (train, held)]
    assert all(prompts)
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == count
    check(task, count=count)


@pytest.mark.parametrize("options", BACKED)
def test_one_row_is_refused_with_what_is_needed(tmp_path: Path, options: Callable[[Path, int], dict[str, Any]]) -> None:
    with pytest.raises(KeelError) as caught:
        build_task(options.__name__, **options(tmp_path, 1))
    message = str(caught.value)
    assert "has 1 problem (1 different), which leaves none for training: give at least two different" in message
    assert "\n" not in message
    assert ("task.eval_path" in message) == (options in (dataset, gsm8k))  # named where there is such an option


def test_one_problem_many_times_is_one(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"has 5 problems \(1 different\)"):
        build_task("dataset", **as_jsonl(tmp_path, [{"question": "1+1=", "answer": "2"}] * 5))


@pytest.mark.parametrize("count", COUNTS)
def test_puzzles_that_are_all_for_evaluation_are_checked_as_such(tmp_path: Path, count: int) -> None:
    """The default of `chess_puzzles`: nothing to train on, and gold and wrong answers are proven on all of them."""
    path = as_jsonl(tmp_path, puzzles(count))["data"]["path"]
    result = CliRunner().invoke(app, ["check-task", "chess_puzzles", f"data.path={path}", "--json"])
    assert result.exit_code == 0, result.output
    checks = {one["name"]: one for one in json.loads(result.stdout)["checks"]}
    assert checks["problems as asked"]["detail"] == (f"evaluation only: {count} held-out problems")
    task = build_task("chess_puzzles", path=path)
    assert task.evaluation_only
    with pytest.raises(KeelError, match="set held_out below 1"):
        task.sample(1, seed=0, step=0)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_a_share_is_by_the_hash_alone_wherever_both_sides_have_some(share: float) -> None:
    for count in (1, 2, 3, 5, 11, 200):
        for start in range(40):
            identities = [f"{start}/{i}" for i in range(count)]
            by_hash = {identity for identity in identities if is_held_out(identity, share)}
            chosen = split_held_out(identities, share)
            if 0 < len(by_hash) < count or count == 1:
                assert chosen == (by_hash or set(identities))
            else:  # one changes sides
                assert len(chosen ^ by_hash) == 1
                assert 0 < len(chosen) < count
