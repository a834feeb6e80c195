"""KV caches for a rollout's running rows, and for contexts between the turns of an episode.

The cache of running rows stores each prompt once and a suffix per row; attention covers both. With the cache between
turns, a turn prefills only new tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from keel.models.prefix_attention import refuse_unsupported_attention


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt's tokens, and its keys and values `[layers, 2, kv_heads, P, D]`, which all its rows share."""

    tokens: tuple[int, ...]
    kv: Tensor


@dataclass(frozen=True, eq=False)
class CachedRow:
    """A cached context: its prompt, the tokens after it (`suffix`), and the suffix's keys and values."""

    prompt: CachedPrompt
    suffix: tuple[int, ...]
    kv: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.suffix)

    def is_prefix_of(self, tokens: tuple[int, ...]) -> bool:
        """Whether this context is a prefix of `tokens`."""
        start = len(self.prompt.tokens)
        return (
            self.length < len(tokens)
            and tokens[:start] == self.prompt.tokens
            and tokens[start : self.length] == self.suffix
        )


@dataclass
class TurnCache:
    """The KV cache of a rollout's contexts, at most `limit` bytes. Contexts that do not fit are prefilled again.

    Entries are valid for one version of the weights and one noise stream. Another version clears the cache.
    """

    limit: int
    rows: dict[int, CachedRow] = field(default_factory=dict)
    bytes: int = 0  # a shared prompt counts once
    _prompt_rows: Counter[int] = field(default_factory=Counter)  # number of rows per prompt
    _version: Any = None

    def use_for(self, *version: Any) -> None:
        """Clear the cache unless its entries have this version."""
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        self.rows.clear()
        self._prompt_rows.clear()
        self.bytes = 0

    def lookup(self, key: int, tokens: tuple[int, ...]) -> CachedRow | None:
        """The cached row under this key, if it is a prefix of `tokens`."""
        row = self.rows.get(key)
        return row if row is not None and row.is_prefix_of(tokens) else None

    def put(self, key: int, row: CachedRow) -> None:
        """Remove the row of the previous turn, and store this one if there is room."""
        previous = self.rows.pop(key, None)
        if previous is not None:
            self._prompt_rows[id(previous.prompt.kv)] -= 1
            self.bytes -= self._unshared_bytes(previous)
        if self.bytes + self._unshared_bytes(row) <= self.limit:
            self.bytes += self._unshared_bytes(row)
            self._prompt_rows[id(row.prompt.kv)] += 1
            self.rows[key] = row

    def _unshared_bytes(self, row: CachedRow) -> int:
        """The bytes of a row that are not shared with other rows."""
        tensors = [row.kv] if self._prompt_rows[id(row.prompt.kv)] else [row.kv, row.prompt.kv]
        return sum(kv.numel() * kv.element_size() for kv in tensors)


def stack_prompts(prompts: list[CachedPrompt]) -> Tensor:
    """Stack prompts into one tensor `[layers, 2, G, kv_heads, P, D]`, right-padded with zeros."""
    if len(prompts) == 1:
        return prompts[0].kv.unsqueeze(2)
    layers, two, heads, _, size = prompts[0].kv.shape
    width = max(len(prompt.tokens) for prompt in prompts)
    out = prompts[0].kv.new_zeros(layers, two, len(prompts), heads, width, size)
    for index, prompt in enumerate(prompts):
        out[:, :, index, :, : len(prompt.tokens)] = prompt.kv
    return out


ATTENTION = "keel_shared_prefix"
_GROWTH = 64  # columns by which a full buffer grows


@dataclass(frozen=True)
class Prefix:
    """The prompts' tokens, and their keys and values per layer `[G, kv_heads, P, D]`, right-padded."""

    tokens: tuple[tuple[int, ...], ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: Tensor = field(init=False)  # true lengths `[G]`

    def __post_init__(self) -> None:
        lengths = torch.tensor([len(prompt) for prompt in self.tokens], device=self.keys[0].device)
        object.__setattr__(self, "lengths", lengths)

    def select(self, groups: list[int]) -> Prefix:
        """Select prompts, padded to the longest of them."""
        tokens = tuple(self.tokens[group] for group in groups)
        width, index = max(map(len, tokens)), torch.tensor(groups, device=self.lengths.device)
        keys, values = (tuple(kv[index, :, :width] for kv in layers) for layers in (self.keys, self.values))
        return Prefix(tokens, keys, values)

    def __add__(self, other: Prefix) -> Prefix:
        """Concatenate two sets of prompts."""
        width = max(self.keys[0].shape[2], other.keys[0].shape[2])

        def concatenate(*layers: Tensor) -> Tensor:
            return torch.cat([pad(kv, (0, 0, 0, width - kv.shape[2])) for kv in layers])

        keys, values = (
            tuple(concatenate(*pair) for pair in zip(*layers, strict=True))
            for layers in ((self.keys, other.keys), (self.values, other.values))
        )
        return Prefix((*self.tokens, *other.tokens), keys, values)


@dataclass(frozen=True)
class SlotLayout:
    """A table `[G, n]` of each prompt's rows, so that one matrix product covers all rows of a prompt.

    `slots` maps slots to rows and `rows` maps rows to slots. Both are None if the rows are in the order of the slots
    and a view suffices. Empty slots recompute row 0, and their results are not read.
    """

    groups: int
    width: int
    slots: Tensor | None
    rows: Tensor | None

    @staticmethod
    def of(group_of: list[int], groups: int, device: torch.device) -> SlotLayout:
        rows_of: list[list[int]] = [[] for _ in range(groups)]
        for row, group in enumerate(group_of):
            rows_of[group].append(row)
        width = max(len(rows) for rows in rows_of)
        if [row for rows in rows_of for row in rows] == list(range(groups * width)):
            return SlotLayout(groups, width, None, None)
        slots = [rows[i] if i < len(rows) else 0 for rows in rows_of for i in range(width)]
        rows_to_slots = [0] * len(group_of)
        for group, rows in enumerate(rows_of):
            for i, row in enumerate(rows):
                rows_to_slots[row] = group * width + i
        return SlotLayout(groups, width, torch.tensor(slots, device=device), torch.tensor(rows_to_slots, device=device))

    def gather(self, x: Tensor) -> Tensor:
        """Convert rows `[B, K, R, D]` to groups `[G, K, n·R, D]`."""
        if self.slots is not None:
            x = x.index_select(0, self.slots)
        _, heads, repeats, size = x.shape
        x = x.view(self.groups, self.width, heads, repeats, size).transpose(1, 2)
        return x.reshape(self.groups, heads, self.width * repeats, size)

    def scatter(self, x: Tensor, repeats: int) -> Tensor:
        """Convert groups `[G, K, n·R, D]` back to rows `[B, K, R, D]`."""
        groups, heads, _, size = x.shape
        x = x.view(groups, heads, self.width, repeats, size).transpose(1, 2)
        x = x.reshape(groups * self.width, heads, repeats, size)
        return x if self.rows is None else x.index_select(0, self.rows)


class SharedPrefixCache(Cache):
    """A transformers cache whose rows share prompts. A step adds one token per row; the first step may add several.

    `suffix_kv` is a preallocated buffer `[layers, 2, B, kv_heads, T, D]` for the tokens after the prompts. Steps write
    in place. When a row leaves, the last row takes its index, so the live rows are a leading slice and nothing is
    reallocated. `past_lengths` are the numbers of tokens that the rows already have after their prompts. Shorter pasts
    are left-padded, so that all rows write into the same column; pad columns are masked. `length` more tokens may
    follow. The buffer has columns for all of them, or for `reserve` of them and then grows. `origin` is the position of
    the first token.
    """

    def __init__(
        self,
        prefix: Prefix,
        group_of: list[int],
        length: int,
        past_lengths: list[int] | None = None,
        reserve: int | None = None,
        origin: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.prefix = prefix
        self.origin = origin
        self.group_of = list(group_of)
        self.length = 0
        first = prefix.keys[0]
        _, heads, _, size = first.shape
        past_lengths = past_lengths or [0] * len(group_of)
        self.past = max(past_lengths)
        self.left_pad = [self.past - past_length for past_length in past_lengths]  # pad columns before each row's past
        self.max_columns = self.past + length  # largest number of columns
        columns = min(self.max_columns, self.past + (length if reserve is None else reserve))
        self.suffix_kv = first.new_empty(len(prefix.keys), 2, len(group_of), heads, columns, size)
        self.suffix_kv[..., : self.past, :] = 0.0  # masked columns have weight 0 but must be finite
        self.layer = 0
        self._update_layout()

    def _update_layout(self) -> None:
        lengths, device = self.prefix.lengths, self.prefix.lengths.device
        groups, width = len(lengths), self.prefix.keys[0].shape[2]
        self.layout = SlotLayout.of(self.group_of, groups, device)
        left_pad = torch.tensor(self.left_pad, device=device)
        self.positions = lengths[torch.tensor(self.group_of, device=device)] - left_pad + self.origin
        padding = torch.arange(width, device=device) >= lengths[:, None]
        prompt_bias = torch.zeros(groups, 1, 1, width, dtype=self.suffix_kv.dtype, device=device)
        # None if no prompt is padded; this saves a pass over the scores.
        self.prompt_bias = prompt_bias.masked_fill_(padding[:, None, None], -torch.inf) if bool(padding.any()) else None
        pad_mask = torch.arange(self.past, device=device) < left_pad[:, None]
        self.pad_mask = pad_mask[:, None, None] if any(self.left_pad) else None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; transformers' layers call this before their attention."""
        self.store(layer_idx, torch.stack((key_states, value_states)))
        self.layer = layer_idx
        return key_states, value_states

    def store(self, layer: int, pair: Tensor) -> None:
        """Write the newest tokens' keys and values `[2, B, kv_heads, N, D]`."""
        self.suffix_kv[layer, :, : pair.shape[1], :, self.length : self.length + pair.shape[3]] = pair

    def advance(self, count: int = 1) -> None:
        """Increase the length after all layers have stored `count` tokens."""
        self.length += count

    def row_kv(self, row: int) -> Tensor:
        """A copy of the row's suffix KV so far, `[layers, 2, kv_heads, T, D]`."""
        return self.suffix_kv[:, :, row, :, self.left_pad[row] : self.length].clone()

    def keep_rows(self, live: list[int]) -> list[int]:
        """Drop all rows except `live`; return the old index of each row in the new order."""
        count = len(live)
        order = list(range(count))
        holes = sorted(set(order) - set(live))
        moved = [row for row in live if row >= count]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if holes:
            device = self.suffix_kv.device
            target, source = torch.tensor(holes, device=device), torch.tensor(moved, device=device)
            self.suffix_kv[:, :, target, :, : self.length] = self.suffix_kv[:, :, source, :, : self.length]
        self.group_of = [self.group_of[row] for row in order]
        self.left_pad = [self.left_pad[row] for row in order]
        self._drop_unused_prompts()
        self._update_layout()
        return order

    def joined(self, other: SharedPrefixCache, length: int) -> SharedPrefixCache:
        """Concatenate two caches, with room for `length` more tokens. A common prompt is stored once."""
        prefix, group_index = self.prefix, {tokens: group for group, tokens in enumerate(self.prefix.tokens)}
        new_groups = sorted({group for group in other.group_of if other.prefix.tokens[group] not in group_index})
        if new_groups:
            prefix = prefix + other.prefix.select(new_groups)
            group_index = {tokens: group for group, tokens in enumerate(prefix.tokens)}
        other_groups = [group_index[other.prefix.tokens[group]] for group in other.group_of]
        past_lengths = [cache.length - padding for cache in (self, other) for padding in cache.left_pad]
        # Do not reserve the full length: with old and new rows in one buffer, that could double its columns.
        reserve = _GROWTH // 4 + -(max(past_lengths) + _GROWTH // 4) % _GROWTH
        joined = SharedPrefixCache(prefix, [*self.group_of, *other_groups], length, past_lengths, reserve, self.origin)
        first = 0
        for cache in (self, other):
            rows, columns = len(cache.group_of), cache.length - min(cache.left_pad)
            block = cache.suffix_kv[:, :, :rows, :, cache.length - columns : cache.length]
            joined.suffix_kv[:, :, first : first + rows, :, joined.past - columns : joined.past] = block
            first += rows
        joined.advance(joined.past)
        return joined

    def grow_if_full(self) -> None:
        """Add columns to the buffer if it is full."""
        if self.length == self.suffix_kv.shape[4]:
            rows, columns = len(self.group_of), min(self.max_columns, self.length + _GROWTH)
            grown = self.suffix_kv.new_empty(
                *self.suffix_kv.shape[:2], rows, self.suffix_kv.shape[3], columns, self.suffix_kv.shape[5]
            )
            grown[..., : self.length, :] = self.suffix_kv[:, :, :rows]
            self.suffix_kv = grown

    def _drop_unused_prompts(self) -> None:
        """Drop prompts without rows once they are half of all prompts, because each drop copies the other prompts."""
        used = sorted(set(self.group_of))
        if 2 * len(used) <= len(self.prefix.lengths):
            self.prefix = self.prefix.select(used)
            self.group_of = [used.index(group) for group in self.group_of]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prefix.keys[0].shape[2] + self.length

    @property
    def next_positions(self) -> Tensor:
        """The position of each row's newest token."""
        return self.positions + self.length

    def attend(self, layer: int, query: Tensor, scaling: float, count: int = 1) -> Tensor:
        """Attention of the newest `count` tokens of each row over its prompt and its suffix.

        Queries are `[B, kv_heads, R·count, D]`, head-major, with R query heads per KV head.
        """

        def mask(scores: Tensor) -> None:
            if self.pad_mask is not None:
                scores[..., : self.past].masked_fill_(self.pad_mask[..., : scores.shape[-1]], -torch.inf)
            if count > 1:
                later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
                scores[..., self.length :].masked_fill_(later.repeat(scores.shape[2] // count, 1), -torch.inf)

        return self.attend_over(layer, query, scaling, self.length + count, mask)

    def attend_over(
        self, layer: int, query: Tensor, scaling: float, columns: int, mask: Callable[[Tensor], None]
    ) -> Tensor:
        """Attention over the prompts and the first `columns` of the suffixes. `mask` masks the scores of the suffixes.

        The query heads of a KV head form one matrix, which for the prompt covers all rows of a group. Therefore heads
        and prompts are never repeated in memory. One softmax covers both parts.
        """
        rows, _, repeats, _ = query.shape
        keys, values = self.suffix_kv[layer, :, :rows, :, :columns]
        prompt_keys, prompt_values = self.prefix.keys[layer], self.prefix.values[layer]
        width = prompt_keys.shape[2]
        query = query * scaling
        prompt_scores = torch.matmul(self.layout.gather(query), prompt_keys.transpose(-1, -2))
        if self.prompt_bias is not None:
            prompt_scores = prompt_scores + self.prompt_bias
        scores = torch.matmul(query, keys.transpose(-1, -2))
        mask(scores)
        weights = torch.cat((self.layout.scatter(prompt_scores, repeats), scores), dim=-1)
        weights = weights.softmax(-1, dtype=torch.float32).to(values.dtype)
        out = torch.matmul(self.layout.gather(weights[..., :width]), prompt_values)
        return self.layout.scatter(out, repeats) + torch.matmul(weights[..., width:], values)


_active: list[SharedPrefixCache] = []


def _shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function during decoding with a SharedPrefixCache. Raises for unsupported variants."""
    window, context = (
        kwargs.get("sliding_window"),
        getattr(getattr(module, "config", None), "max_position_embeddings", 0),
    )
    if isinstance(window, int) and isinstance(context, int) and 0 < context <= window:
        kwargs.pop("sliding_window")  # no context is longer than the window
    refuse_unsupported_attention(kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    cache = _active[-1]
    rows, heads, count, size = query.shape
    grouped = query.reshape(rows, cache.suffix_kv.shape[3], -1, size)
    out = cache.attend(cache.layer, grouped, scale, count).reshape(rows, heads, count, size)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _shared_prefix_attention)


@contextmanager
def shared_prefix_attention(config: Any, cache: SharedPrefixCache) -> Iterator[None]:
    """Within this context, the model of this config attends through `cache`; its own attention is restored afterwards.

    The name is registered for attention but not for masks, so transformers builds no mask.
    """
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    _active.append(cache)
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before
