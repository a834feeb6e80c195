"""Two ways to run a model token by token: with shared prompts where that is exact, plainly everywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from keel.models.head import causal_lm
from keel.models.lora import first_line
from keel.rollout.cache import Prefix, SharedPrefixCache, shared_prefix_attention
from keel.rollout.graph import GraphedStep, can_be_graphed
from keel.rollout.kept import KeptPrompt, KeptRow, stacked
from keel.rollout.lean import LlamaStep, is_llama_shaped

_PREFILL_TOKENS = 16384  # prompts are read in chunks of about this many tokens, to bound their activations
_JOIN, _JOIN_GRAPHED = 4.0, 16.0  # steps that rows which join cost: moving what was read, and making a graph anew
_CPU_ROWS = 16  # with more places a CPU's step costs by the row, and an empty place hardly anything
_PROBE_LENGTH = 32  # room for tokens in a probe: enough that steps run as graphs where they may
_RESUME_SCORES = 2**25  # attention scores that one piece of a resumed context may have, for the same reason


class Decoder(Protocol):
    """What the engine drives: `start` reads prompts, `step` takes one token a row, `keep` drops rows.

    `join_cost` is what it costs in steps, by the places of the batch, to let rows join those running. One that can hold
    contexts between turns (`resumes`) also hands out what it has read, goes on from it, and joins others of its kind.
    """

    resumes: bool
    carries: float  # share of its rows that may have ended and still be carried along, where dropping them costs more

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, live: list[int]) -> list[int]: ...

    def join_cost(self, places: int) -> float: ...


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

    def __init__(self, model: nn.Module, *, lean: bool = False, graphs: bool = False) -> None:
        self.model = model
        self.inner = causal_lm(model)
        step = LlamaStep(self.inner) if lean else None
        self.lean = GraphedStep(step) if graphs and step is not None else step
        self.carries, self._join = (0.25, _JOIN_GRAPHED) if graphs else (0.0, _JOIN)
        self.device = next(model.parameters()).device
        self.cache: SharedPrefixCache

    def start(self, prompts: Sequence[Sequence[int]], prompt_of: Sequence[int], length: int) -> Tensor:
        prefix, logits = self._prefill(prompts)
        self.cache = SharedPrefixCache(prefix, list(prompt_of), length)
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
        cache = SharedPrefixCache(prefix, [places[row.prompt.tokens] for row in rows], length, [len(o) for o in own])
        for index, row in enumerate(rows):
            start = cache.unused[index]
            cache.own[:, :, index, :, start : start + len(row.own)] = row.kv
        new = max(len(tokens) - len(row.own) for row, tokens in zip(rows, own, strict=True))
        ids = torch.tensor([[*[tokens[-1]] * (cache.past - len(tokens)), *tokens] for tokens in own])
        cache.length = cache.past - new
        columns = kv.shape[4] + cache.past
        piece = max(
            1, _RESUME_SCORES // (len(rows) * self.inner.config.get_text_config().num_attention_heads * columns)
        )
        for part in ids[:, cache.length :].to(self.device).split(piece, dim=1):
            positions = cache.positions[:, None] + cache.length + torch.arange(part.shape[1], device=self.device)
            with shared_prefix_attention(self.inner.config, cache):
                out = self.model(
                    input_ids=part,
                    position_ids=positions.clamp(min=0),
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
        rows = max(1, _PREFILL_TOKENS // width)
        parts = [self._prefill_chunk(prompts[i : i + rows], width) for i in range(0, len(prompts), rows)]
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
        positions = torch.arange(width, device=self.device).expand(len(prompts), -1)
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

    def join_cost(self, places: int) -> float:
        return self._join if may_join(self.device.type, places) else math.inf


class RepeatedDecoder:
    """The plain way for models whose attention is their own business: the prompt once a row, transformers' own cache.

    Rows of one prompt length run together, so that nothing is padded and no mask is needed: right for sliding windows
    and recurrent layers, where padding is not neutral. A model that returns no such cache reads its tokens again.
    """

    resumes = False
    carries = 0.0

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inner = causal_lm(model)
        self.device = next(model.parameters()).device

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
        out = self.model(input_ids=ids.to(self.device), use_cache=True, logits_to_keep=1, **given)
        self.caches[bucket] = getattr(out, "past_key_values", None)
        logits: Tensor = out.logits[:, -1]
        return logits

    def keep(self, live: list[int]) -> list[int]:
        renumber = {row: i for i, row in enumerate(live)}
        alive = [[i for i, row in enumerate(rows) if row in renumber] for rows in self.buckets]
        for bucket, places in enumerate(alive):
            if 0 < len(places) < len(self.buckets[bucket]):
                self.contexts[bucket] = self.contexts[bucket][places]
                if self.caches[bucket] is not None:
                    self.caches[bucket].reorder_cache(torch.tensor(places, device=self.device))
            self.buckets[bucket] = [renumber[self.buckets[bucket][i]] for i in places]
        kept = [bucket for bucket, places in enumerate(alive) if places]
        self.buckets = [self.buckets[bucket] for bucket in kept]
        self.contexts = [self.contexts[bucket] for bucket in kept]
        self.caches = [self.caches[bucket] for bucket in kept]
        return live

    def join_cost(self, places: int) -> float:
        """Never worth it: rows that join would be a bucket of their own, one forward more in every later step."""
        return math.inf

    def _in_order(self, logits: list[Tensor]) -> Tensor:
        order = torch.tensor([row for rows in self.buckets for row in rows], device=self.device)
        return torch.cat(logits)[order.argsort()]


def may_join(device: str, places: int) -> bool:
    """Whether rows that join those running can pay there."""
    return device != "cpu" or places <= _CPU_ROWS


def _probe(model: nn.Module, decoder: Decoder) -> float:
    """Largest difference of the decoder's logits from plain full forwards, relative to the logits' own spread."""
    vocabulary = causal_lm(model).config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (10,), generator=generator).tolist()
    prompts, prompt_of = (tokens[:3], tokens[3:]), (0, 0, 1, 1)
    device = next(model.parameters()).device
    if isinstance(decoder, SharedPrefixDecoder) and isinstance(decoder.lean, GraphedStep):
        decoder.lean.must = True
    logits = [decoder.start(prompts, prompt_of, _PROBE_LENGTH)]
    fed = torch.randint(0, vocabulary, (3, 4), generator=generator)
    for column in fed.to(device):
        logits.append(decoder.step(column))
    contexts = [[*prompts[prompt], *fed[:, row].tolist()] for row, prompt in enumerate(prompt_of)]
    resumed = _resumed(decoder, prompts, prompt_of, contexts) if isinstance(decoder, SharedPrefixDecoder) else None
    worst = 0.0
    for row, tokens in enumerate(contexts):
        expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, -4:].float()
        found = torch.stack([step[row] for step in logits]).float()
        apart = (found - expected).abs().max()
        if resumed is not None:
            apart = torch.maximum(apart, (resumed[row].float() - expected[-1]).abs().max())
        worst = max(worst, float(apart / expected.std().clamp(min=1e-6)))
    return worst


def _resumed(
    decoder: SharedPrefixDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of: Sequence[int],
    contexts: Sequence[Sequence[int]],
) -> Tensor:
    """Logits after `contexts`, by going on from what the decoder holds: all of its past but some last tokens."""
    kept = decoder.kept_prompts(prompts)
    rows = []
    for row, prompt in enumerate(prompt_of):
        own = tuple(contexts[row][len(prompts[prompt]) :][: 1 + row % 2])  # pasts and remainders of different lengths
        rows.append(KeptRow(kept[prompt], own, decoder.kept_row(row)[:, :, :, : len(own)]))
    return decoder.resume(rows, contexts, 1)


def choose_decoder(model: nn.Module, *, graphs: bool = True) -> tuple[Callable[[nn.Module], Decoder], str | None]:
    """The fastest decoder that is exact for this model, and why its prompts are not shared where they are not.

    The cache's layer types tell of windows and recurrent states, which short inputs would not show; the probe finds
    everything else, since a model that computes attention in its own way gives other numbers without an error.
    """
    inner = causal_lm(model)
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    try:
        odd = {type(layer).__name__ for layer in DynamicCache(config=inner.config).layers} - {DynamicLayer.__name__}
    except Exception as error:
        return RepeatedDecoder, _line(error)
    if odd:
        return RepeatedDecoder, f"its cache has layers of type {', '.join(sorted(odd))}"
    reason = ""
    ways: list[Callable[[nn.Module], Decoder]] = [SharedPrefixDecoder]
    if is_llama_shaped(inner):
        ways.insert(0, partial(SharedPrefixDecoder, lean=True))
        if graphs and can_be_graphed(inner):
            ways.insert(0, partial(SharedPrefixDecoder, lean=True, graphs=True))
    for shared in ways:
        try:
            difference = _probe(model, shared(model))
        except Exception as error:  # whatever a foreign model raises here, it can still run another way
            reason = _line(error)
            continue
        if difference < (0.2 if half else 1e-3):
            return shared, None
        reason = f"its logits differ by {difference:.1g} of their spread"
    return RepeatedDecoder, reason


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
