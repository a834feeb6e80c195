"""What a decode step on a GPU reads and writes besides weights: rows at fixed addresses, whatever comes and goes.

A graph repeats addresses and sizes. So everything that changes between rollouts stands in tables on the device, the
places of the KV cache among them: a graph of some rows serves any prompts, lengths and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel

KEY_BLOCK = 64  # keys that an attention kernel reads at a time
PROMPT_PARTS = SUFFIX_PARTS = 8  # pieces of a prompt, and of a row's own keys, that are attended to apart at most
PROMPT_PROGRAMS = 132  # pieces of prompts that should be there at least: as many as a large GPU has processors
ENDED = -(2**30)  # the length of a row that is not computed
_STOPS = 64  # end-of-sequence tokens that the device looks for; the host finds any others


def prompt_items(
    widths: Sequence[int], lengths: Sequence[int], repeats: int, kv_heads: int, tile: int
) -> list[tuple[int, ...]]:
    """Pieces of prompts that are attended to by themselves, of prompts with `widths` rows and `lengths` tokens.

    (prompt, its first row, its rows, the first of `tile` queries, first key, end of keys, number of the piece, 0): rows
    are counted prompt by prompt, and a row has `repeats` queries a KV head. A prompt is cut into at most PROMPT_PARTS
    pieces, of whole blocks of keys and of one length for all.
    """
    tiles = [-(-width * repeats // tile) for width in widths]
    pieces = min(PROMPT_PARTS, -(-PROMPT_PROGRAMS // max(1, kv_heads * sum(tiles))))
    span = KEY_BLOCK * -(-max(lengths) // (KEY_BLOCK * pieces))
    items: list[tuple[int, ...]] = []
    first_row = 0
    for group, (width, length, count) in enumerate(zip(widths, lengths, tiles, strict=True)):
        for part, start in enumerate(range(0, length, span)):
            stop = min(length, start + span)
            items += [(group, first_row, width, i * tile, start, stop, part, 0) for i in range(count)]
        first_row += width
    return items


class DecodeState:
    """At most `rows` rows being decoded: their next logits, noise and lengths, and where their keys and values lie."""

    def __init__(self, rows: int, vocabulary: int, cache: SharedPrefixCache) -> None:
        like, layers = cache.suffix_kv, len(cache.prefix.keys)
        device = like.device

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.rows = rows
        self.logits = torch.zeros(rows, vocabulary, dtype=like.dtype, device=device)
        self.numbers = torch.zeros(3, rows, dtype=torch.float64, device=device)  # token, its log-probabilities
        self.tokens, self.keys, self.positions = (ints(rows, dtype=torch.int64) for _ in range(3))
        self.lengths = ints(rows).fill_(ENDED)  # tokens after the prompt with the newest, ENDED for rows that are not
        self.left, self.starts, self.offsets, self.prompt_parts = (ints(rows) for _ in range(4))
        self.stops = ints(_STOPS, dtype=torch.int64).fill_(-1)
        self.members = ints(rows)
        self.items = ints(PROMPT_PARTS * rows * 8, 8)
        self.geometry = ints(8, dtype=torch.int64)
        self.prompt_at = ints(layers, 2, dtype=torch.int64)
        self.anchor = torch.zeros(16, dtype=like.dtype, device=device)  # places are told as distances from it
        self.tile = 16
        self.buffers: tuple[Tensor, ...] = ()  # own keys and values, then each layer's prompt keys and prompt values

    def fits(self, cache: SharedPrefixCache) -> bool:
        """Whether there is room for the cache's rows."""
        return len(cache.group_of) <= self.rows and self.anchor.dtype == cache.suffix_kv.dtype

    def load(self, cache: SharedPrefixCache, repeats: int) -> None:
        """Point at a cache: its buffers, which rows read which prompt, and where each row's own keys begin."""
        kv_heads, size = cache.suffix_kv.shape[3], cache.suffix_kv.shape[5]
        rows_of: list[list[int]] = [[] for _ in cache.prefix.tokens]
        for row, group in enumerate(cache.group_of):
            rows_of[group].append(row)
        widths, lengths = [len(rows) for rows in rows_of], [len(tokens) for tokens in cache.prefix.tokens]
        if max(widths) * repeats > self.tile:
            self.tile = 64  # few sizes, and never back: each is compiled and captured once
        items = prompt_items(widths, lengths, repeats, kv_heads, self.tile)
        prompts = [kv.contiguous() for pair in zip(cache.prefix.keys, cache.prefix.values, strict=True) for kv in pair]
        self.buffers = (cache.suffix_kv, *prompts)
        suffix = cache.suffix_kv.stride()
        prompt = prompts[0].stride()
        parts = [0] * len(rows_of)
        for item in items:
            parts[item[0]] = max(parts[item[0]], item[6] + 1)
        self._fill(self.geometry, [self._distance(cache.suffix_kv), *suffix[:4], *prompt[:2], len(items)])
        self._fill(self.prompt_at.view(-1), [self._distance(kv) for kv in prompts])
        self._fill(self.items.view(-1), [number for item in items for number in item])
        self._fill(self.members, [row for rows in rows_of for row in rows])
        self._fill(self.starts, cache.left_pad)
        self._fill(self.prompt_parts, [parts[group] for group in cache.group_of])
        self.offsets[: len(cache.group_of)] = cache.positions
        assert size == suffix[4], "the last dimension of a KV cache lies together"

    def restart(self, rows: int, length: int) -> None:
        """Compute the first `rows` rows, each with `length` tokens after its prompt so far, and no others."""
        self.lengths.fill_(ENDED)[:rows] = length

    def begin(
        self, logits: Tensor, keys: Sequence[int], positions: Sequence[int], left: Sequence[int], stops: Sequence[int]
    ) -> None:
        """Set what the first rows draw from: logits, noise, how many tokens each may still have, and what ends it."""
        self.logits[: len(keys)] = logits
        for table, values in ((self.keys, keys), (self.positions, positions), (self.left, left)):
            self._fill(table, values)
        self._fill(self.stops, [*sorted(stops)[:_STOPS], *[-1] * (_STOPS - len(stops))])

    def select(self, order: Sequence[int]) -> None:
        """Let the rows with these old indices be the first, and all others end."""
        index = torch.tensor(order, device=self.lengths.device)
        for table in (self.logits, self.keys, self.positions, self.left, self.lengths):
            table[: len(order)] = table[index]
        self.lengths[len(order) :] = ENDED

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Whatever a step changes is put back afterwards, all but the newest keys, which it will store again."""
        tables = (self.logits, self.numbers, self.tokens, self.positions, self.left, self.lengths)
        before = [table.clone() for table in tables]
        yield
        for table, values in zip(tables, before, strict=True):
            table.copy_(values)

    def release(self) -> None:
        """Let go of the cache."""
        self.buffers = ()

    def draw(self, rows: int, sampling: SamplingParams) -> None:
        """Draw a token for each row by torch's own operations, and count it; rows that end with it are not computed."""
        logits, ended = self.logits[:rows], self.lengths[:rows] < 0
        noise = None
        if not sampling.greedy:
            noise = gumbel(self.keys[:rows], self.positions[:rows], sum(block_shape(logits.shape[-1])))
        token, logp, filtered = draw(logits, sampling, noise)
        self.numbers[:, :rows] = torch.stack((token.double(), logp.double(), filtered.double()))
        ended = ended | (token[:, None] == self.stops).any(-1) | (self.left[:rows] <= 1)
        self.tokens[:rows] = token.masked_fill(ended, 0)
        self.positions[:rows] += 1
        self.left[:rows] -= 1
        self.lengths[:rows] = (self.lengths[:rows] + 1).masked_fill(ended, ENDED)

    def feed(self, tokens: Tensor) -> None:
        """Take these tokens as drawn."""
        self.tokens[: len(tokens)] = tokens
        self.lengths.add_(self.lengths >= 0)

    def _distance(self, tensor: Tensor) -> int:
        return (tensor.data_ptr() - self.anchor.data_ptr()) // tensor.element_size()

    @staticmethod
    def _fill(table: Tensor, values: Sequence[int]) -> None:
        table[: len(values)] = torch.tensor(values, dtype=table.dtype)
