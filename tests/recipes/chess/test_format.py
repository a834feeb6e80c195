"""The two texts: what is written is read back, prompts are prefixes of rows, and what is wrong is said."""

from __future__ import annotations

import random
from collections.abc import Sequence

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from keel.base.errors import KeelError
from keel.recipes.chess.format import (
    PADDINGS,
    Analysis,
    Padding,
    StepResult,
    env_completion,
    env_prompt,
    fen_fault,
    policy_completion,
    policy_prompt,
    read_env,
    read_env_row,
    read_policy,
    read_policy_row,
)

from .positions import random_game

START = chess.STARTING_FEN
FIVE = Analysis(("e2e4", "d2d4", "g1f3", "c2c4", "b1c3"), (0.33, 0.3, 0.25, -0.1, 0.0), "e2e4")


def policy_row(fen: str, analysis: Analysis, padding: Padding = PADDINGS["source"]) -> str:
    return policy_prompt(fen, padding) + policy_completion(analysis, padding)


def env_row(fen: str, move: str, history: Sequence[str], verdict: StepResult) -> str:
    return env_prompt(fen, move, history) + env_completion(verdict)


def test_a_policy_row_to_the_letter() -> None:
    row = policy_row(START, FIVE)
    assert row == (
        "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1" + " " * 34 + "M: e2e4 d2d4 g1f3 c2c4 b1c3      "
        "E: 0.33 0.30 0.25 -0.10 0.00               B: e2e4"
    )
    assert [row.index(mark) for mark in ("M: ", "E: ", "B: ")] == [3 + 90, 3 + 90 + 3 + 30, 3 + 90 + 3 + 30 + 3 + 40]
    assert policy_prompt(START) == row[: 3 + 90 + 2]
    assert policy_row("8/8/8/8/8/8/8/8 w - - 0 1", FIVE, PADDINGS["none"]) == (
        "P: 8/8/8/8/8/8/8/8 w - - 0 1 M: e2e4 d2d4 g1f3 c2c4 b1c3 E: 0.33 0.30 0.25 -0.10 0.00 B: e2e4"
    )


def test_an_environment_row_to_the_letter() -> None:
    after = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
    row = env_row(START, "e2e4", ("e2e4",), StepResult(after, 0.001, False, False))
    assert row == f"A: {START}+e2e4+e2e4+{after}+0.001+0+0"
    assert env_prompt(START, "e2e4") == f"A: {START}+e2e4+e2e4+"
    with pytest.raises(KeelError, match="at most 10 moves"):
        env_prompt(START, "e2e4", ["a2a3"] * 10 + ["e2e4"])


@pytest.mark.slow
def test_ten_thousand_positions_come_back_from_both_formats() -> None:
    """Row to parts to row, every prompt a prefix of its row that GPT-2's tokenizer would cut there as well."""
    count, seed = 0, 0
    cut = ByteLevel(add_prefix_space=False)
    kinds: set[str] = set()
    while count < 10_000:
        rng = random.Random(f"values {seed}")
        history: tuple[str, ...] = ()
        fen = START
        for board, move in random_game(seed):
            uci, after = move.uci(), board.fen()
            history = (*history[-9:], uci)
            moves = tuple(dict.fromkeys((uci, *history)))[:5]
            analysis = Analysis(moves, tuple(round(rng.uniform(-99, 99), 2) for _ in moves), uci)
            verdict = StepResult(after, rng.choice((0.001, 1.0, 0.5, -1.0)), rng.random() < 0.5, rng.random() < 0.5)
            padding = PADDINGS[rng.choice(("source", "none"))]
            kinds |= {"promotion"} if move.promotion else {"castling"} if after.split()[2] != fen.split()[2] else set()

            row = policy_row(fen, analysis, padding)
            assert read_policy_row(row) == (fen, analysis)
            assert read_policy(row.removeprefix(policy_prompt(fen, padding)), padding).exact
            other = env_row(fen, uci, history, verdict)
            assert read_env_row(other) == (fen, uci, history, verdict)
            assert read_env(other.removeprefix(env_prompt(fen, uci, history))).exact
            if count % 50 == 0:
                assert policy_row(*read_policy_row(row), padding) == row
                assert env_row(*read_env_row(other)) == other
                for text, prompt in ((row, policy_prompt(fen, padding)), (other, env_prompt(fen, uci, history))):
                    assert text.startswith(prompt)
                    assert len(prompt) in {start for _, (start, _) in cut.pre_tokenize_str(text)}
            count, fen = count + 1, after
        seed += 1
    assert kinds == {"promotion", "castling"}


@pytest.mark.parametrize(
    ("text", "moves", "evaluations", "best", "fault"),
    [
        ("", 0, 0, None, "no 'E:'"),
        (" e2e4", 1, 0, None, "no 'E:'"),
        (" e2e4 d2d4 E: 0.3", 2, 1, None, "no 'B:'"),
        (" e2e4 d2d4 E: 0.3 B: e2e4", 2, 1, "e2e4", "2 moves and 1 evaluations"),
        (" e2e4 Nf3 E: 0.3 0.1 B: e2e4", 1, 2, "e2e4", "'Nf3' is not a valid move in UCI notation"),
        (" e4 d4 E: 0.3 0.1 B: e4", 0, 2, None, "'e4' is not a valid move in UCI notation"),
        (" e2e4 e2e4 E: 0.3 0.3 B: e2e4", 2, 2, "e2e4", "twice"),
        (" e2e4 d2d4 E: 0.3 nan B: e2e4", 2, 1, "e2e4", "'nan' is not a valid evaluation"),
        (" e2e4 d2d4 E: 0.3 1e9 B: e2e4", 2, 1, "e2e4", "'1e9' is not a valid evaluation"),
        (" e2e4 d2d4 E: 0.3 0.1 B: a2a3", 2, 2, "a2a3", "not among the moves"),
        (" e2e4 d2d4 E: 0.3 0.1 B: e2e4 d2d4", 2, 2, "e2e4", "after the best move"),
        (" a7a8k h7h8Q E: 0.3 0.1 B: a7a8q", 0, 2, "a7a8q", "'a7a8k' is not a valid move"),
    ],
)
def test_what_is_wrong_with_a_policy_answer(
    text: str, moves: int, evaluations: int, best: str | None, fault: str
) -> None:
    answer = read_policy(text)
    assert (len(answer.moves), len(answer.evaluations), answer.best) == (moves, evaluations, best)
    assert any(fault in said for said in answer.faults), answer.faults
    assert not answer.structure
    assert not answer.exact


def test_lenient_reads_any_blanks_and_strict_is_exact() -> None:
    gold = policy_completion(FIVE)
    loose = "e2e4   d2d4 g1f3 c2c4 b1c3 E:0.33 .3 +0.25 -0.1 0 B:e2e4\n"
    assert read_policy(gold).exact
    assert read_policy(loose).structure
    assert not read_policy(loose).exact
    assert read_policy(loose).evaluations == read_policy(gold).evaluations
    told = env_completion(StepResult(START, 1.0, True, False))
    assert read_env(told).exact
    assert read_env(f" {START} + 1 +1+ 0\n").structure
    assert not read_env(f"{START}+1+1+0").exact


@pytest.mark.parametrize(
    ("text", "parsed", "fault"),
    [
        ("", False, "there are 1 fields"),
        (START, True, "there are 1 fields"),
        (f"{START}+0.001+0", True, "there are 3 fields"),
        (f"{START}+0.001+0+0+0", True, "there are 5 fields"),
        (f"{START}+win+0+0", True, "'win' is not a number"),
        (f"{START}+inf+0+0", True, "'inf' is not a number"),
        (f"{START}+0.001+0+2", True, "are not 0 or 1"),
        ("rnbqkbnr/pppppppp/8/8+0.001+0+0", False, "it has 1 fields"),
    ],
)
def test_what_is_wrong_with_an_environment_answer(text: str, parsed: bool, fault: str) -> None:
    answer = read_env(text)
    assert answer.parsed is parsed
    assert any(fault in said for said in answer.faults), answer.faults
    assert not answer.exact


@pytest.mark.parametrize(
    ("fen", "fault"),
    [
        ("", "it has 1 fields"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -", "it has 4 fields"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP w KQkq - 0 1", "eight ranks"),
        ("rnbqkbnr/ppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1", "rank 7 has 7 squares"),
        ("rnbqkbnr/pppppppp/8/44/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1", "rank 5 has two numbers in a row"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNX w KQkq - 0 1", "eight ranks"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR x KQkq - 0 1", "side to move is 'x'"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w QK - 0 1", "castling rights are 'QK'"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq e5 0 1", "en-passant square is 'e5'"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - -1 1", "counters"),
    ],
)
def test_broken_fens_are_named(fen: str, fault: str) -> None:
    assert fault in str(fen_fault(fen))
    with pytest.raises(KeelError, match="is broken"):
        read_env_row(f"A: {fen}+e2e4+e2e4+{START}+0.001+0+0")
    with pytest.raises(KeelError, match="is broken"):
        read_policy_row(f"P: {fen} M: e2e4 E: 0.1 B: e2e4")


@given(st.lists(st.sampled_from(["e2e4", "Nf3", "E:", "B:", "M:", "0.5", "-3", "+", START, "", "0", "1"]), max_size=12))
def test_reading_pieces_of_rows_never_raises_and_exact_means_exact(words: list[str]) -> None:
    for text in (" ".join(words), "+".join(words)):
        policy, env = read_policy(text), read_env(text)
        if policy.exact:
            assert policy_completion(Analysis(policy.moves, policy.evaluations, str(policy.best))) == text
        if env.exact:
            assert (
                env_completion(StepResult(str(env.fen), env.reward or 0.0, *map(bool, (env.terminated, env.truncated))))
                == text
            )
