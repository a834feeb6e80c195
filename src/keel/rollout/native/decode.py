"""Decoders: prefill and decode steps of a model, with shared prompts if that is exact."""

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
from keel.models.scorer import padding_columns
from keel.rollout.native.cache import (
    CachedPrompt,
    CachedRow,
    Prefix,
    SharedPrefixCache,
    shared_prefix_attention,
    stack_prompts,
)
from keel.rollout.native.graph import DecodeGraphs
from keel.rollout.native.llama import LlamaStep
from keel.rollout.native.scheduler import Traits, prefill_chunks, resume_columns
from keel.rollout.sampling import SamplingParams


class Decoder(Protocol):
    """The interface of decoders: `prefill` reads prompts, `step` decodes a token per row, `keep_rows` drops other rows.

    The scheduler reads `traits`. A decoder with `can_resume` can also export its KV cache, resume from it, and join
    decoders of the same class. A decoder with `traits.graphed` draws on the device, by `begin` and `draw_and_step`.
    """

    can_resume: bool
    traits: Traits

    def prefill(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep_rows(self, live: list[int]) -> list[int]: ...


@contextmanager
def _last_hidden_only(model: Any, last: Tensor) -> Iterator[None]:
    """Give the LM head only the hidden state at each row's `last` position.

    A hook changes the head's input, so the model's later operations on logits (soft cap, scale) still apply.
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
    """Prefills every distinct prompt once and stores its keys and values once.

    With `own_step`, Keel's step replaces the model's forward. With `graphs`, steps are fused and run as CUDA graphs.
    """

    can_resume = True

    def __init__(
        self,
        model: nn.Module,
        *,
        own_step: type[LlamaStep] | None = None,
        graphs: DecodeGraphs | None = None,
        origin: int = 0,
    ) -> None:
        self.model = model
        self.origin = origin  # the position of the first token, set by probes
        self.inner = causal_lm(model)
        self.graphs = graphs
        if graphs is not None:
            graphs.use(model)
        self.own_step = None if own_step is None else own_step(self.inner)
        self.device = next(model.parameters()).device
        self.traits = Traits(self.device.type, joins=True, graphed=graphs is not None)
        self.cache: SharedPrefixCache

    def prefill(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        prefix, logits = self._prefill_prompts(prompts)
        self.cache = SharedPrefixCache(prefix, list(prompt_of), length, origin=self.origin)
        return logits[torch.tensor(prompt_of, device=self.device)]

    def resume(self, rows: Sequence[CachedRow], contexts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Prefill the tokens of `contexts` (all tokens of each row) after the cached `rows`.

        All rows have the same width and end in the same column. A row with fewer new tokens recomputes some of its last
        tokens, or computes masked pad columns before its past.
        """
        prompts = {row.prompt.tokens: row.prompt for row in rows}
        group_index = {key: index for index, key in enumerate(prompts)}
        kv = stack_prompts(list(prompts.values()))
        prefix = Prefix(tuple(prompts), tuple(kv[:, 0].unbind()), tuple(kv[:, 1].unbind()))
        suffixes = [tuple(tokens[len(row.prompt.tokens) :]) for row, tokens in zip(rows, contexts, strict=True)]
        group_of, past_lengths = [group_index[row.prompt.tokens] for row in rows], [len(tokens) for tokens in suffixes]
        cache = SharedPrefixCache(prefix, group_of, length, past_lengths, origin=self.origin)
        for index, row in enumerate(rows):
            start = cache.left_pad[index]
            cache.suffix_kv[:, :, index, :, start : start + len(row.suffix)] = row.kv
        new_tokens = max(len(tokens) - len(row.suffix) for row, tokens in zip(rows, suffixes, strict=True))
        ids = torch.tensor([[*[tokens[-1]] * (cache.past - len(tokens)), *tokens] for tokens in suffixes])
        cache.length = cache.past - new_tokens
        columns = kv.shape[4] + cache.past
        heads = self.inner.config.get_text_config(decoder=True).num_attention_heads
        chunk_columns = resume_columns(len(rows), heads, columns)
        for chunk in ids[:, cache.length :].to(self.device).split(chunk_columns, dim=1):
            positions = cache.positions[:, None] + cache.length + torch.arange(chunk.shape[1], device=self.device)
            with shared_prefix_attention(self.inner.config, cache):
                out = self.model(
                    input_ids=chunk,
                    position_ids=positions.clamp(min=self.origin),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache.advance(chunk.shape[1])
        self.cache = cache
        return out.logits[:, -1]

    def prompt_kv(self, prompts: Sequence[Sequence[int]]) -> list[CachedPrompt]:
        """A copy of each prompt's keys and values. Call it directly after `prefill`."""
        prefix = self.cache.prefix
        pairs = [torch.stack(pair) for pair in zip(prefix.keys, prefix.values, strict=True)]
        return [
            CachedPrompt(tuple(tokens), torch.stack([pair[:, index, :, : len(tokens)] for pair in pairs]))
            for index, tokens in enumerate(prompts)
        ]

    def row_kv(self, row: int) -> Tensor:
        """A copy of the keys and values of a row's tokens after its prompt, without the newest token."""
        return self.cache.row_kv(row)

    def _prefill_prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[Prefix, Tensor]:
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
        """Prefill right-padded prompts without a mask: causal attention never reads the padding."""
        ids = torch.tensor([[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        positions = (self.origin + torch.arange(width, device=self.device)).expand(len(prompts), -1)
        cache = DynamicCache(config=self.inner.config)
        with _last_hidden_only(self.inner, last):
            out = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache, out.logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        cache = self.cache
        cache.grow_if_full()
        step = self.own_step if self.graphs is None else self.graphs.step
        if step is not None:
            logits = step(tokens, cache)
            cache.advance()
            return logits
        positions = cache.next_positions.unsqueeze(1)
        with shared_prefix_attention(self.inner.config, cache):
            out = self.model(
                input_ids=tokens.unsqueeze(1), position_ids=positions, past_key_values=cache, use_cache=True
            )
        cache.advance()
        return out.logits[:, -1]

    def logits(self) -> Tensor:
        """The rows' next logits."""
        assert self.graphs is not None
        return self.graphs.logits(self.cache)

    def begin(self, logits: Tensor, *draws: Sequence[int]) -> None:
        """Start drawing on the device; see `DecodeState.begin`."""
        assert self.graphs is not None
        self.graphs.begin(self.cache, logits, *draws)

    def draw_and_step(self, sampling: SamplingParams, *, last: bool) -> Tensor:
        """Draw a token per row and decode it unless `last`; return tokens and log-probabilities `[3, B]`."""
        assert self.graphs is not None
        self.cache.grow_if_full()
        numbers = self.graphs.draw_and_step(self.cache, sampling, last=last)
        self.cache.advance(0 if last else 1)
        return numbers

    def keep_rows(self, live: list[int]) -> list[int]:
        order = self.cache.keep_rows(live)
        if self.graphs is not None:
            self.graphs.select(self.cache, order)
        return order

    def join(self, other: SharedPrefixDecoder, length: int) -> None:
        """Append the rows of another decoder, with room for `length` more tokens per row."""
        self.cache = self.cache.joined(other.cache, length)


class UnsharedPrefixDecoder:
    """The fallback for models with custom attention: each row prefills its prompt into transformers' cache.

    Rows of equal prompt length run together without padding or mask, as sliding windows and recurrent layers require.
    Positions are passed if the model takes them, because some models (Bamba) do not continue from their cache. `drop`
    is the cache's method that drops rows (None: prefill the remaining rows again). With `cached` False, for models
    without a correct cache, every step reads all tokens.
    """

    can_resume = False
    traits = Traits()  # rows do not join: they would form their own bucket and cost one more forward per step

    def __init__(
        self, model: nn.Module, *, drop: str | None = "reorder_cache", cached: bool = True, origin: int = 0
    ) -> None:
        self.model = model
        self.origin = origin  # the position of the first token, set by probes
        self.inner = causal_lm(model)
        self.device = next(model.parameters()).device
        self.drop, self.cached = drop, cached
        parameters = inspect.signature(self.inner.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    def prefill(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
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
        """The next logits after `ids`, the last tokens of the bucket's contexts."""
        ids, inputs = ids.to(self.device), dict[str, Any]()
        if self.caches[bucket] is not None:
            inputs["past_key_values"] = self.caches[bucket]
        # A sliding window needs a mask. Padding must not be cached, so the next step reads the row again.
        padding = 0 if inputs else padding_columns(ids)
        ids, cached = torch.cat((ids, ids[:, :padding]), dim=1), self.cached and not padding
        if self._takes_positions:
            stop = self.origin + self.contexts[bucket].shape[1] + padding
            inputs["position_ids"] = torch.arange(stop - ids.shape[1], stop, device=self.device).expand(len(ids), -1)
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1 + padding
        out = self.model(input_ids=ids, use_cache=cached, **inputs)
        self.caches[bucket] = getattr(out, "past_key_values", None) if cached else None
        logits: Tensor = out.logits[:, -1 - padding]
        return logits

    def keep_rows(self, live: list[int]) -> list[int]:
        renumber = {row: i for i, row in enumerate(live)}
        live_rows = [[i for i, row in enumerate(rows) if row in renumber] for rows in self.buckets]
        for bucket, indices in enumerate(live_rows):
            if 0 < len(indices) < len(self.buckets[bucket]):
                self.contexts[bucket] = self.contexts[bucket][indices]
                if self.drop is None:
                    self.caches[bucket] = None
                elif self.caches[bucket] is not None:
                    getattr(self.caches[bucket], self.drop)(torch.tensor(indices, device=self.device))
            self.buckets[bucket] = [renumber[self.buckets[bucket][i]] for i in indices]
        live_buckets = [bucket for bucket, indices in enumerate(live_rows) if indices]
        self.buckets = [self.buckets[bucket] for bucket in live_buckets]
        self.contexts = [self.contexts[bucket] for bucket in live_buckets]
        self.caches = [self.caches[bucket] for bucket in live_buckets]
        return live

    def _in_order(self, logits: list[Tensor]) -> Tensor:
        order = torch.tensor([row for rows in self.buckets for row in rows], device=self.device)
        return torch.cat(logits)[order.argsort()]


class SwitchingDecoder:
    """A decoder for models whose rotary tables change at some context length (LongRoPE).

    Each length regime has its own decoder. A row that enters another regime is prefilled again, because its cached keys
    were rotated for shorter contexts.
    """

    can_resume = False
    traits = Traits()  # rows do not join: they would have to be split by length

    def __init__(
        self, model: nn.Module, *, inner: Callable[..., Decoder], regimes: LengthRegimes, origin: int = 0
    ) -> None:
        self.model, self.regimes, self.origin = model, regimes, origin
        self.inner = partial(inner, origin=origin) if origin else inner
        self.parts: list[tuple[int, Any, list[int]]] = []  # regime, decoder, rows

    def prefill(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        self.contexts = [tuple(prompts[prompt]) for prompt in prompt_of]
        self.length = length
        logits: dict[int, Tensor] = {}
        self._prefill_rows(range(len(prompt_of)), logits)
        return torch.stack([logits[row] for row in range(len(prompt_of))])

    def step(self, tokens: Tensor) -> Tensor:
        before = [self._regime(context) for context in self.contexts]
        self.contexts = [(*context, token) for context, token in zip(self.contexts, tokens.tolist(), strict=True)]
        crossing = [row for row, context in enumerate(self.contexts) if self._regime(context) != before[row]]
        if crossing:
            self._drop_rows_except(set(range(len(self.contexts))) - set(crossing))
        logits: dict[int, Tensor] = {}
        for _, decoder, rows in self.parts:
            reset_rope(self.model)
            logits |= zip(rows, decoder.step(tokens[torch.tensor(rows, device=tokens.device)]), strict=True)
        self._prefill_rows(crossing, logits)
        return torch.stack([logits[row] for row in range(len(self.contexts))])

    def keep_rows(self, live: list[int]) -> list[int]:
        self._drop_rows_except(set(live))
        renumber = {row: i for i, row in enumerate(live)}
        self.parts = [(regime, decoder, [renumber[row] for row in rows]) for regime, decoder, rows in self.parts]
        self.contexts = [self.contexts[row] for row in live]
        return live

    def _regime(self, context: tuple[int, ...]) -> int:
        return self.regimes.of(self.origin + len(context))

    def _drop_rows_except(self, live: set[int]) -> None:
        """Drop all rows except `live`, without renumbering."""
        parts = []
        for regime, decoder, rows in self.parts:
            indices = [i for i, row in enumerate(rows) if row in live]
            if 0 < len(indices) < len(rows):
                rows = [rows[i] for i in decoder.keep_rows(indices)]
            if indices:
                parts.append((regime, decoder, rows))
        self.parts = parts

    def _prefill_rows(self, rows: Sequence[int], logits: dict[int, Tensor]) -> None:
        """Prefill the whole contexts of these rows, grouped by regime."""
        for regime in sorted({self._regime(self.contexts[row]) for row in rows}):
            members = [row for row in rows if self._regime(self.contexts[row]) == regime]
            prompt_index: dict[tuple[int, ...], int] = {}
            prompt_of = [prompt_index.setdefault(self.contexts[row], len(prompt_index)) for row in members]
            decoder: Any = self.inner(self.model)
            reset_rope(self.model)
            logits |= zip(members, decoder.prefill(list(prompt_index), prompt_of, self.length), strict=True)
            same_regime = [
                i for i, (other, running, _) in enumerate(self.parts) if other == regime and running.can_resume
            ]
            if decoder.can_resume and same_regime:
                _, running, running_rows = self.parts[same_regime[0]]
                running.join(decoder, self.length)
                self.parts[same_regime[0]] = (regime, running, [*running_rows, *members])
            else:
                self.parts.append((regime, decoder, members))
