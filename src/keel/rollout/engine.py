"""The base class of engines, a wrapper of engines, and checks of a user's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from keel.base.errors import KeelError
from keel.base.parts import DelegatedAttribute
from keel.base.types import Completion
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams

Answer = Callable[[list[Turn]], Iterable[Request]]
_BY_TURN = ("generate", "converse")


class ModelMismatch(KeelError):
    """The sampler's model differs from the policy in shape, tokenizer or, under LoRA, the base weights."""


class StaleWeights(KeelError):
    """The sampler does not hold the policy's weights after a sync."""


class Interrupted(Exception):
    """Raised by a sampling call when another thread interrupts it."""


class Engine:
    """Samples completions from the policy. A subclass implements `generate` and declares its capabilities.

    An engine with its own weights also implements `sync`. If a class or a mixin overrides `generate` but not
    `converse`, `converse` samples turns by calling that `generate`.
    """

    shares_weights: bool = False  # samples with the policy's own tensors, so sync has nothing to do
    native: bool = False  # samples with the policy's modules or copies of them; differs from them by rounding only
    logp_after_filters: bool = False  # `sample_logp` is the log-probability after top-p, top-k and min-p
    context: int | None = None  # maximum tokens of prompt plus completion; None: no limit
    version: int | None = None  # the policy version of the last `sync`; None if weights are shared
    proven: str = ""  # how the last `sync` verified the weights; empty if they were not verified
    notes: tuple[str, ...] = ()  # why a slower path is used; runs on a GPU show the notes
    on_finished: Callable[[int], None] | None = None  # called with the number of completions that just ended

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        generate, converse = (next(base for base in cls.__mro__ if name in vars(base)) for name in _BY_TURN)
        if cls.__mro__.index(generate) < cls.__mro__.index(converse):
            cls.converse = Engine.converse  # type: ignore[method-assign]

    def check(self, request: Request, sampling: SamplingParams) -> None:
        """Refuse a request that cannot be sampled."""
        request.check(sampling, self.context)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """Sample the completions of each request, in order. `seed`, `attempt` and `step` determine the noise."""
        raise NotImplementedError

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
        """Sample multi-turn episodes. `answer` takes finished turns and returns the requests that continue them.

        By default all episodes finish their turn before any is answered. `answer` may be called without turns, to get
        requests that became ready in the meantime.
        """
        turn_by_turn(self, requests, sampling, answer, seed=seed, attempt=attempt, step=step)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Copy the policy's weights."""
        if not self.shares_weights:
            raise KeelError(
                f"the engine {type(self).__name__} has no sync: write one that copies the policy's weights, or "
                "declare shares_weights = True"
            )

    def release(self) -> None:
        """Free memory that is not needed until the next rollout."""

    def events(self) -> list[tuple[str, str]]:
        """Events of the sampler since the last call, as (code, message)."""
        return []

    def interrupt(self) -> None:
        """If possible, make a sampling call in another thread raise `Interrupted` soon. Call it before `close`."""

    def close(self) -> None:
        """Close processes and connections of the engine."""


class EngineWrapper(Engine):
    """Wraps another engine and forwards every attribute that a subclass does not override, except `native`."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner


class _ForwardedWrite(DelegatedAttribute):
    """A forwarded attribute that can be set."""

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper.inner, self.name, value)


for _name in [
    name for name in vars(Engine) if not name.startswith("_") and name != "native"
]:  # new attributes of Engine are forwarded too
    setattr(EngineWrapper, _name, (_ForwardedWrite if _name == "on_finished" else DelegatedAttribute)(_name))


def turn_by_turn(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, answer: Answer, **noise: int
) -> None:
    """Sample episodes with `generate` only: all episodes finish their turn before any is answered."""
    while requests:
        groups = engine.generate(requests, sampling, **noise)
        requested = [len(request.drawn(sampling)) for request in requests]
        returned = [len(group) for group in groups]
        if requested != returned:
            raise KeelError(
                f"the engine {type(engine).__name__} was asked for {sum(requested)} completions of {len(requested)} "
                f"requests and returned {sum(returned)} of {len(returned)}: generate must return one completion for "
                "each requested sample"
            )
        turns = [
            Turn(request, sample, completion)
            for request, group in zip(requests, groups, strict=True)
            for sample, completion in zip(request.drawn(sampling), group, strict=True)
        ]
        requests = list(answer(turns))


def check_engine(engine: Any, label: str | None = None) -> None:
    """Refuse an object or class that is not an `Engine` or does not implement `generate`."""
    cls = engine if isinstance(engine, type) else type(engine)
    label = label or f"the engine {cls.__name__}"
    if not issubclass(cls, Engine):
        raise KeelError(
            f"{label} does not derive from keel.rollout.Engine: write class {cls.__name__}(keel.rollout.Engine), see "
            "docs/extending.md"
        )
    if cls.generate is Engine.generate:
        raise KeelError(f"{label} has no generate: write generate(requests, sampling, *, seed, attempt, step)")
