"""What an engine takes, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One context to continue: the problem's key, and every token so far, exactly as they were sampled or rendered.

    `samples` are the indices of the completions to draw (default: 0 to num_generations - 1). To continue a
    conversation, ask for the one sample with its context's tokens (prompt, completion and tool output, never
    re-encoded) and `start`, the number of tokens after the original prompt: noise goes on where it stopped.
    `max_new` is this request's own limit, where the turns before have used some of max_completion_length.
    """

    key: str
    tokens: tuple[int, ...]
    samples: tuple[int, ...] | None = None
    start: int = 0
    max_new: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))

    def drawn(self, sampling: SamplingParams) -> Sequence[int]:
        """The indices of the completions to draw."""
        return range(sampling.num_generations) if self.samples is None else self.samples

    def limit(self, sampling: SamplingParams) -> int:
        """How many tokens a completion may have."""
        return sampling.max_completion_length if self.max_new is None else self.max_new

    def check(self, sampling: SamplingParams, context: int | None) -> None:
        """Refuse what cannot be sampled from a model with this context length."""
        length, new = len(self.tokens), self.limit(sampling)
        if not length:
            raise KeelError(f"problem {self.key!r} has an empty prompt: a model needs at least one token to continue")
        if not len(self.drawn(sampling)):
            raise KeelError(f"problem {self.key!r} asks for no samples: leave samples out, or name at least one")
        if new < 1:
            raise KeelError(f"problem {self.key!r} asks for max_new={new} tokens: at least 1 is needed")
        if context is None or length + new <= context:
            return
        if length >= context:
            raise KeelError(
                f"problem {self.key!r} has a prompt of {length} tokens and the model's context is {context}: "
                "leave room for an answer with a smaller data.max_prompt_length and data.truncation left or drop"
            )
        raise KeelError(
            f"problem {self.key!r}: {length} prompt tokens and {new} new ones exceed the model's context of "
            f"{context}: set rollout.max_completion_length to {context - length} or less"
        )


@dataclass(frozen=True)
class Turn:
    """One completion of a request, and which of its samples it is."""

    request: Request
    sample: int
    completion: Completion


def check_noise(requests: Sequence[Request], sampling: SamplingParams, seen: set[tuple[str, int, int]]) -> None:
    """Refuse two completions of the same noise, `seen` before or here: they would look like two samples and be one."""
    for request in requests:
        for sample in request.drawn(sampling):
            noise_key = (request.key, sample, request.start)
            if noise_key in seen:
                raise KeelError(
                    f"problem {request.key!r} asks twice for sample {sample} at start {request.start}, which draws the "
                    f"same noise again: give each request its own key, or other samples"
                )
            seen.add(noise_key)
