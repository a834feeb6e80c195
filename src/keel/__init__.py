"""Keel: GRPO on verifiable rewards with a verified KL term."""

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
    """Import a room on its first access, so that `import keel` does not load torch."""
    if name in _PARTS:
        return importlib.import_module(f"keel.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'keel' has no attribute {name!r}")
