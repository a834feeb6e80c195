"""Rewards by hand for every part, and for every answer that tries to earn without chess; silence never pays."""

from __future__ import annotations

import itertools
import re

import chess
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keel.recipes.chess.format import StepResult, read_env, read_policy
from keel.recipes.chess.rewards import (
    FULL_ENV,
    FULL_POLICY,
    POLICY_WORTH,
    QUALITY,
    SYSTEMS,
    closeness,
    env_reward,
    fen_progress,
    fen_similarity,
    legal_of_five,
    policy_reward,
)
from keel.recipes.chess.rules import legal_moves

START = chess.STARTING_FEN
LEGAL = legal_moves(START)
LINES = (("e2e4", 0.5), ("d2d4", 0.4), ("g1f3", 0.3), ("c2c4", 0.2), ("b1c3", 0.1))
GOLD = " g1f3 e2e4 d2d4 b1c3 c2c4      E: 0.30 0.50 0.40 0.10 0.20                B: e2e4"
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
TRUTH = StepResult(AFTER, 0.001, False, False)
ILLEGAL = StepResult(START, -1.0, False, True)  # what an illegal move leads to


@pytest.mark.parametrize(
    ("text", "total", "content"),
    [
        (GOLD, 1.0, 1.0),
        ("", -0.3, 0.0),
        ("infancy neoc Anth Booker", -0.3, 0.0),
        ("Nf3 Nc3 E: 0.3 0.1 B: Nf3", -0.3, 0.0),  # another notation is not read
        (" a2a3", 0.038, 0.0),  # one legal move of five
        (" z9z9 a2a3 zzz", 0.038, 0.0),
        (" a2a3 E: 5.00", 0.038, 0.0),  # a wrong evaluation earns nothing
        (" a2a3 h2h3 E: 5.00 5.00 B: a2a3", 0.01 + 0.076 + 0.1, 0.0),
        # top5 2/5, best 1, eval 0
        (" e2e4 d2d4 E: 5.00 5.00 B: e2e4", 0.186 + 0.08 + 0.3, (0.4 + 1 + 0) / 3),
        # top5 2/5, best 0, eval 2/5
        (" e2e4 d2d4 E: 0.50 0.40 B: d2d4", 0.186 + 0.08 + 0.08, 0.8 / 3),
        # top5 1, best 0, eval 1/5: four are a pawn off
        (" g1f3 e2e4 d2d4 b1c3 c2c4 E: 1.30 1.50 -0.60 1.10 0.20 B: d2d4", 0.3 + 0.2 + 0.04, 1.2 / 3),
        # top5 1, best 1, eval 1/2: each half as large as it should be
        (" g1f3 e2e4 d2d4 b1c3 c2c4 E: 0.15 0.25 0.20 0.05 0.10 B: e2e4", 0.9, 2.5 / 3),
        # top5 4/5, best 1, eval 4/5
        (" g1f3 e2e4 d2d4 b1c3 a2a3 E: 0.30 0.50 0.40 0.10 0.00 B: e2e4", 0.92, 2.6 / 3),
        # no evaluations: neither those nor the structure
        (" g1f3 e2e4 d2d4 b1c3 c2c4 E: B: e2e4", 0.79, 2 / 3),
    ],
)
def test_graduated_policy_by_hand(text: str, total: float, content: float) -> None:
    reward = policy_reward(read_policy(text), LEGAL, LINES)
    assert reward.total == pytest.approx(total)
    assert reward.parts["content"] == pytest.approx(content)
    assert reward.parsed == (total > -0.3)
    assert reward.parts["correct"] == reward.parts["best"]


ZEROS = "0.00 0.00 0.00 0.00 0.00"
FIVE_LEGAL = "a2a3 h2h3 a2a4 h2h4 b2b3"  # none of them the engine's
EVERY_MOVE = " ".join(a + b for a, b in itertools.permutations(chess.SQUARE_NAMES, 2))
POLICY_EXPLOITS = {
    "the form alone, five moves that go nowhere": (f" a1a1 b1b1 c1c1 d1d1 e1e1 E: {ZEROS} B: a1a1", 0.01),
    "a1a1 everywhere": (f" a1a1 a1a1 a1a1 a1a1 a1a1 E: {ZEROS} B: a1a1", 0.0),
    "the other side's gold": (" e7e5 d7d5 g8f6 c7c5 b8c6 E: 0.50 0.40 0.30 0.20 0.10 B: e7e5", 0.01),
    "one legal move": (" a2a3 E: 0.00 B: a2a3", 0.01 + 0.038 + 0.1),
    "one legal move five times": (f" a2a3 a2a3 a2a3 a2a3 a2a3 E: {ZEROS} B: a2a3", 0.038 + 0.1),
    "any five legal moves, all worth 0.00": (f" {FIVE_LEGAL} E: {ZEROS} B: a2a3", 0.3),
    "a legal best move that is not listed": (f" {FIVE_LEGAL} E: {ZEROS} B: c2c3", 0.29),
    "the engine's moves, all worth 0.00": (f" g1f3 e2e4 d2d4 b1c3 c2c4 E: {ZEROS} B: d2d4", 0.5),
    "the engine's moves, all worth 0.01": (
        f" g1f3 e2e4 d2d4 b1c3 c2c4 E: {ZEROS.replace('0.00', '0.01')} B: d2d4",
        0.5 + 0.2 * (1 / 50 + 1 / 40 + 1 / 30 + 1 / 20 + 1 / 10) / 5,
    ),
    "six moves, to catch one more": (
        f" a2a3 g1f3 e2e4 d2d4 b1c3 c2c4 E: 0.00 {ZEROS} B: a2a3",
        0.01 + 0.19 * 5 / 6 + 0.1 + 0.2 * 4 / 5,
    ),
    "every legal move": (
        f" {' '.join(LEGAL)} E: {' '.join(['0.00'] * 20)} B: {LEGAL[0]}",
        0.01 + 0.19 * 5 / 20 + 0.1 + 0.2 / 5,
    ),
    "every move there is": (f" {EVERY_MOVE}", 0.19 * 5 / 4032),
    "the best move without a list": (" E: 0.50 B: e2e4", -0.3),
    "a second best move behind a wrong one": (GOLD.replace("B: e2e4", "B: d2d4 B: e2e4"), 0.69),
    "every move as the best": (GOLD.replace("B: e2e4", "B: d2d4 e2e4 g1f3 c2c4 b1c3"), 0.69),
    "the gold and then no end": (GOLD + " E: 0.50" * 100, 0.99),
    "the prompt": (f"P: {START}                                  M:", -0.3),
}


@pytest.mark.parametrize(("text", "total"), POLICY_EXPLOITS.values(), ids=list(POLICY_EXPLOITS))
def test_what_a_policy_answer_without_chess_earns(text: str, total: float) -> None:
    assert policy_reward(read_policy(text), LEGAL, LINES).total == pytest.approx(total)


def test_quality_is_worth_most_and_form_a_quarter_of_a_legal_move() -> None:
    assert sum(POLICY_WORTH.values()) == pytest.approx(FULL_POLICY)
    assert sum(POLICY_WORTH[part] for part in QUALITY) == pytest.approx(0.7)
    assert POLICY_WORTH["structure"] < 0.3 * POLICY_WORTH["legal5"] / 5


def test_legal_of_five_by_hand() -> None:
    legal = ("a", "b", "c", "d", "e", "f", "g")
    for moves, share in (("", 0), ("a", 0.2), ("aa", 0.2), ("axxxx", 0.2), ("abcde", 1), ("abcdef", 5 / 6)):
        assert legal_of_five(tuple(moves), legal) == pytest.approx(share)
    assert legal_of_five(("a", "b"), ("a", "b")) == 1.0  # fewer are legal, fewer are asked for
    assert legal_of_five(("a", "b", "x"), ("a", "b")) == pytest.approx(2 / 3)


def test_closeness_by_hand() -> None:
    for stated, value, close in ((0.3, 0.3, 1), (0.0, 0.3, 0), (0.15, 0.3, 0.5), (0.45, 0.3, 0.5), (-0.3, 0.3, 0)):
        assert closeness(stated, value) == pytest.approx(close)
    for stated, value, close in ((6.5, 6.0, 0.5), (7.0, 6.0, 0), (0.0, 0.0, 1), (0.01, 0.0, 0), (0.0, 0.01, 0)):
        assert closeness(stated, value) == pytest.approx(close)


pool = [*(move for move, _ in LINES), "a2a3", "h2h3", "b2b3", "g2g4", "a1a1", "e7e5", "e2e5", "b1b8"]
listed = st.lists(st.tuples(st.sampled_from(pool), st.floats(-2, 2).map(lambda v: round(v, 2))), min_size=1, max_size=8)


def earned(moves: list[tuple[str, float]], best: str) -> float:
    """What a list of moves with their evaluations earns, written out and read again."""
    values = " ".join(f"{value:.2f}" for _, value in moves)
    return policy_reward(read_policy(f" {' '.join(m for m, _ in moves)} E: {values} B: {best}"), LEGAL, LINES).total


@given(listed, st.sampled_from(pool), st.data())
def test_a_better_list_never_earns_less(moves: list[tuple[str, float]], best: str, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(moves) - 1))
    move, value = moves[number]
    assume(move != best)
    before, scores, names = earned(moves, best), dict(LINES), {m for m, _ in moves}
    new = data.draw(st.sampled_from(sorted(set(pool) - names)))
    after = earned([*moves[:number], (new, value), *moves[number + 1 :]], best)
    ranks = [(m in LEGAL) + (m in scores) for m in (move, new)]  # illegal, legal, the engine's
    if ranks[1] > ranks[0]:
        assert after >= before
        if number < 5 and (ranks[1] == 2 or len(names & set(LEGAL)) < 5):
            assert after > before
    if move in scores:
        nearer = [*moves[:number], (move, round((value + scores[move]) / 2, 2)), *moves[number + 1 :]]
        assert earned(nearer, best) >= before - 0.002  # two decimals may round away from a small score
    for useless in (move, "a1a1", "e2e5"):
        if useless != best:
            assert earned([*moves, (useless, 0.0)], best) <= before


def test_policy_parts_by_hand() -> None:
    text = " e2e4 e7e5 a2a3 E: 0.50 0.00 9.99 B: e7e5"  # one of the five, the other side's, a legal one
    parts = policy_reward(read_policy(text), LEGAL, LINES).parts
    assert parts == {
        "structure": 1.0,
        "parsed": 1.0,
        "legal": pytest.approx(2 / 3),
        "legal5": 0.4,
        "best_legal": 0.0,
        "top5": 0.2,
        "best": 0.0,
        "eval": 0.2,
        "content": pytest.approx(0.4 / 3),
        "correct": 0.0,
    }


def test_strict_wants_the_row_to_the_letter() -> None:
    loose = GOLD.replace("      E:", " E:")
    assert policy_reward(read_policy(loose), LEGAL, LINES).total == 1.0
    assert policy_reward(read_policy(GOLD), LEGAL, LINES, parse="strict").total == 1.0
    assert policy_reward(read_policy(loose), LEGAL, LINES, parse="strict").total == -0.3
    assert env_reward(read_env(f"{AFTER}+0.001+0+0"), TRUTH, START, parse="strict").total == 1.5
    assert env_reward(read_env(f"{AFTER} +0.001+0+0"), TRUTH, START, parse="strict").total == -0.3


NEAR = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR w KQkq - 0 1"  # the wrong side to move: 0.95 alike
FAR = "8/8/8/8/8/8/8/8 w - - 7 9"  # nothing but one field in common
TWO_PAWNS = AFTER.replace("PPPP1PPP", "PPPPPPPP")  # half of the move's two squares are right


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (f"{AFTER}+0.001+0+0", 1.5),
        ("", -0.3),
        ("infancy neoc Anth Booker", -0.3),
        ("+++", -0.3),
        (f"{NEAR}+0.001+0+0", 0.1 + 0.95 * (0.45 + 0.05 + 0.3 + 0.1)),
        (f"{TWO_PAWNS}+0.001+0+0", 0.1 + 0.5 * (0.45 + 0.3 + 0.1) + 0.05 * (0.75 * 32 / 33 + 0.25)),
        (f"{AFTER}+1.0+0+0", 0.1 + 1.0 + 0.3 * 0.001 + 0.1),
        (f"{AFTER}+0.5+0+0", 0.1 + 1.0 + 0.3 * 0.501 + 0.1),
        (f"{AFTER}+-1.0+0+0", 0.1 + 1.0 + 0.1),  # |Δ| above 1 takes nothing away
        (f"{AFTER}+99999+0+0", 0.1 + 1.0 + 0.1),
        (f"{AFTER}+0.001+1+0", 0.1 + 1.0 + 0.3),
        (f"{AFTER}+0.001+0+1", 0.1 + 1.0 + 0.3),
        (AFTER, 1.0),  # cut off behind the FEN: no structure, no reward, no flags
        (f"{AFTER}+0.001", 1.3),
        (f"{AFTER}+0.001+0+0+0", 1.0 + 0.3 + 0.1),  # something follows: no structure
    ],
)
def test_graduated_environment_by_hand(text: str, total: float) -> None:
    reward = env_reward(read_env(text), TRUTH, START)
    assert reward.total == pytest.approx(total)
    assert reward.parts["correct"] == float(total == 1.5)


OTHER = "rnbqkbnr/pppppppp/8/8/3P4/8/PPP1PPPP/RNBQKBNR b KQkq - 0 1"
COPY = 0.05 * (0.75 * 31 / 33 + 0.2)
ENV_EXPLOITS = {
    "a copy and the usual verdict": (f"{START}+0.001+0+0", TRUTH, 0.1 + COPY),
    "a copy with the other side to move": (f"{START.replace(' w ', ' b ')}+0.001+0+0", TRUTH, 0.1 + COPY + 0.0025),
    "a copy, and that the move is illegal": (f"{START}+-1.0+0+1", TRUTH, 0.1 + COPY),
    "a copy alone": (START, TRUTH, COPY),
    "the form alone": (f"{FAR}+0.001+0+0", TRUTH, 0.1 + 0.05 * 0.05),
    "another move": (f"{OTHER}+0.001+0+0", TRUTH, 0.1 + 0.05 * (0.75 * 30 / 34 + 0.25)),
    "every verdict at once": (f"{START}+0.001+0+0+1.0+1+0", TRUTH, COPY),
    "every position at once": (f"{OTHER} {AFTER}+0.001+0+0", TRUTH, -0.3),
    "no end": (f"{START}+" * 100, TRUTH, COPY),
    "the prompt": (f"A: {START}+e2e4+e2e4+", TRUTH, -0.3),
    "after an illegal move: a copy and the usual verdict": (f"{START}+0.001+0+0", ILLEGAL, 0.15),
    "after an illegal move: a copy and its reward": (f"{START}+-1.0+0+0", ILLEGAL, 0.15),
    "after an illegal move: a copy and its flags": (f"{START}+0.001+0+1", ILLEGAL, 1.2),
    "after an illegal move: the move all the same": (f"{AFTER}+-1.0+0+1", ILLEGAL, 0.1 + COPY),
    "after an illegal move: what is right": (f"{START}+-1.0+0+1", ILLEGAL, 1.5),
}


@pytest.mark.parametrize(("text", "truth", "total"), ENV_EXPLOITS.values(), ids=list(ENV_EXPLOITS))
def test_what_an_environments_answer_without_chess_earns(text: str, truth: StepResult, total: float) -> None:
    assert env_reward(read_env(text), truth, START).total == pytest.approx(total)


def test_similarity_by_hand() -> None:
    assert fen_similarity(START, START) == 1.0
    # e2e4: of 33 squares that are occupied in either, 31 agree; the side to move differs, four fields agree
    assert fen_similarity(START, AFTER) == pytest.approx(0.75 * 31 / 33 + 0.05 * 4)
    assert fen_similarity("8/8/8/8/8/8/8/8 w - - 0 1", "8/8/8/8/8/8/8/8 b KQ e3 5 7") == pytest.approx(0.75)
    assert fen_similarity(FAR, AFTER) == pytest.approx(0.05)


fens = st.builds(
    lambda ranks, *rest: " ".join(("/".join(ranks), *rest)),
    st.lists(st.sampled_from(["8", "pppppppp", "4K3", "k7", "RNBQ4", "1p1p1p1p"]), min_size=8, max_size=8),
    st.sampled_from("wb"),
    st.sampled_from(["-", "KQkq", "Q"]),
    st.sampled_from(["-", "e3"]),
    st.sampled_from(["0", "17"]),
    st.sampled_from(["1", "40"]),
)


@given(fens, fens)
def test_similarity_is_symmetric_within_0_and_1_and_1_for_equals_alone(one: str, other: str) -> None:
    value = fen_similarity(one, other)
    assert value == fen_similarity(other, one)
    assert 0.0 <= value <= 1.0 + 1e-12
    assert (value > 1 - 1e-9) == (one == other)


@given(fens, fens, st.sampled_from(["0.001", "0.5", "1.0", "-1.0"]), st.sampled_from(["0+0", "1+0", "0+1"]))
def test_a_copy_of_the_position_earns_no_more_than_its_form(fen: str, fields: str, value: str, flags: str) -> None:
    """Whatever the other fields, the reward and the flags say, the pieces stand where they stood."""
    board = chess.Board(AFTER)
    copy = f"{board.board_fen()} {fields.partition(' ')[2]}"
    board.push_uci("g8f6")
    truth = StepResult(board.fen(en_passant="legal"), 0.001, False, False)
    assert env_reward(read_env(f"{copy}+{value}+{flags}"), truth, AFTER).total <= 0.15 + 1e-9
    assert fen_progress(fen, StepResult(fen, 0.001, False, False), AFTER) == 1.0


def placement(squares: list[str]) -> str:
    """The first field of a FEN, of 64 characters."""
    ranks = ("".join(squares[row : row + 8]) for row in range(0, 64, 8))
    return "/".join(re.sub(r"\.+", lambda empty: str(len(empty[0])), rank) for rank in ranks)


right_squares = list("rnbqkbnr" + "p" * 8 + "." * 20 + "P" + "." * 11 + "PPPP.PPP" + "RNBQKBNR")
wrong_squares = st.dictionaries(st.integers(0, 63), st.sampled_from(".PpQk"), max_size=5)


@given(wrong_squares, st.integers(0, 63), st.floats(-2, 2), st.booleans(), st.sampled_from([TRUTH, ILLEGAL]))
def test_a_better_position_never_earns_less(
    wrong: dict[int, str], mended: int, value: float, over: bool, truth: StepResult
) -> None:
    assert placement(right_squares) == AFTER.split(" ")[0]
    squares = [wrong.get(n, square) for n, square in enumerate(right_squares)]
    target = (
        right_squares if truth is TRUTH else [*right_squares[:36], ".", *right_squares[37:52], "P", *right_squares[53:]]
    )
    better = [target[n] if n == mended else square for n, square in enumerate(squares)]

    def total(board: list[str], value: float, over: bool) -> float:
        return env_reward(read_env(f"{placement(board)} b KQkq - 0 1+{value:.3f}+0+{int(over)}"), truth, START).total

    before = total(squares, value, over)
    assert total(better, value, over) >= before
    assert total(squares, (value + truth.reward) / 2, over) >= before - 0.0005  # three decimals
    assert total(squares, value, truth.truncated) >= before
    assert 0 <= before <= FULL_ENV


words = st.lists(
    st.sampled_from(["e2e4", "d2d4", "Nf3", "E:", "B:", "0.5", "-3", "+", AFTER, "", "0", "1", "0.001", "\n"]),
    max_size=14,
)


@given(st.one_of(st.text(max_size=80), words.map(" ".join), words.map("+".join)), st.sampled_from(list(SYSTEMS)))
def test_an_empty_answer_never_earns_more_than_any_other(text: str, system: str) -> None:
    for parse in ("lenient", "strict"):
        silent = policy_reward(read_policy(""), LEGAL, LINES, system=system, parse=parse)
        spoken = policy_reward(read_policy(text), LEGAL, LINES, system=system, parse=parse)
        assert silent.total == SYSTEMS[system] <= spoken.total <= 1.0
        silent = env_reward(read_env(""), TRUTH, START, system=system, parse=parse)
        spoken = env_reward(read_env(text), TRUTH, START, system=system, parse=parse)
        assert silent.total == SYSTEMS[system] <= spoken.total <= 1.5
        assert spoken.parsed == (spoken.parts["parsed"] == 1.0)
