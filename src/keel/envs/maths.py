"""Whether two pieces of mathematics are equal, by math-verify where it is installed."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from functools import lru_cache
from typing import Any

from keel.base.errors import KeelError
from keel.envs.answers import plain_number

_SECONDS = 5
# Towers of powers, long exponents and large factorials: numbers that no memory holds, and no signal interrupts in time
_GIANT = re.compile(r"(?:\*\*|\^)[\s{(]*-?\d+[\s})]*(?:\*\*|\^)|(?:\*\*|\^)[\s{(]*-?\d{5,}|\d{5,}[\s})]*!")

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # of a sentence, where `\\frac` is none


def has_math_verify() -> bool:
    """Whether math-verify can be imported; nothing is loaded to find out."""
    return importlib.util.find_spec("math_verify") is not None


def need_math_verify(what: str) -> None:
    """Refuse `what` where math-verify is missing."""
    if not has_math_verify():
        raise KeelError(f"{what} needs math-verify: pip install math-verify")


def math_equal(answer: str, text: str) -> bool | None:
    """Whether the last mathematics of `text` equals `answer` (½ and 0.5, 2x and x+x); None where none can be read."""
    number = plain_number(text)
    if number is not None and number == plain_number(answer):
        return True  # the usual case, without a parser
    from math_verify import verify

    parsed = [] if _GIANT.search(text) else _parsed(text)
    if not parsed:
        return None
    return bool(verify(list(_gold(answer)), parsed, timeout_seconds=_limit()))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    return tuple(_parsed(answer) or _parsed(f"${answer}$"))


def _parsed(text: str) -> list[Any]:
    """The mathematics of a text, by math-verify.

    A lone formula is mostly written bare (`\\frac12`, `2x+2`), where the parser looks for dollar signs and would else
    read its last number alone.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a text without mathematics is no warning here
    forms = (f"${text.strip()}$", text) if _is_formula(text) else (text,)
    return next((parsed for form in forms if (parsed := list(parse(form, parsing_timeout=_limit())))), [])


def _is_formula(text: str) -> bool:
    marked = "$" in text or "\\boxed" in text or "\n" in text.strip()
    return not (marked or len(text) > 200 or plain_number(text) is not None or _WORD.search(text))


def _limit() -> int | None:
    """math-verify's clock is a signal, which only the main thread may set; elsewhere the judge's limit holds."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
