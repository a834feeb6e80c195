"""The one protocol of engines: every method and capability with its default, and checks of what an engine returns."""

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


class OtherModel(KeelError):
    """The sampler is of another model than the policy: another shape, tokenizer, or base under an adapter."""


class StaleWeights(KeelError):
    """The sampler does not hold the policy's weights after they were sent."""


class Interrupted(Exception):
    """Raised where an engine samples that another thread has interrupted."""


class Engine:
    """Samples completions from the policy. Derive from it, write `generate`, and declare what else holds.

    An engine that has weights of its own writes `sync` too. Where `generate` is written nearer to a class than
    `converse`, by itself or by a mixin, each turn is asked of that `generate`, whatever `converse` it inherits.
    """

    shares_weights: bool = False  # samples with the policy's own tensors, so that there is nothing to sync
    native: bool = False  # samples by the policy's own modules, or by copies of them: only rounding sets it apart
    logp_after_filters: bool = False  # `sample_logp` is of the distribution that top-p, top-k and min-p leave
    context: int | None = None  # tokens that prompt and completion may have together; None where nothing limits them
    version: int | None = None  # the policy version of the last `sync`; None where weights are shared
    proven: str = ""  # what the last `sync` has shown of the sampler's weights; empty where nothing was read back
    notes: tuple[str, ...] = ()  # what it does another way than the fastest, and why; a run on a GPU shows them
    on_finished: Callable[[int], None] | None = None  # called with the number of completions that have just ended

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        generate, converse = (next(base for base in cls.__mro__ if name in vars(base)) for name in _BY_TURN)
        if cls.__mro__.index(generate) < cls.__mro__.index(converse):
            cls.converse = Engine.converse  # type: ignore[method-assign]

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """As many completions of each request as it draws, in order; noise is keyed by seed, attempt and step."""
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
        """Sample until no request is left: `answer` takes the turns that have ended and returns those that continue.

        By default all episodes finish their turn, then all are answered. `answer` may be called without a turn, for
        requests that have become ready.
        """
        turn_by_turn(self, requests, sampling, answer, seed=seed, attempt=attempt, step=step)

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Take over the policy's weights."""
        if not self.shares_weights:
            raise KeelError(
                f"the engine {type(self).__name__} has no sync: write one that takes over the policy's weights, or "
                "declare shares_weights = True"
            )

    def release(self) -> None:
        """Free memory that the update needs and the next rollout does not."""

    def events(self) -> list[tuple[str, str]]:
        """What has happened to the sampler since it was last asked, as codes and messages for the run's events."""
        return []

    def interrupt(self) -> None:
        """Called while another thread samples, for the last time: let that raise `Interrupted` soon, where it can."""

    def close(self) -> None:
        """End what the engine has started: processes, connections."""


class EngineWrapper(Engine):
    """An engine around another: all that a subclass does not change is the inner engine's, but for `native`."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner


class _ForwardedWrite(DelegatedAttribute):
    """One that others set, and the inner engine reads."""

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper.inner, self.name, value)


for _name in [
    name for name in vars(Engine) if not name.startswith("_") and name != "native"
]:  # what is added to Engine is forwarded too
    setattr(EngineWrapper, _name, (_ForwardedWrite if _name == "on_finished" else DelegatedAttribute)(_name))


def turn_by_turn(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, answer: Answer, **noise: int
) -> None:
    """Several turns by `generate` alone: all episodes finish their turn, then all are answered."""
    while requests:
        groups = engine.generate(requests, sampling, **noise)
        requested = [len(request.drawn(sampling)) for request in requests]
        returned = [len(group) for group in groups]
        if requested != returned:
            raise KeelError(
                f"the engine {type(engine).__name__} was asked for {sum(requested)} completions of {len(requested)} "
                f"requests and returned {sum(returned)} of {len(returned)}: its generate must return as many as each "
                "request draws"
            )
        turns = [
            Turn(request, sample, completion)
            for request, group in zip(requests, groups, strict=True)
            for sample, completion in zip(request.drawn(sampling), group, strict=True)
        ]
        requests = list(answer(turns))


def check_engine(engine: Any, label: str | None = None) -> None:
    """Refuse an object or a class that is no `Engine`, or that cannot sample."""
    cls = engine if isinstance(engine, type) else type(engine)
    label = label or f"the engine {cls.__name__}"
    if not issubclass(cls, Engine):
        raise KeelError(
            f"{label} does not derive from keel.rollout.Engine: write class {cls.__name__}(keel.rollout.Engine), see "
            "docs/extending.md"
        )
    if cls.generate is Engine.generate:
        raise KeelError(f"{label} has no generate: write generate(requests, sampling, *, seed, attempt, step)")
