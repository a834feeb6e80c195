"""Whole games between a player of moves and an opponent, many at a time, with PGN of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import chess
import chess.pgn

from keel.envs.chess.engine import Pool, Query
from keel.envs.chess.rules import fen_of
from keel.envs.chess.selfplay import is_over
from keel.envs.problems import stream

# The moves of several games at once, in UCI notation; None where there is none to give.
Player = Callable[[Sequence["Game"]], list[str | None]]
Watch = Callable[[int], None]
SCORES = {True: {"1-0": 1.0, "0-1": 0.0}, False: {"1-0": 0.0, "0-1": 1.0}}
UNFINISHED = "*"


@dataclass
class Game:
    """A game as it is played: who is the model, and how it ended."""

    number: int
    model_is_white: bool
    board: chess.Board = field(default_factory=chess.Board)
    result: str | None = None
    reason: str = ""

    @property
    def models_turn(self) -> bool:
        return (self.board.turn == chess.WHITE) == self.model_is_white

    @property
    def score(self) -> float | None:
        """The model's: 1, 0.5 or 0; None where the game could not be finished."""
        return None if self.result in (None, UNFINISHED) else SCORES[self.model_is_white].get(str(self.result), 0.5)

    def end(self, result: str, reason: str) -> None:
        self.result, self.reason = result, reason

    def pgn(self, model: str, opponent: str) -> str:
        """The game with its moves and why it ended."""
        game = chess.pgn.Game.from_board(self.board)
        white, black = (model, opponent) if self.model_is_white else (opponent, model)
        game.headers.update({"Event": "keel play-chess", "Round": str(self.number + 1), "White": white, "Black": black})
        game.headers["Result"] = self.result or UNFINISHED
        game.headers["Termination"] = self.reason
        return str(game)


def random_mover(seed: int) -> Player:
    """Any legal move, by a stream of each game's own."""
    return lambda games: [_random_move(g, "mover", seed) for g in games]


def engine_mover(pool: Pool) -> Player:
    """The engine's best move; None where no engine answered."""

    def moves(games: Sequence[Game]) -> list[str | None]:
        found = pool.analyse([Query(fen_of(game.board)) for game in games])
        return [lines[0][0] if lines else None for lines in found]

    return moves


def play_games(
    model: Player,
    opponent: Player,
    count: int,
    *,
    opening_plies: int = 4,
    max_plies: int = 200,
    seed: int = 0,
    told: Watch | None = None,
) -> list[Game]:
    """`count` games, the model white in every other one; two in a row begin with the same random moves.

    A move of the model's that is not legal, or cannot be read, loses at once. After `max_plies` the game is a draw by
    length. A game whose opponent gave no move stays unfinished and counts for nobody.
    """
    games = [Game(number, number % 2 == 0) for number in range(count)]
    for game in games:
        rng = stream("chess opening", seed, game.number // 2)
        while len(game.board.move_stack) < opening_plies and not game.board.is_game_over():
            game.board.push(rng.choice(list(game.board.legal_moves)))
    while live := [game for game in games if game.result is None]:
        for side, mover in ((True, model), (False, opponent)):
            turn = [game for game in live if game.models_turn == side and not _ended(game, max_plies)]
            if turn:
                for game, move in zip(turn, mover(turn), strict=True):
                    _make(game, move, by_model=side)
        if told is not None:
            told(sum(game.result is not None for game in live))
    return games


def _make(game: Game, move: str | None, *, by_model: bool) -> None:
    legal = {m.uci(): m for m in game.board.legal_moves}
    if move in legal:
        game.board.push(legal[str(move)])
    elif by_model:
        said = "no readable move" if move is None else f"illegal move {move}"
        game.end("0-1" if game.model_is_white else "1-0", said)
    else:
        game.end(UNFINISHED, "the engine gave no move")


def _ended(game: Game, max_plies: int) -> bool:
    """Whether the game is over, which is then noted."""
    if game.result is None and is_over(game.board):
        outcome = game.board.outcome(claim_draw=True)
        reason = "draw" if outcome is None else outcome.termination.name.lower().replace("_", " ")
        game.end("1/2-1/2" if outcome is None else outcome.result(), reason)
    elif game.result is None and len(game.board.move_stack) >= max_plies:
        game.end("1/2-1/2", f"length ({max_plies} plies)")
    return game.result is not None


def _random_move(game: Game, name: str, seed: int) -> str | None:
    rng = stream("chess", name, seed, game.number, len(game.board.move_stack))
    return rng.choice(sorted(move.uci() for move in game.board.legal_moves))


def tally(games: Sequence[Game]) -> dict[str, int]:
    """Wins, draws and losses of the model, forfeits among the losses, and games that were not finished."""
    scores = [game.score for game in games]
    return {
        "games": len(games),
        "wins": scores.count(1.0),
        "draws": scores.count(0.5),
        "losses": scores.count(0.0),
        "forfeits": sum(game.reason.startswith(("illegal", "no readable")) for game in games),
        "unfinished": scores.count(None),
    }
