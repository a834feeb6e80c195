"""Making chess data: every row is true and earns the full reward, no position comes twice, a kill changes nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import pytest

from keel import cli
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.registry import build_task
from keel.recipes.chess.__main__ import app
from keel.recipes.chess.format import read_env_row, read_policy_row
from keel.recipes.chess.make import MakeOptions, check_options, checked, game_items
from keel.recipes.chess.positions import read_openings
from keel.recipes.chess.rules import identity

from .fake_engine import fake_engine

pytestmark = pytest.mark.processes


OPENINGS = "eco\tname\tpgn\nB00\tKing's Pawn\t1. e4\nC20\tWayward Queen\t1. e4 e5 2. Qh5\n"

main = partial(cli.main, app=app)


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    names = ("train", "held_out")
    return {n: [json.loads(line) for line in (folder / f"{n}.jsonl").read_text().splitlines()] for n in names}


def made(folder: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    assert main(["data", "--out", str(folder), "--jobs", "1", *words]) == 0
    return rows_of(folder)


def test_environment_rows_say_what_the_rules_say(tmp_path: Path) -> None:
    sides = made(tmp_path / "a", "--rows", "300", "--illegal", "0.2")
    rows = sides["train"] + sides["held_out"]
    assert len(rows) == 300
    illegal = 0
    for row in rows:
        assert set(row) == {"prompt", "completion", "game"}
        fen, move, history, said = read_env_row(row["prompt"] + row["completion"])
        board = chess.Board(fen)
        assert history[-1] == move
        if chess.Move.from_uci(move) in board.legal_moves:
            board.push_uci(move)
            assert said.fen == board.fen(en_passant="legal")
            assert not said.truncated
        else:
            illegal += 1
            assert (said.fen, said.reward, said.truncated) == (fen, -1.0, True)
    assert 0.1 < illegal / len(rows) < 0.3


def test_no_position_twice_and_no_game_on_both_sides(tmp_path: Path) -> None:
    sides = made(tmp_path / "a", "--rows", "400", "--plies", "12")
    positions = [identity(row["prompt"][3:].split("+")[0]) for side in sides.values() for row in side]
    assert len(positions) == len(set(positions))
    games = {name: {row["game"] for row in side} for name, side in sides.items()}
    assert games["train"]
    assert games["held_out"]
    assert not games["train"] & games["held_out"]
    assert json.loads((tmp_path / "a" / "data.json").read_text())["made"]["duplicates"] > 0


def test_the_task_reads_the_two_files_and_splits_them_alike(tmp_path: Path) -> None:
    sides = made(tmp_path / "a", "--rows", "300", "--max-pieces", "4", "--history", "1")
    paths = [str(tmp_path / "a" / f"{name}.jsonl") for name in ("train", "held_out")]
    task = build_task("chess_env", data={"path": paths}, history=1)
    held = {problem.prompt for problem in task.held_out(10_000)}
    assert held == {row["prompt"] for row in sides["held_out"]}
    asked = {problem.prompt for problem in task.sample(len(sides["train"]), seed=0, step=0)}
    assert asked == {row["prompt"] for row in sides["train"]}
    for problem in task.held_out(10):
        assert task.reward(problem, [task.gold(problem)]).total == pytest.approx(1.5)


def test_few_pieces_and_one_move_of_history(tmp_path: Path) -> None:
    for row in made(tmp_path / "a", "--rows", "200", "--max-pieces", "3", "--plies", "3", "--history", "1")["train"]:
        fen, move, history, _ = read_env_row(row["prompt"] + row["completion"])
        assert len(chess.Board(fen).piece_map()) <= 3
        assert history == (move,)


@pytest.mark.parametrize("games", ["random", "engine", "openings"])
def test_policy_rows_are_labelled_and_earn_the_full_reward(games: str, tmp_path: Path) -> None:
    (tmp_path / "openings.tsv").write_text(OPENINGS)
    extra = ["--openings", str(tmp_path / "openings.tsv")] if games == "openings" else []
    words = ["--kind", "both", "--rows", "24", "--plies", "10", "--nodes", "300", "--games", games, *extra]
    sides = made(tmp_path / "p", *words)
    rows = sides["train"] + sides["held_out"]
    policy = [row for row in rows if row["prompt"].startswith("P: ")]
    assert len(policy) == 12
    for row in policy:
        fen, analysis = read_policy_row(row["prompt"] + row["completion"])
        legal = {move.uci() for move in chess.Board(fen).legal_moves}
        assert set(analysis.moves) <= legal
        assert len(analysis.moves) == min(5, len(legal))
        assert dict(zip(analysis.moves, analysis.evaluations, strict=True))[analysis.best] == max(analysis.evaluations)


def test_rows_that_the_engine_did_not_label_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KEEL_STOCKFISH", fake_engine(tmp_path, "board.turn == chess.BLACK and sys.exit(1)"))
    # a pool belongs to its options: 4321 nodes are no other test's
    words = ["--kind", "both", "--rows", "18", "--plies", "12", "--nodes", "4321"]
    sides = made(tmp_path / "both", *words)
    assert "\n6 P: rows are missing because the engine failed" in capsys.readouterr().out
    rows = [row["prompt"] for row in sides["train"] + sides["held_out"]]
    assert len(rows) == 18
    assert {prompt.split()[2] for prompt in rows if prompt.startswith("P: ")} == {"w"}
    assert json.loads((tmp_path / "both" / "data.json").read_text())["made"]["unavailable"] == 6
    again = main(["data", "--out", str(tmp_path / "both"), "--jobs", "1", *words, "--json"])
    assert (again, json.loads(capsys.readouterr().out)["unavailable"]) == (0, 6)


@pytest.mark.parametrize("kind", ["p", "a"])
def test_a_dead_engine_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KEEL_STOCKFISH", fake_engine(tmp_path, "sys.exit(1)"))
    words = ["--kind", kind, "--games", "engine", "--rows", "5", "--plies", "40", "--nodes", f"{4322 + (kind == 'a')}"]
    assert main(["data", "--out", str(tmp_path / "p"), "--jobs", "1", *words]) == 2
    error = capsys.readouterr().err
    assert "fake-engine answered for none of" in error
    assert error.count("\n") == 1


def test_an_opening_is_played_to_its_end_and_then_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "openings.tsv"
    path.write_text(OPENINGS)
    options = MakeOptions(games=("openings",), openings=str(path), plies=6, illegal=0.0)
    prompts = [json.loads(rows[0])["prompt"] for _, rows, _ in game_items(options, 1)]
    moves = [read_env_row(p + "8/8/8/8/8/8/8/8 w - - 0 1+0.001+0+0")[1] for p in prompts]
    assert moves[:3] == ["e2e4", "e7e5", "d1h5"]
    assert len(moves) == 6


def test_a_killed_making_goes_on_and_gives_the_same_files(tmp_path: Path) -> None:
    words = ["--rows", "1500", "--max-pieces", "3", "--plies", "4", "--history", "1", "--jobs", "1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["data", "--out", str(whole), *words]) == 0
    command = [sys.executable, "-m", "keel.recipes.chess", "data", "--out", str(cut), *words]
    process = subprocess.Popen(command, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not (cut / "parts" / "000000").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "train.jsonl").exists()
    assert main(["data", "--out", str(cut), *words]) == 0
    for name in ("train.jsonl", "held_out.jsonl", "data.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert not (cut / "parts").exists()


def test_processes_do_not_change_the_result(tmp_path: Path) -> None:
    words = ["--rows", "600", "--max-pieces", "3", "--plies", "4"]
    one = made(tmp_path / "one", *words)
    assert main(["data", "--out", str(tmp_path / "two"), "--jobs", "2", *words]) == 0
    assert rows_of(tmp_path / "two") == one


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    made(out, "--rows", "50")
    before = (out / "train.jsonl").stat().st_mtime_ns
    made(out, "--rows", "50")
    assert (out / "train.jsonl").stat().st_mtime_ns == before
    assert main(["data", "--out", str(out), "--rows", "50", "--seed", "3"]) == 2
    assert "another seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pgn",
    [
        "1. e4 e5 2. Nf3 Nc6 3. Bc4 Nf6 4. O-O",
        "1.e4! e5?! 2.Nf3 $1 Nc6 3.Bc4 Nf6 4.O-O 1/2-1/2",
        "1. e4 {the king's pawn} 1... e5 (1... c5 2. Nf3 (2. c3)) 2. Nf3 Nc6 3. Bc4 Nf6 4. O-O *",
    ],
)
def test_pgn_openings_are_read_as_they_are_written(pgn: str, tmp_path: Path) -> None:
    path = tmp_path / "openings.tsv"
    path.write_text(f"pgn\tname\n{pgn}\tItalian\n")
    game = chess.pgn.read_game(io.StringIO(pgn))
    assert game is not None
    moves = tuple(move.uci() for move in game.mainline_moves())
    assert read_openings(str(path)) == (moves,)
    assert len(moves) == 7


def test_a_row_that_does_not_earn_the_full_reward_is_refused() -> None:
    lie = Problem("x", f"A: {chess.STARTING_FEN}+e2e4+e2e4+", (chess.STARTING_FEN, 0.5, False, False))
    checked(MakeOptions(), "a", Problem(lie.key, lie.prompt, lie.answer, {"fen": chess.STARTING_FEN}))
    with pytest.raises(KeelError, match="please report"):
        checked(MakeOptions(), "a", Problem(lie.key, lie.prompt, lie.answer, {"fen": "8/8/8/8/8/8/8/8 w - - 0 1"}))
    check_options(MakeOptions())
