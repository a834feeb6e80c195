"""References: the policy that the KL is measured against, frozen or moving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.imports import import_object, is_import_path
from keel.base.parts import parameters_of, part_arguments
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
    reference = get_reference(kind)(loaded, **_arguments(kind, params))
    if not isinstance(reference, Reference):
        raise KeelError(
            f"reference.kind={kind} made a {type(reference).__name__}: it must have what keel.reference.Reference lists"
        )
    return reference


def check_reference(kind: str, **params: Any) -> None:
    """Check the name and its parameters before any model is loaded."""
    _arguments("frozen" if kind == "auto" else kind, params)


def _arguments(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    factory = get_reference(kind)
    arguments = part_arguments(f"reference {kind}", factory, params, section="reference", positional=1)
    for name, value in params.items():
        declared = (parameters_of(factory) or {}).get(name)
        for range_ in getattr(declared and declared.annotation, "__metadata__", ()):
            if isinstance(range_, Range) and not range_.holds(value):
                raise KeelError(f"reference.{name} is {value!r}: expected {range_.expected}")
    return arguments


def get_reference(kind: str) -> Callable[..., Reference]:
    """What makes the reference of that name, or a user's own `module:attr`."""
    if kind in KINDS:
        return KINDS[kind]
    if is_import_path(kind):
        return import_object(kind, "reference")
    raise unknown("reference.kind", kind, [*KINDS, "auto"])


__all__ = ["KINDS", "Range", "Reference", "build_reference", "check_reference", "get_reference"]
