"""The text formats: P: (a policy's analysis of a position), A: (the environment's answer to a move), moves and FENs.

    P: {FEN padded to 90}M: {moves padded to 30}E: {evaluations in pawns padded to 40}B: {best move}
    A: {FEN}+{move}+{at most 10 moves, this one last}+{new FEN}+{reward}+{terminated}+{truncated}

A row is prompt + completion, so that a prompt is a prefix of its row. Both prompts end at a token boundary of GPT-2's
tokenizer: after a symbol that is followed by a letter, a digit or a space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from keel.base.errors import KeelError, unknown

UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_RANKS = re.compile(r"[pnbrqkPNBRQK1-8]{1,8}(/[pnbrqkPNBRQK1-8]{1,8}){7}")
_CASTLING = re.compile(r"-|K?Q?k?q?")
_SQUARE = re.compile(r"-|[a-h][36]")
_SAN = re.compile(r"([KQRBN][a-h]?[1-8]?x?[a-h][1-8]|([a-h]x)?[a-h][1-8](=[QRBN])?|O-O(-O)?)[+#]?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
LINES = 5  # moves in a P: row, or all legal moves if there are fewer
HISTORY = 10  # moves in an A: row, the current one included
REWARDS = {0.001: "0.001", 1.0: "1.0", 0.5: "0.5", -1.0: "-1.0"}


# ------------------------------------------------------------------------------------------------- moves and FENs


def is_uci(text: str) -> bool:
    """Whether a text has the form of a move, such as e2e4 or a7a8q; legality is not checked."""
    return UCI.fullmatch(text) is not None


def looks_like_san(text: str) -> bool:
    """Whether a text is a move in SAN, such as Nf3 or O-O."""
    return _SAN.fullmatch(text) is not None


def fen_fault(fen: str) -> str | None:
    """The fault in the form of a FEN (six fields, eight ranks of eight squares), or None.

    Whether the position is playable is checked by `rules`.
    """
    fields = fen.split(" ")
    if len(fields) != 6:
        return f"it has {len(fields)} fields, not 6"
    ranks, side, castling, passant, clock, number = fields
    if not _RANKS.fullmatch(ranks):
        return f"{ranks!r} is not eight ranks of pieces and numbers"
    for index, rank in enumerate(ranks.split("/")):
        if re.search(r"\d\d", rank):
            return f"rank {8 - index} has two numbers in a row"
        squares = sum(int(c) if c.isdigit() else 1 for c in rank)
        if squares != 8:
            return f"rank {8 - index} has {squares} squares"
    if side not in ("w", "b"):
        return f"the side to move is {side!r}, not w or b"
    if not castling or not _CASTLING.fullmatch(castling):
        return f"the castling rights are {castling!r}, not some of KQkq or -"
    if not _SQUARE.fullmatch(passant):
        return f"the en-passant square is {passant!r}"
    if not (re.fullmatch(r"\d{1,3}", clock, re.ASCII) and re.fullmatch(r"[1-9]\d{0,3}", number, re.ASCII)):
        return f"the counters are {clock!r} and {number!r}"
    return None


def require_fen(fen: str) -> None:
    """Raise a KeelError if the form of a FEN is invalid."""
    if fault := fen_fault(fen):
        raise KeelError(f"the FEN {fen!r} is broken: {fault}")


def require_uci(move: str) -> str:
    """The move; a KeelError if it is in another notation or does not change the square."""
    if is_uci(move):
        if move[:2] == move[2:4]:
            raise KeelError(f"the move {move!r} does not change the square: a move goes from one square to another")
        return move
    other = " (it looks like SAN)" if looks_like_san(move) else ""
    raise KeelError(f"the move {move!r} is not in UCI notation{other}: write from and to, such as g1f3 or a7a8q")


def is_number(text: str) -> bool:
    """Whether a text is a decimal number of at most 12 characters, without an exponent."""
    return len(text) <= 12 and _NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


@dataclass(frozen=True)
class Padding:
    """Widths of the three padded fields of a P: row; a field at least as long as its width gets one space."""

    fen: int = 90
    moves: int = 30
    evaluations: int = 40


PADDINGS = {"source": Padding(), "none": Padding(0, 0, 0)}
PaddingName = Literal["source", "none"]


def padding_of(name: str) -> Padding:
    """The widths called `source` (90, 30 and 40) or `none` (one space after each field)."""
    if name not in PADDINGS:
        raise unknown("chess padding", name, PADDINGS)
    return PADDINGS[name]


# ------------------------------------------------------------------------------------------------------ P: policy


@dataclass(frozen=True)
class Analysis:
    """The content of a P: completion: moves, evaluations in pawns for the side to move, and the best move."""

    moves: tuple[str, ...]
    evaluations: tuple[float, ...]
    best: str


@dataclass(frozen=True)
class PolicyAnswer:
    """A parsed P: completion.

    `moves`, `evaluations` and `best` are the valid entries. `structure`: all three fields are there in order, all
    entries are valid, there are as many evaluations as moves, and the best move is among them. `exact`: the text equals
    the output of `policy_completion`. `faults` are the errors, in order.
    """

    moves: tuple[str, ...]
    evaluations: tuple[float, ...]
    best: str | None
    faults: tuple[str, ...]
    exact: bool

    @property
    def structure(self) -> bool:
        return not self.faults

    @property
    def parsed(self) -> bool:
        """Whether at least one move could be parsed."""
        return bool(self.moves)


def policy_prompt(fen: str, padding: Padding = PADDINGS["source"]) -> str:
    """`P: {FEN}M:`, padded."""
    return f"P: {_padded(fen, padding.fen)}M:"


def policy_completion(analysis: Analysis, padding: Padding = PADDINGS["source"]) -> str:
    """The completion of a P: prompt; it starts with the space after `M:`."""
    moves = _padded(" ".join(analysis.moves), padding.moves)
    evaluations = _padded(" ".join(map(pawns, analysis.evaluations)), padding.evaluations)
    return f" {moves}E: {evaluations}B: {analysis.best}"


def pawns(value: float) -> str:
    """The text of an evaluation: two decimals, and no negative zero."""
    return f"{value + 0.0:.2f}".replace("-0.00", "0.00")


def read_policy(text: str, padding: Padding = PADDINGS["source"]) -> PolicyAnswer:
    """Parse any text as a P: completion. A move in another notation (`Nf3`) is a fault."""
    faults: list[str] = []
    head, mark, tail = text.partition("E:")
    if not mark:
        faults.append("there is no 'E:'")
        head, _, tail = text.partition("B:")
        tail = f"B:{tail}" if _ else ""
    middle, mark, last = tail.partition("B:")
    if not mark:
        faults.append("there is no 'B:'")
    moves = _entries(head.split(), is_uci, faults, "move")
    numbers = [float(n) for n in _entries(middle.split(), is_number, faults, "evaluation")]
    ends = _entries(last.split(), is_uci, faults, "best move")
    best = ends[0] if ends else None
    if not moves:
        faults.append("there is no move")
    elif len(numbers) != len(moves):
        faults.append(f"there are {len(moves)} moves and {len(numbers)} evaluations")
    if len(set(moves)) < len(moves):
        faults.append("a move is listed twice")
    if len(ends) > 1:
        faults.append("there is text after the best move")
    if best is None:
        faults.append("there is no best move")
    elif moves and best not in moves:
        faults.append(f"the best move {best} is not among the moves")
    exact = (
        not faults
        and best is not None
        and text == policy_completion(Analysis(tuple(moves), tuple(numbers), best), padding)
    )
    return PolicyAnswer(tuple(moves), tuple(numbers), best, tuple(faults), exact)


def read_policy_row(row: str) -> tuple[str, Analysis]:
    """The FEN and the analysis of a whole P: row, with any padding; a KeelError names its first fault."""
    fen, mark, rest = row.removeprefix("P: ").partition("M:")
    if not row.startswith("P: ") or not mark:
        raise KeelError("a policy row is 'P: FEN M: moves E: evaluations B: best move'")
    fen = fen.rstrip(" ")
    require_fen(fen)
    answer = read_policy(rest)
    if not answer.structure or answer.best is None:
        raise KeelError(f"the policy row is broken: {answer.faults[0]}")
    return fen, Analysis(answer.moves, answer.evaluations, answer.best)


# ------------------------------------------------------------------------------------------------- A: environment


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a move: the new position, the mover's reward, and whether the game is over."""

    fen: str
    reward: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class EnvAnswer:
    """A parsed A: completion; a field is None if it is missing or invalid.

    `structure`: four valid fields, and nothing else. `exact`: the text equals the output of `env_completion`.
    """

    fen: str | None
    reward: float | None
    terminated: bool | None
    truncated: bool | None
    faults: tuple[str, ...]
    exact: bool

    @property
    def structure(self) -> bool:
        return not self.faults

    @property
    def parsed(self) -> bool:
        """Whether a position could be parsed."""
        return self.fen is not None


def env_prompt(fen: str, move: str, history: Sequence[str] = ()) -> str:
    """`A: {FEN}+{move}+{moves}+`, where `history` ends with the move itself (default: only this move)."""
    moves = tuple(history) or (move,)
    if moves[-1] != move or len(moves) > HISTORY:
        raise KeelError(f"the history {' '.join(moves)!r} must hold at most {HISTORY} moves and end with {move}")
    return f"A: {fen}+{move}+{' '.join(moves)}+"


def env_completion(verdict: StepResult) -> str:
    """The completion of an A: prompt."""
    flags = f"{int(verdict.terminated)}+{int(verdict.truncated)}"
    return f"{verdict.fen}+{reward_text(verdict.reward)}+{flags}"


def reward_text(value: float) -> str:
    """The text of a reward: 0.001, 1.0, 0.5 or -1.0."""
    return REWARDS.get(value, repr(value))


def read_env(text: str) -> EnvAnswer:
    """Parse any text as an A: completion, field by field; spaces around fields are ignored."""
    faults: list[str] = []
    fields = [field.strip() for field in text.split("+")]
    if len(fields) != 4:
        faults.append(f"there are {len(fields)} fields, not 4")
    fen, reward, terminated, truncated = (*fields, "", "", "", "")[:4]
    fault = fen_fault(fen)
    if fault:
        faults.append(f"the FEN is broken: {fault}")
    value = float(reward) if is_number(reward) else None
    if value is None:
        faults.append(f"the reward {reward[:20]!r} is not a number")
    flags = [{"0": False, "1": True}.get(flag) for flag in (terminated, truncated)]
    if None in flags:
        faults.append(f"the flags {terminated[:20]!r} and {truncated[:20]!r} are not 0 or 1")
    exact = not faults and text == f"{fen}+{reward_text(value or 0.0)}+{terminated}+{truncated}"
    return EnvAnswer(None if fault else fen, value, flags[0], flags[1], tuple(faults), exact)


def read_env_row(row: str) -> tuple[str, str, tuple[str, ...], StepResult]:
    """FEN, move, history and result of a whole A: row; a KeelError names its first fault."""
    fields = row.removeprefix("A: ").split("+", 3)
    if not row.startswith("A: ") or len(fields) != 4:
        raise KeelError("an environment row is 'A: FEN+move+moves+new FEN+reward+terminated+truncated'")
    fen, move, moves, rest = fields
    require_fen(fen)
    history = tuple(moves.split())
    for uci in (move, *history):
        require_uci(uci)
    env_prompt(fen, move, history)
    answer = read_env(rest)
    if answer.faults:
        raise KeelError(f"the environment row is broken: {answer.faults[0]}")
    flags = bool(answer.terminated), bool(answer.truncated)
    return fen, move, history, StepResult(rest.split("+")[0], float(answer.reward or 0), *flags)


def _padded(text: str, width: int) -> str:
    return text.ljust(max(width, len(text) + 1))


def _entries(entries: Sequence[str], is_valid: Callable[[str], bool], faults: list[str], kind: str) -> list[str]:
    good = [entry for entry in entries if is_valid(entry)]
    wrong = next((entry for entry in entries if not is_valid(entry)), None)
    if wrong is not None:
        faults.append(f"{wrong[:20]!r} is not a valid {kind}" + (" in UCI notation" if looks_like_san(wrong) else ""))
    return good
