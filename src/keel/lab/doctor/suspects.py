"""The suspects of suspects.yaml: what confirms each, and what it takes to rule it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from keel.base.yaml_text import load_package_yaml

Side = Literal["at least", "at most"]


@dataclass(frozen=True)
class RuleOut:
    """What rules a suspect out: every figure is there, and on the safe side of its threshold (a name, or a number)."""

    text: str
    figures: tuple[tuple[str, Side, str | float], ...]


@dataclass(frozen=True)
class Suspect:
    """One hypothesis; the fields are explained in suspects.yaml."""

    name: str
    title: str
    priority: str
    codes: tuple[str, ...]
    ruled_out_by: tuple[RuleOut, ...]
    interacts: str
    if_ruled_out: str
    if_confirmed: str | None = None
    to_test: str = "run keel doctor on the configuration"
    codes_if_measured: tuple[str, ...] = ()
    over: tuple[tuple[str, str], ...] = ()
    under: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    by_formula: bool = False


def _suspects() -> tuple[Suspect, ...]:
    rows = load_package_yaml("keel.lab.doctor", "suspects.yaml")
    return tuple(_suspect(name, row) for name, row in rows.items())


def _suspect(name: str, row: dict[str, Any]) -> Suspect:
    ruled_out_by = tuple(RuleOut(entry["text"], _tuples(entry["figures"])) for entry in row["ruled_out_by"])
    return Suspect(name, **{**{key: _tuples(value) for key, value in row.items()}, "ruled_out_by": ruled_out_by})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


SUSPECTS = _suspects()
