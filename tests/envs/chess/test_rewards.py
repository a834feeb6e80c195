"""Rewards by hand for every rung and part; silence never pays."""

from __future__ import annotations

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.envs.chess.format import Verdict, read_env, read_policy
from keel.envs.chess.rewards import SYSTEMS, env_reward, fen_similarity, policy_reward
from keel.envs.chess.rules import legal_moves

START = chess.STARTING_FEN
LEGAL = legal_moves(START)
LINES = (("e2e4", 0.5), ("d2d4", 0.4), ("g1f3", 0.3), ("c2c4", 0.2), ("b1c3", 0.1))
GOLD = " g1f3 e2e4 d2d4 b1c3 c2c4      E: 0.30 0.50 0.40 0.10 0.20                B: e2e4"
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
TRUTH = Verdict(AFTER, 0.001, False, False)


@pytest.mark.parametrize(
    ("text", "total", "content"),
    [
        (GOLD, 1.0, 1.0),
        ("", -0.3, 0.0),
        ("infancy neoc Anth Booker", -0.3, 0.0),
        ("Nf3 Nc3 E: 0.3 0.1 B: Nf3", -0.3, 0.0),  # another notation is not read
        (" a2a3", 0.2, 0.0),  # one move
        (" z9z9 a2a3 zzz", 0.2, 0.0),
        (" a2a3 E: 5.00", 0.4, 0.0),  # and an evaluation
        (" a2a3 h2h3 E: 5.00 5.00 B: a2a3", 0.6, 0.0),  # two of both
        (" a2a3 a2a3 E: 5.00 5.00 B: a2a3", 0.4, 0.0),  # the same move twice is one
        (" a2a3 b2b3 c2c3 d2d3 e2e3 f2f3 g2g3 E: 5 5 5 5 5 5 5 B: a2a3", 0.4, 0.0),  # seven are too many
        # top5 2/5, best 1, eval 0: content 0.4667
        (" e2e4 d2d4 E: 5.00 5.00 B: e2e4", 0.8, (0.4 + 1 + 0) / 3),
        # top5 2/5, best 0, eval 2/5: content 0.2667
        (" e2e4 d2d4 E: 0.50 0.40 B: d2d4", 0.6, 0.8 / 3),
        # top5 1, best 0, eval 1 (one pawn off at most): content 0.6667
        (" g1f3 e2e4 d2d4 b1c3 c2c4 E: 1.30 1.50 -0.60 1.10 0.20 B: d2d4", 0.8, 2 / 3),
        # top5 4/5, best 1, eval 4/5: content 0.8667
        (" g1f3 e2e4 d2d4 b1c3 a2a3 E: 0.30 0.50 0.40 0.10 0.00 B: e2e4", 1.0, 2.6 / 3),
        # content without evaluations does not jump over the rung below it
        (" g1f3 e2e4 d2d4 b1c3 c2c4 E: B: e2e4", 0.2, 2 / 3),
    ],
)
def test_graduated_policy_by_hand(text: str, total: float, content: float) -> None:
    reward = policy_reward(read_policy(text), LEGAL, LINES)
    assert reward.total == pytest.approx(total)
    assert reward.parts["content"] == pytest.approx(content)
    assert reward.parsed == (total > -0.3)
    assert reward.parts["correct"] == reward.parts["best"]


def test_policy_parts_by_hand() -> None:
    text = " e2e4 e7e5 a2a3 E: 0.50 0.00 9.99 B: e7e5"  # one of the five, the other side's, a legal one
    parts = policy_reward(read_policy(text), LEGAL, LINES).parts
    assert parts == {
        "structure": 1.0,
        "parsed": 1.0,
        "legal": pytest.approx(2 / 3),
        "best_legal": 0.0,
        "top5": 0.2,
        "best": 0.0,
        "eval": 0.2,
        "content": pytest.approx(0.4 / 3),
        "correct": 0.0,
    }


def test_moves_of_equal_score_are_all_best() -> None:
    lines = (("e2e4", 0.5), ("d2d4", 0.5), ("g1f3", 0.3))
    for move, right in (("e2e4", 1.0), ("d2d4", 1.0), ("g1f3", 0.0)):
        assert policy_reward(read_policy(f" {move} E: 0.5 B: {move}"), LEGAL, lines).parts["correct"] == right


def test_one_legal_move_is_enough_where_there_is_one() -> None:
    only = "k7/8/8/8/8/8/1r6/K7 w - - 0 1"
    assert legal_moves(only) == ("a1b2",)
    reward = policy_reward(read_policy(" a1b2 E: 0.00 B: a1b2"), legal_moves(only), (("a1b2", 0.0),))
    assert reward.total == 1.0


def test_binary_policy_is_a_cliff() -> None:
    for text, total in (
        (GOLD, 1.0),
        (GOLD.replace("B: e2e4", "B: d2d4"), 0.0),
        ("", -1.0),
        (" e2e4", -1.0),
        ("x", -1.0),
    ):
        assert policy_reward(read_policy(text), LEGAL, LINES, system="binary").total == total


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_the_engine_content_is_left_out_and_never_zero(system: str) -> None:
    reward = policy_reward(read_policy(GOLD), LEGAL, None, system=system)
    assert reward.total == 1.0
    assert reward.parts["unavailable"] == 1.0
    assert not {"correct", "content", "top5", "best", "eval"} & set(reward.parts)
    assert policy_reward(read_policy(""), LEGAL, None, system=system).total == SYSTEMS[system]
    if system == "graduated":
        assert policy_reward(read_policy(" e2e4"), LEGAL, None).total == pytest.approx(1 / 3)


def test_strict_wants_the_row_to_the_letter() -> None:
    loose = GOLD.replace("      E:", " E:")
    assert policy_reward(read_policy(loose), LEGAL, LINES).total == 1.0
    assert policy_reward(read_policy(GOLD), LEGAL, LINES, parse="strict").total == 1.0
    assert policy_reward(read_policy(loose), LEGAL, LINES, parse="strict").total == -0.3
    assert env_reward(read_env(f"{AFTER}+0.001+0+0"), TRUTH, parse="strict").total == 1.5
    assert env_reward(read_env(f"{AFTER} +0.001+0+0"), TRUTH, parse="strict").total == -0.3


NEAR = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR w KQkq - 0 1"  # the wrong side to move: 0.95 alike
FAR = "8/8/8/8/8/8/8/8 w - - 7 9"  # nothing but one field in common


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (f"{AFTER}+0.001+0+0", 1.5),
        ("", -0.3),
        ("infancy neoc Anth Booker", -0.3),
        ("+++", -0.3),
        (f"{NEAR}+0.001+0+0", 0.1 + 0.5 * 0.95 + 0.3 + 0.1),
        (f"{FAR}+0.001+0+0", 0.1 + 0.3 + 0.1),
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
    reward = env_reward(read_env(text), TRUTH)
    assert reward.total == pytest.approx(total)
    assert reward.parts["correct"] == float(total == 1.5)


def test_binary_environment_is_a_cliff() -> None:
    texts = {f"{AFTER}+0.001+0+0": 1.0, f"{NEAR}+0.001+0+0": 0.0, f"{AFTER}+0.5+0+0": 0.0, AFTER: -1.0, "": -1.0}
    for text, total in texts.items():
        assert env_reward(read_env(text), TRUTH, system="binary").total == total


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
        silent = env_reward(read_env(""), TRUTH, system=system, parse=parse)
        spoken = env_reward(read_env(text), TRUTH, system=system, parse=parse)
        assert silent.total == SYSTEMS[system] <= spoken.total <= 1.5
        assert spoken.parsed == (spoken.parts["parsed"] == 1.0)


def test_options_of_rewards() -> None:
    assert env_reward(read_env(""), TRUTH, malformed=-0.7).total == -0.7
    with pytest.raises(KeelError, match="malformed is 0: it must be a number below 0"):
        env_reward(read_env(""), TRUTH, malformed=0)
    with pytest.raises(KeelError, match="unknown chess reward system 'graded': did you mean 'graduated'"):
        env_reward(read_env(""), TRUTH, system="graded")
