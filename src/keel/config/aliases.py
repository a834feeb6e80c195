"""Names of other trainers."""
from __future__ import annotations
from collections.abc import Callable, Mapping, Sequence
from typing import Any

def names() -> list[str]:
    return []

def translate(layer: Sequence[tuple[str, Any, str]], given: Mapping[str, Any], is_option: Callable[[str], bool]) -> tuple[list[tuple[str, Any, str]], list[str]]:
    return list(layer), []
