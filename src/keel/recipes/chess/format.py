"""The two texts a model learns: P: (a policy's analysis of a position) and A: (the environment's answer to a move).

    P: {FEN padded to 90}M: {moves padded to 30}E: {evaluations in pawns padded to 40}B: {best move}
    A: {FEN}+{move}+{at most 10 moves, this one last}+{new FEN}+{reward}+{terminated}+{truncated}

A row is always prompt + completion, so that a prompt is a prefix of its row by construction. Both prompts end where
GPT-2's tokenizer cuts as well: after a sign that a letter, a digit or a space follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keel.base.errors import KeelError, unknown
from keel.recipes.chess.notation import fen_fault, is_number, is_uci, looks_like_san, require_uci

LINES = 5  # moves in a P: row, where the position has as many
HISTORY = 10  # moves in an A: row, the current one included
PARSES = ("lenient", "strict")
REWARDS = {0.001: "0.001", 1.0: "1.0", 0.5: "0.5", -1.0: "-1.0"}


@dataclass(frozen=True)
class Padding:
    """Widths of the three padded fields of a P: row; a field at least as long as its width gets one space."""

    fen: int = 90
    moves: int = 30
    evaluations: int = 40


PADDINGS = {"source": Padding(), "none": Padding(0, 0, 0)}


def padding_of(name: str) -> Padding:
    """The widths called `source` (90, 30 and 40) or `none` (one space behind each field)."""
    if not isinstance(name, str) or name not in PADDINGS:
        raise unknown("chess padding", name, PADDINGS)
    return PADDINGS[name]


# ------------------------------------------------------------------------------------------------------ P: policy


@dataclass(frozen=True)
class Analysis:
    """What stands behind a P: prompt: moves and their evaluations in pawns for the side to move, and the best move."""

    moves: tuple[str, ...]
    evaluations: tuple[float, ...]
    best: str


@dataclass(frozen=True)
class PolicyAnswer:
    """What could be read of a completion of P:.

    `moves`, `evaluations` and `best` are those that have the right form. `structure`: all three fields stand in order,
    each entry readable, as many evaluations as moves and the best move among them. `exact`: not a blank differs from
    what `policy_completion` writes. `faults` says what is wrong, the first thing first.
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
        """Whether anything at all could be read: one move."""
        return bool(self.moves)


def policy_prompt(fen: str, padding: Padding = PADDINGS["source"]) -> str:
    """`P: {FEN}M:`, padded."""
    return f"P: {_padded(fen, padding.fen)}M:"


def policy_completion(analysis: Analysis, padding: Padding = PADDINGS["source"]) -> str:
    """What a P: prompt is continued with; it begins with the space behind `M:`."""
    moves = _padded(" ".join(analysis.moves), padding.moves)
    evaluations = _padded(" ".join(map(pawns, analysis.evaluations)), padding.evaluations)
    return f" {moves}E: {evaluations}B: {analysis.best}"


def pawns(value: float) -> str:
    """An evaluation as it is written: two decimals, and no negative zero."""
    return f"{value + 0.0:.2f}".replace("-0.00", "0.00")


def read_policy(text: str, padding: Padding = PADDINGS["source"]) -> PolicyAnswer:
    """Read a completion of P:, whatever it is. A move in another notation (`Nf3`) is a fault, not a move."""
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
        faults.append("a move stands twice")
    if len(ends) > 1:
        faults.append("something follows the best move")
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
    """The FEN and the analysis of a whole P: row; a KeelError says what is wrong with it. Any padding is read."""
    fen, mark, rest = row.removeprefix("P: ").partition("M:")
    if not row.startswith("P: ") or not mark:
        raise KeelError("a policy row is 'P: FEN M: moves E: evaluations B: best move'")
    fault = fen_fault(fen.rstrip(" "))
    if fault:
        raise KeelError(f"the FEN {fen.rstrip()!r} is broken: {fault}")
    answer = read_policy(rest)
    if not answer.structure or answer.best is None:
        raise KeelError(f"the policy row is broken: {answer.faults[0]}")
    return fen.rstrip(" "), Analysis(answer.moves, answer.evaluations, answer.best)


# ------------------------------------------------------------------------------------------------- A: environment


@dataclass(frozen=True)
class Verdict:
    """What the environment says to a move: the new position, the mover's reward, and whether the game is over."""

    fen: str
    reward: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class EnvAnswer:
    """What could be read of a completion of A:; None where a field is missing or has the wrong form.

    `structure`: four fields, each of the right form, and nothing else. `exact`: not a blank or a digit differs from
    what `env_completion` writes.
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
        """Whether there is a position to compare."""
        return self.fen is not None


def env_prompt(fen: str, move: str, history: Sequence[str] = ()) -> str:
    """`A: {FEN}+{move}+{moves}+`, where `history` ends with the move itself (default: it alone)."""
    moves = tuple(history) or (move,)
    if moves[-1] != move or len(moves) > HISTORY:
        raise KeelError(f"the history {' '.join(moves)!r} must hold at most {HISTORY} moves and end with {move}")
    return f"A: {fen}+{move}+{' '.join(moves)}+"


def env_completion(verdict: Verdict) -> str:
    """What an A: prompt is continued with."""
    flags = f"{int(verdict.terminated)}+{int(verdict.truncated)}"
    return f"{verdict.fen}+{reward_text(verdict.reward)}+{flags}"


def reward_text(value: float) -> str:
    """A reward as it is written: 0.001, 1.0, 0.5 or -1.0."""
    return REWARDS.get(value, repr(value))


def read_env(text: str) -> EnvAnswer:
    """Read a completion of A:, whatever it is; fields are read one by one, blanks around them do not matter."""
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
        faults.append(f"the reward {reward[:20]!r} is no number")
    flags = [{"0": False, "1": True}.get(flag) for flag in (terminated, truncated)]
    if None in flags:
        faults.append(f"the flags {terminated[:20]!r} and {truncated[:20]!r} are not 0 or 1")
    exact = not faults and text == f"{fen}+{reward_text(value or 0.0)}+{terminated}+{truncated}"
    return EnvAnswer(None if fault else fen, value, flags[0], flags[1], tuple(faults), exact)


def read_env_row(row: str) -> tuple[str, str, tuple[str, ...], Verdict]:
    """FEN, move, history and verdict of a whole A: row; a KeelError says what is wrong with it."""
    fields = row.removeprefix("A: ").split("+", 3)
    if not row.startswith("A: ") or len(fields) != 4:
        raise KeelError("an environment row is 'A: FEN+move+moves+new FEN+reward+terminated+truncated'")
    fen, move, moves, rest = fields
    fault = fen_fault(fen)
    if fault:
        raise KeelError(f"the FEN {fen!r} is broken: {fault}")
    history = tuple(moves.split())
    for uci in (move, *history):
        require_uci(uci)
    env_prompt(fen, move, history)
    answer = read_env(rest)
    if answer.faults:
        raise KeelError(f"the environment row is broken: {answer.faults[0]}")
    flags = bool(answer.terminated), bool(answer.truncated)
    return fen, move, history, Verdict(rest.split("+")[0], float(answer.reward or 0), *flags)


def _padded(text: str, width: int) -> str:
    return text.ljust(max(width, len(text) + 1))


def _entries(entries: Sequence[str], is_valid: Callable[[str], bool], faults: list[str], kind: str) -> list[str]:
    good = [entry for entry in entries if is_valid(entry)]
    wrong = next((entry for entry in entries if not is_valid(entry)), None)
    if wrong is not None:
        faults.append(f"{wrong[:20]!r} is no {kind}" + (" in UCI notation" if looks_like_san(wrong) else ""))
    return good
