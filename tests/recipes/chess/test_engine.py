"""The engine: labels that are right for both colours, repeat, are kept, and survive what processes do."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import chess
import chess.engine
import pytest

from keel.base.errors import KeelError
from keel.recipes.chess import engine as engine_module
from keel.recipes.chess.engine import EnginePool, Query, StockfishOptions, engine_options, pawns_of
from keel.recipes.chess.policy import chess_policy

from .fake_engine import fake_engine
from .positions import random_game
from .stockfish import needs_stockfish

pytestmark = pytest.mark.processes


NODES = 4000


def pool(folder: Path, cache: str = "cache.sqlite", **options: object) -> EnginePool:
    return EnginePool(StockfishOptions(**{"nodes": NODES, "workers": 2, "cache": str(folder / cache), **options}))  # type: ignore[arg-type]


def some_positions(count: int) -> list[str]:
    fens = [board.fen() for seed in range(4) for board, _ in random_game(seed, 60) if any(board.legal_moves)]
    return fens[:: max(1, len(fens) // count)][:count]


# ------------------------------------------------------------------------------------------------ an own search


VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9, chess.KING: 0}


def material(board: chess.Board) -> float:
    """For the side to move."""
    own = sum(VALUES[p.piece_type] * (1 if p.color == board.turn else -1) for p in board.piece_map().values())
    return float(own)


def search(board: chess.Board, depth: int, low: float = -1e9, high: float = 1e9) -> float:
    """Plain alpha-beta over material, mates first; it goes on through captures at the end."""
    if board.is_checkmate():
        return -1000.0 - depth
    if board.is_stalemate() or board.is_insufficient_material():
        return 0.0
    moves = list(board.legal_moves)
    if depth <= 0:
        still = material(board)
        if still >= high or depth <= -4:
            return still
        low, moves = max(low, still), [m for m in moves if board.is_capture(m)]
    for move in sorted(moves, key=board.is_capture, reverse=True):
        board.push(move)
        value = -search(board, depth - 1, -high, -low)
        board.pop()
        low = max(low, value)
        if low >= high:
            break
    return low


def move_values(fen: str, depth: int) -> dict[str, float]:
    board = chess.Board(fen)
    found = {}
    for move in list(board.legal_moves):
        board.push(move)
        found[move.uci()] = -search(board, depth - 1)
        board.pop()
    return found


# a queen to be won, a fork, a mate: by White; the other side's are their mirror images
TACTICS = [
    "rnb1kbnr/pppp1ppp/8/4p1q1/4P3/3P4/PPP2PPP/RNBQKBNR w KQkq - 1 3",  # takes the queen
    "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1",  # mate on the back rank
    "7k/8/8/3q4/8/4N3/P7/K7 w - - 0 1",  # takes the queen
    "4k3/8/8/3q4/8/8/8/3RK3 w - - 0 1",  # takes it along the file
    "r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4",  # mate on f7
    "k7/8/1K6/8/8/8/8/7R w - - 0 1",  # mate on the last rank
]


@needs_stockfish
def test_labels_are_right_for_both_colours_by_an_independent_search(tmp_path: Path) -> None:
    """The best move is among those that an own alpha-beta finds best, for White and, mirrored, for Black."""
    whites = TACTICS
    blacks = [chess.Board(fen).mirror().fen() for fen in whites]
    answers = pool(tmp_path, nodes=20_000).analyse([Query(fen) for fen in (*whites, *blacks)])
    only = []
    for fen, lines in zip((*whites, *blacks), answers, strict=True):
        assert lines
        values = move_values(fen, 2)
        best = {move for move, value in values.items() if value >= max(values.values()) - 0.5}
        assert len(best) < len(values) / 2
        assert lines[0][0] in best, (fen, lines, best)
        only.append(len(best) == 1)
    count = len(whites)
    assert sum(only) >= 6
    for white, black, one in zip(answers[:count], answers[count:], only, strict=False):
        assert white
        assert black
        assert not one or _mirrored(white[0][0]) == black[0][0]
        assert white[0][1] > 1  # for the side to move, whichever it is
        assert black[0][1] > 1


def _mirrored(move: str) -> str:
    return "".join(c if not c.isdigit() else str(9 - int(c)) for c in move)


@needs_stockfish
def test_every_mate_in_one_is_found_for_both_colours(tmp_path: Path) -> None:
    """All positions of random games in which a move mates, by trying every move."""
    found: dict[str, set[str]] = {}
    for seed in range(25):
        for board, _ in random_game(seed, 100):
            mates = {m.uci() for m in board.legal_moves if _mates(board, m)}
            if mates:
                found[board.fen()] = mates
    colours = {fen.split()[1] for fen in found}
    assert colours == {"w", "b"}
    assert len(found) >= 8
    for (fen, mates), lines in zip(found.items(), pool(tmp_path).analyse([Query(f) for f in found]), strict=True):
        assert lines
        assert lines[0][0] in mates, fen
        assert lines[0][1] == 99.0  # mate in one


def _mates(board: chess.Board, move: chess.Move) -> bool:
    if not board.gives_check(move):
        return False
    board.push(move)
    mate = board.is_checkmate()
    board.pop()
    return mate


@needs_stockfish
def test_lines_are_sorted_legal_and_as_many_as_there_are(tmp_path: Path) -> None:
    fens = [*some_positions(20), "k7/8/8/8/8/8/1r6/K7 w - - 0 1"]
    for fen, lines in zip(fens, pool(tmp_path).analyse([Query(fen) for fen in fens]), strict=True):
        legal = {m.uci() for m in chess.Board(fen).legal_moves}
        assert lines
        assert len(lines) == min(5, len(legal)) == len({move for move, _ in lines})
        assert {move for move, _ in lines} <= legal
        assert [value for _, value in lines] == sorted((value for _, value in lines), reverse=True)


@needs_stockfish
def test_scores_depend_neither_on_order_nor_on_the_number_of_processes(tmp_path: Path) -> None:
    fens = some_positions(12)
    one = pool(tmp_path, "one", workers=1).analyse([Query(fen) for fen in fens])
    two = pool(tmp_path, "two", workers=2).analyse([Query(fen) for fen in reversed(fens)])
    alone = [pool(tmp_path, f"alone{i}", workers=1).analyse([Query(fen)])[0] for i, fen in enumerate(fens[:2])]
    assert one == list(reversed(two))
    assert one[:2] == alone


@needs_stockfish
def test_the_cache_needs_no_process_and_knows_settings_apart(tmp_path: Path) -> None:
    fens = some_positions(6)
    first = pool(tmp_path)
    asked = first.analyse([Query(fen) for fen in fens])
    assert first.counts["analysed"] == 6
    again = pool(tmp_path)
    assert again.analyse([Query(fen) for fen in fens]) == asked
    assert (again.counts["started"], again.counts["cached"], again.pids) == (0, 6, [])
    other = pool(tmp_path, nodes=NODES + 1)
    other.analyse([Query(fens[0])])
    assert (other.counts["cached"], other.counts["analysed"]) == (0, 1)


@needs_stockfish
def test_one_move_can_be_asked_about(tmp_path: Path) -> None:
    engine = pool(tmp_path)
    (lines,) = engine.analyse([Query(chess.STARTING_FEN, ("g2g4",))])
    assert lines
    assert [move for move, _ in lines] == ["g2g4"]
    assert lines[0][1] < 0
    with pytest.raises(KeelError, match="has no legal move e2e5"):
        engine.analyse([Query(chess.STARTING_FEN, ("e2e5",))])
    with pytest.raises(KeelError, match="is broken: it has 1 fields"):
        engine.analyse([Query("nonsense")])
    with pytest.raises(KeelError, match="has no legal move"):
        engine.analyse([Query("7k/5Q2/5K2/8/8/8/8/8 b - - 1 1")])


@needs_stockfish
def test_killing_processes_changes_nothing_but_a_counter(tmp_path: Path) -> None:
    fens = some_positions(20)
    calm = pool(tmp_path, "calm", nodes=20_000).analyse([Query(fen) for fen in fens])
    troubled = pool(tmp_path, "troubled", nodes=20_000)
    done = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        # A position is tried twice: kills stand so far apart that they do not hit the same one twice.
        while not done.is_set() and len(killed) < 2:
            for pid in set(troubled.pids[:1]) - set(killed):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                done.wait(4.0)
            time.sleep(0.05)

    murderer = threading.Thread(target=kill)
    murderer.start()
    answers = troubled.analyse([Query(fen) for fen in fens])
    done.set()
    murderer.join()
    assert answers == calm
    assert killed
    assert troubled.counts["crashed"] >= 1
    assert troubled.counts["started"] >= 3
    assert troubled.counts["timed_out"] == 0
    assert troubled.counts["unavailable"] == 0


@needs_stockfish
def test_an_engine_that_died_between_questions_is_replaced(tmp_path: Path) -> None:
    engine = pool(tmp_path, workers=1)
    engine.analyse([Query(chess.STARTING_FEN)])
    os.kill(engine.pids[0], signal.SIGKILL)
    time.sleep(0.3)
    assert engine.analyse([Query(some_positions(1)[0])])[0]
    assert engine.counts["crashed"] == 1


# ------------------------------------------------------------------------------------------------- bad programs


def test_a_hung_engine_is_unavailable_and_counted(tmp_path: Path) -> None:
    engine = pool(tmp_path, path=fake_engine(tmp_path, "time.sleep(60)"), timeout_s=0.5, workers=1)
    began = time.monotonic()
    assert engine.analyse([Query(chess.STARTING_FEN)]) == [None]
    assert time.monotonic() - began < 20
    assert engine.counts["timed_out"] == 3
    assert engine.counts["unavailable"] == 1
    assert engine.pids == []


def test_one_position_that_breaks_the_engine_does_not_stop_a_batch(tmp_path: Path) -> None:
    """It is counted, is not in a batch, not held out, and never kept in the cache."""
    crash = "board.turn == chess.BLACK and sys.exit(1)"
    path = fake_engine(tmp_path, crash)
    options = {"path": path, "cache": str(tmp_path / "cache"), "workers": 1}
    task = chess_policy(pieces=4, plies=[0, 4], engine=options)
    problems = task.sample(6, seed=0, step=0)
    assert len({p.key for p in problems}) == 6
    assert {p.info["fen"].split()[1] for p in problems} == {"w"}
    assert any("#again" in p.key for p in problems)
    assert all(task.reward(p, [task.gold(p)]).total == 1.0 for p in problems)
    held = task.held_out(6)
    assert 0 < len(held) < 6
    pool_used = engine_module.pool_of(task.grader.engine)  # type: ignore[attr-defined]
    assert pool_used.counts["unavailable"] >= 2
    never = chess_policy(pieces=4, engine={**options, "path": path, "cache": str(tmp_path / "other")})
    Path(path).write_text(Path(path).read_text().replace(crash, "sys.exit(1)"))
    with pytest.raises(KeelError, match="fake-engine answered for none of 9 positions in 3 draws"):
        never.sample(3, seed=1, step=1)
    with pytest.raises(KeelError, match="fake-engine answered for none of 6 positions in 3 draws"):
        never.held_out(2)
    assert never.sample(0, seed=1, step=1) == never.held_out(0) == []


def test_programs_that_are_no_engines_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "START_S", 0.5)
    plain = tmp_path / "notes.txt"
    plain.write_text("not a program")
    broken = tmp_path / "broken"
    broken.write_text("not a program either")
    broken.chmod(0o755)
    for path, message in (
        ("/bin/true", "/bin/true is not a UCI engine.*apt-get install stockfish"),
        ("/bin/cat", "not a UCI engine .it did not answer 'uci' in 0.5 s"),
        (str(broken), "not a UCI engine"),
        (str(plain), "notes.txt, which is not a program"),
        (str(tmp_path / "none"), "none, which is not a program.*apt-get install stockfish"),
    ):
        with pytest.raises(KeelError, match=message) as caught:
            pool(tmp_path, path=path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"node": 5}, "task.engine.node.*did you mean task.engine.nodes"),
        ({"nodes": 5}, "nodes is 5: it must be at least 100"),
        ({"workers": 0}, "workers is 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "abc"}, "timeout_s is"),
        ({"timeout_s": None}, "timeout_s is"),
        ({"workers": True}, "workers is"),
        ({"nodes": "many"}, "nodes is"),
        ({"path": 5}, "task.engine.path is 5"),
        ({"cache": 5}, "task.engine.cache is 5"),
    ],
)
def test_options_are_checked(given: object, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        engine_options(given)  # type: ignore[arg-type]


def test_a_cache_that_is_damaged_during_a_run_is_not_known_and_stops_nothing(tmp_path: Path) -> None:
    """Pages of nonsense behind a sound first one: reads and writes fail, and positions are analysed as without it."""
    fens, path = some_positions(20), fake_engine(tmp_path)
    right = pool(tmp_path, path=path).analyse([Query(fen) for fen in fens])
    file = tmp_path / "cache.sqlite"
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    running = pool(tmp_path, path=path)
    damaged = file.read_bytes()[:4096] + b"\xff" * (file.stat().st_size - 4096)
    file.write_bytes(damaged)
    for engine in (running, pool(tmp_path, path=path)):
        assert engine.analyse([Query(fen) for fen in fens]) == right
        assert (engine.counts["cached"], engine.counts["analysed"], engine.counts["unkept"]) == (0, 20, 20)


def test_scores_in_pawns_keep_their_order() -> None:
    cp, mate, given = chess.engine.Cp, chess.engine.Mate, chess.engine.MateGiven
    worst_first = [
        mate(-1),
        mate(-2),
        mate(-49),
        cp(-9000),
        cp(-120),
        cp(0),
        cp(35),
        cp(4999),
        cp(9000),
        mate(60),
        mate(3),
    ]
    values = [pawns_of(score) for score in (*worst_first, mate(1), given)]
    assert values == [-99.0, -98.0, -51.0, -50.0, -1.2, 0.0, 0.35, 49.99, 50.0, 51.0, 97.0, 99.0, 100.0]
    assert values == sorted(values)
