"""Choose a model's decoder: probe candidates against the model's own forward, fastest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from keel.base.errors import KeelError, first_line
from keel.models.head import causal_lm
from keel.models.precision import EXACT, Errors, errors_of, has_experts, judge, rounds
from keel.models.probe import last_logits, length_past, local_windows, longest_probe, position_switches
from keel.models.rope import length_regimes
from keel.models.tokenizer import context_length
from keel.rollout.native.cache import CachedRow
from keel.rollout.native.decode import Decoder, SharedPrefixDecoder, SwitchingDecoder, UnsharedPrefixDecoder
from keel.rollout.native.fused import fusion_obstacle
from keel.rollout.native.graph import DecodeGraphs, graph_obstacle
from keel.rollout.native.llama import LlamaStep, is_llama_shaped

_PROBE_STEPS = 4  # tokens decoded in a probe
_PROBE_LENGTH = 32  # cache length of a probe, long enough for CUDA graphs
_SLACK = 10.0  # for the plain decoder in half precision: a model is refused only if it is clearly wrong
_EXACT_CACHE = 1e-4  # a share of the logits' std: some models' own caches are slightly wrong (NemotronH, Zamba 2)


@dataclass(frozen=True)
class _ProbeCase:
    """A probe: the lengths of its prompts, the position `origin` of the first token, and the decoded `steps`."""

    prompts: tuple[int, ...] = (3, 7)
    origin: int = 0
    steps: int = _PROBE_STEPS - 1  # the probe drops rows after these steps and decodes one more


def _cases(model: nn.Module, *, shared: bool, own_step: bool) -> list[_ProbeCase]:
    """Probes that cross every length at which the model's computation may change, if a probe can be that long.

    With `shared` prompts, a few tokens at shifted positions test effects of positions (scaled queries, rotary tables).
    Effects of length (windows, chunks) need a sequence of that length. Without shared prompts all probes need it,
    because the model's own cache may count tokens. An `own_step` replaces the model's code and is therefore also probed
    at the end of the context.
    """
    limit, longest_allowed = context_length(causal_lm(model)), longest_probe(model)
    switches = position_switches(model)
    lengths = [window for window in local_windows(model) if _beyond(window, longest_allowed, limit) is not None]
    cases = [_ProbeCase()]
    if shared:
        origins = {point - 5 if limit is None else min(point - 5, limit - 16) for point in switches}
        cases += [_ProbeCase(origin=origin) for origin in sorted(origins) if origin > 0]
        if own_step and limit is not None and limit > 64:
            cases.append(_ProbeCase((3, 4), limit - 16, steps=1))
    else:
        lengths += [point for point in switches if _beyond(point, longest_allowed, limit) is not None]
    for length in sorted(set(lengths)):
        longest = _beyond(length, longest_allowed, limit)
        if longest is not None and longest > 1:
            cases.append(_ProbeCase((max(1, min(length - 1, longest - 1)), longest)))
    return cases


def _beyond(length: int, longest_allowed: int, limit: int | None) -> int | None:
    """A prompt length for a probe that crosses `length`, if possible by a wide margin; None if no probe can."""
    room = longest_allowed if limit is None else min(longest_allowed, limit - _PROBE_STEPS)
    longest = min(length_past(length), room)
    return longest if longest + _PROBE_STEPS > length else None


def _verified_length(model: nn.Module) -> int | None:
    """The longest verified context; None if probes cross all windows.

    A window affects only longer contexts. So the result is the shortest window that no probe can cross.
    """
    longest_allowed, limit = longest_probe(model), context_length(causal_lm(model))
    return min(
        (window for window in local_windows(model) if _beyond(window, longest_allowed, limit) is None), default=None
    )


def _probe(model: nn.Module, make_decoder: Callable[..., Decoder], case: _ProbeCase, seed: int = 0) -> Errors:
    """The errors of a decoder's logits and of the model's own full forwards, per row and step."""
    vocabulary = causal_lm(model).config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sum(case.prompts),), generator=generator).tolist()
    prompts, prompt_of = (tokens[: case.prompts[0]], tokens[case.prompts[0] :]), (0, 0, 1, 1)
    device = next(model.parameters()).device
    decoder: Any = make_decoder(model, origin=case.origin) if case.origin else make_decoder(model)
    logits = [decoder.prefill(prompts, prompt_of, _PROBE_LENGTH)]
    sampled = torch.randint(0, vocabulary, (case.steps, 4), generator=generator)
    for column in sampled.to(device):
        logits.append(decoder.step(column))
    contexts = [[*prompts[prompt], *sampled[:, row].tolist()] for row, prompt in enumerate(prompt_of)]
    decoded = {row: [step[row] for step in logits] for row in range(4)}
    repeated = False
    if case.steps == 1:
        pass
    elif isinstance(decoder, SharedPrefixDecoder):
        resumed = _resumed(decoder, prompts, prompt_of, contexts)
        for row in decoded:
            decoded[row].append(resumed[row])
        repeated = True  # the last context is scored twice
    else:  # drop the first row of one bucket and the last of the other, and continue
        order = decoder.keep_rows([1, 2])
        more = torch.randint(0, vocabulary, (4,), generator=generator)
        step = decoder.step(more[order].to(device))
        for index, row in enumerate(order):
            contexts[row].append(int(more[row]))
            decoded[row].append(step[index])

    def full_forwards() -> Tensor:
        rows = []
        for row, tokens in enumerate(contexts):
            own = _reference_logits(model, tokens, case.prompts[prompt_of[row]], case.origin)
            rows += [own, own[-1:]] if repeated else [own]
        return torch.cat(rows)

    fast = torch.cat([torch.stack(decoded[row]).float() for row in range(4)])
    return errors_of(model, fast, full_forwards(), full_forwards)


def _reference_logits(model: nn.Module, tokens: list[int], first: int, origin: int) -> Tensor:
    """The model's own logits after the first `first` tokens and after each later token, by full forwards.

    This takes one forward, or one per length regime if the model has any.
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
    """Logits after `contexts`, resumed from the decoder's own cache with the last tokens removed."""
    prompt_kv = decoder.prompt_kv(prompts)
    rows = []
    for row, prompt in enumerate(prompt_of):
        # Cached pasts, and the tokens after them, have different lengths.
        suffix = tuple(contexts[row][len(prompts[prompt]) :][: 1 + row % 2])
        rows.append(CachedRow(prompt_kv[prompt], suffix, decoder.row_kv(row)[:, :, :, : len(suffix)]))
    return decoder.resume(rows, contexts, 1)


@dataclass(frozen=True)
class DecoderChoice:
    """The fastest decoder that is exact for a model.

    `reason` says why prompts are not shared; it is None if they are. `verified_length` is the longest context that a
    probe verified (None: no limit). `no_graph_reason` says why requested CUDA graphs are not used.
    """

    decoder: Callable[[nn.Module], Decoder]
    reason: str | None = None
    verified_length: int | None = None
    no_graph_reason: str | None = None


def choose_decoder(model: nn.Module, *, graphs: DecodeGraphs | None = None) -> DecoderChoice:
    """Choose the fastest decoder whose probes match the model.

    Layer types of the model's cache show windows and recurrent states. Probes detect other differences: a model with
    custom attention would give wrong results without an error.
    """
    inner = causal_lm(model)
    shared, reason = _shared_candidates(inner)
    regimes = length_regimes(inner)
    no_graph_reason = None
    if graphs is not None:
        no_graph_reason = graph_obstacle(inner) or fusion_obstacle(inner) or (None if shared else reason)
        if no_graph_reason is None:
            shared = [partial(SharedPrefixDecoder, graphs=graphs), *shared]
    for candidate in (*shared, *_UNSHARED):
        make_decoder = candidate if regimes is None else partial(SwitchingDecoder, inner=candidate, regimes=regimes)
        own_step = isinstance(candidate, partial) and not candidate.keywords.keys().isdisjoint(("own_step", "graphs"))
        plain = candidate is _UNSHARED[-1]
        exact = EXACT if candidate in shared or next(model.parameters()).is_cuda else _EXACT_CACHE
        cases = _cases(model, shared=candidate in shared, own_step=own_step)
        # The plain decoder runs the model's forward without a cache. Its rounding may differ in a batch.
        fault = _probe_error(model, make_decoder, cases, exact, slack=_SLACK if plain and rounds(model) else 1.0)
        if fault is None:
            note = None if candidate in shared else f"{reason}{_RECOMPUTE_NOTES.get(candidate, '')}"
            return DecoderChoice(make_decoder, note, None if plain else _verified_length(model), no_graph_reason)
        if isinstance(candidate, partial) and "graphs" in candidate.keywords:
            no_graph_reason = fault
        reason = reason if reason and candidate in _UNSHARED else fault
    if (model_fault := _model_fault(model)) is not None:
        return DecoderChoice(UnsharedPrefixDecoder, model_fault, no_graph_reason=no_graph_reason)
    if (difference := _batch_dependence(model)) > EXACT:
        raise KeelError(
            f"{type(inner).__name__} cannot be sampled from: a row's logits depend on other rows of the batch (they "
            f"differ by {difference:.2g} between a row alone and in a batch of two): make its forward independent of "
            "the batch, without batch statistics or expert capacities"
        )
    raise KeelError(
        f"{type(inner).__name__} cannot be sampled from: even without a cache its logits differ from those of a plain "
        f"forward of the same tokens ({reason}): use your own engine with rollout.engine=module:attr"
    )


def _model_fault(model: nn.Module) -> str | None:
    """Why decoders cannot be compared with the model (logits not finite or not deterministic), or None."""
    ids = torch.arange(3, 11, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        first, again = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    if not bool(first.isfinite().all()):
        return "its logits are not finite"
    return None if torch.equal(first, again) else "it is not deterministic: the same tokens give different logits"


def _batch_dependence(model: nn.Module) -> float:
    """The largest difference between a row's logits in a batch of one and in a batch of two rows of equal length."""
    ids = torch.arange(3, 19, device=next(model.parameters()).device).reshape(2, 8)
    with torch.no_grad():
        alone, beside = (model(input_ids=rows, use_cache=False).logits[0] for rows in (ids[:1], ids))
    return float((alone - beside).abs().max())


_UNSHARED: tuple[Callable[..., Decoder], ...] = (
    UnsharedPrefixDecoder,
    partial(UnsharedPrefixDecoder, drop="batch_select_indices"),
    partial(UnsharedPrefixDecoder, drop=None),
    partial(UnsharedPrefixDecoder, drop=None, cached=False),
)
_RECOMPUTE_NOTES = {
    _UNSHARED[2]: "; its cache cannot drop rows, so contexts are prefilled again when one ends",
    _UNSHARED[3]: "; its own cache is wrong, so contexts are computed again at every step",
}


def _shared_candidates(inner: Any) -> tuple[list[Callable[..., Decoder]], str]:
    """The decoders with shared prompts that support the model's cache, or the reason why there are none."""
    try:
        layers = [layer for layer in DynamicCache(config=inner.config).layers if not _is_full_attention(inner, layer)]
    except Exception as error:
        return [], _error_line(error)
    odd = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}
    if odd:
        return [], f"its cache has layers of type {', '.join(sorted(odd))}"
    candidates: list[Callable[..., Decoder]] = [SharedPrefixDecoder]
    if is_llama_shaped(inner):
        candidates.insert(0, partial(SharedPrefixDecoder, own_step=LlamaStep))
    return candidates, ""


def _is_full_attention(inner: nn.Module, layer: Any) -> bool:
    """Whether a sliding-window layer's window covers the model's whole context."""
    context = context_length(inner)
    return type(layer) is DynamicSlidingWindowLayer and context is not None and layer.sliding_window >= context


def _probe_error(
    model: nn.Module, decoder: Callable[..., Decoder], cases: Sequence[_ProbeCase], exact: float, slack: float
) -> str | None:
    """The error of a decoder as a sentence, or None."""
    for case in cases:
        try:
            draw = partial(_probe, model, decoder, case)
            fault = judge(draw, exact=exact, slack=slack, routed=has_experts(model))
        except torch.OutOfMemoryError:
            raise  # this error does not depend on the decoder
        except Exception as error:  # a user's model may raise anything; other decoders may work
            return _error_line(error)
        if fault is not None:
            return fault + (f" at positions from {case.origin}" if case.origin else "")
    return None


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
