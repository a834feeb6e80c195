"""What chess answers earn: a graduated reward (default) and the binary cliff, each part named.

Every system has one worst value, `malformed`, and an answer that cannot be read earns exactly that, an empty one too:
silence never pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from keel.base.errors import KeelError, unknown
from keel.base.types import Reward
from keel.envs.chess.format import LINES, EnvAnswer, PolicyAnswer, Verdict
from keel.envs.chess.notation import is_real

SYSTEMS = {"graduated": -0.3, "binary": -1.0}  # and what a malformed answer earns
RUNG = 0.2
STRUCTURE, FEN_EXACT, FEN_NEAR, REWARD_VALUE, FLAGS = 0.1, 1.0, 0.5, 0.3, 0.1
FULL_ENV = STRUCTURE + FEN_EXACT + REWARD_VALUE + FLAGS
NEAR = 0.5  # similarity from which a wrong FEN earns its share
CONTENT_RUNGS = (0.3, 0.7)
EVALUATION_TOLERANCE = 1.0  # pawns
PLACEMENT_WEIGHT = 0.75  # of a FEN's similarity; the five other fields have 0.05 each
_CLOSE = 1e-6

Lines = Sequence[tuple[str, float]]  # moves with their evaluations in pawns, best first


def malformed_value(system: str, malformed: float | None = None) -> float:
    """What a malformed answer earns under a system, or the user's own value for it."""
    if not isinstance(system, str) or system not in SYSTEMS:
        raise unknown("chess reward system", system, SYSTEMS)
    if malformed is None:
        return SYSTEMS[system]
    if not is_real(malformed) or malformed >= 0:
        raise KeelError(
            f"chess malformed is {malformed!r}: it must be a number below 0, or a malformed answer would pay"
        )
    return float(malformed)


def fen_similarity(fen: str, other: str) -> float:
    """How alike two FENs are, in [0, 1], symmetric, 1 only for equal ones.

    0.75 × the share of squares with the same piece, among squares that are occupied in either, + 0.05 for each of
    the other five fields that is equal.
    """
    first, second = fen.split(" "), other.split(" ")
    boards = [_squares(first[0]), _squares(second[0])]
    pairs = [(a, b) for a, b in zip(*boards, strict=True) if a != "." or b != "."]
    placement = fmean(a == b for a, b in pairs) if pairs else 1.0
    same = sum(a == b for a, b in zip(first[1:], second[1:], strict=True))
    return PLACEMENT_WEIGHT * placement + (1 - PLACEMENT_WEIGHT) / 5 * same


def policy_reward(
    answer: PolicyAnswer,
    legal: Sequence[str],
    lines: Lines | None,
    *,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
) -> Reward:
    """The reward of a P: answer against the engine's `lines`; None: the engine could not be asked (`unavailable`).

    Graduated: 0.2 for each rung, each counting only above the ones before it: a move of UCI form; an evaluation too;
    2 to 6 different moves and 2 to 6 evaluations (one is enough where one move is legal); content above 0.3; above
    0.7. Binary: 1 where the best move is right, 0 where it is wrong, the cliff where the structure is. Without lines
    content is left out and the rest scaled up to the same full reward; there is no part `correct` then.
    """
    readable = answer.parsed and (parse == "lenient" or answer.exact)
    shown = answer.moves if readable else ()
    parts = {
        "structure": float(readable and answer.structure),
        "parsed": float(readable),
        "legal": fmean(move in legal for move in shown) if shown else 0.0,
        "best_legal": float(readable and answer.best in legal),
    }
    if lines is None:
        parts["unavailable"] = 1.0
    else:
        parts |= content_parts(answer, lines) if readable else dict.fromkeys(("top5", "best", "eval", "content"), 0.0)
        parts["correct"] = parts["best"]
    worst = malformed_value(system, malformed)
    if not readable or (system == "binary" and not answer.structure):
        return Reward(worst, parts | ({"correct": 0.0} if lines is not None else {}), parsed=readable)
    if system == "binary":
        return Reward(parts.get("best", 1.0), parts)
    few = min(2, len(legal))
    several = few <= len(set(answer.moves)) <= 6 and few <= len(answer.evaluations) <= 6
    rungs = [True, bool(answer.evaluations), several]
    if lines is not None:
        rungs += [parts["content"] > threshold for threshold in CONTENT_RUNGS]
    reached = rungs.index(False) if False in rungs else len(rungs)
    return Reward(round(RUNG * reached * 5 / len(rungs), 9), parts)


def content_parts(answer: PolicyAnswer, lines: Lines) -> dict[str, float]:
    """How good a P: answer is: the mean of `top5`, `best` and `eval`, each in [0, 1].

    `top5` is the share of the engine's moves that are among the first five different ones of the answer, `best`
    whether the best move has the highest score of them (several may share it), `eval` the share of the engine's moves
    whose evaluation stands beside them within one pawn.
    """
    scores = dict(lines)
    moves = list(dict.fromkeys(answer.moves))[:LINES]
    stated = dict(reversed(list(zip(answer.moves, answer.evaluations, strict=False))))
    top = sum(move in scores for move in moves) / len(scores)
    best = float(answer.best in scores and scores[answer.best] >= max(scores.values()) - _CLOSE)
    near = sum(m in stated and abs(stated[m] - v) <= EVALUATION_TOLERANCE + _CLOSE for m, v in scores.items())
    close = near / len(scores)
    return {"top5": top, "best": best, "eval": close, "content": (top + best + close) / 3}


def env_reward(
    answer: EnvAnswer,
    truth: Verdict,
    *,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
) -> Reward:
    """The reward of an A: answer.

    Graduated: 0.1 structure + 1.0 for the exact FEN (else 0.5 × similarity where that is at least 0.5)
    + 0.3 × max(0, 1 − |Δreward|) + 0.1 where both flags are right: 1.5 in full. Binary: 1 where all of it is right,
    0 where some of it is wrong, the cliff where the structure is.
    """
    readable = answer.parsed and (parse == "lenient" or answer.exact)
    exact = readable and answer.fen == truth.fen
    similarity = fen_similarity(answer.fen, truth.fen) if readable and answer.fen is not None else 0.0
    value = max(0.0, 1 - abs(answer.reward - truth.reward)) if readable and answer.reward is not None else 0.0
    flags = readable and (answer.terminated, answer.truncated) == (truth.terminated, truth.truncated)
    right = exact and flags and answer.structure and value >= 1 - _CLOSE
    parts = {
        "structure": float(readable and answer.structure),
        "parsed": float(readable),
        "fen_exact": float(exact),
        "fen_similarity": similarity,
        "reward_value": value,
        "flags": float(flags),
        "correct": float(right),
    }
    worst = malformed_value(system, malformed)
    if not readable or (system == "binary" and not answer.structure):
        return Reward(worst, parts, parsed=readable)
    if system == "binary":
        return Reward(float(right), parts)
    near = FEN_NEAR * similarity if similarity >= NEAR else 0.0
    total = STRUCTURE * parts["structure"] + (FEN_EXACT if exact else near)
    return Reward(round(total + REWARD_VALUE * value + FLAGS * parts["flags"], 9), parts)


def _squares(placement: str) -> str:
    """64 characters from a8 to h1, a dot where no piece stands."""
    return "".join("." * int(c) if c.isdigit() else c for c in placement if c != "/")
