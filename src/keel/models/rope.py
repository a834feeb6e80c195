"""Rotary tables that depend on the context length: LongRoPE, dynamic NTK.

The longest position of a forward selects the tables. So a row's result depends on longer rows in the batch, and keys
cached before a switch of tables are stale after it. Keel uses the tables for the length of a token's context to compute
its log-probability. This is the distribution of step-by-step decoding. A forward of the finished sequence gives other
numbers for tokens before the switch. Scoring and decoding use the same definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keel.models.pack import PADDING, PackedBatch, Segments, to_device


@dataclass(frozen=True)
class LengthRegimes:
    """Ranges of context lengths with equal tables, separated by switches.

    Above `dynamic_after` (dynamic NTK) every length is a separate regime.
    """

    switches: tuple[int, ...]
    dynamic_after: int | None = None

    def of(self, length: int) -> int:
        """The regime's index for a context of `length` tokens."""
        passed = sum(length > switch for switch in self.switches)
        return passed if self.dynamic_after is None else passed + max(0, length - self.dynamic_after)

    def spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """The regimes of contexts of up to `longest` tokens, as pairs (exclusive minimum, inclusive maximum)."""
        ends = {switch for switch in self.switches if switch < longest} | {longest}
        if self.dynamic_after is not None:
            ends |= set(range(self.dynamic_after, longest))
        edges = [0, *sorted(ends)]
        yield from pairwise(edges)


_known: WeakKeyDictionary[nn.Module, LengthRegimes | None] = WeakKeyDictionary()


def length_regimes(model: nn.Module) -> LengthRegimes | None:
    """The lengths at which the model's rotary tables change for all positions; None if they never do."""
    if model not in _known:
        _known[model] = _regimes(model)
    return _known[model]


def _regimes(model: nn.Module) -> LengthRegimes | None:
    switches: set[int] = set()
    dynamic: list[int] = []
    for module in _rope_modules(model):
        kinds: Any = module.rope_type
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            settings = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
            if kind == "longrope":
                switches.add(int(settings["original_max_position_embeddings"]))
            elif "dynamic" in str(kind):
                dynamic.append(int(module.original_max_seq_len))
    if not switches and not dynamic:
        return None
    return LengthRegimes(tuple(sorted(switches)), min(dynamic, default=None))


def reset_rope(model: nn.Module) -> None:
    """Restore the original tables of dynamic NTK, because the module keeps those of its longest sequence."""
    for module in _rope_modules(model):
        if "dynamic" in str(module.rope_type) and isinstance(module.rope_type, str):
            module.max_seq_len_cached = module.original_max_seq_len
            module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)


def _rope_modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if getattr(module, "rope_type", None) is not None and hasattr(module, "config"):
            yield module


@dataclass(frozen=True)
class RegimePart:
    """A batch's rows cut to one regime. The hidden states at `positions` `[n]` score the tokens `scored` `[n]`."""

    rows: PackedBatch
    positions: Tensor
    scored: Tensor


def split_by_regime(packed: PackedBatch, regimes: LengthRegimes) -> list[RegimePart]:
    """One part per regime: the rows with contexts of that regime, cut at the start of the next regime."""
    device, packed = packed.input_ids.device, packed.host or packed
    width = packed.input_ids.shape[1]
    positions, _ = packed.scored()
    context = packed.position_ids.flatten()[positions] + 1
    parts = []
    for above, upto in regimes.spans(int(context.max()) if len(context) else 0):
        scored = ((context > above) & (context <= upto)).nonzero().squeeze(-1)
        if not len(scored):
            continue
        rows, row_of = torch.unique(positions[scored] // width, return_inverse=True)
        valid = (packed.prefix[rows] >= 0) & (packed.position_ids[rows] < upto)
        length = int(valid.sum(1).max())
        order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :length]
        padding = ~valid.gather(1, order)

        def cut(x: Tensor, fill: int, rows: Tensor = rows, order: Tensor = order, padding: Tensor = padding) -> Tensor:
            return x[rows].gather(1, order).masked_fill(padding, fill)

        position_ids = cut(packed.position_ids, 0)
        if not packed.shared_prefix:  # positions continue over padding
            position_ids = packed.position_ids[rows][:, :length]
        columns = (valid.cumsum(1) - 1)[row_of, positions[scored] % width]
        prefix, branch = cut(packed.prefix, PADDING), cut(packed.branch, 0)
        part = replace(
            packed,
            input_ids=cut(packed.input_ids, int(packed.input_ids[0, 0])),
            position_ids=position_ids,
            prefix=prefix,
            branch=branch,
            segments=Segments.of(prefix, branch),
        )
        parts.append(
            RegimePart(part.to(device), to_device(row_of * length + columns, device), to_device(scored, device))
        )
    return parts
