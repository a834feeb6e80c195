"""Rewards of chess answers: graduated (default) or binary, with named parts.

An answer that cannot be parsed, or an empty one, earns the lowest value, `malformed`. Answers that do not depend on
the position (format alone, a copy of the prompt, one guess for all) earn little more than 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from keel.base.types import Reward
from keel.recipes.chess.format import LINES, EnvAnswer, PolicyAnswer, StepResult

# The options of a reward. `malformed` is below 0, so that a malformed answer earns least.
System = Literal["graduated", "binary"]
Parse = Literal["lenient", "strict"]
Malformed = Annotated[float, Field(lt=0)] | None
SYSTEMS: Mapping[str, float] = {"graduated": -0.3, "binary": -1.0}  # the reward of a malformed answer
# P: at most 1. Form is worth 0.01, legality 0.29, quality 0.7. The step from malformed (−0.3) to form alone is 0.31.
POLICY_WORTH = {"structure": 0.01, "legal5": 0.19, "best_legal": 0.1, "top5": 0.2, "best": 0.3, "eval": 0.2}
QUALITY = ("top5", "best", "eval")  # parts that need an engine
FULL_POLICY = 1.0
EVALUATION_TOLERANCE = 1.0  # pawns
CENTIPAWN = 0.01
# A: at most 1.5
STRUCTURE, FEN_EXACT, FEN_PROGRESS, FEN_NEAR, REWARD_VALUE, FLAGS = 0.1, 1.0, 0.45, 0.05, 0.3, 0.1
FULL_ENV = STRUCTURE + FEN_EXACT + REWARD_VALUE + FLAGS
PLACEMENT_WEIGHT = 0.75  # weight of the pieces in a FEN's similarity; the five other fields have 0.05 each
MOVE_SQUARES = 2  # minimum number of squares that a move changes
_CLOSE = 1e-6

Lines = Sequence[tuple[str, float]]  # moves with their evaluations in pawns, best first


def fen_similarity(fen: str, other: str) -> float:
    """The similarity of two FENs, in [0, 1], symmetric, 1 only for equal ones.

    0.75 × the fraction of squares with the same piece, among squares that are occupied in either, + 0.05 for each of
    the other five fields that is equal.
    """
    pairs = [(a, b) for a, b in _square_pairs(fen, other) if a != "." or b != "."]
    return _weighed(fmean(a == b for a, b in pairs) if pairs else 1.0, fen, other)


def fen_progress(fen: str, truth: StepResult, before: str) -> float:
    """The progress of an answer's FEN from the position `before` a move to the position after it, in [0, 1].

    (1 − wrong squares / squares that the move changes, at least 0) × (0.75 + 0.05 for each other correct field): 0 for
    a copy of `before` with any counters, 1 only for the correct FEN. An illegal move changes nothing; the number of
    changed squares then counts as two.
    """
    wrong = sum(a != b for a, b in _square_pairs(fen, truth.fen))
    changed = sum(a != b for a, b in _square_pairs(before, truth.fen))
    placement = max(0.0, 1 - wrong / max(changed, MOVE_SQUARES))
    return placement * _weighed(1.0, fen, truth.fen)


def policy_reward(
    answer: PolicyAnswer,
    legal: Sequence[str],
    lines: Lines | None,
    *,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
) -> Reward:
    """The reward of a P: answer by the engine's `lines`, which are None if the engine failed (part `unavailable`).

    Graduated: Σ worth × part (`POLICY_WORTH`), which rises with every part. Binary: 1 if the best move is correct, 0 if
    not, `malformed` if the structure is invalid. Without lines, quality earns nothing, form and legality earn the same
    as otherwise, and there is no part `correct`.
    """
    readable = answer.parsed and (parse == "lenient" or answer.exact)
    shown = answer.moves if readable else ()
    parts = {
        "structure": float(readable and answer.structure),
        "parsed": float(readable),
        "legal": fmean(move in legal for move in shown) if shown else 0.0,
        "legal5": legal_of_five(shown, legal),
        "best_legal": float(readable and answer.best in legal),
    }
    if lines is None:
        parts["unavailable"] = 1.0
    else:
        parts |= content_parts(answer, lines) if readable else dict.fromkeys((*QUALITY, "content"), 0.0)
        parts["correct"] = parts["best"]
    if not readable or (system == "binary" and not answer.structure):
        worst = SYSTEMS[system] if malformed is None else malformed
        return Reward(worst, parts | ({"correct": 0.0} if lines is not None else {}), parsed=readable)
    if system == "binary":
        return Reward(parts.get("best", 0.0), parts)
    return Reward(round(sum(worth * parts.get(name, 0.0) for name, worth in POLICY_WORTH.items()), 9), parts)


def legal_of_five(moves: Sequence[str], legal: Sequence[str]) -> float:
    """Distinct legal moves as a fraction of five (fewer if fewer are legal), or of the listed moves if more.

    Short lists, repeated moves and endless lists therefore earn less.
    """
    wanted = min(LINES, len(legal))
    return min(wanted, len(set(moves) & set(legal))) / max(wanted, len(moves), 1)


def content_parts(answer: PolicyAnswer, lines: Lines) -> dict[str, float]:
    """The quality of a P: answer: `top5`, `best` and `eval`, each in [0, 1], and their mean `content`.

    `top5` is the fraction of the engine's moves among the first five of the answer, `best` is whether the best move has
    the highest score (several moves may have it), `eval` is the mean closeness of the evaluations of the engine's moves
    in the answer, 0 if it has none of them.
    """
    scores = dict(lines)
    moves = answer.moves[:LINES]
    stated = dict(reversed(list(zip(moves, answer.evaluations, strict=False))))  # a move's first evaluation counts
    top = len(scores.keys() & moves) / len(scores)
    best = float(answer.best in scores and scores[answer.best] >= max(scores.values()) - _CLOSE)
    close = fmean(closeness(stated[m], v) if m in stated else 0.0 for m, v in scores.items())
    return {"top5": top, "best": best, "eval": close, "content": (top + best + close) / 3}


def closeness(stated: float, value: float) -> float:
    """The closeness of an evaluation: 1 if equal, falling linearly to 0 at a distance of one pawn or, if less, |value|.

    A constant guess of 0.00 therefore earns only where it is true, and one of 0.01 hardly more.
    """
    reach = max(CENTIPAWN, min(EVALUATION_TOLERANCE, abs(value)))
    return max(0.0, 1 - abs(stated - value) / reach)


def env_reward(
    answer: EnvAnswer,
    truth: StepResult,
    before: str,
    *,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
) -> Reward:
    """The reward of an A: answer to a move in the position `before`.

    Graduated: 0.1 structure + 1.0 for the exact FEN (else 0.45 × progress + 0.05 × similarity) + progress ×
    (0.3 × max(0, 1 − |Δreward|) + 0.1 if both flags are correct): at most 1.5. After an illegal move the correct FEN is
    a copy: progress and the exact FEN then also need correct flags. Binary: 1 if everything is correct, 0 if not,
    `malformed` if the structure is invalid.
    """
    readable = answer.parsed and (parse == "lenient" or answer.exact)
    fen = answer.fen if readable else None
    value = max(0.0, 1 - abs(answer.reward - truth.reward)) if readable and answer.reward is not None else 0.0
    flags = readable and (answer.terminated, answer.truncated) == (truth.terminated, truth.truncated)
    is_news = flags or truth.fen != before
    parts = {
        "structure": float(readable and answer.structure),
        "parsed": float(readable),
        "fen_exact": float(fen == truth.fen),
        "fen_similarity": fen_similarity(fen, truth.fen) if fen is not None else 0.0,
        "fen_progress": fen_progress(fen, truth, before) if fen is not None and is_news else 0.0,
        "reward_value": value,
        "flags": float(flags),
        "correct": float(fen == truth.fen and flags and answer.structure and value >= 1 - _CLOSE),
    }
    if not readable or (system == "binary" and not answer.structure):
        return Reward(SYSTEMS[system] if malformed is None else malformed, parts, parsed=readable)
    if system == "binary":
        return Reward(parts["correct"], parts)
    progress = parts["fen_progress"]
    near = FEN_PROGRESS * progress + FEN_NEAR * parts["fen_similarity"]
    position = FEN_EXACT if fen == truth.fen and is_news else near
    verdict = progress * (REWARD_VALUE * value + FLAGS * parts["flags"])
    return Reward(round(STRUCTURE * parts["structure"] + position + verdict, 9), parts)


def _weighed(placement: float, fen: str, other: str) -> float:
    """0.75 × the score of the pieces + 0.05 for each of the other five fields that is equal."""
    same = sum(a == b for a, b in zip(fen.split(" ")[1:], other.split(" ")[1:], strict=True))
    return PLACEMENT_WEIGHT * placement + (1 - PLACEMENT_WEIGHT) / 5 * same


def _square_pairs(fen: str, other: str) -> list[tuple[str, str]]:
    return list(zip(_squares(fen.split(" ")[0]), _squares(other.split(" ")[0]), strict=True))


def _squares(placement: str) -> str:
    """64 characters from a8 to h1, with a dot for an empty square."""
    return "".join("." * int(c) if c.isdigit() else c for c in placement if c != "/")
