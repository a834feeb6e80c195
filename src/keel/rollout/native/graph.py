"""Decode steps as CUDA graphs: all kernels of a step are launched at once.

A graph has fixed addresses and sizes. Those of a `DecodeState` do not change, so a graph stays valid until weights move
to other addresses. There is one graph per row bucket and sampling setting. It is captured once and replayed in every
rollout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import first_line
from keel.models.head import causal_lm
from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.native.fused import FusedStep, draw
from keel.rollout.native.scheduler import bucket, buckets
from keel.rollout.native.state import DecodeState
from keel.rollout.native.weights import weights_layout
from keel.rollout.sampling import SamplingParams, sorts_all


@dataclass(frozen=True)
class _GraphPool:
    """The stream and the memory pool of a device's graphs, and a graph that keeps the pool alive."""

    stream: Any
    handle: Any
    anchor: Any


_pools: dict[torch.device, _GraphPool] = {}


def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture `work` as a graph, without running it, and return its replay."""
    with torch.cuda.device(device):
        pool = _pools.get(device) or _GraphPool(torch.cuda.Stream(), torch.cuda.graph_pool_handle(), None)
        if pool.anchor is None:
            anchor = _capture_graph(lambda: torch.zeros(1, device=device), pool)
            pool = _pools[device] = replace(pool, anchor=anchor)
        try:
            graph = _capture_graph(work, pool)
        except BaseException:
            _pools.pop(device)  # the failed capture may leave the pool unusable
            raise
    replay: Callable[[], None] = graph.replay
    return replay


def _capture_graph(work: Callable[[], Any], pool: _GraphPool) -> Any:
    graph = torch.cuda.CUDAGraph()
    random = torch.cuda.default_generators[pool.stream.device_index]
    before = random.clone_state()
    pool.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # other threads may use the GPU
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # capture_end raises again for the same failure
                graph.capture_end()
            random.graphsafe_set_state(before)  # a failed capture leaves the generator in capture mode
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(pool.stream)
    return graph


class DecodeGraphs:
    """The graphs of one engine and their state.

    `captured` is the number of captured graphs. If capturing fails, `failure` says why and steps run without graphs.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.failure: str | None = None
        self._raises = False
        self.state: DecodeState | None = None
        self._step: FusedStep
        self._weights: Any = None
        self._graphs: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._warm: set[tuple[Any, ...]] = set()
        self._loaded: tuple[Any, ...] = ()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise if a graph cannot be captured, instead of falling back."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def warm(self) -> None:
        """Compile the kernels of a rollout by running them on inactive rows."""
        if self.state is not None:
            self.release()
            self.state.restart(0, 0)
            self.state.geometry.zero_()  # without prompts
            for tile in (16, 64):
                self._work(min(8, self.state.rows), tile, SamplingParams())

    def use(self, model: nn.Module) -> None:
        """Use the current weights of this model. Graphs are dropped if addresses have changed."""
        weights = weights_layout(model)
        if weights != self._weights:
            self.clear()
            self._step, self._weights = FusedStep(causal_lm(model)), weights
        self._step.refresh()

    def step(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        """Decode these tokens and return the next logits."""
        state = self._attach(cache)
        state.restart(len(tokens), cache.length)
        state.feed(tokens)
        self._run(len(tokens), None)
        return self.logits(cache)

    def logits(self, cache: SharedPrefixCache) -> Tensor:
        """The next logits of the cache's rows."""
        return self._attach(cache).logits[: len(cache.group_of)].clone()  # the next step overwrites them

    def begin(self, cache: SharedPrefixCache, logits: Tensor, *draws: Sequence[int]) -> None:
        """Start drawing on the device; see `DecodeState.begin`."""
        self._loaded = ()  # row indices may be reused
        self._attach(cache).begin(logits, *draws)

    def draw_and_step(self, cache: SharedPrefixCache, sampling: SamplingParams, *, last: bool) -> Tensor:
        """Draw a token per row and decode it unless `last`; return tokens and log-probabilities `[3, B]`."""
        state, rows = self._attach(cache), len(cache.group_of)
        if last:
            draw(state, rows, sampling)
        elif sorts_all(sampling, state.logits.shape[-1]):  # not as a graph: the host needs the number of kept tokens
            draw(state, rows, sampling)
            self._run(rows, None)
        else:
            self._run(rows, sampling)
        return state.numbers[:, :rows]

    def select(self, cache: SharedPrefixCache, order: Sequence[int]) -> None:
        """Keep the rows `order`, in this order."""
        if self.state is not None and self._loaded and self._loaded[0] is cache:
            self.state.select(order)
            self._load(cache)

    def release(self) -> None:
        """Release the KV cache but keep the graphs."""
        self._loaded = ()
        if self.state is not None:
            self.state.release()

    def clear(self) -> None:
        """Drop all graphs."""
        self.release()
        self.state, self._weights = None, None
        self._graphs.clear()
        self._warm.clear()

    def _attach(self, cache: SharedPrefixCache) -> DecodeState:
        """The state after loading this cache into it."""
        rows = len(cache.group_of)
        if self.state is None or not self.state.fits(cache):
            self._graphs.clear()
            self._loaded = ()
            blocks = self._step.blocks
            self.state = DecodeState(bucket(rows), blocks.lm_head.out_features, cache)
        if not self._loaded or self._loaded[0] is not cache:
            self._load(cache)
            self.state.restart(rows, cache.length)
        elif self._loaded[1] is not cache.layout or self._loaded[2] is not cache.suffix_kv:
            self._load(cache)
        return self.state

    def _load(self, cache: SharedPrefixCache) -> None:
        assert self.state is not None
        self.state.load(cache, self._step.repeats)
        self._loaded = (cache, cache.layout, cache.suffix_kv)

    def _run(self, rows: int, sampling: SamplingParams | None) -> None:
        """Replay the graph for this number of rows. The first use also captures the graphs for all smaller numbers."""
        assert self.state is not None
        tile = self.state.tile
        way: tuple[Any, ...] = (tile, None)
        if sampling is not None:
            way = (tile, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if (bucket(rows), *way) not in self._graphs:
            for size in buckets(rows):
                if (size, *way) not in self._graphs:
                    self._graphs[size, *way] = self._captured(partial(self._work, size, tile, sampling), way)
        self._graphs[bucket(rows), *way]()

    def _work(self, rows: int, tile: int, sampling: SamplingParams | None) -> None:
        assert self.state is not None
        if sampling is not None:
            draw(self.state, rows, sampling)
        self._step(self.state, rows, tile)

    def _captured(self, work: Callable[[], None], way: tuple[Any, ...]) -> Callable[[], None]:
        assert self.state is not None
        if self.failure is not None:
            return work
        if way not in self._warm:  # the first run, without a graph, compiles kernels and initialises libraries
            self._warm.add(way)
            with self.state.unchanged():
                work()
        try:
            replay = capture(work, self.state.lengths.device)
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            if self._raises:
                raise
            self.failure = first_line(error)
            warnings.warn(f"decoding continues without CUDA graphs: {self.failure}", RuntimeWarning, stacklevel=2)
            return work
        self.captured += 1
        return replay


def graph_obstacle(model: Any) -> str | None:
    """Why a step of this model cannot be a CUDA graph, or None."""
    if not next(model.parameters()).is_cuda:
        return "the model is not on a CUDA device"
    return None if has_fixed_rotations(model) else "its rotary tables change with the context length"


def has_fixed_rotations(model: Any) -> bool:
    """Whether a token's rotation depends only on its position."""
    rotations = getattr(getattr(model, "model", None), "rotary_emb", None)
    return getattr(rotations, "rope_type", "default") not in ("dynamic", "longrope")
