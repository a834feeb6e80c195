"""The native rollout engine: batched sampling from the policy, exact about tokens, log-probabilities and noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from keel.errors import KeelError
from keel.models.head import causal_lm, evaluating
from keel.models.load import context_length, eos_ids
from keel.rollout.decode import choose_decoder
from keel.rollout.kept import KeptContexts, KeptPrompt, KeptRow, weights_stamp
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel, row_key
from keel.rollout.stops import StopStrings
from keel.rollout.weights import WeightCopy
from keel.types import Completion

_NOISE_AHEAD = 16  # positions whose noise is made at once: it costs many small operations


@dataclass(frozen=True)
class Request:
    """One context to continue: the problem's key, and every token so far, exactly as they were sampled or given.

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


@dataclass
class _Row:
    """One completion being sampled."""

    request: int
    place: int
    key: int
    start: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)
    filtered_logp: list[float] = field(default_factory=list)
    text: str | None = None
    stop_reason: str = ""
    past: KeptRow | None = None  # what is kept of its context from the turn before
    prompt: KeptPrompt | None = None  # where its context begins, if it is to be kept itself


class NativeEngine:
    """Samples from a transformers model, plain or adapted by peft.

    By default it shares the policy's weights and there is nothing to sync. With `copy=True` (implied by a `dtype` or
    `device`) it holds its own, `merge=True` with the active adapters merged into them; `sync` updates them and
    `is_stale` tells whether that is due. `kept_bytes` is the memory for keys and values of past turns: a request that
    goes on where a turn ended reads only what is new, the prompt of a group is held once, and `forget` frees them.
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
    ) -> None:
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise KeelError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token before sampling")
        copied = copy or merge or dtype is not None or device is not None
        self._policy = model
        self._copy = WeightCopy(model, dtype=dtype, device=device, merge=merge) if copied else None
        self.tokenizer = tokenizer
        self.on_finished: Callable[[int], None] | None = None  # told how many completions have just ended
        self._stops = StopStrings(tokenizer)
        self.eos_ids = frozenset(eos_ids(causal_lm(model), tokenizer))
        self.context = context_length(causal_lm(model))
        with evaluating(self.model):
            self._decoder, self.fallback_reason = choose_decoder(self.model)
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

    @property
    def version(self) -> int | None:
        """The policy version of the last `sync`; None for shared weights, which have no version of their own."""
        return None if self._copy is None else self._copy.version

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Take over the policy's weights; nothing to do where they are shared."""
        self.forget()
        if self._copy is not None:
            self._copy.sync(policy, version)
        elif policy is not self._policy:
            raise KeelError(
                "this engine shares the weights of another model: build it on this policy, or with copy=True"
            )

    def forget(self) -> None:
        """Free what was kept of past turns."""
        self.kept.forget()

    def is_stale(self, policy: nn.Module) -> bool:
        """Whether sampling now would use other weights than the policy's."""
        return policy is not self._policy if self._copy is None else self._copy.is_stale(policy)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """Completions of each request, in order; what is wrong with a request is said before anything is computed."""
        for request in requests:
            self._check(request, sampling)
        if not sampling.greedy:
            _check_noise(requests, sampling)
        rows = [
            _Row(i, place, row_key(seed, attempt, step, request.key, sample), request.start, _limit(request, sampling))
            for i, request in enumerate(requests)
            for place, sample in enumerate(_samples(request, sampling))
        ]
        # prompts of like length together: less padding in a wave, and all rows of a group stay neighbours
        rows.sort(key=lambda row: (len(requests[row.request].tokens), row.request))
        if self.kept.limit:
            self.kept.enter(seed, attempt, step, weights_stamp(self.model))
        with evaluating(self.model):
            for row in rows:
                row.past = self.kept.find(row.key, tuple(requests[row.request].tokens))
            for part in ([row for row in rows if row.past], [row for row in rows if not row.past]):
                for wave in _waves(part, sampling.max_batch or len(rows)):
                    self._run(wave, requests, sampling)
        finished: list[list[Completion]] = [[] for _ in requests]
        for row in sorted(rows, key=lambda row: (row.request, row.place)):
            finished[row.request].append(self._completion(row))
        return finished

    def _check(self, request: Request, sampling: SamplingParams) -> None:
        length, new = len(request.tokens), _limit(request, sampling)
        if not length:
            raise KeelError(
                f"problem {request.key!r} has an empty prompt: a model needs at least one token to continue"
            )
        if not len(_samples(request, sampling)):
            raise KeelError(f"problem {request.key!r} asks for no samples: leave samples out, or name at least one")
        if new < 1:
            raise KeelError(f"problem {request.key!r} asks for max_new={new} tokens: at least 1 is needed")
        if self.context is None or length + new <= self.context:
            return
        if length >= self.context:
            raise KeelError(
                f"problem {request.key!r} has a prompt of {length} tokens and the model's context is {self.context}: "
                f"shorten it to leave room for an answer"
            )
        raise KeelError(
            f"problem {request.key!r}: {length} prompt tokens and {new} new ones exceed the model's context of "
            f"{self.context}: set rollout.max_completion_length to {self.context - length} or less"
        )

    def _run(self, rows: list[_Row], requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Sample one wave of rows to their ends: all of them with a past that was kept, or none."""
        decoder: Any = self._decoder(self.model)
        logits = self._read(rows, requests, decoder)
        noise = _Noise(rows, logits, sampling)
        while rows:
            token, sample_logp, filtered_logp = draw(logits, sampling, noise.next())
            self._record(rows, token, sample_logp, filtered_logp, sampling)
            live = [i for i, row in enumerate(rows) if not row.stop_reason]
            if len(live) < len(rows):
                self._keep(rows, requests, decoder)
                if self.on_finished is not None:
                    self.on_finished(len(rows) - len(live))
                if not live:
                    return
                order = decoder.keep(live)
                rows = [rows[i] for i in order]
                token = token[torch.tensor(order, device=token.device)]
                noise.keep(order)
            logits = decoder.step(token)

    def _read(self, rows: list[_Row], requests: Sequence[Request], decoder: Any) -> Tensor:
        """Read the contexts of a wave, or what is new in them; the logits of each row's first token."""
        contexts = [tuple(requests[row.request].tokens) for row in rows]
        length = max(row.limit for row in rows)
        pasts = [row.past for row in rows if row.past]
        if pasts:
            for row, past in zip(rows, pasts, strict=True):
                row.prompt = past.prompt
            return decoder.resume(pasts, contexts, length)
        number: dict[tuple[int, ...], int] = {}
        prompt_of = [number.setdefault(tokens, len(number)) for tokens in contexts]
        logits: Tensor = decoder.start(list(number), prompt_of, length)
        if self.kept.limit and decoder.resumes:
            prompts = decoder.kept_prompts(list(number))
            for row, index in zip(rows, prompt_of, strict=True):
                row.prompt = prompts[index]
        return logits

    def _keep(self, rows: list[_Row], requests: Sequence[Request], decoder: Any) -> None:
        """Keep the contexts of the rows that have just ended, all but the last token, which was never read."""
        for index, row in enumerate(rows):
            if row.stop_reason and row.prompt is not None:
                own = (*requests[row.request].tokens[len(row.prompt.tokens) :], *row.tokens[:-1])
                self.kept.keep(row.key, KeptRow(row.prompt, own, decoder.kept_row(index)))

    def _record(
        self, rows: list[_Row], token: Tensor, logp: Tensor, filtered: Tensor, sampling: SamplingParams
    ) -> None:
        """Write down what each row drew, and whether it is done."""
        numbers = torch.stack((token.double(), logp.double(), filtered.double())).tolist()  # one transfer
        for row, drawn, row_logp, row_filtered in zip(rows, *numbers, strict=True):
            row.tokens.append(int(drawn))
            row.sample_logp.append(row_logp)
            row.filtered_logp.append(row_filtered)
            if int(drawn) in self.eos_ids and not sampling.ignore_eos:
                row.stop_reason = "eos"
            elif sampling.stop and (text := self._stops.cut(row.tokens, sampling.stop)) is not None:
                row.stop_reason, row.text = "stop", text
            elif len(row.tokens) == row.limit:
                row.stop_reason = "length"

    def _completion(self, row: _Row) -> Completion:
        return Completion(
            tokens=tuple(row.tokens),
            action=(True,) * len(row.tokens),
            sample_logp=tuple(row.sample_logp),
            filtered_logp=tuple(row.filtered_logp),
            text=self._stops.decode(row.tokens) if row.text is None else row.text,
            stop_reason=row.stop_reason,
        )


class _Noise:
    """Noise for the rows of a wave, made for several positions at a time."""

    def __init__(self, rows: list[_Row], logits: Tensor, sampling: SamplingParams) -> None:
        device = logits.device
        self.width = 0 if sampling.greedy else sum(block_shape(logits.shape[-1]))
        self.keys = torch.tensor([row.key for row in rows], device=device)
        self.starts = torch.tensor([row.start for row in rows], device=device)
        self.position = 0
        self.ahead: Tensor | None = None

    def next(self) -> Tensor | None:
        if not self.width:
            return None
        offset = self.position % _NOISE_AHEAD
        if offset == 0 or self.ahead is None:
            first = self.position - offset
            positions = self.starts + torch.arange(first, first + _NOISE_AHEAD, device=self.keys.device).unsqueeze(1)
            self.ahead = gumbel(self.keys.expand(_NOISE_AHEAD, -1), positions, self.width)
        self.position += 1
        return self.ahead[offset]

    def keep(self, order: list[int]) -> None:
        index = torch.tensor(order, device=self.keys.device)
        self.keys, self.starts = self.keys[index], self.starts[index]
        if self.ahead is not None:
            self.ahead = self.ahead[:, index]


def _check_noise(requests: Sequence[Request], sampling: SamplingParams) -> None:
    """Refuse two completions of the same noise: they would look like two samples and be one."""
    seen: set[tuple[str, int, int]] = set()
    for request in requests:
        for sample in _samples(request, sampling):
            place = (request.key, sample, request.start)
            if place in seen:
                raise KeelError(
                    f"problem {request.key!r} asks twice for sample {sample} at start {request.start}, which draws the "
                    f"same noise again: give each request its own key, or other samples"
                )
            seen.add(place)


def _limit(request: Request, sampling: SamplingParams) -> int:
    return sampling.max_completion_length if request.max_new is None else request.max_new


def _waves(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    """At most `size` rows at a time; a group is divided, and its prompt read again, only if it is larger than that."""
    wave: list[_Row] = []
    for _, group in groupby(rows, key=lambda row: row.request):
        members = list(group)
        if wave and len(wave) + len(members) > size:
            yield wave
            wave = []
        wave += members
        while len(wave) > size:
            yield wave[:size]
            wave = wave[size:]
    if wave:
        yield wave


def _samples(request: Request, sampling: SamplingParams) -> Sequence[int]:
    return range(sampling.num_generations) if request.samples is None else request.samples
