"""Positions from games: random legal games, engine self-play, and the lines of an openings file."""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import chess
from pydantic import Field

from keel.base.errors import KeelError
from keel.recipes.chess.engine import EnginePool, Query
from keel.recipes.chess.format import HISTORY, require_uci
from keel.recipes.chess.rules import fen_of, identity

Pieces = Annotated[int, Field(ge=3, le=12)] | None
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
    """Random legal games of `plies` (from, to) half-moves, from the starting position or a random position with 3 to
    `pieces` pieces."""

    plies: tuple[int, int] = PLIES
    pieces: int | None = None

    def draw(self, rng: random.Random, accept: Callable[[str], bool] = lambda identity: True) -> Position:
        """A playable position that `accept` accepts. Otherwise the game continues, or a new one starts."""
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


def games_of(plies: Sequence[int] | None, pieces: Pieces) -> Games:
    """The generator of a task's parameters `plies: [from, to]` and `pieces`, checked."""
    if plies is None:
        return Games(PLIES if pieces is None else PLIES_FEW, pieces)
    if len(plies) != 2 or not 0 <= plies[0] <= plies[1]:
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


LINES_COLUMNS = ("uci", "pgn")
RANDOM_PLIES = 6  # number of random moves at the start of an engine game, so that games differ
NEAR = 0.5  # pawns: moves within this distance of the best are chosen with equal probability
_NO_MOVES = re.compile(r"\{[^}]*\}|;[^\n]*|\[[^]]*\]|\$\d+|(?<![a-h])\d+\.+|[!?]+|1-0|0-1|1/2-1/2|\*")
_VARIATION = re.compile(r"\([^()]*\)")
Choose = Callable[[chess.Board], chess.Move | None]


@dataclass(frozen=True)
class Ply:
    """A position of a game and the move played there."""

    position: Position
    move: str


def play(board: chess.Board, plies: int, choose: Choose) -> Iterator[Ply]:
    """A game from `board` until it is over, has `plies` moves, or `choose` has no move."""
    while len(board.move_stack) < plies and not is_over(board):
        move = choose(board)
        if move is None:
            return
        history = tuple(m.uci() for m in board.move_stack[-(HISTORY - 1) :])
        yield Ply(Position(fen_of(board), history), move.uci())
        board.push(move)


def is_over(board: chess.Board) -> bool:
    """Whether a game ends here: mate, stalemate, insufficient material, fifty moves, or third repetition."""
    return board.is_game_over() or board.halfmove_clock >= 100 or board.is_repetition(3)


def at_random(rng: random.Random) -> Choose:
    """Choose a random legal move."""
    return lambda board: rng.choice(list(board.legal_moves))


def by_engine(rng: random.Random, pool: EnginePool) -> Choose:
    """Choose a few random moves, then one of the engine's moves near its best; None if the engine fails."""
    anything = at_random(rng)

    def choose(board: chess.Board) -> chess.Move | None:
        if len(board.move_stack) < RANDOM_PLIES:
            return anything(board)
        lines = pool.analyse([Query(fen_of(board))])[0]
        if not lines:
            return None
        near = [move for move, value in lines if value >= lines[0][1] - NEAR]
        return chess.Move.from_uci(rng.choice(near))

    return choose


def along(moves: tuple[str, ...], after: Choose) -> Choose:
    """Choose the moves of a line, then those of `after`."""

    def choose(board: chess.Board) -> chess.Move | None:
        played = len(board.move_stack)
        return chess.Move.from_uci(moves[played]) if played < len(moves) else after(board)

    return choose


@lru_cache(maxsize=2)
def read_openings(path: str) -> tuple[tuple[str, ...], ...]:
    """The lines of a tab- or comma-separated file with a column `uci` (moves) or `pgn` (moves in SAN), as UCI moves."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KeelError(f"cannot read --openings {path}: {why}") from error
    first = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if "\t" in first or "," not in first else ",")
    columns = [name or "" for name in reader.fieldnames or ()]
    column = next((name for name in LINES_COLUMNS if name in columns), None)
    if column is None:
        listed = ", ".join(columns) or "none"
        raise KeelError(f"{path} has no column uci or pgn, with an opening's moves: its columns are {listed}")
    lines = []
    for row in reader:
        try:
            lines.append(_line(row[column] or "", column))
        except (ValueError, KeelError) as error:
            raise KeelError(f"{path}, line {reader.line_num}: {str(error) or 'no moves'}") from error
    if not lines:
        raise KeelError(f"{path} has no openings: give one per line below the header")
    return tuple(lines)


def _line(text: str, column: str) -> tuple[str, ...]:
    board = chess.Board()
    if column == "uci":
        for move in text.split():
            board.push_uci(require_uci(move))
    else:
        for san in _san_moves(text):
            try:
                board.push_san(san)
            except ValueError as error:
                raise KeelError(f"the move {san!r} of {text[:40]!r} is not legal") from error
    moves = tuple(move.uci() for move in board.move_stack)
    if not moves:
        raise KeelError(f"{text[:40]!r} has no moves")
    return moves


def _san_moves(text: str) -> list[str]:
    """The moves of a PGN, without headers, comments, variations, numbers, annotations and the result.

    python-chess silently ends a line at a move that it cannot parse.
    """
    rest, variations = _NO_MOVES.sub(" ", text), 1
    while variations:
        rest, variations = _VARIATION.subn(" ", rest)
    return rest.split()
