"""A loaded policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keel.models.options import LoraOptions

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LoadedModel:
    """A loaded policy, its tokenizer and its properties.

    `eos_ids` are all tokens that end a completion (the tokenizer's and the generation config's). `context_length`
    is None if the config sets no limit. `notes` lists the decisions made for the user. `shared_prefix` says
    whether a row may hold several completions (see `pack`); `packing_note` says why it may not. `missing` weights are
    not in the checkpoint and start at random. `unexpected` weights are not in the model.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    context_length: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    device: torch.device
    dtype: torch.dtype
    lora: LoraOptions | None = None
    notes: tuple[str, ...] = ()
    shared_prefix: bool = False
    packing_note: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
