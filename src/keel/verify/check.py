"""One proven (or failed) statement, and what equality means here."""

from __future__ import annotations

from dataclasses import dataclass

EXACT = 1e-10  # what "holds by enumeration" means, in float64


@dataclass(frozen=True)
class Check:
    """A fact, what was measured, what must hold, and whether it does."""

    section: str
    fact: str
    measured: str
    expected: str
    ok: bool


def close(measured: float, expected: float, digits: int) -> bool:
    """Equal to the number of decimal places given."""
    return abs(measured - expected) <= 0.5 * 10**-digits + 1e-12
