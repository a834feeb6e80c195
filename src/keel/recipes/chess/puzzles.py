"""`chess_puzzles`: find the solution of a puzzle, from a file in Lichess' format (columns FEN and Moves)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chess

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.dataset import Dataset, NoGrader, data_name
from keel.envs.layouts import source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import check_split, split_held_out
from keel.envs.rows import DataRow, read_rows
from keel.recipes.chess.data import usable
from keel.recipes.chess.format import (
    PADDINGS,
    Analysis,
    Padding,
    padding_of,
    policy_completion,
    policy_prompt,
    read_policy,
    require_uci,
)
from keel.recipes.chess.rewards import malformed_value
from keel.recipes.chess.rules import board_of, fen_of, identity, legal_moves, mating_moves
from keel.recipes.chess.task import ChessGrader, ChessTask, mate_in_one, part_means

COLUMNS = ("FEN", "Moves")
PARTS = ("parsed", "structure", "best_legal", "correct")
LEGAL_WORTH = 0.1  # reward of a legal move that is not the solution
_RENAMED = {"best_legal": "legal_move_rate", "correct": "puzzle_accuracy"}


@dataclass(frozen=True)
class PuzzleGrader(ChessGrader):
    """1 for the solution (if it is mate, for any mate), 0.1 for another legal move, 0 for an illegal one, and
    `malformed` without a move."""

    padding: Padding = PADDINGS["source"]
    malformed: float = -0.3

    def gold(self, problem: Problem) -> str:
        move = problem.answer[0]
        return policy_completion(Analysis((move,), (0.0,), move), self.padding)

    def reward(self, problem: Problem, text: str) -> Reward:
        answer = read_policy(text, self.padding)
        best = answer.best
        parts = {
            "structure": float(answer.structure),
            "parsed": float(best is not None),
            "best_legal": float(best in legal_moves(problem.info["fen"])),
            "correct": float(best in problem.answer),
        }
        paid = max(parts["correct"], LEGAL_WORTH * parts["best_legal"])
        return Reward(paid if best is not None else self.malformed, parts, parsed=best is not None)

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        means = part_means(groups, PARTS, self.reward)
        return {_RENAMED.get(name, name): value for name, value in means.items()} | mate_in_one(groups, self.padding)


def chess_puzzles(
    path: str | None = None,
    data: Mapping[str, Any] | None = None,
    padding: str = "source",
    malformed: float | None = None,
    held_out: float = 1.0,
) -> ChessTask:
    """The task `chess_puzzles`: find the move. `path`, or `data.path`, is a file with columns FEN and Moves, where the
    first move is the opponent's and the second the solution.

    `held_out` is the fraction of puzzles for evaluation, by default all of them.
    """
    source = source_of(data)
    if (path is None) == (source.path is None):
        raise KeelError("chess_puzzles reads one file with columns FEN and Moves: give path, or data.path")
    if not isinstance(path, str | None):
        raise KeelError(f"chess_puzzles path is {path!r}: it must be a file's name")
    if not isinstance(held_out, int | float) or isinstance(held_out, bool) or not 0 < held_out <= 1:
        raise KeelError(f"chess_puzzles held_out is {held_out!r}: it must be a fraction above 0, 1 for all")
    widths = padding_of(padding)
    grader = PuzzleGrader(widths, malformed_value("graduated", malformed))
    problems = _read(source.model_copy(update={"path": path or source.path}), widths, float(held_out))
    return ChessTask(problems if problems.train else OnlyHeldOut(problems), grader, "chess_puzzles")


def _read(source: SourceOptions, padding: Padding, share: float) -> Dataset:
    assert source.path is not None
    rows = read_rows(source.path, source.split)
    missing = [name for name in COLUMNS if name not in rows.columns]
    if rows.rows and missing:
        columns = ", ".join(rows.columns)
        raise KeelError(f"{rows.source} has no column {' and '.join(missing)}, which a puzzle needs: it has {columns}")
    puzzles, notes = usable(rows, source, lambda row: _problem(row, padding))
    if not puzzles:
        raise KeelError(f"{rows.source} has no puzzles: give rows with FEN and Moves")
    positions = [identity(puzzle.info["fen"]) for puzzle in puzzles]
    chosen = split_held_out(positions, share)
    held = tuple(puzzle for puzzle, position in zip(puzzles, positions, strict=True) if position in chosen)
    train = tuple(puzzle for puzzle, position in zip(puzzles, positions, strict=True) if position not in chosen)
    if share < 1:
        evaluate = ", or held_out=1 for evaluation only"
        distinct = len(set(positions))
        check_split(rows.source, len(puzzles), len(train), len(held), distinct=distinct, more=evaluate)
    summary = f"{rows.source}: {len(held)} puzzles held out, {len(train)} to train on"
    return Dataset(f"chess_puzzles/{data_name(source)}", train, held, NoGrader(), (*notes, summary))


@dataclass(frozen=True)
class OnlyHeldOut(TaskWrapper):
    """Puzzles that are all held out."""

    inner: Task
    evaluation_only = True

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        raise KeelError("all puzzles are held out for evaluation: set held_out below 1 to train on the others")


def _problem(row: DataRow, padding: Padding) -> Problem:
    fen, moves = (row.values.get(name) for name in COLUMNS)
    if not isinstance(fen, str) or not isinstance(moves, str):
        raise KeelError("FEN or Moves is empty")
    board = board_of(fen.strip())
    line = [require_uci(move) for move in moves.split()]
    if len(line) < 2:
        raise KeelError(f"Moves is {moves!r}: it must have at least the opponent's move and the answer")
    for move in line[:2]:
        if chess.Move.from_uci(move) not in board.legal_moves:
            raise KeelError(f"the move {move} is not legal in {fen_of(board)!r}")
        board.push_uci(move)
    mates = board.is_checkmate()
    board.pop()
    position = fen_of(board)
    right = tuple(dict.fromkeys((line[1], *(mating_moves(position) if mates else ()))))
    return Problem(row.location, policy_prompt(position, padding), answer=right, info={"fen": position})
