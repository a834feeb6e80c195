"""A proven or failed statement, and its tolerance."""

from __future__ import annotations

from dataclasses import dataclass

EXACT = 1e-10  # tolerance of enumeration in float64


@dataclass(frozen=True)
class Check:
    """A statement, its measured and its expected value, and whether they agree."""

    section: str
    fact: str
    measured: str
    expected: str
    ok: bool


def close(measured: float, expected: float, digits: int) -> bool:
    """Whether two numbers are equal to this number of decimal places."""
    return abs(measured - expected) <= 0.5 * 10**-digits + 1e-12
