"""Ways to run a model token by token: with shared prompts where that is exact, plainly everywhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from keel.models.head import causal_lm
from keel.models.rope import LengthRegimes, reset_rope
from keel.rollout.native.cache import Prefix, SharedPrefixCache, shared_prefix_attention
from keel.rollout.native.graph import GraphedStep
from keel.rollout.native.kept import KeptPrompt, KeptRow, stacked
from keel.rollout.native.lean import LlamaStep
from keel.rollout.native.scheduler import Traits, prefill_chunks, resume_columns


class Decoder(Protocol):
    """What the engine drives: `start` reads prompts, `step` takes one token a row, `keep` drops rows.

    `traits` are what a scheduler has to know of it. One that can hold contexts between turns (`resumes`) also hands out
    what it has read, goes on from it, and joins others of its kind.
    """

    resumes: bool
    traits: Traits

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, live: list[int]) -> list[int]: ...


@contextmanager
def _only_last(model: Any, last: Tensor) -> Iterator[None]:
    """Hand the vocabulary projection just the hidden state at each row's `last` position.

    A hook on its input rather than a call of its weight, so that whatever the model does to logits afterwards (a
    softcap, a scale) still happens.
    """

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return (hidden[torch.arange(len(last), device=hidden.device), last].unsqueeze(1), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class SharedPrefixDecoder:
    """Reads every distinct prompt once and keeps its keys and values once; `lean` steps past the model's forward.

    With `graphs` those steps run as CUDA graphs.
    """

    resumes = True

    def __init__(self, model: nn.Module, *, lean: bool = False, graphs: bool = False, origin: int = 0) -> None:
        self.model = model
        self.origin = origin  # the position of the first token, which a probe moves to where a model might change
        self.inner = causal_lm(model)
        step = LlamaStep(self.inner) if lean else None
        self.lean = GraphedStep(step) if graphs and step is not None else step
        self.device = next(model.parameters()).device
        self.traits = Traits(self.device.type, joins=True, graphed=graphs)
        self.cache: SharedPrefixCache

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        prefix, logits = self._prefill(prompts)
        self.cache = SharedPrefixCache(prefix, list(prompt_of), length, origin=self.origin)
        return logits[torch.tensor(prompt_of, device=self.device)]

    def resume(self, rows: Sequence[KeptRow], contexts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Go on from kept rows: `contexts` are all tokens of each, and only those after what is kept are read.

        Contexts end in one column. A row with less to read than the longest reads a few of its last tokens again, or
        columns before its past, which nothing sees: no row needs a shape of its own.
        """
        prompts = {row.prompt.tokens: row.prompt for row in rows}
        places = {key: index for index, key in enumerate(prompts)}
        kv = stacked(list(prompts.values()))
        prefix = Prefix(tuple(prompts), tuple(kv[:, 0].unbind()), tuple(kv[:, 1].unbind()))
        own = [tuple(tokens[len(row.prompt.tokens) :]) for row, tokens in zip(rows, contexts, strict=True)]
        group_of, pasts = [places[row.prompt.tokens] for row in rows], [len(tokens) for tokens in own]
        cache = SharedPrefixCache(prefix, group_of, length, pasts, origin=self.origin)
        for index, row in enumerate(rows):
            start = cache.unused[index]
            cache.own[:, :, index, :, start : start + len(row.own)] = row.kv
        new = max(len(tokens) - len(row.own) for row, tokens in zip(rows, own, strict=True))
        ids = torch.tensor([[*[tokens[-1]] * (cache.past - len(tokens)), *tokens] for tokens in own])
        cache.length = cache.past - new
        columns = kv.shape[4] + cache.past
        heads = self.inner.config.get_text_config(decoder=True).num_attention_heads
        piece = resume_columns(len(rows), heads, columns)
        for part in ids[:, cache.length :].to(self.device).split(piece, dim=1):
            positions = cache.positions[:, None] + cache.length + torch.arange(part.shape[1], device=self.device)
            with shared_prefix_attention(self.inner.config, cache):
                out = self.model(
                    input_ids=part,
                    position_ids=positions.clamp(min=self.origin),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache.advance(part.shape[1])
        self.cache = cache
        return out.logits[:, -1]

    def kept_prompts(self, prompts: Sequence[Sequence[int]]) -> list[KeptPrompt]:
        """A copy of each prompt's keys and values, just after `start`."""
        prefix = self.cache.prefix
        pairs = [torch.stack(pair) for pair in zip(prefix.keys, prefix.values, strict=True)]
        return [
            KeptPrompt(tuple(tokens), torch.stack([pair[:, index, :, : len(tokens)] for pair in pairs]))
            for index, tokens in enumerate(prompts)
        ]

    def kept_row(self, row: int) -> Tensor:
        """A copy of the keys and values of a row's tokens after its prompt, all but the newest."""
        return self.cache.of_row(row)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Prefix, Tensor]:
        width = max(len(prompt) for prompt in prompts)
        ends = list(accumulate(prefill_chunks(len(prompts), width)))
        parts = [self._prefill_chunk(prompts[i:j], width) for i, j in pairwise((0, *ends))]
        logits = torch.cat([logits for _, logits in parts])
        layers = [[(layer.keys, layer.values) for layer in cache.layers] for cache, _ in parts]
        if len(layers) == 1:
            keys, values = zip(*layers[0], strict=True)
        else:
            pairs = [(torch.cat(k), torch.cat(v)) for k, v in (zip(*layer) for layer in zip(*layers))]  # noqa: B905
            keys, values = zip(*pairs, strict=True)
        return Prefix(tuple(map(tuple, prompts)), tuple(keys), tuple(values)), logits

    def _prefill_chunk(self, prompts: Sequence[Sequence[int]], width: int) -> tuple[Any, Tensor]:
        """Right-padded and causal: no prompt token can see the padding, so no mask is needed."""
        ids = torch.tensor([[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        positions = (self.origin + torch.arange(width, device=self.device)).expand(len(prompts), -1)
        cache = DynamicCache(config=self.inner.config)
        with _only_last(self.inner, last):
            out = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache, out.logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        cache = self.cache
        cache.make_room()
        if self.lean is not None:
            logits = self.lean(tokens, cache)
            cache.advance()
            return logits
        positions = cache.next_positions.unsqueeze(1)
        with shared_prefix_attention(self.inner.config, cache):
            out = self.model(
                input_ids=tokens.unsqueeze(1), position_ids=positions, past_key_values=cache, use_cache=True
            )
        cache.advance()
        return out.logits[:, -1]

    def keep(self, live: list[int]) -> list[int]:
        return self.cache.keep(live)

    def join(self, other: SharedPrefixDecoder, length: int) -> None:
        """Put the other's rows behind these, with room for `length` more tokens of each."""
        if isinstance(self.lean, GraphedStep):
            self.lean.release()
        self.cache = self.cache.joined(other.cache, length)


class RepeatedDecoder:
    """The plain way for models whose attention is their own business: the prompt once a row, transformers' own cache.

    Rows of one prompt length run together, so that nothing is padded and no mask is needed: right for sliding windows
    and recurrent layers, where padding is not neutral. Positions are given wherever the model takes them, since not
    every model (Bamba) counts on from its cache. `drop` is the cache's method that leaves rows out, None where it has
    none that works: then what is left is read again. A model that returns no cache, or (`cached` False) one whose cache
    is wrong, reads all of its tokens again at every step.
    """

    resumes = False
    traits = Traits()  # rows that join would be a bucket of their own, one forward more in every later step

    def __init__(
        self, model: nn.Module, *, drop: str | None = "reorder_cache", cached: bool = True, origin: int = 0
    ) -> None:
        self.model = model
        self.origin = origin  # as above
        self.inner = causal_lm(model)
        self.device = next(model.parameters()).device
        self.drop, self.cached = drop, cached
        takes = inspect.signature(self.inner.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._takes_positions = "position_ids" in takes

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        lengths = [len(prompts[prompt]) for prompt in prompt_of]
        self.buckets = [[row for row, n in enumerate(lengths) if n == size] for size in sorted(set(lengths))]
        self.contexts = [torch.tensor([prompts[prompt_of[row]] for row in rows]) for rows in self.buckets]
        self.caches: list[Any] = [None] * len(self.buckets)
        return self._in_order([self._forward(i, ids) for i, ids in enumerate(self.contexts)])

    def step(self, tokens: Tensor) -> Tensor:
        logits: list[Tensor] = []
        for i, rows in enumerate(self.buckets):
            newest = tokens[torch.tensor(rows, device=self.device)].unsqueeze(1)
            self.contexts[i] = torch.cat((self.contexts[i], newest.cpu()), dim=1)
            logits.append(self._forward(i, self.contexts[i] if self.caches[i] is None else newest))
        return self._in_order(logits)

    def _forward(self, bucket: int, ids: Tensor) -> Tensor:
        given = {} if self.caches[bucket] is None else {"past_key_values": self.caches[bucket]}
        if self._takes_positions:
            stop = self.origin + self.contexts[bucket].shape[1]
            given["position_ids"] = torch.arange(stop - ids.shape[1], stop, device=self.device).expand(len(ids), -1)
        out = self.model(input_ids=ids.to(self.device), use_cache=self.cached, **self._options, **given)
        self.caches[bucket] = getattr(out, "past_key_values", None) if self.cached else None
        logits: Tensor = out.logits[:, -1]
        return logits

    def keep(self, live: list[int]) -> list[int]:
        renumber = {row: i for i, row in enumerate(live)}
        alive = [[i for i, row in enumerate(rows) if row in renumber] for rows in self.buckets]
        for bucket, places in enumerate(alive):
            if 0 < len(places) < len(self.buckets[bucket]):
                self.contexts[bucket] = self.contexts[bucket][places]
                if self.drop is None:
                    self.caches[bucket] = None
                elif self.caches[bucket] is not None:
                    getattr(self.caches[bucket], self.drop)(torch.tensor(places, device=self.device))
            self.buckets[bucket] = [renumber[self.buckets[bucket][i]] for i in places]
        kept = [bucket for bucket, places in enumerate(alive) if places]
        self.buckets = [self.buckets[bucket] for bucket in kept]
        self.contexts = [self.contexts[bucket] for bucket in kept]
        self.caches = [self.caches[bucket] for bucket in kept]
        return live

    def _in_order(self, logits: list[Tensor]) -> Tensor:
        order = torch.tensor([row for rows in self.buckets for row in rows], device=self.device)
        return torch.cat(logits)[order.argsort()]


class SwitchingDecoder:
    """For models that turn every position otherwise once a context is longer than some length (LongRoPE).

    Rows on either side of it are decoded apart, each side by a decoder of its own, and a row that crosses it is read
    again: the keys it has were turned for shorter contexts.
    """

    resumes = False
    traits = Traits()  # rows that join would have to be told apart by their lengths again

    def __init__(
        self, model: nn.Module, *, inner: Callable[..., Decoder], regimes: LengthRegimes, origin: int = 0
    ) -> None:
        self.model, self.regimes, self.origin = model, regimes, origin
        self.inner = partial(inner, origin=origin) if origin else inner
        self.parts: list[tuple[int, Any, list[int]]] = []  # regime, decoder, rows

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        self.contexts = [tuple(prompts[prompt]) for prompt in prompt_of]
        self.length = length
        logits: dict[int, Tensor] = {}
        self._read(range(len(prompt_of)), logits)
        return torch.stack([logits[row] for row in range(len(prompt_of))])

    def step(self, tokens: Tensor) -> Tensor:
        before = [self._regime(context) for context in self.contexts]
        self.contexts = [(*context, token) for context, token in zip(self.contexts, tokens.tolist(), strict=True)]
        crossing = [row for row, context in enumerate(self.contexts) if self._regime(context) != before[row]]
        if crossing:
            self._leave(set(range(len(self.contexts))) - set(crossing))
        logits: dict[int, Tensor] = {}
        for _, decoder, rows in self.parts:
            reset_rope(self.model)
            logits |= zip(rows, decoder.step(tokens[torch.tensor(rows, device=tokens.device)]), strict=True)
        self._read(crossing, logits)
        return torch.stack([logits[row] for row in range(len(self.contexts))])

    def keep(self, live: list[int]) -> list[int]:
        self._leave(set(live))
        renumber = {row: i for i, row in enumerate(live)}
        self.parts = [(regime, decoder, [renumber[row] for row in rows]) for regime, decoder, rows in self.parts]
        self.contexts = [self.contexts[row] for row in live]
        return live

    def _regime(self, context: tuple[int, ...]) -> int:
        return self.regimes.of(self.origin + len(context))

    def _leave(self, live: set[int]) -> None:
        """Let go of all rows but these; their numbers stay."""
        parts = []
        for regime, decoder, rows in self.parts:
            places = [i for i, row in enumerate(rows) if row in live]
            if 0 < len(places) < len(rows):
                rows = [rows[i] for i in decoder.keep(places)]
            if places:
                parts.append((regime, decoder, rows))
        self.parts = parts

    def _read(self, rows: Sequence[int], logits: dict[int, Tensor]) -> None:
        """Read the contexts of these rows from their beginning, those of a regime together."""
        for regime in sorted({self._regime(self.contexts[row]) for row in rows}):
            members = [row for row in rows if self._regime(self.contexts[row]) == regime]
            number: dict[tuple[int, ...], int] = {}
            prompt_of = [number.setdefault(self.contexts[row], len(number)) for row in members]
            decoder: Any = self.inner(self.model)
            reset_rope(self.model)
            logits |= zip(members, decoder.start(list(number), prompt_of, self.length), strict=True)
            same = [i for i, (other, there, _) in enumerate(self.parts) if other == regime and there.resumes]
            if decoder.resumes and same:
                _, there, beside = self.parts[same[0]]
                there.join(decoder, self.length)
                self.parts[same[0]] = (regime, there, [*beside, *members])
            else:
                self.parts.append((regime, decoder, members))
