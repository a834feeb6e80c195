"""The state of a decode step on a GPU, at fixed addresses, and a second stream for small kernels.

A CUDA graph has fixed addresses and sizes. All values that change between rollouts, including the addresses of the KV
cache, are in tables on the device. So a graph works for any prompts, lengths and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel

KEY_BLOCK = 64  # keys per block of an attention kernel
PROMPT_PARTS = SUFFIX_PARTS = 8  # largest number of pieces of a prompt, and of a row's own keys
PROMPT_PROGRAMS = 132  # target number of programs for prompts: the multiprocessors of a large GPU
ENDED = -(2**30)  # the length of an inactive row
_STOPS = 64  # end-of-sequence tokens checked on the device; the host checks the others


def prompt_items(
    widths: Sequence[int], lengths: Sequence[int], repeats: int, kv_heads: int, tile: int
) -> list[tuple[int, ...]]:
    """Work items of the prompt attention, for prompts with `widths` rows and `lengths` tokens.

    An item is (prompt, its first row, its number of rows, first of `tile` queries, first key, end of keys, piece
    index, 0). Rows are numbered prompt by prompt, and a row has `repeats` queries per KV head. A prompt is split into
    at most PROMPT_PARTS pieces. Pieces are whole key blocks and, except the last, of equal length.
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
    """The state of up to `rows` rows: next logits, noise, lengths, and the addresses of their keys and values."""

    def __init__(self, rows: int, vocabulary: int, cache: SharedPrefixCache) -> None:
        like, layers = cache.suffix_kv, len(cache.prefix.keys)
        device = like.device

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.rows = rows
        self.logits = torch.zeros(rows, vocabulary, dtype=like.dtype, device=device)
        self.numbers = torch.zeros(3, rows, dtype=torch.float64, device=device)  # token, logp, filtered logp
        self.tokens, self.keys, self.positions = (ints(rows, dtype=torch.int64) for _ in range(3))
        self.lengths = ints(rows).fill_(ENDED)  # tokens after the prompt, newest included; ENDED for inactive rows
        self.left, self.starts, self.offsets, self.prompt_parts = (ints(rows) for _ in range(4))
        self.stops = ints(_STOPS, dtype=torch.int64).fill_(-1)
        self.members = ints(rows)
        self.items = ints(PROMPT_PARTS * rows * 8, 8)
        self.geometry = ints(8, dtype=torch.int64)
        self.prompt_at = ints(layers, 2, dtype=torch.int64)
        self.anchor = torch.zeros(16, dtype=like.dtype, device=device)  # addresses are stored as offsets from it
        self.tile = 16
        self.buffers: tuple[Tensor, ...] = ()  # own keys and values, then each layer's prompt keys and prompt values

    def fits(self, cache: SharedPrefixCache) -> bool:
        """Whether there is room for the cache's rows."""
        return len(cache.group_of) <= self.rows and self.anchor.dtype == cache.suffix_kv.dtype

    def load(self, cache: SharedPrefixCache, repeats: int) -> None:
        """Load the tables of a cache: its buffers, and for each row its prompt and the start of its own keys."""
        kv_heads, size = cache.suffix_kv.shape[3], cache.suffix_kv.shape[5]
        rows_of: list[list[int]] = [[] for _ in cache.prefix.tokens]
        for row, group in enumerate(cache.group_of):
            rows_of[group].append(row)
        widths, lengths = [len(rows) for rows in rows_of], [len(tokens) for tokens in cache.prefix.tokens]
        if max(widths) * repeats > self.tile:
            self.tile = 64  # never reduced again, so each of the two sizes is compiled and captured once
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
        assert size == suffix[4], "the last dimension of a KV cache must be contiguous"

    def restart(self, rows: int, length: int) -> None:
        """Activate the first `rows` rows with `length` tokens after the prompt, and deactivate all others."""
        self.lengths.fill_(ENDED)[:rows] = length

    def begin(
        self, logits: Tensor, keys: Sequence[int], positions: Sequence[int], left: Sequence[int], stops: Sequence[int]
    ) -> None:
        """Set logits, noise keys and positions, remaining tokens and stop tokens of the first rows."""
        self.logits[: len(keys)] = logits
        for table, values in ((self.keys, keys), (self.positions, positions), (self.left, left)):
            self._fill(table, values)
        self._fill(self.stops, [*sorted(stops)[:_STOPS], *[-1] * (_STOPS - len(stops))])

    def select(self, order: Sequence[int]) -> None:
        """Move the rows with these old indices to the front, and deactivate all others."""
        index = torch.tensor(order, device=self.lengths.device)
        for table in (self.logits, self.keys, self.positions, self.left, self.lengths):
            table[: len(order)] = table[index]
        self.lengths[len(order) :] = ENDED

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the tables after a step, except the newest keys, which the next step stores again."""
        tables = (self.logits, self.numbers, self.tokens, self.positions, self.left, self.lengths)
        before = [table.clone() for table in tables]
        yield
        for table, values in zip(tables, before, strict=True):
            table.copy_(values)

    def release(self) -> None:
        """Release the cache."""
        self.buffers = ()

    def draw(self, rows: int, sampling: SamplingParams) -> None:
        """Draw a token for each row with torch operations. Rows that end become inactive."""
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
        """Set the drawn tokens, and add 1 to the lengths of active rows."""
        self.tokens[: len(tokens)] = tokens
        self.lengths.add_(self.lengths >= 0)

    def _distance(self, tensor: Tensor) -> int:
        return (tensor.data_ptr() - self.anchor.data_ptr()) // tensor.element_size()

    @staticmethod
    def _fill(table: Tensor, values: Sequence[int]) -> None:
        table[: len(values)] = torch.tensor(values, dtype=table.dtype)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Launch the kernels of this context on a second stream. The yielded function makes the current stream wait.

    Call it before anything reads the results. A device has one second stream, so all callers must be on the same
    current stream.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    stream, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(stream)
    with torch.cuda.stream(second):
        yield lambda: stream.wait_stream(second)


@lru_cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
