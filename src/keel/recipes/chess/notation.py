"""Moves in UCI notation and FENs: whether a text has their form, and what is wrong if not."""

from __future__ import annotations

import math
import re

from keel.base.errors import KeelError

UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_RANKS = re.compile(r"[pnbrqkPNBRQK1-8]{1,8}(/[pnbrqkPNBRQK1-8]{1,8}){7}")
_CASTLING = re.compile(r"-|K?Q?k?q?")
_SQUARE = re.compile(r"-|[a-h][36]")
_SAN = re.compile(r"([KQRBN][a-h]?[1-8]?x?[a-h][1-8]|([a-h]x)?[a-h][1-8](=[QRBN])?|O-O(-O)?)[+#]?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)


def is_uci(text: str) -> bool:
    """Whether a text has the form of a move, such as e2e4 or a7a8q; not whether it is legal or goes anywhere."""
    return UCI.fullmatch(text) is not None


def looks_like_san(text: str) -> bool:
    """Whether a text is a move in the other notation, such as Nf3 or O-O."""
    return _SAN.fullmatch(text) is not None


def fen_fault(fen: str) -> str | None:
    """What is wrong with the form of a FEN (six fields, eight ranks of eight squares), or None.

    The form alone: whether such a position can be played on is the rules' to say.
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


def require_uci(move: str) -> str:
    """The move, or a KeelError that names its notation, or that it goes nowhere."""
    if is_uci(move):
        if move[:2] == move[2:4]:
            raise KeelError(f"the move {move!r} stays on its square: a move goes from one square to another")
        return move
    other = " (it looks like SAN)" if looks_like_san(move) else ""
    raise KeelError(f"the move {move!r} is not in UCI notation{other}: write from and to, such as g1f3 or a7a8q")


def is_real(value: object) -> bool:
    """Whether an option's value is a finite number; neither a truth value nor a text is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_number(text: str) -> bool:
    """Whether a text is a decimal number of at most 12 characters, without an exponent."""
    return len(text) <= 12 and _NUMBER.fullmatch(text) is not None and math.isfinite(float(text))
