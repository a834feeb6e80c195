"""Engines by name: Keel's own, or a user's `module:attr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from keel.base.errors import KeelError, unknown
from keel.base.imports import import_object, is_users_own
from keel.rollout.engine import Engine, check_engine
from keel.rollout.native.engine import NativeEngine

ENGINES: dict[str, Callable[..., Engine]] = {"native": NativeEngine}


def check_name(name: str, option: str = "rollout.engine") -> None:
    """Refuse a name that is neither in the registry nor a `module:attr`."""
    if name == "vllm":
        raise KeelError(f"{option}=vllm is not available in this version: use {option}=native")
    if name not in ENGINES and not is_users_own(name):
        raise unknown(option, name, ENGINES)


def find_engine(name: str, option: str = "rollout.engine") -> Callable[..., Engine]:
    """What makes the engine of this name; a class that is no engine is refused."""
    check_name(name, option)
    if name in ENGINES:
        return ENGINES[name]
    make = import_object(name, option)
    if isinstance(make, type):
        check_engine(make, f"{option}={name}")
    return make


def build_engine(name: str, model: nn.Module, tokenizer: Any, **options: Any) -> Engine:
    """The engine of this name on a model and its tokenizer; `options` are the engine's own."""
    engine = find_engine(name)(model, tokenizer, **options)
    check_engine(engine, f"rollout.engine={name}")
    return engine
