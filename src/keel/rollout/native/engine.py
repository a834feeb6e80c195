"""The native rollout engine: batched sampling from the policy, exact about tokens, log-probabilities and noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.models.head import causal_lm, evaluating
from keel.models.load import context_length, eos_ids
from keel.rollout.engine import Answer, Engine
from keel.rollout.native.batch import DecodeBatch, DecodeRow
from keel.rollout.native.choose import choose_decoder
from keel.rollout.native.decode import Decoder
from keel.rollout.native.kept import KeptContexts, weights_stamp
from keel.rollout.native.scheduler import Scheduler
from keel.rollout.native.weights import WeightCopy
from keel.rollout.request import Request, Turn, check_noise
from keel.rollout.sampling import SamplingParams, row_key
from keel.rollout.stops import StopStrings


class NativeEngine(Engine):
    """Samples from a transformers model, plain or adapted by peft.

    By default it shares the policy's weights and there is nothing to sync. With `copy=True` (implied by a `dtype` or
    `device`) it holds its own, `merge=True` with the active adapters merged into them; `sync` updates them and
    `is_stale` tells whether that is due. `kept_bytes` is the memory for keys and values of past turns: a request that
    goes on where a turn ended reads only what is new, the prompt of a group is held once, and `release` frees them.
    `graphs` lets decoding steps run as CUDA graphs where they can.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        copy: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        merge: bool = False,
        kept_bytes: int = 0,
        graphs: bool = True,
    ) -> None:
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise KeelError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token before sampling")
        copied = copy or merge or dtype is not None or device is not None
        self._policy = model
        self._copy = WeightCopy(model, dtype=dtype, device=device, merge=merge) if copied else None
        self.shares_weights = not copied
        self.tokenizer = tokenizer
        self._stops = StopStrings(tokenizer)
        self.eos_ids = frozenset(eos_ids(causal_lm(model), tokenizer))
        self.context = context_length(causal_lm(model))
        with evaluating(self.model):
            chosen = choose_decoder(self.model, graphs=graphs)
        self._decoder, self.fallback_reason, self._vouched = chosen.decoder, chosen.reason, chosen.vouched
        self._traits = self._new_decoder().traits
        self.kept = KeptContexts(kept_bytes)
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

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Take over the policy's weights; nothing to do where they are shared."""
        self.release()
        if self._copy is not None:
            self._copy.sync(policy)
            self.version = version
        elif policy is not self._policy:
            raise KeelError(
                "this engine shares the weights of another model: build it on this policy, or with copy=True"
            )

    def release(self) -> None:
        """Free what was kept of past turns."""
        self.kept.forget()

    def is_stale(self, policy: nn.Module) -> bool:
        """Whether sampling now would use other weights than the policy's."""
        return policy is not self._policy if self._copy is None else self._copy.is_stale(policy)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """Completions of each request, in order; what is wrong with a request is said before anything is computed."""
        rows = self._rows(requests, sampling, (seed, attempt, step), set())
        self._run(rows, sampling, (seed, attempt, step))
        said = iter([self._completion(row) for row in rows])
        return [[next(said) for _ in request.drawn(sampling)] for request in requests]

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
        """Sample until no request is left: `answer` is told of turns that have ended and returns the requests that go
        on, which join those still running. When it is asked depends on what is sampled and how, never on the clock;
        where places have stood empty it is asked again, without a turn, for requests that have become ready.
        """
        noise = (seed, attempt, step)
        seen: set[tuple[str, int, int]] = set()

        def go_on(rows: list[DecodeRow]) -> list[DecodeRow]:
            turns = [Turn(row.request, row.sample, self._completion(row)) for row in rows]
            return self._rows(answer(turns), sampling, noise, seen)

        self._run(self._rows(requests, sampling, noise, seen), sampling, noise, go_on)

    def _rows(
        self,
        requests: Iterable[Request],
        sampling: SamplingParams,
        noise: tuple[int, int, int],
        seen: set[tuple[str, int, int]],
    ) -> list[DecodeRow]:
        """A row for each completion, once nothing is wrong with any request; `seen` is the noise drawn before."""
        asked = list(requests)
        for request in asked:
            request.check(sampling, self.context)
            self._check_vouched(request, sampling)
        if not sampling.greedy:
            check_noise(asked, sampling, seen)
        return [
            DecodeRow(request, sample, row_key(*noise, request.key, sample), request.limit(sampling))
            for request in asked
            for sample in request.drawn(sampling)
        ]

    def _check_vouched(self, request: Request, sampling: SamplingParams) -> None:
        """Refuse contexts beyond a window that no probe could reach: nobody has seen the model decode them rightly."""
        longest = len(request.tokens) + request.limit(sampling)
        if self._vouched is not None and longest > self._vouched:
            raise KeelError(
                f"problem {request.key!r} may reach {longest} tokens and {type(causal_lm(self._policy)).__name__} is "
                f"known to decode rightly up to {self._vouched}, a window that no probe could cross: shorten "
                "prompt and completion"
            )

    def _run(
        self,
        rows: Sequence[DecodeRow],
        sampling: SamplingParams,
        noise: tuple[int, int, int],
        go_on: Callable[[list[DecodeRow]], list[DecodeRow]] | None = None,
    ) -> None:
        """Sample rows to their ends, and whatever `go_on` makes of those that have ended."""
        waiting = _by_length(rows)
        scheduler = Scheduler(len(rows), sampling.max_batch, self._traits)
        batch = DecodeBatch(self._new_decoder, self.kept, sampling, scheduler, self._record)
        while waiting or batch.live:
            if self.kept.limit:
                self.kept.enter(*noise, weights_stamp(self.model))
            waiting, ended = self._sample(batch, waiting, pausing=go_on is not None)
            if go_on is not None:  # a user's code: the model is as it was outside
                waiting = [*_by_length(go_on(ended)), *waiting]

    def _sample(
        self, batch: DecodeBatch, waiting: list[DecodeRow], *, pausing: bool
    ) -> tuple[list[DecodeRow], list[DecodeRow]]:
        """Go on until nothing is left, or (`pausing`) others may join; who waits, and who ended."""
        ended: list[DecodeRow] = []
        with evaluating(self.model):
            while True:
                if batch.scheduler.has_room:
                    waiting = batch.fill(waiting)
                if not batch.live:
                    return waiting, ended
                left = batch.step()
                if left and self.on_finished is not None:
                    self.on_finished(len(left))
                ended += left
                if pausing and batch.scheduler.has_room and (ended or not waiting):
                    return waiting, ended

    def _new_decoder(self) -> Decoder:
        return self._decoder(self.model)

    def _record(
        self, rows: list[DecodeRow], token: Tensor, logp: Tensor, filtered: Tensor, sampling: SamplingParams
    ) -> None:
        """Write down what each row drew, and whether it is done."""
        numbers = torch.stack((token.double(), logp.double(), filtered.double())).tolist()  # one transfer
        for row, drawn, row_logp, row_filtered in zip(rows, *numbers, strict=True):
            if row.stop_reason:  # it has ended and is carried along
                continue
            row.tokens.append(int(drawn))
            row.sample_logp.append(row_logp)
            row.filtered_logp.append(row_filtered)
            if int(drawn) in self.eos_ids and not sampling.ignore_eos:
                row.stop_reason = "eos"
            elif sampling.stop and (text := self._stops.cut(row.tokens, sampling.stop)) is not None:
                row.stop_reason, row.text = "stop", text
            elif len(row.tokens) == row.limit:
                row.stop_reason = "length"

    def _completion(self, row: DecodeRow) -> Completion:
        return Completion(
            tokens=tuple(row.tokens),
            action=(True,) * len(row.tokens),
            sample_logp=tuple(row.sample_logp),
            filtered_logp=tuple(row.filtered_logp),
            text=self._stops.decode(row.tokens) if row.text is None else row.text,
            stop_reason=row.stop_reason,
        )


def _by_length(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """Contexts of like length together: less padding, and the rows of a request stay neighbours."""
    return sorted(rows, key=lambda row: len(row.request.tokens))
