"""Combinations."""
from __future__ import annotations
from keel.config.schema import Config

def check(config: Config) -> None: ...

def advice(config: Config) -> list[str]:
    return []
