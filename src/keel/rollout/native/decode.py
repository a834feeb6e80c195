"""Ways to run a model token by token: with shared prompts where that is exact, plainly everywhere else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from keel.base.errors import KeelError, first_line
from keel.models.checks import context_length
from keel.models.head import causal_lm
from keel.models.lengths import LengthRegimes, forget_lengths, length_regimes
from keel.models.probe import last_logits, local_windows, longest_probe, past, position_switches
from keel.rollout.native.cache import Prefix, SharedPrefixCache, shared_prefix_attention
from keel.rollout.native.graph import GraphedStep, can_be_graphed
from keel.rollout.native.kept import KeptPrompt, KeptRow, stacked
from keel.rollout.native.lean import LlamaStep, is_llama_shaped

_PREFILL_TOKENS = 16384  # prompts are read in chunks of about this many tokens, to bound their activations
_JOIN, _JOIN_GRAPHED = 4.0, 16.0  # steps that rows which join cost: moving what was read, and making a graph anew
_CPU_ROWS = 16  # with more places a CPU's step costs by the row, and an empty place hardly anything
_PROBE_STEPS = 4  # tokens that a probe decodes after its prompts
_PROBE_LENGTH = 32  # room for tokens in a probe: enough that steps run as graphs where they may
_HALF_TRIES, _HALF_FAULTS = 7, 4  # in half precision: draws of a probe, and how many must show what counts as wrong
_HALF_NOISE = (0.2, 1.0)  # of the logits' spread: what rounding may always do, and what no rounding excuses
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

    def __init__(self, model: nn.Module, *, lean: bool = False, graphs: bool = False, origin: int = 0) -> None:
        self.model = model
        self.origin = origin  # the position of the first token, which a probe moves to where a model might change
        self.inner = causal_lm(model)
        step = LlamaStep(self.inner) if lean else None
        self.lean = GraphedStep(step) if graphs and step is not None else step
        self.carries, self._join = (0.25, _JOIN_GRAPHED) if graphs else (0.0, _JOIN)
        self.device = next(model.parameters()).device
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
        piece = max(1, _RESUME_SCORES // (len(rows) * heads * columns))
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

    def join_cost(self, places: int) -> float:
        return self._join if may_join(self.device.type, places) else math.inf


class RepeatedDecoder:
    """The plain way for models whose attention is their own business: the prompt once a row, transformers' own cache.

    Rows of one prompt length run together, so that nothing is padded and no mask is needed: right for sliding windows
    and recurrent layers, where padding is not neutral. Positions are given wherever the model takes them, since not
    every model (Bamba) counts on from its cache. `drop` is the cache's method that leaves rows out, None where it has
    none that works: then what is left is read again. A model that returns no cache, or (`cached` False) one whose cache
    is wrong, reads all of its tokens again at every step.
    """

    resumes = False
    carries = 0.0

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

    def join_cost(self, places: int) -> float:
        """Never worth it: rows that join would be a bucket of their own, one forward more in every later step."""
        return math.inf

    def _in_order(self, logits: list[Tensor]) -> Tensor:
        order = torch.tensor([row for rows in self.buckets for row in rows], device=self.device)
        return torch.cat(logits)[order.argsort()]


class SwitchingDecoder:
    """For models that turn every position otherwise once a context is longer than some length (LongRoPE).

    Rows on either side of it are decoded apart, each side by a decoder of its own, and a row that crosses it is read
    again: the keys it has were turned for shorter contexts.
    """

    resumes = False
    carries = 0.0

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
            forget_lengths(self.model)
            logits |= zip(rows, decoder.step(tokens[torch.tensor(rows, device=tokens.device)]), strict=True)
        self._read(crossing, logits)
        return torch.stack([logits[row] for row in range(len(self.contexts))])

    def keep(self, live: list[int]) -> list[int]:
        self._leave(set(live))
        renumber = {row: i for i, row in enumerate(live)}
        self.parts = [(regime, decoder, [renumber[row] for row in rows]) for regime, decoder, rows in self.parts]
        self.contexts = [self.contexts[row] for row in live]
        return live

    def join_cost(self, places: int) -> float:
        """Rows join when the others have ended: they would have to be told apart by their lengths again."""
        return math.inf

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
            forget_lengths(self.model)
            logits |= zip(members, decoder.start(list(number), prompt_of, self.length), strict=True)
            same = [i for i, (other, there, _) in enumerate(self.parts) if other == regime and there.resumes]
            if decoder.resumes and same:
                _, there, beside = self.parts[same[0]]
                there.join(decoder, self.length)
                self.parts[same[0]] = (regime, there, [*beside, *members])
            else:
                self.parts.append((regime, decoder, members))


def may_join(device: str, places: int) -> bool:
    """Whether rows that join those running can pay there."""
    return device != "cpu" or places <= _CPU_ROWS


@dataclass(frozen=True)
class _Case:
    """What a probe decodes: prompts of these lengths and `steps` tokens, the first token at position `origin`."""

    prompts: tuple[int, ...] = (3, 7)
    origin: int = 0
    steps: int = _PROBE_STEPS - 1  # one more is decoded when rows have left


def _cases(model: nn.Module, *, shared: bool, lean: bool) -> list[_Case]:
    """Contexts that cross every length at which the model may change, as far as a probe reaches.

    What depends on positions (scaled queries, rotary tables) shows with `shared` prompts in a few tokens that stand
    there; what depends on how many tokens there are (windows, chunks) needs as many, and so does a cache of the model's
    own, which may count tokens by itself. A `lean` step is no code of the model's: it is tried at the end of the
    context too, where whatever no config names would show.
    """
    limit, most = context_length(causal_lm(model)), longest_probe(model)
    switches = position_switches(model)
    lengths = [window for window in local_windows(model) if _beyond(window, most, limit) is not None]
    cases = [_Case()]
    if shared:
        origins = {point - 5 if limit is None else min(point - 5, limit - 16) for point in switches}
        cases += [_Case(origin=origin) for origin in sorted(origins) if origin > 0]
        if lean and limit is not None and limit > 64:
            cases.append(_Case((3, 4), limit - 16, steps=1))
    else:
        lengths += [point for point in switches if _beyond(point, most, limit) is not None]
    for length in sorted(set(lengths)):
        longest = _beyond(length, most, limit)
        if longest is not None and longest > 1:
            cases.append(_Case((max(1, min(length - 1, longest - 1)), longest)))
    return cases


def _beyond(length: int, most: int, limit: int | None) -> int | None:
    """A prompt whose probe crosses `length`, well past it where that fits; None where nothing that fits crosses it."""
    room = most if limit is None else min(most, limit - _PROBE_STEPS)
    longest = min(past(length), room)
    return longest if longest + _PROBE_STEPS > length else None


def _vouched(model: nn.Module) -> int | None:
    """The longest context that is known to be decoded rightly: the shortest window that no probe could cross.

    Contexts up to a window never leave it. None where every window was crossed.
    """
    most, limit = longest_probe(model), context_length(causal_lm(model))
    return min((window for window in local_windows(model) if _beyond(window, most, limit) is None), default=None)


def _probe(model: nn.Module, decoder: Callable[..., Decoder], case: _Case, seed: int = 0) -> Tensor:
    """A decoder's largest difference from plain full forwards, by row and step, relative to the logits' own spread."""
    vocabulary = causal_lm(model).config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sum(case.prompts),), generator=generator).tolist()
    prompts, prompt_of = (tokens[: case.prompts[0]], tokens[case.prompts[0] :]), (0, 0, 1, 1)
    device = next(model.parameters()).device
    made: Any = decoder(model, origin=case.origin) if case.origin else decoder(model)
    if isinstance(made, SharedPrefixDecoder) and isinstance(made.lean, GraphedStep):
        made.lean.must = True
    logits = [made.start(prompts, prompt_of, _PROBE_LENGTH)]
    fed = torch.randint(0, vocabulary, (case.steps, 4), generator=generator)
    for column in fed.to(device):
        logits.append(made.step(column))
    contexts = [[*prompts[prompt], *fed[:, row].tolist()] for row, prompt in enumerate(prompt_of)]
    found = {row: [step[row] for step in logits] for row in range(4)}
    if case.steps == 1:
        pass
    elif isinstance(made, SharedPrefixDecoder):
        after = _resumed(made, prompts, prompt_of, contexts)
        for row in found:
            found[row].append(after[row])
            contexts[row].append(-1)  # the same context twice
    else:  # rows leave, in one bucket the first and in the other the last, and the others go on
        order = made.keep([1, 2])
        more = torch.randint(0, vocabulary, (4,), generator=generator)
        step = made.step(more[order].to(device))
        for place, row in enumerate(order):
            contexts[row].append(int(more[row]))
            found[row].append(step[place])
    worst = []
    for row, tokens in enumerate(contexts):
        first = case.prompts[prompt_of[row]]
        expected = _own_logits(model, [token for token in tokens if token >= 0], first, case.origin)
        if tokens[-1] < 0:
            expected = torch.cat((expected, expected[-1:]))
        apart = (torch.stack(found[row]).float() - expected).abs().amax(-1) / expected.std().clamp(min=1e-6)
        worst.append(apart.nan_to_num(nan=torch.inf))
    return torch.cat(worst)


def _own_logits(model: nn.Module, tokens: list[int], first: int, origin: int) -> Tensor:
    """The model's own logits after `first` tokens and after each one more, by plain forwards of the context alone.

    One forward where the logits of a context do not depend on what follows it; else one a regime of lengths.
    """
    device = next(model.parameters()).device
    regimes = length_regimes(causal_lm(model))
    spans = [(0, origin + len(tokens))] if regimes is None else list(regimes.spans(origin + len(tokens)))
    parts = []
    for above, upto in spans:
        begin, end = max(first, above - origin + 1), upto - origin
        if begin > end:
            continue
        parts.append(last_logits(model, torch.tensor([tokens[:end]], device=device), end - begin + 1, origin))
    return torch.cat(parts)


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


@dataclass(frozen=True)
class Choice:
    """The fastest decoder that is exact for a model; `reason` says why prompts are not shared where they are not.

    `vouched` is the longest context that could be tried, None where none is too long.
    """

    decoder: Callable[[nn.Module], Decoder]
    reason: str | None = None
    vouched: int | None = None


def choose_decoder(model: nn.Module, *, graphs: bool = True) -> Choice:
    """Try every way to decode, fastest first, across the lengths at which the model changes: the first right one.

    The cache's layer types tell of windows and recurrent states; the probe finds everything else, since a model that
    computes attention in its own way gives other numbers without an error.
    """
    inner = causal_lm(model)
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    shared, reason = _shared_ways(inner, graphs)
    regimes = length_regimes(inner)
    for way in (*shared, *_REPEATED):
        made = way if regimes is None else partial(SwitchingDecoder, inner=way, regimes=regimes)
        # a model's own cache may be wrong by little (NemotronH, Zamba 2): where rounding is finer, so is the limit
        allowed = _HALF_NOISE[0] if half else 1e-3 if way in shared or next(model.parameters()).is_cuda else 1e-4
        lean = isinstance(way, partial) and "lean" in way.keywords
        plain = way is _REPEATED[-1]
        # reading everything again is the plain forward itself: in half precision only its rounding is there to differ
        limit = math.inf if plain and half else allowed
        fault = _fault(model, made, _cases(model, shared=way in shared, lean=lean), limit, half=half)
        if fault is None:
            note = None if way in shared else f"{reason}{_REREADS.get(way, '')}"
            return Choice(made, note, None if plain else _vouched(model))
        reason = reason if reason and way in _REPEATED else fault
    if (broken := _broken(model)) is not None:
        return Choice(RepeatedDecoder, broken)
    raise KeelError(
        f"{type(inner).__name__} cannot be sampled from: without any cache its logits still are not those of a plain "
        f"forward of the same tokens ({reason}): give an engine of your own as rollout.engine=module:attr"
    )


def _broken(model: nn.Module) -> str | None:
    """What is wrong with a model that no decoder can be held against: the model's fault, which others have to name."""
    ids = torch.arange(3, 11, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        first, again = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    if not bool(first.isfinite().all()):
        return "its logits are not finite"
    return None if torch.equal(first, again) else "it answers the same tokens differently each time"


_REPEATED: tuple[Callable[..., Decoder], ...] = (
    RepeatedDecoder,
    partial(RepeatedDecoder, drop="batch_select_indices"),
    partial(RepeatedDecoder, drop=None),
    partial(RepeatedDecoder, drop=None, cached=False),
)
_REREADS = {
    _REPEATED[2]: "; its cache cannot drop rows, so that contexts are read again when one ends",
    _REPEATED[3]: "; its own cache does not serve, so that contexts are read again at every step",
}


def _shared_ways(inner: Any, graphs: bool) -> tuple[list[Callable[..., Decoder]], str]:
    """Ways to decode with shared prompts that nothing known of the model forbids, and what does."""
    try:
        layers = [layer for layer in DynamicCache(config=inner.config).layers if not _never_slides(inner, layer)]
    except Exception as error:
        return [], _line(error)
    odd = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}
    if odd:
        return [], f"its cache has layers of type {', '.join(sorted(odd))}"
    ways: list[Callable[..., Decoder]] = [SharedPrefixDecoder]
    if is_llama_shaped(inner):
        ways.insert(0, partial(SharedPrefixDecoder, lean=True))
        if graphs and can_be_graphed(inner):
            ways.insert(0, partial(SharedPrefixDecoder, lean=True, graphs=True))
    return ways, ""


def _never_slides(inner: nn.Module, layer: Any) -> bool:
    """Whether a layer's window is no shorter than the model's context, so that it is full attention by another name."""
    context = context_length(inner)
    return type(layer) is DynamicSlidingWindowLayer and context is not None and layer.sliding_window >= context


def _fault(
    model: nn.Module, decoder: Callable[..., Decoder], cases: Sequence[_Case], allowed: float, *, half: bool = False
) -> str | None:
    """What is wrong with a decoder, None if nothing is."""
    for case in cases:
        try:
            apart = _probe(model, decoder, case)
            if bool((apart < allowed).all()) or (half and not _is_steady(model, decoder, case, apart)):
                continue
        except torch.OutOfMemoryError:
            raise  # says nothing of the decoder
        except Exception as error:  # whatever a foreign model raises here, it can still run another way
            return _line(error)
        where = f" at positions from {case.origin}" if case.origin else ""
        return f"its logits differ by {float(apart.max()):.1g} of their spread{where}"
    return None


def _is_steady(model: nn.Module, decoder: Callable[..., Decoder], case: _Case, apart: Tensor) -> bool:
    """Whether a difference in half precision is there whatever the tokens, and not the model's own noise.

    Rounding sends a token to another expert here and there, which moves its logits as much as a fault would; a fault is
    at the same row and step of every draw. What plain forwards in other batches already do is allowed.
    """
    regimes = length_regimes(causal_lm(model))
    plain = _REPEATED[-1] if regimes is None else partial(SwitchingDecoder, inner=_REPEATED[-1], regimes=regimes)
    least, most = _HALF_NOISE
    allowed = min(max(2 * float(_probe(model, plain, case).median()), least), most)
    wrong = (~(apart < allowed)).int()
    for seed in range(1, _HALF_TRIES):
        if int(wrong.max()) >= _HALF_FAULTS or int(wrong.max()) + _HALF_TRIES - seed < _HALF_FAULTS:
            break
        wrong += ~(_probe(model, decoder, case, seed) < allowed)
    return int(wrong.max()) >= _HALF_FAULTS


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
