"""End-of-run hooks: passed in by whoever starts a run, so that a run knows nothing of the lab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EndHooks:
    """`findings` of a finished run's folder go into findings.json and summary.json; `report` then writes its page."""

    findings: Callable[[Path], list[dict[str, Any]]] | None = None
    report: Callable[[Path], None] | None = None


NO_HOOKS = EndHooks()
