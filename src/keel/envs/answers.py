"""Extract tags and numbers from a completion in linear time, and compare expressions with math-verify.

The text is never executed.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from functools import lru_cache
from typing import Any

from keel.base.errors import KeelError

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_LONGEST_NUMBER = 60
_SECONDS = 5
# Nested powers, long exponents, large and nested factorials: evaluating them exhausts memory and cannot be interrupted.
_POWER = r"(?:\^|(?<=[\w)}\]])\*\*|(?<=[\w)}\]]\s)\*\*(?=\s))"  # other `**` make text bold
_GIANT = re.compile(
    rf"{_POWER}[\s{{(]*-?\d+[\s}})]*(?:\*\*|\^)|{_POWER}[\s{{(]*-?\d{{5,}}|\d{{5,}}[\s}})]*!|"
    r"![\d\s+*/^.(){}\[\]-]*[)}\]]\s*!"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # a word of a sentence; not a LaTeX command such as `\\frac`


def last_tag(text: str, tag: str = "answer") -> str | None:
    """The content of the last closed `<tag>…</tag>`, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def last_number(text: str) -> str | None:
    """The last number of a text in normal form (`1,000` → `1000`, `7.0` → `7`, `-0` → `0`), or None.

    A minus between two numbers is a subtraction, not the sign of the second number.
    """
    numbers = [match.group() for match in _NUMBER.finditer(text.replace("−", "-"))]
    return plain_number(numbers[-1]) if numbers else None


def plain_number(text: str) -> str | None:
    """A number in normal form, or None if the text is not a number or is longer than 60 characters."""
    text = text.strip().replace("−", "-").replace(",", "")
    if len(text) > _LONGEST_NUMBER or not re.fullmatch(r"[-+]?\d+(\.\d+)?", text, re.ASCII):
        return None
    sign = "-" if text.startswith("-") else ""
    digits, _, decimals = text.lstrip("+-").partition(".")
    digits, decimals = digits.lstrip("0") or "0", decimals.rstrip("0")
    number = f"{digits}.{decimals}" if decimals else digits
    return number if number == "0" else sign + number


def has_math_verify() -> bool:
    """Whether math-verify is installed; does not import it."""
    return importlib.util.find_spec("math_verify") is not None


def require_math_verify(what: str) -> None:
    """Raise a KeelError for `what` if math-verify is missing."""
    if not has_math_verify():
        raise KeelError(f"{what} needs math-verify: pip install math-verify")


def math_equal(answer: str, text: str) -> bool | None:
    """Whether the last expression in `text` equals `answer` (½ and 0.5, 2x and x+x); None if `text` has none."""
    number = plain_number(text)
    if number is not None and number == plain_number(answer):
        return True  # fast path
    from math_verify import verify

    parsed = [] if _GIANT.search(text) else _parsed(text)
    if not parsed:
        return None
    return bool(verify(list(_gold(answer)), parsed, timeout_seconds=_limit()))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    return tuple(_parsed(answer) or _parsed(f"${answer}$"))


def _parsed(text: str) -> list[Any]:
    """Parse the expressions of a text with math-verify.

    A bare formula (`\\frac12`, `2x+2`) gets dollar signs first; without them the parser finds only its last number.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about text without mathematics
    forms = (f"${text.strip()}$", text) if _is_formula(text) else (text,)
    return next((parsed for form in forms if (parsed := list(parse(form, parsing_timeout=_limit())))), [])


def _is_formula(text: str) -> bool:
    marked = "$" in text or "\\boxed" in text or "\n" in text.strip()
    return not (marked or len(text) > 200 or plain_number(text) is not None or _WORD.search(text))


def _limit() -> int | None:
    """math-verify's time limit, which uses a signal and needs the main thread; elsewhere the judge's limit applies."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
