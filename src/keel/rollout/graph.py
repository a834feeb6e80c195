"""Decoding steps as CUDA graphs: the hundreds of small kernels of a step are launched at once.

A graph repeats fixed addresses and sizes, and a step has neither: its context grows, rows leave and join. So a graph is
made for a window of columns that fills up step by step, and made anew when the window is full or the rows have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keel.rollout.cache import SharedPrefixCache
from keel.rollout.lean import LlamaStep

_WINDOW = 64  # columns by which a window grows: wider ones are read in vain, narrower ones made more often
_WORTH = 16  # steps that must be left for a graph to pay: making one takes as long as two or three of them


class Window:
    """A cache as a graph sees it: a fixed number of columns, and the newest of them as a number on the device."""

    def __init__(self, cache: SharedPrefixCache) -> None:
        device = cache.own.device
        self.cache, self.rows = cache, len(cache.group_of)
        self.columns = min(cache.own.shape[4], (cache.length // _WINDOW + 1) * _WINDOW)
        self.newest = torch.tensor([cache.length], device=device)
        self._column = torch.arange(self.columns, device=device)
        self._before = self._column < torch.tensor(cache.unused, device=device)[:, None]
        self._hidden: Tensor
        cache.own[..., cache.length : self.columns, :] = 0.0  # a masked column still enters a product, with weight 0

    def open(self) -> None:
        """Begin a step: see all up to the newest column."""
        self._hidden = (self._before | (self._column > self.newest))[:, None, None]

    def close(self) -> None:
        """End a step: the next column is the newest."""
        self.newest.add_(1)

    @property
    def next_positions(self) -> Tensor:
        return self.cache.positions + self.newest

    def store(self, layer: int, pair: Tensor) -> None:
        """Write the newest token's keys and values `[2, B, kv_heads, 1, D]`."""
        self.cache.own[layer, :, : self.rows, :, : self.columns].index_copy_(3, self.newest, pair)

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """As the cache's, over the whole window."""
        return self.cache.attend_over(layer, query, scaling, self.columns, self._mask)

    def _mask(self, scores: Tensor) -> None:
        scores.masked_fill_(self._hidden, -torch.inf)


def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """`work` as a graph: what runs it, and where its result will stand. Nothing is computed yet."""
    device = torch.cuda.current_device()
    pool, _ = _last.get(device) or (torch.cuda.graph_pool_handle(), None)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # tools in other threads may use the GPU
        try:
            result = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    _last[device] = (pool, graph)
    return graph.replay, result


_last: dict[int, tuple[Any, Any]] = {}  # by device: all graphs share a pool, which lives as long as the last of them

_warm: set[torch.device] = set()  # where a step has run as it is, which sets libraries up


class GraphedStep:
    """A LlamaStep that runs as a graph wherever one pays."""

    def __init__(self, step: LlamaStep) -> None:
        self.step = step
        self._cache: SharedPrefixCache | None = None
        self._layout: Any = None
        self._window: Window
        self._tokens: Tensor
        self._logits: Tensor
        self._run: Callable[[], None]

    def __call__(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        held = self._cache is cache and self._layout is cache.layout and cache.length < self._window.columns
        if not held and (tokens.device not in _warm or cache.own.shape[4] - cache.length < _WORTH):
            _warm.add(tokens.device)
            self._cache = None
            return self.step(tokens, cache)
        if not held:
            self._make(tokens, cache)
        self._tokens.copy_(tokens)
        self._run()
        return self._logits.clone()  # the next run writes over it

    def _make(self, tokens: Tensor, cache: SharedPrefixCache) -> None:
        self._cache, self._layout, self._window = cache, cache.layout, Window(cache)
        self._tokens = tokens.clone()
        self._run, self._logits = record(self._once)

    def _once(self) -> Tensor:
        self._window.open()
        logits = self.step(self._tokens, self._window)
        self._window.close()
        return logits


def can_be_graphed(model: Any) -> bool:
    """Whether a step of this model always does the same: on CUDA, and with rotations that no batch changes."""
    rotation = getattr(model.model.rotary_emb, "rope_type", "default")
    return bool(next(model.parameters()).is_cuda and rotation not in ("dynamic", "longrope"))
