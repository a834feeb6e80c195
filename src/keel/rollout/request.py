"""Requests to an engine, completions in progress, the stop strings that end them, and finished turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.rollout.sampling import SamplingParams, row_key


class StopStrings:
    """Decodes tokens and truncates their text at stop strings."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def cut(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """The text before the first stop string, or None.

        The last tokens are decoded first; all tokens are decoded only if these contain a stop string. A stop string of
        n bytes spans at most n tokens, because a token adds at least one byte. The window of 2n + 8 tokens leaves room
        for special tokens, which add no bytes. A stop string that contains a special token is searched in the text with
        special tokens. Any other stop string is searched in the text without them.
        """
        cuts = [
            text
            for special in (False, True)
            if (strings := [string for string in stop if self._has_special(string) == special])
            and (text := self._cut_at(tokens, strings, special)) is not None
        ]
        return min(cuts, key=len) if cuts else None

    def ending(
        self, tokens: list[int], limit: int, sampling: SamplingParams, eos_ids: Collection[int]
    ) -> tuple[str, str | None]:
        """The stop reason at the newest token ("" if none), and the truncated text if a stop string ended it."""
        if tokens[-1] in sampling.stop_ids or (tokens[-1] in eos_ids and not sampling.ignore_eos):
            return "eos", None
        if sampling.stop and (text := self.cut(tokens, sampling.stop)) is not None:
            return "stop", text
        return ("length" if len(tokens) == limit else ""), None

    def special_in(self, stop: Sequence[str]) -> bool:
        """Whether any stop string contains a special token."""
        return any(map(self._has_special, stop))

    def _cut_at(self, tokens: list[int], stop: list[str], special: bool) -> str | None:
        window = 2 * max(len(string.encode()) for string in stop) + 8
        if len(tokens) > window:
            tail = self.decode(tokens[-window:], special=special)
            if not any(string in tail for string in stop):
                return None
        text = self.decode(tokens, special=special)
        starts = [text.find(string) for string in stop if string in text]
        if not starts:
            return None
        return self._without_special(tokens, text[: min(starts)]) if special else text[: min(starts)]

    def _has_special(self, string: str) -> bool:
        return any(token in string for token in self._special)

    def _without_special(self, tokens: list[int], before: str) -> str:
        """Remove special tokens from the text `before` a stop string.

        The complete tokens are decoded without special tokens; the remaining text is appended.
        """
        count = len(tokens)
        while count and len(self.decode(tokens[:count], special=True)) > len(before):
            count -= 1
        return self.decode(tokens[:count]) + before[len(self.decode(tokens[:count], special=True)) :]


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """The tokens that decoding skips."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(filter(None, (*named, *(str(token) for token in added.values() if token.special))))


@dataclass(frozen=True)
class Request:
    """One context to continue: the problem's key and all tokens so far, as sampled or rendered.

    `samples` are the indices of the completions to draw (default: 0 to num_generations - 1). To continue an episode,
    request one sample with all its tokens: prompt, completion and tool output, never re-encoded. `start` is the number
    of tokens after the original prompt; the noise continues there. `max_new` limits this request's tokens if earlier
    turns used part of max_completion_length. `noise` is a noise key chosen by the sender. A request with such a key may
    be repeated and gives the same tokens again.
    """

    key: str
    tokens: tuple[int, ...]
    samples: tuple[int, ...] | None = None
    start: int = 0
    max_new: int | None = None
    noise: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))

    def drawn(self, sampling: SamplingParams) -> Sequence[int]:
        """The indices of the completions to draw."""
        return range(sampling.num_generations) if self.samples is None else self.samples

    def limit(self, sampling: SamplingParams) -> int:
        """The largest number of tokens of a completion."""
        return sampling.max_completion_length if self.max_new is None else self.max_new

    def check(self, sampling: SamplingParams, context: int | None) -> None:
        """Refuse a request that cannot be sampled within this context length."""
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
    """One completion of a request, with its sample index."""

    request: Request
    sample: int
    completion: Completion


def check_noise(requests: Sequence[Request], sampling: SamplingParams, seen: set[tuple[str, int, int]]) -> None:
    """Refuse a sample whose noise is in `seen`, because it would repeat another sample."""
    for request in requests:
        for sample in request.drawn(sampling):
            noise_key = (request.key, sample, request.start)
            if noise_key in seen:
                raise KeelError(
                    f"problem {request.key!r} asks twice for sample {sample} at start {request.start}, which draws the "
                    f"same noise again: give each request its own key, or other samples"
                )
            seen.add(noise_key)


@dataclass(eq=False)
class OpenRow:
    """A completion in progress, of at most `limit` tokens. `key` is the key of its noise."""

    request: Request
    sample: int
    key: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)
    filtered_logp: list[float] = field(default_factory=list)
    text: str | None = None
    stop_reason: str = ""
    prompt: Any = None  # the native engine's cached prompt

    def append(
        self, drawn: tuple[int, float, float], stops: StopStrings, sampling: SamplingParams, eos_ids: Collection[int]
    ) -> None:
        """Append a token with its log-probabilities, and set `stop_reason` if the completion ends."""
        token, logp, filtered = drawn
        self.tokens.append(token)
        self.sample_logp.append(logp)
        self.filtered_logp.append(filtered)
        self.stop_reason, self.text = stops.ending(self.tokens, self.limit, sampling, eos_ids)

    def turn(self, stops: StopStrings) -> Turn:
        """The finished completion."""
        completion = Completion(
            tokens=tuple(self.tokens),
            action=(True,) * len(self.tokens),
            sample_logp=tuple(self.sample_logp),
            filtered_logp=tuple(self.filtered_logp),
            text=stops.decode(self.tokens) if self.text is None else self.text,
            stop_reason=self.stop_reason,
        )
        return Turn(self.request, self.sample, completion)


def open_rows(
    requests: Iterable[Request],
    sampling: SamplingParams,
    check: Callable[[Request, SamplingParams], None],
    noise: tuple[int, int, int],
    seen: set[tuple[str, int, int]],
) -> list[OpenRow]:
    """Check all requests and return a row per completion. `seen` holds the noise keys that were already used."""
    batch = list(requests)
    for request in batch:
        check(request, sampling)
    if not sampling.greedy:
        check_noise([request for request in batch if request.noise is None], sampling, seen)

    def key(request: Request, sample: int) -> int:
        return row_key(*noise, request.key, sample) if request.noise is None else request.noise

    return [
        OpenRow(request, sample, key(request, sample), request.limit(sampling))
        for request in batch
        for sample in request.drawn(sampling)
    ]
