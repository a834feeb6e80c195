"""Random positions from seeded legal games, from the starting position or from a few pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import chess

from keel.base.errors import KeelError
from keel.recipes.chess.format import HISTORY
from keel.recipes.chess.rules import fen_of, identity

PLIES = (0, 80)
PLIES_FEW = (0, 12)
_MAX_GAMES = 1000
_SQUARES = [chess.square_name(square) for square in chess.SQUARES]


@dataclass(frozen=True)
class Position:
    """A position and the last moves before it (at most nine), in order."""

    fen: str
    history: tuple[str, ...] = ()


@dataclass(frozen=True)
class Games:
    """Random legal games of `plies` moves (from, to), from the starting position or from a random position with 3 to
    `pieces` pieces."""

    plies: tuple[int, int] = PLIES
    pieces: int | None = None

    def draw(self, rng: random.Random, accept: Callable[[str], bool] = lambda identity: True) -> Position:
        """A playable position that `wanted` accepts: otherwise the game continues, or a new one starts."""
        for _ in range(_MAX_GAMES):
            board = self._start(rng)
            plies = rng.randint(*self.plies)
            while True:
                if not any(board.generate_legal_moves()) or board.is_insufficient_material():
                    break
                if len(board.move_stack) >= plies and accept(identity(fen_of(board))):
                    history = tuple(move.uci() for move in board.move_stack[-(HISTORY - 1) :])
                    return Position(fen_of(board), history)
                if len(board.move_stack) >= self.plies[1]:
                    break
                board.push(rng.choice(list(board.legal_moves)))
        raise KeelError(f"{_MAX_GAMES} random games had no suitable position: widen plies, which is {self.plies}")

    def _start(self, rng: random.Random) -> chess.Board:
        return chess.Board() if self.pieces is None else few_pieces(rng, rng.randint(3, self.pieces))


def few_pieces(rng: random.Random, count: int) -> chess.Board:
    """A random valid position of two kings and `count` − 2 other pieces, without castling rights."""
    while True:
        board = chess.Board(None)
        for number, square in enumerate(rng.sample(range(64), count)):
            kind = chess.KING if number < 2 else rng.choice(chess.PIECE_TYPES[:5])
            color = bool(number % 2) if number < 2 else rng.random() < 0.5
            board.set_piece_at(square, chess.Piece(kind, color))
        board.turn = rng.random() < 0.5
        if board.is_valid():
            return board


def games_of(plies: Sequence[int] | None, pieces: int | None) -> Games:
    """The generator of a task's parameters `plies: [from, to]` and `pieces`, checked."""
    if pieces is not None and not (isinstance(pieces, int) and 3 <= pieces <= 12):
        raise KeelError(f"chess pieces is {pieces!r}: it must be from 3 to 12, or null for games from the start")
    if plies is None:
        return Games(PLIES if pieces is None else PLIES_FEW, pieces)
    fine = isinstance(plies, Sequence) and len(plies) == 2 and all(isinstance(n, int) for n in plies)
    if not fine or not 0 <= plies[0] <= plies[1]:
        raise KeelError(f"chess plies is {plies!r}: it must be [from, to] with 0 <= from <= to")
    return Games((plies[0], plies[1]), pieces)


def any_move(rng: random.Random, legal: Sequence[str], illegal_share: float) -> str:
    """A random legal move; with probability `illegal_share`, one of the same form that is not legal."""
    if rng.random() >= illegal_share:
        return rng.choice(legal)
    while True:
        move = rng.choice((rng.choice(legal)[:2], rng.choice(_SQUARES))) + rng.choice(_SQUARES)
        if move not in legal and move[:2] != move[2:]:
            return move
