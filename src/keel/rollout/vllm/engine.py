"""The engine `vllm`: forward passes by vLLM; requests, noise, stops and log-probabilities by Keel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.models.head import causal_lm
from keel.models.load import eos_ids
from keel.rollout.engine import Answer, Engine
from keel.rollout.request import OpenRow, Request, Turn, open_rows
from keel.rollout.sampling import SamplingParams
from keel.rollout.stops import StopStrings
from keel.rollout.vllm.rows import Drawing, Row, Sampled, VllmSampler


class VllmEngine(Engine):
    """Samples with vLLM, in this process or behind a server.

    Tokens are drawn with Keel's noise (`sampler.py`): the same seed gives the native engine's completions up to
    rounding, and lost completions can be reproduced.
    """

    def __init__(self, sampler: VllmSampler, model: nn.Module, tokenizer: Any) -> None:
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise KeelError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token before sampling")
        self.sampler, self.tokenizer, self.notes = sampler, tokenizer, sampler.notes
        self.eos_ids = frozenset(eos_ids(causal_lm(model), tokenizer))
        self.context, self.version = sampler.info.context, 0  # the policy that the sampler has loaded
        self._stops = StopStrings(tokenizer)
        self._numbers = itertools.count()  # row ids are unique, because results of old rows may still arrive

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Send the policy's weights and verify them by reading back."""
        self.sampler.load(policy)
        self.version = version
        self.proven = f"weights read back: all {self.sampler.read_back} tensors of the sampler are the policy's"

    def release(self) -> None:
        """Let the sampler sleep until the next rollout."""
        self.sampler.sleep()

    def events(self) -> list[tuple[str, str]]:
        return self.sampler.events()

    def interrupt(self) -> None:
        self.sampler.interrupt()

    def close(self) -> None:
        self.sampler.close()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """Completions of each request, in order; a bad request is refused before anything is sampled."""
        completions: dict[tuple[int, int], Completion] = {}
        order = {id(request): index for index, request in enumerate(requests)}

        def answer(turns: list[Turn]) -> list[Request]:
            completions.update({(order[id(turn.request)], turn.sample): turn.completion for turn in turns})
            return []

        self.converse(requests, sampling, answer, seed=seed, attempt=attempt, step=step)
        return [
            [completions[index, sample] for sample in request.drawn(sampling)] for index, request in enumerate(requests)
        ]

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
        """Sample multi-turn episodes: each turn is answered when it ends, and its continuation joins the others.

        Completions do not depend on the order in which turns end.
        """
        noise, seen = (seed, attempt, step), set[tuple[str, int, int]]()
        special, vocabulary = self._stops.special_in(sampling.stop), self.sampler.info.vocabulary
        drawing = Drawing.of(sampling, sorted(self.eos_ids), stop_is_special=special, vocabulary=vocabulary)
        waiting = open_rows(requests, sampling, self.context, noise, seen)
        running: dict[str, OpenRow] = {}
        width = sampling.max_batch
        try:
            while waiting or running:
                room = len(waiting) if width is None else width - len(running)
                admitted, waiting = waiting[:room], waiting[room:]
                rows = [_remaining_row(pending, next(self._numbers)) for pending in admitted]
                running |= {row.id: pending for row, pending in zip(rows, admitted, strict=True)}
                if rows:
                    self.sampler.start(rows, drawing)
                ended: list[OpenRow] = []
                for sampled in self.sampler.finished():
                    pending = running.pop(sampled.id)
                    self._append(pending, sampled, sampling)
                    (ended if pending.stop_reason else waiting).append(pending)
                if ended and self.on_finished is not None:
                    self.on_finished(len(ended))
                turns = [pending.turn(self._stops) for pending in ended]
                if turns:
                    waiting = [*open_rows(answer(turns), sampling, self.context, noise, seen), *waiting]
        finally:
            if running:
                self.sampler.cancel()

    def _append(self, row: OpenRow, sampled: Sampled, sampling: SamplingParams) -> None:
        """Append sampled tokens until Keel's stop rules apply; vLLM may stop earlier or later."""
        if not sampled.tokens:
            raise KeelError(f"the sampler returned no token for problem {row.request.key!r}")
        for drawn in zip(sampled.tokens, sampled.sample_logp, sampled.filtered_logp, strict=True):
            row.append(drawn, self._stops, sampling, self.eos_ids)
            if row.stop_reason:
                return


def _remaining_row(row: OpenRow, number: int) -> Row:
    """A vLLM row for the rest of a completion; if vLLM stops too early, another one follows."""
    tokens, start = (*row.request.tokens, *row.tokens), row.request.start + len(row.tokens)
    return Row(str(number), tokens, row.limit - len(row.tokens), row.key, start)
