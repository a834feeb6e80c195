"""Keel: GRPO on verifiable rewards with a KL term that can be trusted."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"

_PARTS = ("envs", "kl", "losses", "models", "reference", "rollout", "trainer", "verify")
_NAMES = {
    "Run": "keel.lab.notebook",
    "evaluate": "keel.api",
    "load_config": "keel.config",
    "train": "keel.api",
}


def __getattr__(name: str) -> Any:
    """Rooms are imported when they are first asked for: `import keel` does not load torch."""
    if name in _PARTS:
        return importlib.import_module(f"keel.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'keel' has no attribute {name!r}")
