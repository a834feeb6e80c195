"""Models whose numbers at every position depend on how long the sequence is: LongRoPE, dynamic NTK.

Their rotary tables are chosen by the longest position of a forward, so that a row is computed otherwise beside a longer
one, and keys that were cached before a switch are stale after it. Here the log-probability of a token is the model's
own given its context, *at the length of that context*: the distribution that sampling draws from, step by step, which a
forward of the finished sequence is not for tokens before the switch. Scoring and decoding both follow it, each row by
its own length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keel.models.pack import PackedBatch


@dataclass(frozen=True)
class LengthRegimes:
    """Contexts of one regime share their tables: up to the first switch, between two, beyond the last.

    Beyond `moving` (dynamic NTK) every length is a regime of its own.
    """

    switches: tuple[int, ...]
    moving: int | None = None

    def of(self, length: int) -> int:
        """The number of the regime in which a context of so many tokens is read."""
        passed = sum(length > switch for switch in self.switches)
        return passed if self.moving is None else passed + max(0, length - self.moving)

    def first(self) -> int:
        """The longest context that nothing switches for."""
        return min((*self.switches, *(() if self.moving is None else (self.moving,))))

    def spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """The regimes that contexts of up to `longest` tokens reach, as (above, up to)."""
        ends = {switch for switch in self.switches if switch < longest} | {longest}
        if self.moving is not None:
            ends |= set(range(self.moving, longest))
        edges = [0, *sorted(ends)]
        yield from pairwise(edges)


_known: WeakKeyDictionary[nn.Module, LengthRegimes | None] = WeakKeyDictionary()


def length_regimes(model: nn.Module) -> LengthRegimes | None:
    """The lengths at which the model's rotary tables change for all positions at once; None where they never do."""
    if model not in _known:
        _known[model] = _regimes(model)
    return _known[model]


def _regimes(model: nn.Module) -> LengthRegimes | None:
    switches: set[int] = set()
    moving: list[int] = []
    for module in _rotations(model):
        kinds: Any = module.rope_type
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            settings = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
            if kind == "longrope":
                switches.add(int(settings["original_max_position_embeddings"]))
            elif "dynamic" in str(kind):
                moving.append(int(module.original_max_seq_len))
    if not switches and not moving:
        return None
    return LengthRegimes(tuple(sorted(switches)), min(moving, default=None))


def forget_lengths(model: nn.Module) -> None:
    """Undo what longer sequences before have left in the tables: dynamic NTK keeps those of the longest it has seen."""
    for module in _rotations(model):
        if "dynamic" in str(module.rope_type) and isinstance(module.rope_type, str):
            module.max_seq_len_cached = module.original_max_seq_len
            module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)


def _rotations(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if getattr(module, "rope_type", None) is not None and hasattr(module, "config"):
            yield module


@dataclass(frozen=True)
class LengthPart:
    """The rows of a batch as far as one regime reads them; `where` are the hidden states `[n]` that score `scored`."""

    rows: PackedBatch
    where: Tensor
    scored: Tensor


def by_length(packed: PackedBatch, regimes: LengthRegimes) -> list[LengthPart]:
    """A part for each regime: contexts of its lengths, cut off where the next begins, which nothing in them sees."""
    width = packed.input_ids.shape[1]
    where, _ = packed.scored()
    context = packed.position_ids.flatten()[where] + 1
    parts = []
    for above, upto in regimes.spans(int(context.max()) if len(context) else 0):
        scored = ((context > above) & (context <= upto)).nonzero().squeeze(-1)
        if not len(scored):
            continue
        rows, row_of = torch.unique(where[scored] // width, return_inverse=True)
        real = (packed.prefix[rows] >= 0) & (packed.position_ids[rows] < upto)
        length = int(real.sum(1).max())
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)[:, :length]
        kept = real.gather(1, order)

        def cut(x: Tensor, fill: int, rows: Tensor = rows, order: Tensor = order, kept: Tensor = kept) -> Tensor:
            return x[rows].gather(1, order).masked_fill(~kept, fill)

        positions = cut(packed.position_ids, 0)
        if not packed.shared_prefix:  # padding continues the count there
            positions = packed.position_ids[rows][:, :length]
        columns = (real.cumsum(1) - 1)[row_of, where[scored] % width]
        part = replace(
            packed,
            input_ids=cut(packed.input_ids, int(packed.input_ids[0, 0])),
            position_ids=positions,
            prefix=cut(packed.prefix, -1),
            branch=cut(packed.branch, 0),
        )
        parts.append(LengthPart(part, row_of * length + columns, scored))
    return parts
