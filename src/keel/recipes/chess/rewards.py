"""Rewards of chess answers: graduated (default) or binary, with named parts.

An answer that cannot be parsed, or an empty one, earns the lowest value, `malformed`. Answers that need no chess
(format alone, a copy of the prompt, one guess for every position) earn little more than 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from keel.base.errors import KeelError, unknown
from keel.base.types import Reward
from keel.recipes.chess.format import LINES, EnvAnswer, PolicyAnswer, Verdict
from keel.recipes.chess.notation import is_real

SYSTEMS = {"graduated": -0.3, "binary": -1.0}  # and what a malformed answer earns
# P:, in full 1: above 0 form is worth 0.01, legality 0.29, quality 0.7. From malformed (−0.3) to form alone it is 0.31.
POLICY_WORTH = {"structure": 0.01, "legal5": 0.19, "best_legal": 0.1, "top5": 0.2, "best": 0.3, "eval": 0.2}
QUALITY = ("top5", "best", "eval")  # what only an engine can judge
FULL_POLICY = 1.0
EVALUATION_TOLERANCE = 1.0  # pawns
CENTIPAWN = 0.01
# A:, in full 1.5
STRUCTURE, FEN_EXACT, FEN_PROGRESS, FEN_NEAR, REWARD_VALUE, FLAGS = 0.1, 1.0, 0.45, 0.05, 0.3, 0.1
FULL_ENV = STRUCTURE + FEN_EXACT + REWARD_VALUE + FLAGS
PLACEMENT_WEIGHT = 0.75  # of a FEN's similarity; the five other fields have 0.05 each
MOVE_SQUARES = 2  # that a move changes at least: where from and where to
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
    pairs = [(a, b) for a, b in _square_pairs(fen, other) if a != "." or b != "."]
    return _weighed(fmean(a == b for a, b in pairs) if pairs else 1.0, fen, other)


def fen_progress(fen: str, truth: Verdict, before: str) -> float:
    """How much of the way from the position `before` a move to the one behind it an answer's FEN has gone, in [0, 1].

    (1 − wrong squares / squares that the move changes, at least 0) × (0.75 + 0.05 for each other field that is right):
    0 for a copy of `before` whatever its counters say, 1 for the right FEN alone. An illegal move changes nothing; an
    answer is then measured against a move's two squares.
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
    """The reward of a P: answer against the engine's `lines`; None: the engine could not be asked (`unavailable`).

    Graduated: Σ worth × part (`POLICY_WORTH`), so a part that rises never costs anything. Binary: 1 where the best move
    is right, 0 where it is wrong, the cliff where the structure is. Without lines nothing is paid for quality, nor
    scaled up for it: form and legality earn what they always do, and there is no part `correct`.
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
    worst = malformed_value(system, malformed)
    if not readable or (system == "binary" and not answer.structure):
        return Reward(worst, parts | ({"correct": 0.0} if lines is not None else {}), parsed=readable)
    if system == "binary":
        return Reward(parts.get("best", 0.0), parts)
    return Reward(round(sum(worth * parts.get(name, 0.0) for name, worth in POLICY_WORTH.items()), 9), parts)


def legal_of_five(moves: Sequence[str], legal: Sequence[str]) -> float:
    """Different legal moves, of the five asked for (fewer where fewer are legal), or of as many as stand there.

    A short list, a move that stands twice and a list without an end all lose by it.
    """
    wanted = min(LINES, len(legal))
    return min(wanted, len(set(moves) & set(legal))) / max(wanted, len(moves), 1)


def content_parts(answer: PolicyAnswer, lines: Lines) -> dict[str, float]:
    """How good a P: answer is: `top5`, `best` and `eval`, each in [0, 1], and their mean `content`.

    `top5` is the share of the engine's moves that are among the first five of the answer, `best` whether the best move
    has the highest score of them (several may share it), `eval` the mean closeness of the evaluations that stand beside
    the engine's moves there, 0 where none does.
    """
    scores = dict(lines)
    moves = answer.moves[:LINES]
    stated = dict(reversed(list(zip(moves, answer.evaluations, strict=False))))  # a move's first evaluation counts
    top = len(scores.keys() & moves) / len(scores)
    best = float(answer.best in scores and scores[answer.best] >= max(scores.values()) - _CLOSE)
    close = fmean(closeness(stated[m], v) if m in stated else 0.0 for m, v in scores.items())
    return {"top5": top, "best": best, "eval": close, "content": (top + best + close) / 3}


def closeness(stated: float, value: float) -> float:
    """1 for the evaluation itself, falling to 0 at one pawn's distance, or at 0.00 where that is nearer.

    So 0.00 everywhere earns nothing but where it is true, and 0.01 everywhere hardly more.
    """
    reach = max(CENTIPAWN, min(EVALUATION_TOLERANCE, abs(value)))
    return max(0.0, 1 - abs(stated - value) / reach)


def env_reward(
    answer: EnvAnswer,
    truth: Verdict,
    before: str,
    *,
    system: str = "graduated",
    parse: str = "lenient",
    malformed: float | None = None,
) -> Reward:
    """The reward of an A: answer to a move in the position `before`.

    Graduated: 0.1 structure + 1.0 for the exact FEN (else 0.45 × progress + 0.05 × similarity) + progress ×
    (0.3 × max(0, 1 − |Δreward|) + 0.1 where both flags are right): 1.5 in full. After an illegal move the right FEN is
    a copy and the flags are the news: without them there is no progress and no exact FEN. Binary: 1 where all of it is
    right, 0 where some of it is wrong, the cliff where the structure is.
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
    worst = malformed_value(system, malformed)
    if not readable or (system == "binary" and not answer.structure):
        return Reward(worst, parts, parsed=readable)
    if system == "binary":
        return Reward(parts["correct"], parts)
    progress = parts["fen_progress"]
    near = FEN_PROGRESS * progress + FEN_NEAR * parts["fen_similarity"]
    position = FEN_EXACT if fen == truth.fen and is_news else near
    verdict = progress * (REWARD_VALUE * value + FLAGS * parts["flags"])
    return Reward(round(STRUCTURE * parts["structure"] + position + verdict, 9), parts)


def _weighed(placement: float, fen: str, other: str) -> float:
    """0.75 × how well the pieces stand + 0.05 for each of the other five fields that is equal."""
    same = sum(a == b for a, b in zip(fen.split(" ")[1:], other.split(" ")[1:], strict=True))
    return PLACEMENT_WEIGHT * placement + (1 - PLACEMENT_WEIGHT) / 5 * same


def _square_pairs(fen: str, other: str) -> list[tuple[str, str]]:
    return list(zip(_squares(fen.split(" ")[0]), _squares(other.split(" ")[0]), strict=True))


def _squares(placement: str) -> str:
    """64 characters from a8 to h1, a dot where no piece stands."""
    return "".join("." * int(c) if c.isdigit() else c for c in placement if c != "/")
