"""References: the policy that the KL is measured against, frozen or moving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.imports import import_object, is_import_path
from keel.base.parts import options_class, parameters_of
from keel.base.validation import read_options
from keel.models.load import LoadedModel
from keel.models.lora import is_lora
from keel.reference.kinds import Range, Reference, adapter_off, ema, frozen, kl_triggered, snapshot
from keel.reference.weights import unwrap

KINDS: Mapping[str, Callable[..., Reference]] = MappingProxyType(
    {
        "frozen": frozen,
        "adapter_off": adapter_off,
        "ema": ema,
        "snapshot": snapshot,
        "kl_triggered": kl_triggered,
    }
)


def build_reference(kind: str, loaded: LoadedModel, **params: Any) -> Reference:
    """The reference called `kind` (`auto`: adapter_off for LoRA, frozen for full weights) or a user's `module:attr`."""
    if kind == "auto":
        kind = "adapter_off" if is_lora(unwrap(loaded.model)) else "frozen"
    check_reference(kind, **params)
    factory = _factory(kind)
    if declared := options_class(factory):
        return factory(loaded, options=read_options(declared, params, "reference"))
    return factory(loaded, **params)


def check_reference(kind: str, **params: Any) -> None:
    """Check the name and its parameters before any model is loaded.

    A reference declares its parameters as keyword parameters, or as one `options` of a class of `Options`.
    """
    factory = frozen if kind == "auto" else _factory(kind)
    if declared := options_class(factory):
        read_options(declared, params, "reference")
        return
    accepts = parameters_of(factory)
    known = [p.name for p in list(accepts.values())[1:] if p.kind is not p.VAR_KEYWORD]
    for name, value in params.items():
        if name not in known:
            if any(p.kind is p.VAR_KEYWORD for p in accepts.values()):
                continue
            raise unknown(f"parameter of reference kind {kind}", name, known)
        for range_ in getattr(accepts[name].annotation, "__metadata__", ()):
            if isinstance(range_, Range) and not range_.holds(value):
                raise KeelError(f"reference.{name} is {value!r}: expected {range_.expected}")


def _factory(kind: str) -> Callable[..., Reference]:
    if kind in KINDS:
        return KINDS[kind]
    if is_import_path(kind):
        return import_object(kind, "reference")
    raise unknown("reference.kind", kind, [*KINDS, "auto"])


__all__ = ["KINDS", "Range", "Reference", "build_reference", "check_reference"]
