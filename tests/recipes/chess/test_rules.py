"""The environment's truth, by hand for every rule, and against python-chess over whole games."""

from __future__ import annotations

import random

import chess
import pytest

from keel.base.errors import KeelError
from keel.recipes.chess.rules import board_of, fen_of, legal_moves, occurrences, step

from .positions import random_game

START = chess.STARTING_FEN
CASTLE = "r3k2r/8/8/8/8/8/8/R3K2R"

# position, move, new position, reward, terminated, truncated, reason: each written down by hand
CASES: list[tuple[str, str, str, float, int, int, str]] = [
    # an ordinary move; no en-passant square, since nothing can capture there
    (START, "e2e4", "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1", 0.001, 0, 0, "legal"),
    (START, "g1f3", "rnbqkbnr/pppppppp/8/8/8/5N2/PPPPPPPP/RNBQKB1R b KQkq - 1 1", 0.001, 0, 0, "legal"),
    # mate, by either side
    (
        "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2",
        "d8h4",
        "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3",
        1.0,
        1,
        0,
        "checkmate",
    ),
    ("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1", "a1a8", "R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1", 1.0, 1, 0, "checkmate"),
    # mate comes before the fifty moves
    ("6k1/5ppp/8/8/8/8/8/R5K1 w - - 99 80", "a1a8", "R5k1/5ppp/8/8/8/8/8/6K1 b - - 100 80", 1.0, 1, 0, "checkmate"),
    # stalemate
    ("7k/8/5KQ1/8/8/8/8/8 w - - 0 1", "g6f7", "7k/5Q2/5K2/8/8/8/8/8 b - - 1 1", 0.5, 1, 0, "stalemate"),
    # the last piece is taken: bare kings; and a lone bishop
    ("8/8/8/3k4/4P3/8/8/4K3 b - - 0 1", "d5e4", "8/8/8/8/4k3/8/8/4K3 w - - 0 2", 0.5, 1, 0, "insufficient material"),
    (
        "8/8/8/3k4/4P3/8/8/4K1B1 b - - 0 1",
        "d5e4",
        "8/8/8/8/4k3/8/8/4K1B1 w - - 0 2",
        0.5,
        1,
        0,
        "insufficient material",
    ),
    # two knights are not "insufficient": a mate can be built
    ("8/8/8/3k4/4P3/8/8/2N1K1N1 b - - 0 1", "d5e4", "8/8/8/8/4k3/8/8/2N1K1N1 w - - 0 2", 0.001, 0, 0, "legal"),
    # the hundredth move without capture or pawn; the ninety-ninth; a pawn move sets the counter back
    ("7k/8/8/8/8/8/P7/R3K3 w - - 99 90", "a1b1", "7k/8/8/8/8/8/P7/1R2K3 b - - 100 90", 0.5, 1, 0, "fifty moves"),
    ("7k/8/8/8/8/8/P7/R3K3 w - - 98 90", "a1b1", "7k/8/8/8/8/8/P7/1R2K3 b - - 99 90", 0.001, 0, 0, "legal"),
    ("7k/8/8/8/8/8/P7/R3K3 w - - 99 90", "a2a4", "7k/8/8/8/P7/8/8/R3K3 b - - 0 90", 0.001, 0, 0, "legal"),
    # promotion to each piece, with and without capture; without its piece it is no move
    ("8/P6k/8/8/8/8/8/4K3 w - - 0 1", "a7a8q", "Q7/7k/8/8/8/8/8/4K3 b - - 0 1", 0.001, 0, 0, "legal"),
    ("8/P6k/8/8/8/8/8/4K3 w - - 0 1", "a7a8r", "R7/7k/8/8/8/8/8/4K3 b - - 0 1", 0.001, 0, 0, "legal"),
    ("8/P6k/8/8/8/8/8/4K3 w - - 0 1", "a7a8b", "B7/7k/8/8/8/8/8/4K3 b - - 0 1", 0.5, 1, 0, "insufficient material"),
    ("8/P6k/8/8/8/8/8/4K3 w - - 0 1", "a7a8n", "N7/7k/8/8/8/8/8/4K3 b - - 0 1", 0.5, 1, 0, "insufficient material"),
    ("4k3/8/8/8/8/7K/p7/1R6 b - - 3 9", "a2b1n", "4k3/8/8/8/8/7K/8/1n6 w - - 0 10", 0.5, 1, 0, "insufficient material"),
    ("8/P6k/8/8/8/8/8/4K3 w - - 0 1", "a7a8", "8/P6k/8/8/8/8/8/4K3 w - - 0 1", -1.0, 0, 1, "illegal"),
    # castling on both sides by both colours
    (f"{CASTLE} w KQkq - 0 1", "e1g1", "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1", 0.001, 0, 0, "legal"),
    (f"{CASTLE} w KQkq - 0 1", "e1c1", "r3k2r/8/8/8/8/8/8/2KR3R b kq - 1 1", 0.001, 0, 0, "legal"),
    (f"{CASTLE} b KQkq - 0 1", "e8g8", "r4rk1/8/8/8/8/8/8/R3K2R w KQ - 1 2", 0.001, 0, 0, "legal"),
    (f"{CASTLE} b KQkq - 0 1", "e8c8", "2kr3r/8/8/8/8/8/8/R3K2R w KQ - 1 2", 0.001, 0, 0, "legal"),
    # rights are lost by a rook's move, a king's move, and both sides' by a rook that takes a rook
    (f"{CASTLE} w KQkq - 0 1", "a1b1", "r3k2r/8/8/8/8/8/8/1R2K2R b Kkq - 1 1", 0.001, 0, 0, "legal"),
    (f"{CASTLE} w KQkq - 0 1", "e1e2", "r3k2r/8/8/8/8/8/4K3/R6R b kq - 1 1", 0.001, 0, 0, "legal"),
    (f"{CASTLE} w KQkq - 0 1", "h1h8", "r3k2R/8/8/8/8/8/8/R3K3 b Qq - 0 1", 0.001, 0, 0, "legal"),
    # castling without the right, through an attacked square, and in the notation of king takes rook
    (f"{CASTLE} w Qkq - 0 1", "e1g1", f"{CASTLE} w Qkq - 0 1", -1.0, 0, 1, "illegal"),
    ("4kr2/8/8/8/8/8/8/R3K2R w KQ - 0 1", "e1g1", "4kr2/8/8/8/8/8/8/R3K2R w KQ - 0 1", -1.0, 0, 1, "illegal"),
    (f"{CASTLE} w KQkq - 0 1", "e1h1", f"{CASTLE} w KQkq - 0 1", -1.0, 0, 1, "illegal"),
    # en passant: the square is written where the capture is legal, and the capture takes the pawn beside
    ("4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1", "e2e4", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", 0.001, 0, 0, "legal"),
    ("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", "d4e3", "4k3/8/8/8/8/4p3/8/4K3 w - - 0 2", 0.001, 0, 0, "legal"),
    ("4k3/8/8/8/3pP3/8/8/4K3 b - - 0 1", "d4e3", "4k3/8/8/8/3pP3/8/8/4K3 b - - 0 1", -1.0, 0, 1, "illegal"),
    # no square where the capturing pawn is pinned to its king
    ("3k4/8/8/8/3p4/8/4P3/3RK3 w - - 0 1", "e2e4", "3k4/8/8/8/3pP3/8/8/3RK3 b - - 0 1", 0.001, 0, 0, "legal"),
    # illegal: an empty square, the other side's piece, leaving the king in check, a piece's wrong way
    (START, "e4e5", START, -1.0, 0, 1, "illegal"),
    (START, "e7e5", START, -1.0, 0, 1, "illegal"),
    (START, "b1b3", START, -1.0, 0, 1, "illegal"),
    ("4r1k1/8/8/8/8/8/4B3/4K3 w - - 0 1", "e2d3", "4r1k1/8/8/8/8/8/4B3/4K3 w - - 0 1", -1.0, 0, 1, "illegal"),
    # another notation is no legal move either
    (START, "Nf3", START, -1.0, 0, 1, "illegal"),
    (START, "", START, -1.0, 0, 1, "illegal"),
]


@pytest.mark.parametrize(("fen", "move", "after", "reward", "terminated", "truncated", "reason"), CASES)
def test_by_hand(fen: str, move: str, after: str, reward: float, terminated: int, truncated: int, reason: str) -> None:
    found = step(fen, move)
    verdict = found.verdict
    assert (verdict.fen, verdict.reward, verdict.terminated, verdict.truncated, found.reason) == (
        after,
        reward,
        bool(terminated),
        bool(truncated),
        reason,
    )


def test_draws_that_nobody_claims() -> None:
    before = "7k/8/8/8/8/8/P7/R3K3 w - - {} 90"
    assert step(before.format(99), "a1b1", draws="automatic").reason == "legal"
    assert step(before.format(149), "a1b1", draws="automatic").reason == "seventy-five moves"
    with pytest.raises(KeelError, match="unknown chess draws 'never'"):
        step(START, "e2e4", draws="never")


KNIGHTS = ["g1f3", "g8f6", "f3g1", "f6g8"]


def played(moves: list[str], start: str = START) -> tuple[str, str, list[str]]:
    """The position before the last of `moves`, that move, and the moves before it."""
    board = chess.Board(start)
    for move in moves[:-1]:
        board.push_uci(move)
    return fen_of(board), moves[-1], moves[:-1]


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        (KNIGHTS * 2, "repetition"),  # the starting position for the third time
        (KNIGHTS, "legal"),
        ((KNIGHTS * 2)[:-1], "legal"),
        (["e2e4", *["g8f6", "g1f3", "f6g8", "f3g1"] * 2], "repetition"),  # nobody can capture on e3, so nothing differs
        (["e2e4", "a7a6", *KNIGHTS, *KNIGHTS], "repetition"),
        # the king leaves its square for the first time: the position before had rights to castle
        (["e2e4", "e7e5", *["e1e2", "e8e7", "e2e1", "e7e8"] * 2], "legal"),
        (["h2h4", "h7h5", *["h1h2", "h8h7", "h2h1", "h7h8"] * 2], "legal"),
    ],
)
def test_repetition_by_hand(moves: list[str], reason: str) -> None:
    fen, move, before = played(moves)
    found = step(fen, move, before)
    assert found.reason == reason
    assert found.verdict.reward == (0.5 if reason == "repetition" else 0.001)
    assert step(fen, move, before, draws="automatic").reason == "legal"
    assert step(fen, move, before[-3:]).reason == "legal"  # too little is shown to know


def test_a_position_with_en_passant_does_not_count() -> None:
    """After e2e4 Black could take on e3 once and never again: two rounds later it is the second time."""
    start = "rnbqkbnr/ppp1pppp/8/8/3p4/8/PPPPPPPP/RNBQKBNR w KQkq - 0 3"
    fen, move, before = played(["e2e4", *["g8f6", "g1f3", "f6g8", "f3g1"] * 2], start)
    assert step(fen, move, before).reason == "legal"
    fen, move, before = played(["a2a4", *["g8f6", "g1f3", "f6g8", "f3g1"] * 2], start)
    assert step(fen, move, before).reason == "repetition"


def test_repetitions_are_those_of_the_whole_game() -> None:
    """Over games that shuffle: whatever is called a repetition is one, and with the rights to castle gone every one
    that lies within the moves shown is found."""
    found = missed = 0
    for seed in range(12):
        rng = random.Random(seed)
        board = chess.Board("2b1k1n1/p7/8/8/8/8/7P/1N2K1B1 w - - 0 1")
        for _ in range(60):
            back = board.move_stack[-2] if len(board.move_stack) > 1 else None
            moves = list(board.legal_moves)
            undo = chess.Move(back.to_square, back.from_square) if back else None
            move = undo if undo in moves and rng.random() < 0.7 else rng.choice(moves)
            fen, before = fen_of(board), [m.uci() for m in board.move_stack[-9:]]
            says = occurrences(board_of(fen), move.uci(), before)
            board.push(move)
            true = sum(_same(board, back) for back in range(0, min(10, len(board.move_stack)) + 1, 2))
            assert says <= true
            assert says >= 3 or true < 3 or _at_home(before)
            if says >= 3:
                assert board.is_repetition(3)
                found += 1
            missed += says < true
            if board.is_game_over():
                break
    assert found > 20
    assert missed < found


def _same(board: chess.Board, plies: int) -> bool:
    earlier = board.copy()
    for _ in range(plies):
        earlier.pop()
    return fen_of(earlier).split()[:4] == fen_of(board).split()[:4]


def _at_home(moves: list[str]) -> bool:
    return any(move[:2] in ("e1", "e8", "a1", "h1", "a8", "h8") for move in moves)


def test_whole_games_against_the_library() -> None:
    """Next position, end and reward of every move of random games, from the FEN alone."""
    reasons: dict[str, int] = {}
    for seed in range(12):
        fen = START
        for after, move in random_game(seed, most=400):
            found = step(fen, move.uci())
            fen = after.fen()
            outcome = after.outcome(claim_draw=False)
            verdict = found.verdict
            assert verdict.fen == fen
            if outcome is not None and outcome.termination is chess.Termination.CHECKMATE:
                assert (verdict.reward, verdict.terminated) == (1.0, True)
            elif outcome is not None or after.halfmove_clock >= 100:
                assert (verdict.reward, verdict.terminated) == (0.5, True)
            else:
                assert (verdict.reward, verdict.terminated) == (0.001, False)
            assert not verdict.truncated
            reasons[found.reason] = reasons.get(found.reason, 0) + 1
            if verdict.terminated:
                break
    assert {"legal", "checkmate"} <= set(reasons)


@pytest.mark.parametrize(
    ("fen", "message"),
    [
        ("8/8/8/8/8/8/8/8 w - - 0 1", "no white king, no black king"),
        ("4k3/8/8/8/8/8/8/8 w - - 0 1", "no white king"),
        ("4k3/8/8/8/8/8/8/P3K3 w - - 0 1", "pawns on backrank"),
        ("4k3/4R3/8/8/8/8/8/4K3 w - - 0 1", "opposite check"),
        ("4k3/8/8/8/8/8/8/4K3 w K - 0 1", "bad castling rights"),
        ("4k3/8/8/8/8/8/8/4K3 w - e6 0 1", "invalid ep square"),
        ("not a position", "it has 3 fields"),
    ],
)
def test_positions_that_cannot_be_are_named(fen: str, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        legal_moves(fen)
    with pytest.raises(KeelError, match=message):
        step(fen, "e2e4")
