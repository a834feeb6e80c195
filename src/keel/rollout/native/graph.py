"""Decode steps as CUDA graphs: the hundreds of small kernels of a step are launched at once.

A graph repeats fixed addresses and sizes, and a step has neither: its context grows, rows leave and join. So a graph is
captured for a window of columns that fills up step by step, and again when the window is full or the rows have changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import first_line
from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.native.fused import FusedStep, FusedWindow
from keel.rollout.native.llama import LlamaStep

_WINDOW = 64  # columns by which a window grows: wide ones attend in vain, narrow ones are captured more often
_MIN_STEPS = 16  # steps that must be left for a graph to pay: a capture takes as long as two or three


class Window:
    """A KV cache as a graph sees it: a fixed number of columns, and the index of the newest one on the device."""

    def __init__(self, cache: SharedPrefixCache) -> None:
        device = cache.suffix_kv.device
        self.cache, self.rows = cache, len(cache.group_of)
        self.columns = min(cache.suffix_kv.shape[4], -(-(cache.length + _MIN_STEPS) // _WINDOW) * _WINDOW)
        self.newest = torch.tensor([cache.length], device=device)
        self._column = torch.arange(self.columns, device=device)
        self._left_pad = self._column < torch.tensor(cache.left_pad, device=device)[:, None]
        self._masked: Tensor
        # a masked column still enters a product, with weight 0
        cache.suffix_kv[..., cache.length : self.columns, :] = 0.0

    def begin_step(self) -> None:
        """Begin a step: unmask all up to the newest column."""
        self._masked = (self._left_pad | (self._column > self.newest))[:, None, None]

    def end_step(self) -> None:
        """End a step: the next column is the newest."""
        self.newest.add_(1)

    @property
    def next_positions(self) -> Tensor:
        return self.cache.positions + self.newest

    def store(self, layer: int, pair: Tensor) -> None:
        """Write the newest token's keys and values `[2, B, kv_heads, 1, D]`."""
        self.cache.suffix_kv[layer, :, : self.rows, :, : self.columns].index_copy_(3, self.newest, pair)

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """As the cache's, over the whole window."""
        return self.cache.attend_over(layer, query, scaling, self.columns, self._mask)

    def _mask(self, scores: Tensor) -> None:
        scores.masked_fill_(self._masked, -torch.inf)


@dataclass(frozen=True)
class _GraphPool:
    """What graphs of a device share: one stream, one memory pool, and a graph that keeps the pool alive."""

    stream: Any
    handle: Any
    anchor: Any


_pools: dict[torch.device, _GraphPool] = {}


def capture(work: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Capture `work` as a graph: its replay, and the tensor that a replay writes. Nothing is computed yet."""
    with torch.cuda.device(device):
        pool = _pools.get(device) or _GraphPool(torch.cuda.Stream(), torch.cuda.graph_pool_handle(), None)
        if pool.anchor is None:
            anchor, _ = _capture_graph(lambda: torch.zeros(1, device=device), pool)
            pool = _pools[device] = replace(pool, anchor=anchor)
        try:
            graph, result = _capture_graph(work, pool)
        except BaseException:
            _pools.pop(device)  # its pool may be left half captured
            raise
    return graph.replay, result


def _capture_graph(work: Callable[[], Tensor], pool: _GraphPool) -> tuple[Any, Tensor]:
    graph = torch.cuda.CUDAGraph()
    random = torch.cuda.default_generators[pool.stream.device_index]
    before = random.clone_state()
    pool.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # tools in threads may use the GPU
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # it complains about the same failure
                graph.capture_end()
            random.graphsafe_set_state(before)  # a capture that failed leaves it in the midst of one
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(pool.stream)
    return graph, result


_warm: set[torch.device] = set()  # devices on which a step has run eagerly, which sets libraries up


class GraphedStep:
    """A step that runs as a CUDA graph where one pays, and eagerly where none can be captured."""

    def __init__(self, step: LlamaStep | FusedStep) -> None:
        self.step: Callable[..., Tensor] = step
        self._open: type[Window | FusedWindow] = FusedWindow if isinstance(step, FusedStep) else Window
        self.strict = False  # raise where no graph can be captured
        self._disabled = False
        self._cache: SharedPrefixCache | None = None
        self._suffix_kv: Tensor | None = None
        self._layout: Any = None
        self._window: Window | FusedWindow
        self._tokens: Tensor
        self._logits: Tensor
        self._run: Callable[[], None]

    def __call__(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        if not self._is_valid_for(cache) and not self._capture(tokens, cache):
            return self.step(tokens, cache)
        self._tokens.copy_(tokens)
        self._run()
        return self._logits.clone()  # the next replay overwrites it

    def release(self) -> None:
        """Drop the graph, and with it the cache that it was captured for."""
        self._cache = self._suffix_kv = self._layout = None
        for name in ("_window", "_run", "_logits"):
            self.__dict__.pop(name, None)

    def _is_valid_for(self, cache: SharedPrefixCache) -> bool:
        return (
            self._cache is cache
            and self._suffix_kv is cache.suffix_kv
            and self._layout is cache.layout
            and cache.length < self._window.columns
        )

    def _capture(self, tokens: Tensor, cache: SharedPrefixCache) -> bool:
        """Capture a graph for the cache as it is; False where the step should run eagerly."""
        self.release()
        if tokens.device not in _warm:
            _warm.add(tokens.device)
            return False
        if self._disabled or cache.max_columns - cache.length < _MIN_STEPS:
            return False
        self._window, self._tokens = self._open(cache), tokens.clone()
        try:
            self._run, self._logits = capture(self._window_step, tokens.device)
        except RuntimeError as error:  # out of memory, or an operation that no graph can hold
            if self.strict:
                raise
            self._disabled = True
            self.release()
            warnings.warn(f"decoding goes on without CUDA graphs: {first_line(error)}", RuntimeWarning, stacklevel=2)
            return False
        self._cache, self._suffix_kv, self._layout = cache, cache.suffix_kv, cache.layout
        return True

    def _window_step(self) -> Tensor:
        self._window.begin_step()
        logits = self.step(self._tokens, self._window)
        self._window.end_step()
        return logits


def can_be_graphed(model: Any) -> bool:
    """Whether a step of this model can be replayed: on CUDA, and with rotary tables that no batch changes."""
    return bool(next(model.parameters()).is_cuda) and has_fixed_rotations(model)


def has_fixed_rotations(model: Any) -> bool:
    """Whether a token's rotation depends on its own position alone."""
    rotations = getattr(getattr(model, "model", None), "rotary_emb", None)
    return getattr(rotations, "rope_type", "default") not in ("dynamic", "longrope")
