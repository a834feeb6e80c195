"""The native rollout engine: batched sampling from a transformers model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.models.head import causal_lm, evaluating
from keel.models.lora import trial_adapters
from keel.models.tokenizer import context_length, eos_ids
from keel.rollout.engine import Answer, Engine, Interrupted
from keel.rollout.native.cache import TurnCache
from keel.rollout.native.choose import choose_decoder
from keel.rollout.native.decode import Decoder
from keel.rollout.native.fused import fusion_obstacle, join_projections
from keel.rollout.native.graph import DecodeGraphs, graph_obstacle
from keel.rollout.native.scheduler import DecodeBatch, Scheduler
from keel.rollout.native.weights import WeightCopy, weights_version
from keel.rollout.request import OpenRow, Request, StopStrings, open_rows
from keel.rollout.sampling import SamplingParams


class NativeEngine(Engine):
    """Samples from a transformers model, with or without peft adapters.

    By default it shares the policy's weights. With `copy=True`, or a `dtype` or `device`, it holds a copy: `sync`
    updates the copy, and `is_stale` says whether it is outdated. LoRA adapters are applied unmerged in every step.
    `kv_cache_bytes` limits the KV cache between turns. A request that continues a turn then prefills only new tokens,
    and a group's prompt is stored once. `release` frees the cache. With `graphs`, decode steps run as CUDA graphs if
    possible. Graphs are kept across rollouts, and `captured_graphs` counts them.
    """

    native = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        copy: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kv_cache_bytes: int = 0,
        graphs: bool = True,
    ) -> None:
        copied = copy or dtype is not None or device is not None
        self._policy = model
        self._copy = WeightCopy(model, dtype=dtype, device=device) if copied else None
        self.shares_weights = not copied
        self.version = 0 if copied else None
        self.tokenizer = tokenizer
        self._stops = StopStrings(tokenizer)
        self.eos_ids = frozenset(eos_ids(causal_lm(model), tokenizer))
        self.context = context_length(causal_lm(model))
        self._interrupted = False
        self._graphs = DecodeGraphs()
        inner = causal_lm(model)
        if not copied and graphs and graph_obstacle(inner) is None and fusion_obstacle(inner) is None:
            join_projections(model)
        with evaluating(self.model), trial_adapters(self.model), self._graphs.raising():
            chosen = choose_decoder(self.model, graphs=self._graphs if graphs else None)
            if graphs and chosen.no_graph_reason is None:
                self._graphs.warm()
        self._decoder, self.fallback_reason = chosen.decoder, chosen.reason
        self._verified_length, self._ungraphed = chosen.verified_length, chosen.no_graph_reason
        self._traits = self._new_decoder().traits
        self.turn_cache = TurnCache(kv_cache_bytes)
        if self.fallback_reason:
            warnings.warn(
                f"decoding without shared prompts, which is slower: {self.fallback_reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def model(self) -> nn.Module:
        """The model that decodes."""
        return self._policy if self._copy is None else self._copy.model

    @property
    def captured_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return self._graphs.captured

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The fast paths that this model cannot use, and why."""
        no_graph_reason = self._graphs.failure or (self._ungraphed if next(self.model.parameters()).is_cuda else None)
        reasons = {"shared prompts": self.fallback_reason, "CUDA graphs": no_graph_reason}
        return tuple(f"sampling without {what}: {reason}" for what, reason in reasons.items() if reason)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Copy the policy's weights, unless they are shared."""
        self.release()
        if self._copy is not None:
            self._copy.sync(policy)
            self.version = version
        elif policy is not self._policy:
            raise KeelError(
                "this engine shares the weights of another model: build it on this policy, or with copy=True"
            )

    def interrupt(self) -> None:
        """End sampling at the next token."""
        self._interrupted = True

    def release(self) -> None:
        """Free the KV cache of past turns."""
        self.turn_cache.clear()
        self._graphs.release()

    def is_stale(self, policy: nn.Module) -> bool:
        """Whether the sampling weights differ from the policy's."""
        return policy is not self._policy if self._copy is None else self._copy.is_stale(policy)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """The completions of each request, in order. All requests are checked before anything is computed."""
        rows = open_rows(requests, sampling, self.check, (seed, attempt, step), set())
        self._run(rows, sampling, (seed, attempt, step))
        completions = iter([row.turn(self._stops).completion for row in rows])
        return [[next(completions) for _ in request.drawn(sampling)] for request in requests]

    def converse(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        answer: Answer,
        *,
        seed: int = 0,
        attempt: int = 0,
        step: int = 0,
    ) -> None:
        """Sample multi-turn episodes. Requests that `answer` returns join the running rows.

        The steps at which `answer` is called depend on the samples, not on timing. While slots are empty, it is called
        without turns, to get requests that became ready in the meantime.
        """
        noise = (seed, attempt, step)
        seen: set[tuple[str, int, int]] = set()

        def next_rows(rows: list[OpenRow]) -> list[OpenRow]:
            turns = [row.turn(self._stops) for row in rows]
            return open_rows(answer(turns), sampling, self.check, noise, seen)

        self._run(open_rows(requests, sampling, self.check, noise, seen), sampling, noise, next_rows)

    def check(self, request: Request, sampling: SamplingParams) -> None:
        """Refuse a request that cannot be sampled, or whose context is longer than the verified length."""
        super().check(request, sampling)
        longest = len(request.tokens) + request.limit(sampling)
        if self._verified_length is not None and longest > self._verified_length:
            raise KeelError(
                f"problem {request.key!r} may reach {longest} tokens, but the decoding of "
                f"{type(causal_lm(self._policy)).__name__} is verified only up to {self._verified_length} tokens, "
                "because its attention window is too long to probe: shorten prompt and completion"
            )

    def _run(
        self,
        rows: Sequence[OpenRow],
        sampling: SamplingParams,
        noise: tuple[int, int, int],
        next_rows: Callable[[list[OpenRow]], list[OpenRow]] | None = None,
    ) -> None:
        """Sample all rows to their ends, including the rows that `next_rows` returns for finished rows."""
        waiting = _by_length(rows)
        scheduler = Scheduler(len(rows), sampling.max_batch, self._traits)
        stops = tuple({*sampling.stop_ids, *(() if sampling.ignore_eos else self.eos_ids)})
        batch = DecodeBatch(self._new_decoder, self.turn_cache, sampling, scheduler, self._record, stops)
        try:
            while waiting or batch.live:
                if self.turn_cache.limit:
                    self.turn_cache.use_for(*noise, weights_version(self.model))
                waiting, ended = self._sample(batch, waiting, pausing=next_rows is not None)
                if next_rows is not None:  # may call user code, so `_sample` has restored the model's mode
                    waiting = [*_by_length(next_rows(ended)), *waiting]
        finally:
            self._graphs.release()

    def _sample(
        self, batch: DecodeBatch, waiting: list[OpenRow], *, pausing: bool
    ) -> tuple[list[OpenRow], list[OpenRow]]:
        """Decode all rows, or with `pausing` until other rows may join; return (waiting, ended)."""
        ended: list[OpenRow] = []
        with evaluating(self.model):
            while True:
                if self._interrupted:
                    raise Interrupted
                if batch.scheduler.has_room:
                    waiting = batch.admit(waiting)
                if batch.live:
                    batch.step()
                finished = batch.take_ended()
                if finished and self.on_finished is not None:
                    self.on_finished(len(finished))
                ended += finished
                if not batch.live and not waiting:
                    return waiting, ended
                if pausing and batch.scheduler.has_room and (ended or not waiting):
                    return waiting, ended

    def _new_decoder(self) -> Decoder:
        return self._decoder(self.model)

    def _record(self, rows: list[OpenRow], numbers: list[list[float]], sampling: SamplingParams) -> None:
        """Append each row's token, and set the stop_reason of finished rows."""
        for row, drawn, row_logp, row_filtered in zip(rows, *numbers, strict=True):
            if row.stop_reason:  # the row has ended but is still in the batch
                continue
            row.append((int(drawn), row_logp, row_filtered), self._stops, sampling, self.eos_ids)


def _by_length(rows: Sequence[OpenRow]) -> list[OpenRow]:
    """Sort by context length, to reduce padding. Rows of one request stay adjacent."""
    return sorted(rows, key=lambda row: len(row.request.tokens))
