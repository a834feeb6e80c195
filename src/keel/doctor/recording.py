"""An engine that records its requests and answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keel.base.types import Completion
from keel.rollout import Engine, EngineWrapper, Request, SamplingParams
from keel.rollout.engine import Answer
from keel.rollout.request import Turn


class RecordingEngine(EngineWrapper):
    """Wraps an engine. `first` are the requests of its first call, and `turns` are all of its answers in order."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.first: list[Request] = []
        self.turns: list[Turn] = []
        self.sampling: SamplingParams | None = None

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        self._record(requests, sampling)
        generated = self.inner.generate(requests, sampling, seed=seed, attempt=attempt, step=step)
        self.turns += [
            Turn(request, sample, completion)
            for request, completions in zip(requests, generated, strict=False)  # the caller reports a wrong number
            for sample, completion in zip(request.drawn(sampling), completions, strict=False)
        ]
        return generated

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
        self._record(requests, sampling)

        def recorded(turns: list[Turn]) -> Iterable[Request]:
            self.turns += turns
            return answer(turns)

        self.inner.converse(requests, sampling, recorded, seed=seed, attempt=attempt, step=step)

    def _record(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if self.sampling is None:
            self.first, self.sampling = list(requests), sampling
