"""Decoding steps as CUDA graphs: the hundreds of small kernels of a step are launched at once.

A graph repeats fixed addresses and sizes, and a step has neither: its context grows, rows leave and join. So a graph is
made for a window of columns that fills up step by step, and made anew when the window is full or the rows have changed.
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
from keel.rollout.native.lean import LlamaStep

_WINDOW = 64  # columns by which a window grows: wider ones are read in vain, narrower ones made more often
_WORTH = 16  # steps that must be left for a graph to pay: making one takes as long as two or three of them


class Window:
    """A cache as a graph sees it: a fixed number of columns, and the newest of them as a number on the device."""

    def __init__(self, cache: SharedPrefixCache) -> None:
        device = cache.own.device
        self.cache, self.rows = cache, len(cache.group_of)
        self.columns = min(cache.own.shape[4], -(-(cache.length + _WORTH) // _WINDOW) * _WINDOW)
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


@dataclass(frozen=True)
class _Place:
    """Where graphs of a device are made: one stream, one pool of memory, and a graph that keeps the pool alive."""

    stream: Any
    pool: Any
    anchor: Any


_places: dict[torch.device, _Place] = {}


def record(work: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """`work` as a graph: what runs it, and where its result will stand. Nothing is computed yet."""
    with torch.cuda.device(device):
        place = _places.get(device) or _Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle(), None)
        if place.anchor is None:
            anchor, _ = _captured(lambda: torch.zeros(1, device=device), place)
            place = _places[device] = replace(place, anchor=anchor)
        try:
            graph, result = _captured(work, place)
        except BaseException:
            _places.pop(device)  # its pool may be left half recorded to
            raise
    return graph.replay, result


def _captured(work: Callable[[], Tensor], place: _Place) -> tuple[Any, Tensor]:
    graph = torch.cuda.CUDAGraph()
    random = torch.cuda.default_generators[place.stream.device_index]
    before = random.clone_state()
    place.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(place.stream):
        graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")  # tools in threads may use the GPU
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # it complains about the same failure
                graph.capture_end()
            random.graphsafe_set_state(before)  # a capture that failed leaves it in the midst of one
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(place.stream)
    return graph, result


_warm: set[torch.device] = set()  # where a step has run as it is, which sets libraries up


class GraphedStep:
    """A LlamaStep that runs as a graph wherever one pays, and as it is where none can be made."""

    def __init__(self, step: LlamaStep) -> None:
        self.step = step
        self.must = False  # raise where no graph can be made
        self._fails = False
        self._cache: SharedPrefixCache | None = None
        self._own: Tensor | None = None
        self._layout: Any = None
        self._window: Window
        self._tokens: Tensor
        self._logits: Tensor
        self._run: Callable[[], None]

    def __call__(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        if not self._holds(cache) and not self._make(tokens, cache):
            return self.step(tokens, cache)
        self._tokens.copy_(tokens)
        self._run()
        return self._logits.clone()  # the next run writes over it

    def release(self) -> None:
        """Let the graph go, and with it the cache that it was made for."""
        self._cache = self._own = self._layout = None
        for name in ("_window", "_run", "_logits"):
            self.__dict__.pop(name, None)

    def _holds(self, cache: SharedPrefixCache) -> bool:
        return (
            self._cache is cache
            and self._own is cache.own
            and self._layout is cache.layout
            and cache.length < self._window.columns
        )

    def _make(self, tokens: Tensor, cache: SharedPrefixCache) -> bool:
        """Make a graph for the cache as it stands; False where a step should run as it is."""
        self.release()
        if tokens.device not in _warm:
            _warm.add(tokens.device)
            return False
        if self._fails or cache.end - cache.length < _WORTH:
            return False
        self._window, self._tokens = Window(cache), tokens.clone()
        try:
            self._run, self._logits = record(self._once, tokens.device)
        except RuntimeError as error:  # out of memory, or an operation that no graph can hold
            if self.must:
                raise
            self._fails = True
            self.release()
            warnings.warn(f"decoding goes on without CUDA graphs: {first_line(error)}", RuntimeWarning, stacklevel=2)
            return False
        self._cache, self._own, self._layout = cache, cache.own, cache.layout
        return True

    def _once(self) -> Tensor:
        self._window.open()
        logits = self.step(self._tokens, self._window)
        self._window.close()
        return logits


def can_be_graphed(model: Any) -> bool:
    """Whether a step of this model always does the same: on CUDA, and with rotations that no batch changes."""
    return bool(next(model.parameters()).is_cuda) and has_fixed_rotations(model)


def has_fixed_rotations(model: Any) -> bool:
    """Whether a token's rotation depends on its own position alone."""
    return getattr(model.model.rotary_emb, "rope_type", "default") not in ("dynamic", "longrope")
