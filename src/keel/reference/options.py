"""Options of the reference: `reference`."""

from __future__ import annotations

from pydantic import Field

from keel.base.options import PluginOptions


class ReferenceOptions(PluginOptions):
    """The reference and its parameters."""

    named_by = "kind"

    kind: str = Field(
        default="auto",
        description="auto, frozen, adapter_off (the base of a fresh adapter, a copy of a continued or warm-started "
        "adapter), ema, snapshot, kl_triggered, or a user's module:attr.",
    )
