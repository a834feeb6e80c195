"""Bound the size of a formula without evaluating it, so that giant ones are not passed to sympy.

A few characters such as `(9999!)!` or `9^{9*9*9*9*9}` can exhaust memory, and a thread that evaluates them cannot be
stopped. The bounds are computed in one pass over the text, which may mix prose, LaTeX and plain formulas.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_LARGEST = 40_000  # digits of a number: 9999! has 35,660
_EXPONENT_DIGITS = math.log10(9_999.5)
_MOST_TERMS = 2_000  # of the expanded power of a sum of three or more terms
_DEEPEST = 60  # nested brackets and powers
_GROWS = re.compile(r"[!^]|\*\*|\\(?:[dt]?binom|choose|exp|prod|sum|[Gg]amma)(?![A-Za-z])|exp|[Gg]amma")
_TOKEN = re.compile(
    r"\\[A-Za-z]+|\\.|\d+(?:(?:,|\\[,!]|\{,\}| )\d{3}(?!\d))*(?:\.\d+)?|[^\W\d_]+|\*\*|\s+|.", re.DOTALL
)
_OPEN = {"(", "[", "{", "\\{", "\\(", "\\[", "\\lfloor", "\\lceil", "\\langle", "⌊", "⌈"}
_CLOSE = {")", "]", "}", "\\}", "\\)", "\\]", "\\rfloor", "\\rceil", "\\rangle", "⌋", "⌉"}
_SPACE = re.compile(r"\s+|~|\\[,:;!> ]|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|q?quad)")
_FRACTIONS, _BINOMIALS = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"}, {"\\binom", "\\dbinom", "\\tbinom"}
_REPEATED = {"\\prod", "\\sum"}
_GROWTH, _SIGNS = ("!", "^", "**"), ("+", "-", "−", "\\pm")
_CONSTANTS = {"e", "pi", "\\pi", "\\phi"}
_GAMMA, _EXP = {"\\Gamma", "\\gamma", "gamma", "Gamma"}, {"\\exp", "exp"}


def is_giant(text: str, exclamations: bool = False) -> bool:
    """Whether a formula in the text may have more than 40,000 digits, an exponent above 9999, or 2,000 terms.

    With `exclamations`, a `!` outside all brackets is a punctuation mark, not a factorial.
    """
    if not _GROWS.search(text):
        return False
    try:
        _Reader(text, exclamations).group(0)
    except _GiantError:
        return True
    return False


class _GiantError(Exception):
    pass


class _Size(NamedTuple):
    """Bounds of a formula: log10 of the numerator and of the denominator, the terms of a sum, whether a sign occurs."""

    up: float
    down: float = 0.0
    terms: int = 1
    signed: bool = False


_LETTER, _CONSTANT = _Size(0.1), _Size(0.5)
_TWO = math.log10(2)  # numbers count at least as 2, so that a sum is not more than the product of its terms


class _Reader:
    def __init__(self, text: str, exclamations: bool) -> None:
        self.tokens, self.spaced = list[str](), set[int]()  # `spaced`: indices of tokens after a space
        for token in _TOKEN.findall(text):
            if not _SPACE.fullmatch(token):
                self.tokens.append(token)
            else:
                self.spaced.add(len(self.tokens))
        self.tokens.append("")
        self.at, self.bold, self.exclamations = 0, False, exclamations

    def next(self) -> str:
        """The next token, without taking it; "" at the end."""
        return self.tokens[self.at]

    def group(self, depth: int) -> _Size:
        """The size of everything up to the closing bracket, whether it is a product or a sum."""
        up = down = largest = 0.0
        terms, signed, divided, chooses, before = 1, False, False, False, ""
        while token := self.next():
            if token in _CLOSE:
                self.at += 1
                if depth:
                    break
            elif token in _SIGNS:
                self.at, signed, terms = self.at + 1, True, terms + bool(before)
            elif token in ("/", "÷", "\\div", "\\over"):
                self.at, divided = self.at + 1, True
            elif token == "\\choose":
                self.at, chooses = self.at + 1, True
            elif token in _GROWTH and before not in ("|", "\\|"):
                self.at += 1  # no operand: an exclamation mark, or Markdown's bold type
                self.bold = self.bold != (token == "**")
            elif token in _GROWTH or _is_operand(token):
                size = self.power(depth, _Size(largest, largest) if token in _GROWTH else None)
                size = _Size(size.down, size.up) if divided else size
                up, down, largest, divided = up + size.up, down + size.down, max(largest, size.up, size.down), False
            else:
                self.at += 1
            before = token
        size = _Size(up + down if terms > 1 else up, down, terms, signed)
        return _binomial(size, size) if chooses else size

    def power(self, depth: int, base: _Size | None = None) -> _Size:
        """The size of an operand with its factorials and exponents."""
        word = base is None and self.next().isalpha()
        size = self.operand(depth) if base is None else base
        while True:
            token = self.next()
            if token == "!":
                self.at += 1
                size = size if self.exclamations and depth == 0 else _factorial(size)
            elif token == "^" or (token == "**" and not self.is_bold(word and self.at in self.spaced)):
                self.at += 1
                size = self.raised(size, depth + 1)
            elif token == "_":
                self.at += 1
                below = self.operand(depth + 1)
                size = _Size(size.up + below.up, size.down + below.down)
            else:
                return size

    def is_bold(self, after_word: bool) -> bool:
        """Whether `**` is Markdown's mark of bold type: it opens after a word and a space, or closes."""
        following = self.tokens[self.at + 1]
        is_number = following[:1].isdigit() or following in _OPEN or following in _SIGNS
        return after_word or (self.bold and not is_number)

    def raised(self, base: _Size, depth: int) -> _Size:
        """The size of a power. Powers of powers are read from the right, which gives the larger value."""
        signed = False
        while self.next() in _SIGNS:
            self.at, signed = self.at + 1, True
        exponent = self.operand(depth)
        while self.next() in ("^", "**"):
            self.at += 1
            exponent = self.raised(exponent, depth + 1)
        return _power(base, exponent, signed or exponent.signed)

    def operand(self, depth: int) -> _Size:
        """The size of a number, a letter, a group, or a function of groups; a missing operand counts as a letter."""
        if depth > _DEEPEST:
            raise _GiantError
        token = self.next()
        if not _is_operand(token):
            return _LETTER
        self.at += 1
        if token in _OPEN:
            return self.group(depth + 1)
        if token[0].isdigit():
            return _number(token)
        if token in _FRACTIONS:
            above, below = self.operand(depth + 1), self.operand(depth + 1)
            return _Size(above.up + below.down, above.down + below.up, signed=above.signed or below.signed)
        if token in _BINOMIALS:
            return _binomial(self.operand(depth + 1), self.operand(depth + 1))
        if token in _EXP and self.next() in _OPEN:
            return _power(_CONSTANT, self.operand(depth + 1), True)
        if token in _GAMMA and self.next() in _OPEN:
            return _factorial(self.operand(depth + 1))
        if token in _REPEATED:
            return self.repeated(depth + 1)
        return _CONSTANT if token in _CONSTANTS else _LETTER

    def repeated(self, depth: int) -> _Size:
        """The size of a sum or a product: that of its body, times the number of its terms."""
        count = 1.0
        while (mark := self.next()) in ("_", "^"):
            self.at += 1
            limit = self.operand(depth)
            count = _value(limit) if mark == "^" else count
        body = self.power(depth)
        return _checked(_Size(body.up * count, body.down * count))


def _is_operand(token: str) -> bool:
    return token in _OPEN or (token[:1] == "\\" and len(token) > 2 and token not in _CLOSE) or token[:1].isalnum()


def _number(text: str) -> _Size:
    whole, _, decimals = text.partition(".")
    digits = re.sub(r"\D", "", whole).lstrip("0")
    up = math.log10(max(2, int(digits or 0) + bool(decimals))) if len(digits) < 16 else float(len(digits))
    return _Size(up, float(len(decimals)))


def _value(exponent: _Size) -> float:
    """A bound of an exponent's value; raises if it is too large."""
    if exponent.up > _EXPONENT_DIGITS:
        raise _GiantError
    return 10.0**exponent.up


def _power(base: _Size, exponent: _Size, signed: bool) -> _Size:
    """The size of a power. A negative exponent swaps numerator and denominator."""
    value = _value(exponent)
    terms = math.lgamma(value + base.terms) - math.lgamma(base.terms) - math.lgamma(value + 1)
    if base.terms > 2 and terms > math.log(_MOST_TERMS):
        raise _GiantError
    larger = max(base.up, base.down)
    return _checked(_Size(larger * value, larger * value) if signed else _Size(base.up * value, base.down * value))


def _factorial(size: _Size) -> _Size:
    return _checked(_Size(10.0 ** min(size.up, 300.0) * size.up))


def _binomial(above: _Size, below: _Size) -> _Size:
    """At most 2ⁿ, and at most nᵏ."""
    n, k = 10.0 ** min(above.up, 300.0), 10.0 ** min(below.up, 300.0)
    return _checked(_Size(max(_TWO, min(n * _TWO, k * above.up))))


def _checked(size: _Size) -> _Size:
    if max(size.up, size.down) > _LARGEST:
        raise _GiantError
    return size
