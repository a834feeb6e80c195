"""Play whole games between the model and an opponent, many at a time, with a PGN of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import chess
import chess.pgn

from keel.envs import Episode
from keel.envs.problems import seeded_rng
from keel.recipes.chess.engine import EnginePool, Query
from keel.recipes.chess.positions import is_over
from keel.recipes.chess.rules import fen_of

# Returns one move per game in UCI notation, or None if there is none.
Player = Callable[[Sequence["PlayedGame"]], list[str | None]]
OnFinished = Callable[[int], None]
SCORES = {True: {"1-0": 1.0, "0-1": 0.0}, False: {"1-0": 0.0, "0-1": 1.0}}
UNFINISHED = "*"


@dataclass
class PlayedGame(Episode):
    """A game against an opponent after the opening: `step` takes the model's move and returns the opponent's."""

    number: int
    model_is_white: bool
    opponent: Player | None = None
    max_plies: int = 200
    board: chess.Board = field(default_factory=chess.Board)
    result: str | None = None
    reason: str = ""

    @property
    def models_turn(self) -> bool:
        return (self.board.turn == chess.WHITE) == self.model_is_white

    @property
    def score(self) -> float | None:
        """The model's score: 1, 0.5 or 0; None if the game could not be finished."""
        return None if self.result in (None, UNFINISHED) else SCORES[self.model_is_white].get(str(self.result), 0.5)

    def step(self, text: str) -> str | None:
        """The opponent's answer to the model's move, both in UCI notation; None if the game is over.

        A move that is illegal, or empty because it could not be parsed, loses at once. If it is the opponent's turn,
        the model's move is ignored.
        """
        if self.models_turn and not self._push(text):
            self.end("0-1" if self.model_is_white else "1-0", f"illegal move {text}" if text else "no readable move")
        return self.answer()

    def reward(self) -> float:
        return self.score or 0.0

    def answer(self) -> str | None:
        """Play the opponent's move if it is its turn; without a move the game stays unfinished."""
        if self.is_over or self.models_turn or self.opponent is None:
            return None
        (move,) = self.opponent([self])
        if not self._push(move or ""):
            self.end(UNFINISHED, "the engine gave no move")
        return None if self.is_over else move

    @property
    def is_over(self) -> bool:
        """Whether the game has ended by the rules or by its length; stores the reason."""
        if self.result is None and is_over(self.board):
            outcome = self.board.outcome(claim_draw=True)
            reason = "draw" if outcome is None else outcome.termination.name.lower().replace("_", " ")
            self.end("1/2-1/2" if outcome is None else outcome.result(), reason)
        elif self.result is None and len(self.board.move_stack) >= self.max_plies:
            self.end("1/2-1/2", f"length ({self.max_plies} plies)")
        return self.result is not None

    def end(self, result: str, reason: str) -> None:
        self.result, self.reason = result, reason

    def _push(self, move: str) -> bool:
        """Play a move if it is legal."""
        legal = next((candidate for candidate in self.board.legal_moves if candidate.uci() == move), None)
        if legal is not None:
            self.board.push(legal)
        return legal is not None

    def pgn(self, model: str, opponent: str) -> str:
        """The PGN of the game, with the reason of its end."""
        game = chess.pgn.Game.from_board(self.board)
        white, black = (model, opponent) if self.model_is_white else (opponent, model)
        game.headers.update({"Event": "keel chess", "Round": str(self.number + 1), "White": white, "Black": black})
        game.headers["Result"] = self.result or UNFINISHED
        game.headers["Termination"] = self.reason
        return str(game)


def random_mover(seed: int) -> Player:
    """A player of random legal moves, with a random stream per game and ply."""

    def move(game: PlayedGame) -> str | None:
        rng = seeded_rng("chess", "mover", seed, game.number, len(game.board.move_stack))
        return rng.choice(sorted(move.uci() for move in game.board.legal_moves))

    return lambda games: [move(game) for game in games]


def engine_mover(pool: EnginePool) -> Player:
    """A player of the engine's best moves; None if the engine failed."""

    def moves(games: Sequence[PlayedGame]) -> list[str | None]:
        analyses = pool.analyse([Query(fen_of(game.board)) for game in games])
        return [lines[0][0] if lines else None for lines in analyses]

    return moves


def play_games(
    model: Player,
    opponent: Player,
    count: int,
    *,
    opening_plies: int = 4,
    max_plies: int = 200,
    seed: int = 0,
    at_once: int = 16,
    on_finished: OnFinished | None = None,
) -> list[PlayedGame]:
    """Play `count` games; the model has white in every other one, and each pair starts with the same random moves.

    The opponent plays `at_once` games at the same time. After `max_plies` a game is a draw. A game whose opponent gave
    no move stays unfinished and does not count.
    """
    games = [PlayedGame(number, number % 2 == 0, opponent, max_plies) for number in range(count)]
    for game in games:
        rng = seeded_rng("chess opening", seed, game.number // 2)
        while len(game.board.move_stack) < opening_plies and not game.board.is_game_over():
            game.board.push(rng.choice(list(game.board.legal_moves)))
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(PlayedGame.answer, (game for game in games if not game.models_turn)))
        while live := [game for game in games if not game.is_over]:
            list(pool.map(PlayedGame.step, live, (move or "" for move in model(live))))
            if on_finished is not None:
                on_finished(sum(game.is_over for game in live))
    return games


def tally(games: Sequence[PlayedGame]) -> dict[str, int]:
    """Wins, draws and losses of the model, forfeits (which are also losses), and unfinished games."""
    scores = [game.score for game in games]
    return {
        "games": len(games),
        "wins": scores.count(1.0),
        "draws": scores.count(0.5),
        "losses": scores.count(0.0),
        "forfeits": sum(game.reason.startswith(("illegal", "no readable")) for game in games),
        "unfinished": scores.count(None),
    }
