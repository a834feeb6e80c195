"""Whole games: results by the rules, forfeits counted, PGN that reads back, and the command."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import chess
import chess.pgn
import pytest

from keel import cli
from keel.base.errors import KeelError
from keel.recipes.chess.__main__ import app
from keel.recipes.chess.engine import StockfishOptions, pool_of
from keel.recipes.chess.matches import PlayedGame, Player, engine_mover, play_games, random_mover, tally

main = partial(cli.main, app=app)


def script(moves: Sequence[str]) -> object:
    """A player of given moves, by the ply."""
    return lambda games: [moves[len(game.board.move_stack)] for game in games]


FOOLS_MATE = ("f2f3", "e7e5", "g2g4", "d8h4")


def test_the_mated_side_loses_whoever_is_the_model() -> None:
    player = script(FOOLS_MATE)
    white, black = play_games(player, player, 2, opening_plies=0)
    assert (white.result, white.score, white.reason) == ("0-1", 0.0, "checkmate")
    assert (black.result, black.score) == ("0-1", 1.0)
    assert tally([white, black]) == {
        "games": 2,
        "wins": 1,
        "draws": 0,
        "losses": 1,
        "forfeits": 0,
        "unfinished": 0,
    }


@pytest.mark.parametrize(("move", "reason"), [("e2e5", "illegal move e2e5"), (None, "no readable move")])
def test_an_illegal_or_missing_move_forfeits(move: str | None, reason: str) -> None:
    games = play_games(lambda games: [move for _ in games], random_mover(0), 4)
    assert [game.score for game in games] == [0.0] * 4
    assert {game.reason for game in games} == {reason}
    assert tally(games)["forfeits"] == 4
    assert games[0].result == "0-1"
    assert games[1].result == "1-0"


def test_an_opponent_without_a_move_leaves_the_game_unfinished() -> None:
    games = play_games(random_mover(0), lambda games: [None for _ in games], 3, opening_plies=0)
    assert [game.score for game in games] == [None] * 3
    assert tally(games)["unfinished"] == 3
    assert tally(games)["forfeits"] == 0


def test_repetition_and_length_are_draws() -> None:
    dance = ("g1f3", "g8f6", "f3g1", "f6g8")
    endless = lambda games: [dance[len(game.board.move_stack) % 4] for game in games]  # noqa: E731
    (game,) = play_games(endless, endless, 1, opening_plies=0)
    assert (game.result, game.score, game.reason) == ("1/2-1/2", 0.5, "threefold repetition")
    (game,) = play_games(endless, endless, 1, opening_plies=0, max_plies=3)
    assert (game.score, game.reason) == (0.5, "length (3 plies)")


def test_games_repeat_under_a_seed_and_pairs_share_their_opening() -> None:
    one, again = (play_games(random_mover(1), random_mover(2), 4, max_plies=20, seed=3) for _ in range(2))
    assert [g.board.fen() for g in one] == [g.board.fen() for g in again]
    starts = [tuple(m.uci() for m in game.board.move_stack[:4]) for game in one]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert [game.model_is_white for game in one] == [True, False, True, False]


def test_stockfish_beats_a_random_mover() -> None:
    pool = pool_of(StockfishOptions(nodes=500, workers=1))
    games = play_games(engine_mover(pool), random_mover(0), 2, max_plies=120)
    assert tally(games)["wins"] == 2
    assert {game.reason for game in games} == {"checkmate"}


def test_the_opponent_answers_games_at_the_same_time_from_the_first_move_on() -> None:
    """Each of its moves waits until all four games ask for one."""
    together = threading.Barrier(4, timeout=30)

    def opponent(games: Sequence[PlayedGame]) -> list[str | None]:
        together.wait()
        return random_mover(0)(games)

    games = [g for g in play_games(random_mover(1), opponent, 8, max_plies=1, opening_plies=0) if not g.model_is_white]
    assert [len(game.board.move_stack) for game in games] == [1] * 4
    alone = play_games(random_mover(1), random_mover(0), 8, max_plies=1, opening_plies=0, at_once=1)
    assert [g.board.fen() for g in games] == [g.board.fen() for g in alone if not g.model_is_white]


@pytest.mark.parametrize("breaks", [None, "model", "opponent"])
def test_threads_end_however_the_games_end(breaks: str | None) -> None:
    def mover(name: str) -> Player:
        def moves(games: Sequence[PlayedGame]) -> list[str | None]:
            if breaks == name:
                raise KeelError(f"no {name}")
            return random_mover(1)(games)

        return moves

    before = threading.active_count()
    with pytest.raises(KeelError, match=f"no {breaks}") if breaks else nullcontext():
        play_games(mover("model"), mover("opponent"), 4, max_plies=4, opening_plies=0)
    assert threading.active_count() == before


def test_pgn_reads_back() -> None:
    games = play_games(random_mover(1), random_mover(2), 2, max_plies=30)
    for game in games:
        read = chess.pgn.read_game(io.StringIO(game.pgn("model", "other")))
        assert read is not None
        assert not read.errors
        assert read.end().board().fen() == game.board.fen()
        assert read.headers["Result"] == game.result
        assert read.headers["White"] == ("model" if game.model_is_white else "other")
    assert PlayedGame(0, True).score is None


def test_the_command_plays_counts_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pgn, boards = tmp_path / "games.pgn", tmp_path / "boards"
    words = ["--games", "2", "--max-tokens", "4", "--pgn", str(pgn), "--svg", str(boards), "--json"]
    assert main(["play", "tiny", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["forfeits"] == data["losses"] == 2  # random weights do not write moves
    assert data["score"] == 0
    assert data["ci95"][1] > 0.4
    assert pgn.read_text().count("[Event") == 2
    assert sorted(path.name for path in boards.iterdir()) == ["game-001.svg", "game-002.svg"]
