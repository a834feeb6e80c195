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
    """A policy ready to score and to train, with its properties.

    `eos_ids` are all tokens that end a completion (the tokenizer's and the generation config's). `context_length`
    is None if the config sets no limit. `notes` list the decisions made for the user. `shared_prefix` says
    whether a row may hold several completions (`pack`'s argument of that name), `packing_note` why not.
    `missing` are weights that the checkpoint lacks and that start at random, `unexpected` those that only it has.
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
