"""References: the policy that the KL is measured against, frozen or moving."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from keel.base.errors import unknown
from keel.base.imports import import_object, is_users_own
from keel.models.load import LoadedModel
from keel.models.lora import is_lora
from keel.reference.held import unwrap
from keel.reference.kinds import Reference, adapter_off, ema, frozen, kl_triggered, snapshot

KINDS: dict[str, Callable[..., Reference]] = {
    "frozen": frozen,
    "adapter_off": adapter_off,
    "ema": ema,
    "snapshot": snapshot,
    "kl_triggered": kl_triggered,
}


def build_reference(kind: str, loaded: LoadedModel, **params: Any) -> Reference:
    """The reference called `kind` (`auto`: adapter_off for LoRA, frozen for full weights) or a user's `module:attr`."""
    if kind == "auto":
        kind = "adapter_off" if is_lora(unwrap(loaded.model)) else "frozen"
    check_reference(kind, **params)
    return _factory(kind)(loaded, **params)


def check_reference(kind: str, **params: Any) -> None:
    """Check the name and its parameters against the factory's signature, before any model is loaded."""
    factory = frozen if kind == "auto" else _factory(kind)
    accepts = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepts.values()):
        return
    known = list(accepts)[1:]
    for name in params:
        if name not in known:
            raise unknown(f"parameter of reference kind {kind}", name, known)


def _factory(kind: str) -> Callable[..., Reference]:
    if kind in KINDS:
        return KINDS[kind]
    if is_users_own(kind):
        return import_object(kind, "reference")
    raise unknown("reference.kind", kind, [*KINDS, "auto"])


__all__ = ["KINDS", "Reference", "build_reference", "check_reference"]
