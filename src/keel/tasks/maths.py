"""Whether two pieces of mathematics are equal, by math-verify where it is installed."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from functools import lru_cache
from typing import Any

from keel.errors import KeelError
from keel.tasks.answers import plain_number

_SECONDS = 5
# Towers of powers, long exponents and large factorials: numbers that no memory holds, and no signal interrupts in time
_GIANT = re.compile(r"(?:\*\*|\^)[\s{(]*-?\d+[\s})]*(?:\*\*|\^)|(?:\*\*|\^)[\s{(]*-?\d{5,}|\d{5,}[\s})]*!")

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def has_math_verify() -> bool:
    """Whether math-verify can be imported; nothing is loaded to find out."""
    return importlib.util.find_spec("math_verify") is not None


def need_math_verify(what: str) -> None:
    """Refuse `what` where math-verify is missing."""
    if not has_math_verify():
        raise KeelError(f"{what} needs math-verify: pip install math-verify")


def math_equal(answer: str, text: str) -> bool | None:
    """Whether the last mathematics of `text` equals `answer` (½ and 0.5, 2x and x+x); None where none can be read."""
    given = plain_number(text)
    if given is not None and given == plain_number(answer):
        return True  # the usual case, without a parser
    from math_verify import verify

    found = [] if _GIANT.search(text) else _parsed(text)
    if not found:
        return None
    return bool(verify(list(_gold(answer)), found, timeout_seconds=_limit()))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """A gold answer is written bare in most data (`\\frac12`, `2x+2`), where the parser looks for dollar signs.

    Bare, it would read the last number alone (2 of `2x+2`), which is right for `1,000` and for `72 apples` only.
    """
    is_text = plain_number(answer) is not None or "$" in answer or "\\boxed" in answer or _WORD.search(answer)
    forms = (answer, f"${answer}$") if is_text else (f"${answer}$", answer)
    return tuple(next(filter(None, map(_parsed, forms)), ()))


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a text without mathematics is no warning here
    return list(parse(text, parsing_timeout=_limit()))


def _limit() -> int | None:
    """math-verify's clock is a signal, which only the main thread may set; elsewhere the judge's limit holds."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
