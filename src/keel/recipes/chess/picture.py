"""Draw a board (SVG) with the model's answer and the correct one."""

from __future__ import annotations

import chess
import chess.svg

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.recipes.chess.format import is_uci, read_env, read_policy
from keel.recipes.chess.rules import board_of

SIZE = 240
RIGHT, WRONG, ENGINE = "#15781b88", "#c0392b99", "#1f5fa888"


def answer_picture(problem: Problem, text: str) -> str | None:
    """The board of an answer. A: the answer's position, with wrong squares in red. P: the best move as an arrow, green
    if it is also the engine's, and otherwise the engine's in blue. None if no board can be drawn."""
    try:
        board = board_of(problem.info["fen"])
    except KeelError:
        return None
    return _environment(problem, text) if "move" in problem.info else _policy(problem, board, text)


def board_picture(board: chess.Board) -> str:
    """A position with its last move."""
    return str(chess.svg.board(board, size=SIZE, lastmove=board.move_stack[-1] if board.move_stack else None))


def _environment(problem: Problem, text: str) -> str:
    fen, truth = read_env(text).fen, chess.Board(problem.answer[0])
    shown = chess.Board(fen) if fen is not None else chess.Board(None)
    wrong = {s: WRONG for s in chess.SQUARES if shown.piece_at(s) != truth.piece_at(s)}
    move = chess.Move(*_squares(problem.info["move"]))
    return str(chess.svg.board(shown, size=SIZE, fill=wrong, lastmove=move))


def _policy(problem: Problem, board: chess.Board, text: str) -> str:
    best = read_policy(text).best
    lines = problem.info.get("lines") or ()
    right_move = lines[0][0] if lines else problem.answer[0] if problem.answer else None
    arrows = []
    if right_move is not None and right_move != best:
        arrows.append(_arrow(right_move, ENGINE))
    if best is not None and is_uci(best):
        arrows.append(_arrow(best, RIGHT if best == right_move else WRONG))
    return str(chess.svg.board(board, size=SIZE, arrows=arrows))


def _arrow(move: str, color: str) -> chess.svg.Arrow:
    return chess.svg.Arrow(*_squares(move), color=color)


def _squares(move: str) -> tuple[chess.Square, chess.Square]:
    """The squares of a move; both may be the same, since a model may write e2e2, which is drawn as a circle."""
    return chess.parse_square(move[:2]), chess.parse_square(move[2:4])
