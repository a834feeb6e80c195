"""The rules of chess, by python-chess: the environment's answer to a move, as a function of the A: prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import chess

from keel.base.errors import KeelError, unknown
from keel.recipes.chess.format import HISTORY, StepResult, require_fen

LEGAL, WIN, DRAW, ILLEGAL = 0.001, 1.0, 0.5, -1.0
Draws = Literal["claimed", "automatic"]
_HOMES = {chess.E1, chess.A1, chess.H1, chess.E8, chess.A8, chess.H8}


@dataclass(frozen=True)
class MoveOutcome:
    """A result and its reason: legal, checkmate, stalemate, insufficient material, fifty moves, repetition, illegal."""

    verdict: StepResult
    reason: str


def board_of(fen: str) -> chess.Board:
    """The position of a FEN; a KeelError if the form is invalid or the position is not playable."""
    return _valid_board(fen).copy(stack=False)


@lru_cache(maxsize=256)  # the same position is often needed several times in a row
def _valid_board(fen: str) -> chess.Board:
    require_fen(fen)
    board = chess.Board(fen)
    status = board.status()
    if status != chess.STATUS_VALID:
        fault = ", ".join(str(flag.name).lower().replace("_", " ") for flag in chess.Status if flag and flag & status)
        raise KeelError(f"the FEN {fen!r} is broken: {fault}")
    return board


def fen_of(board: chess.Board) -> str:
    """The FEN in the form used here: with an en-passant square only if such a capture is legal."""
    return board.fen(en_passant="legal")


@lru_cache(maxsize=4096)
def legal_moves(fen: str) -> tuple[str, ...]:
    """The legal moves in UCI notation, sorted; castling is the king's move (e1g1)."""
    return tuple(sorted(move.uci() for move in board_of(fen).legal_moves))


def next_positions(fen: str) -> frozenset[str]:
    """The FENs after each legal move."""
    board = board_of(fen)
    fens: set[str] = set()
    for move in list(board.legal_moves):
        board.push(move)
        fens.add(fen_of(board))
        board.pop()
    return frozenset(fens)


def mating_moves(fen: str) -> tuple[str, ...]:
    """The moves that give checkmate."""
    board = board_of(fen)
    mates = []
    for move in legal_moves(fen):
        board.push_uci(move)
        if board.is_checkmate():
            mates.append(move)
        board.pop()
    return tuple(mates)


def identity(fen: str) -> str:
    """The identity of a position: its FEN without the counters."""
    return " ".join(fen.split(" ")[:4])


def step(fen: str, move: str, history: Sequence[str] = (), draws: str = "claimed") -> MoveOutcome:
    """The environment's answer to `move` in `fen`; `history` are the moves before it, the latest last.

    The mover earns 1.0 for checkmate, 0.5 for a draw that ends the game, 0.001 for any other legal move. An illegal
    move (also one of the other side, or a promotion without its piece) earns −1.0 with `truncated`, and the position is
    unchanged. `draws: claimed` ends the game at the third repetition and after fifty moves, `automatic` after 75 moves.
    Checkmate has priority. Repetitions are counted within the prompt's moves (see `occurrences`), which are too few for
    a fifth one.
    """
    if draws not in get_args(Draws):
        raise unknown("chess draws", draws, get_args(Draws))
    board = board_of(fen)
    if move not in legal_moves(fen):
        return MoveOutcome(StepResult(fen, ILLEGAL, False, True), "illegal")
    before = board.copy()
    board.push_uci(move)
    after = fen_of(board)
    reason = _end(board, draws)
    if reason == "legal" and draws == "claimed" and occurrences(before, move, history) >= 3:
        reason = "repetition"
    reward = {"legal": LEGAL, "checkmate": WIN}.get(reason, DRAW)
    return MoveOutcome(StepResult(after, reward, reason != "legal", False), reason)


def _end(board: chess.Board, draws: str) -> str:
    if board.is_checkmate():
        return "checkmate"
    if board.is_stalemate():
        return "stalemate"
    if board.is_insufficient_material():
        return "insufficient material"
    if board.halfmove_clock >= (100 if draws == "claimed" else 150):
        return "fifty moves" if draws == "claimed" else "seventy-five moves"
    return "legal"


def occurrences(before: chess.Board, move: str, history: Sequence[str] = ()) -> int:
    """The number of occurrences of the position after `move`, including this one, that the previous moves prove.

    The moves are taken back one by one. The FEN's counter gives the number of moves that were neither captures nor pawn
    moves; only these can be taken back without guessing, and only they can lead to a repetition. The search ends at a
    move of a king or rook from its home square, which may have lost castling rights, and at a first position whose last
    move is unknown, since en passant depends on it.
    """
    moves = list(history)[-(HISTORY - 1) :]
    clock, count = before.halfmove_clock, 1
    if not moves or clock == 0:
        return count
    after = before.copy()
    after.push_uci(move)
    if after.halfmove_clock == 0:
        return count
    position, board = _key(after), before.copy(stack=False)
    for undone in range(1, min(clock, len(moves)) + 1):
        if not _take_back(board, chess.Move.from_uci(moves.pop()), moves):
            break
        if undone == clock and moves:
            last = chess.Move.from_uci(moves[-1])
            if board.piece_type_at(last.to_square) == chess.PAWN and abs(last.to_square - last.from_square) == 16:
                board.ep_square = (last.from_square + last.to_square) // 2
        elif undone == clock and clock < before.ply():
            break
        count += _key(board) == position
    return count


def _take_back(board: chess.Board, move: chess.Move, earlier: Sequence[str]) -> bool:
    """Undo a move that was neither a capture nor a pawn move; False if the previous position is not certain."""
    piece = board.piece_at(move.to_square)
    if piece is None or board.piece_at(move.from_square) or piece.color == board.turn or move.promotion:
        raise KeelError(f"the history's move {move.uci()} does not lead to {board.fen()!r}")
    if piece.piece_type == chess.KING and chess.square_distance(move.from_square, move.to_square) > 1:
        return False  # castling: no earlier position can occur again
    at_home = piece.piece_type in (chess.KING, chess.ROOK) and move.from_square in _HOMES
    came_back = any(chess.Move.from_uci(m).to_square == move.from_square for m in earlier)
    if at_home and not came_back:
        return False
    board.set_piece_at(move.from_square, board.remove_piece_at(move.to_square))
    board.turn = not board.turn
    board.ep_square = None
    return True


def _key(board: chess.Board) -> str:
    return identity(fen_of(board))
