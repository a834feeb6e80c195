"""Extract tags and numbers from a completion in linear time. The text is never executed."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_LONGEST_NUMBER = 60


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
