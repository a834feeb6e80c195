"""Keel: GRPO on verifiable rewards with a KL term that can be trusted."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PARTS = ("doctor", "kl", "losses", "models", "reference", "rollout", "tasks", "train", "verify")


def __getattr__(name: str) -> Any:
    """Rooms are imported when they are first asked for: `import keel` does not load torch."""
    if name in _PARTS:
        return importlib.import_module(f"keel.{name}")
    if name == "load_config":
        return importlib.import_module("keel.config").load_config
    raise AttributeError(f"module 'keel' has no attribute {name!r}")
