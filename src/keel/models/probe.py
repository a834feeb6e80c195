"""Check at load time that a model computes shared-prefix rows correctly.

transformers passes a 4-D mask to every layer unchanged, so models with sliding windows, hybrid or eager attention
silently give wrong results. The probe scores random tokens in three ways: with the model's own logits (one plain row,
no mask), with one row per completion, and with a shared-prefix row. Its rows exceed every attention window in the
config and cross every position at which the model scales queries or switches rotary tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError, first_line
from keel.base.types import Completion, Group, Problem
from keel.models.head import (
    body_of,
    causal_lm,
    config_numbers,
    evaluating,
    head_of,
    takes_positions,
)
from keel.models.pack import pack
from keel.models.precision import (
    ROUNDING,
    Errors,
    eps_of,
    finite_or_infinite,
    has_experts,
    in_fp32,
    judge,
    matmul_eps,
    rounds,
)
from keel.models.rope import length_regimes, reset_rope
from keel.models.scorer import score_tokens
from keel.models.tokenizer import context_length

LONGEST_PROBE = 8192
_EXTRA = 8
_EXACT = 1e-4  # nats for logits with a std of 1: fp32 rounding
_SLACK = 10.0  # for one row per completion: the model is refused only if these rows are clearly wrong
_WINDOWS = ("window", "chunk_size", "chunk_length", "local_attention", "block_size", "index_topk", "rel_extent")
_POSITIONS = ("original_max_position", "floor_scale")


@dataclass(frozen=True)
class PackingProbe:
    """Whether shared-prefix rows may be used, and if not, the `reason` in one line.

    `window` is the shortest local attention window that the job can exceed. `max_error` is the largest
    |Δ log-probability| of packed rows against the model's own logits in fp32. `length` is the longest sequence probed.
    """

    ok: bool
    max_error: float
    reason: str
    length: int
    window: int | None = None


def local_windows(model: nn.Module, longest: int | None = None) -> list[int]:
    """The local attention windows in the config that are shorter than `longest` tokens (default: the context)."""
    numbers = config_numbers(model)
    limit = longest or context_length(causal_lm(model))
    named = {
        int(value)
        for name, value in numbers.items()
        if any(part in name for part in _WINDOWS) and not any(part in name for part in ("layers", "pattern"))
    }
    rates = _compress_rates(model)
    named |= rates | {int(numbers["index_topk"]) * rate for rate in rates if "index_topk" in numbers}
    return sorted(value for value in named if limit is None or value < limit)


def _compress_rates(model: nn.Module) -> set[int]:
    """Tokens per entry of compressed attention, whose top-k is a number of entries."""
    config: Any = causal_lm(model).config.get_text_config(decoder=True)
    rates = getattr(config, "compress_rates", None)
    return {int(rate) for _, rate in _nested(rates)} if isinstance(rates, Mapping) else set()


def position_switches(model: nn.Module, longest: int | None = None) -> list[int]:
    """Positions in the config below `longest` (default: the context) at which the model's computation may change."""
    config: Any = causal_lm(model).config.get_text_config(decoder=True)
    limit = longest or context_length(causal_lm(model))
    named = {int(value) for name, value in _nested(config.to_dict()) if any(part in name for part in _POSITIONS)}
    return sorted(value for value in named if limit is None or value < limit)


def _nested(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of every positive number in a config, nested ones included."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _nested(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield name, value


def longest_probe(model: nn.Module) -> int:
    """The length of the longest sequence that a probe scores within a few seconds."""
    return LONGEST_PROBE if next(model.parameters()).device.type == "cpu" else 8 * LONGEST_PROBE


def probe_packing(
    model: nn.Module, vocab_size: int | None = None, *, longest: int | None = None, max_length: int = LONGEST_PROBE
) -> PackingProbe:
    """Compare packed with unpacked log-probabilities on rows longer than any window that the job can exceed.

    `longest` is the job's longest prompt plus completion (None: the context). If a window is longer than `max_length`,
    packing is refused, because the probe cannot detect errors. Raises if one row per completion disagrees with the
    model's own logits, or if the job exceeds a window that is too long to probe.
    """
    windows = local_windows(model, longest)
    reachable = [window for window in windows if window + 3 * _EXTRA <= max_length]
    _check_long_windows(
        model, vocab_size, [window for window in windows if window not in reachable], longest, max_length
    )
    prompt = min(length_past(max(reachable)), max_length - 2 * _EXTRA) if reachable else length_past(0)
    length = _Trial(model, vocab_size, prompt).length
    window = windows[0] if windows else None
    name = type(causal_lm(model)).__name__
    cases = [(prompt, 0)]
    if takes_positions(body_of(model)):
        cases += [(_EXTRA, origin) for origin in _origins(model, longest, length)]
    max_error, fault = 0.0, None
    with evaluating(model):
        for case, origin in cases:
            with _as_keel_error(model):
                trial = _Trial(model, vocab_size, case, origin)
                wrong = trial.fault(shared_prefix=False)
                if origin and wrong is not None:
                    # Positions cannot be shifted (compressed attention): use real tokens instead.
                    trial = _Trial(model, vocab_size, min(origin + _EXTRA, max_length))
                    wrong = trial.fault(shared_prefix=False)
                trial.refuse(wrong)
            try:
                fault = fault or trial.fault(shared_prefix=True)
                max_error = max(max_error, trial.largest)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as failure:  # includes KeelError
                reason = (
                    f"{name} raises an error for shared-prefix rows ({first_line(failure)}): one row per completion"
                )
                return PackingProbe(False, float("inf"), reason, length, window)
    refusal = _refusal(model, fault, windows, reachable)
    if refusal:
        return PackingProbe(False, max_error, f"{name} {refusal}: one row per completion", length, window)
    reason = f"{name}: shared-prefix rows agree to {max_error:.1e} nats over {length} tokens"
    return PackingProbe(True, max_error, reason, length)


def _origins(model: nn.Module, longest: int | None, length: int) -> list[int]:
    """Start positions of short sequences that cross each position switch."""
    limit = longest or context_length(causal_lm(model))
    length_needed = 2 * _EXTRA
    origins = {switch - _EXTRA - 4 for switch in position_switches(model, longest)}
    if limit is not None:
        origins = {min(origin, limit - length_needed) for origin in origins}
    return sorted(origin for origin in origins if origin > 0 and origin + length_needed > length)


def length_past(window: int) -> int:
    """A prompt length far above the window, so that ignoring the window has a large effect."""
    return window + max(_EXTRA, window // 4)


def _refusal(model: nn.Module, fault: str | None, windows: list[int], reachable: list[int]) -> str | None:
    """Why shared-prefix rows must not be used; None if they may."""
    if fault is not None:
        local = f"has local attention of {windows[0]} tokens and " if windows else ""
        return f"{local}computes shared-prefix rows wrongly: {fault}"
    if len(reachable) < len(windows):
        return f"has local attention of {windows[-1]} tokens, which is too long to probe"
    if windows and matmul_eps(model) > torch.finfo(torch.float32).eps:
        return (
            f"has local attention of {windows[0]} tokens, and its dtype is too coarse to check that shared-prefix "
            "rows respect it"
        )
    return None


def _check_long_windows(
    model: nn.Module, vocab_size: int | None, windows: list[int], longest: int | None, max_length: int
) -> None:
    """Check one padded row longer than each long window. Refuse a job that exceeds a window too long to check."""
    longest_row = max(max_length, longest_probe(model)) if max_length == LONGEST_PROBE else max_length
    for window in windows:
        if window + 2 * _EXTRA <= longest_row:
            with evaluating(model), _as_keel_error(model):
                trial = _Trial(model, vocab_size, window + 1, completions=1)
                trial.refuse(trial.fault(shared_prefix=False))
        elif longest is not None:
            raise KeelError(
                f"{type(causal_lm(model)).__name__} has local attention of {window} tokens, which is too long to "
                f"check, and prompt plus completion may have {longest}: limit them to {window} tokens, or "
                "set model.scorer to your own function (module:attr)"
            )


@dataclass
class _Trial:
    """Compare packed and plain log-probabilities of random tokens after `prompt` tokens from position `origin`.

    `largest` is the largest difference in the last trial, in nats. A half-precision model's plain rows run in fp32 too.
    """

    model: nn.Module
    vocab_size: int | None
    prompt: int
    origin: int = 0
    completions: int | None = None
    largest: float = 0.0
    own: dict[int, tuple[Tensor, Tensor | None, float]] = field(default_factory=dict)  # by seed: plain, fp32, spread

    def groups(self, seed: int = 0) -> list[Group]:
        groups = _random_groups(self.model, self.vocab_size, self.prompt, seed)
        return [replace(group, completions=group.completions[: self.completions]) for group in groups]

    @property
    def length(self) -> int:
        return max(len(g.prompt_tokens) + len(c.tokens) for g in self.groups() for c in g.completions)

    def fault(self, *, shared_prefix: bool) -> str | None:
        """The error of shared-prefix rows, or of one row per completion, as a sentence; None if it is acceptable.

        For one row per completion only a clear error counts, because there is no other fallback.
        """
        self.largest = 0.0
        draw, slack = partial(self._errors, shared_prefix=shared_prefix), 1.0 if shared_prefix else _SLACK
        return judge(draw, exact=_EXACT, slack=slack, routed=has_experts(self.model))

    def refuse(self, fault: str | None) -> None:
        """Refuse the model if one row per completion gives wrong log-probabilities."""
        if fault is not None:
            _check_function_of_the_past(self.model, self.groups()[0])
            raise KeelError(
                f"{type(causal_lm(self.model)).__name__}: log-probabilities of padded rows differ from the model's "
                f"own logits ({fault}): set model.scorer to your own function (module:attr)"
            )

    def _errors(self, seed: int, *, shared_prefix: bool) -> Errors:
        """The largest error in each completion, of packed rows and of the model's own plain rows."""
        groups = self.groups(seed)
        if seed not in self.own:
            self.own[seed] = self._own_rows(groups)
        plain, truth, logit_std = self.own[seed]
        scored = _scored(self.model, groups, shared_prefix, self.origin)
        lengths = [len(c.tokens) for group in groups for c in group.completions]
        expected = plain if truth is None else truth
        self.largest = float(finite_or_infinite((scored - expected).abs()).max())
        fast, own = (
            finite_or_infinite(torch.stack([part.abs().max() for part in (logp - expected).split(lengths)])).cpu()
            / max(1.0, logit_std)
            for logp in (scored, plain)
        )
        if truth is None and rounds(self.model):
            own = own.clamp(min=ROUNDING * eps_of(self.model))
        return Errors(fast, own)

    def _own_rows(self, groups: list[Group]) -> tuple[Tensor, Tensor | None, float]:
        plain, logit_std = _unpacked_logp(self.model, groups, self.origin)
        widened = None
        if rounds(self.model):
            widened = in_fp32(self.model, lambda: _unpacked_logp(self.model, groups, self.origin))
        return (plain, None, logit_std) if widened is None else (plain, *widened)


def _check_function_of_the_past(model: nn.Module, group: Group) -> None:
    """Refuse a model that is not deterministic, has state, or is not causal (its logits depend on later tokens)."""
    name = type(causal_lm(model)).__name__
    row = torch.tensor([group.prompt_tokens + group.completions[0].tokens], device=next(model.parameters()).device)
    half = row[:, : row.shape[1] // 2]
    whole, again, past = (model(input_ids=ids, use_cache=False).logits[0, 0].float() for ids in (row, row, half))

    def differs(logits: Tensor) -> bool:
        return not float((logits - whole).abs().max()) <= 1e-2 * max(1.0, float(whole.std()))

    if not bool(whole.isfinite().all()):
        raise KeelError(f"{name} gives logits that are not finite: check its weights, or load it in another dtype")
    if differs(again):
        raise KeelError(
            f"{name} gives different logits for the same tokens in a second call, so it cannot be scored: "
            "remove randomness in eval mode and state that is kept between calls"
        )
    if differs(past):
        raise KeelError(
            f"{name} attends to later tokens, so it cannot be sampled from: load a causal "
            "language model (a decoder), or set is_decoder in its config"
        )


def _random_groups(model: nn.Module, vocab_size: int | None, prompt: int, seed: int) -> list[Group]:
    """Two ragged groups; the first is longer than every window, within the context."""
    size = int(config_numbers(model).get("vocab_size", 0)) or 2
    size = min(size, vocab_size or size)
    context = context_length(causal_lm(model))
    if context is not None:
        prompt = max(1, min(prompt, context - _EXTRA))
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(size, (count,), generator=generator).tolist())

    def completion(count: int) -> Completion:
        zeros = (0.0,) * count
        return Completion(tokens(count), (True,) * count, zeros, zeros, "", "length")

    return [
        Group(Problem("probe-long", ""), tokens(prompt), (completion(_EXTRA), completion(3), completion(_EXTRA))),
        Group(Problem("probe-short", ""), tokens(min(prompt, 5)), (completion(2), completion(6))),
    ]


def _unpacked_logp(model: nn.Module, groups: list[Group], origin: int = 0) -> tuple[Tensor, float]:
    """Log-probabilities from the model's own logits, one plain row at a time, without mask, positions or packing.

    A model with length regimes runs once for each regime. `origin` is the position of the first token. Also returns the
    standard deviation of the logits over the vocabulary, because rounding errors are proportional to it.
    """
    parts, logit_stds = [], []
    device = next(model.parameters()).device
    regimes = length_regimes(causal_lm(model))
    for group in groups:
        for completion in group.completions:
            row = torch.tensor([group.prompt_tokens + completion.tokens], device=device)
            first, end = len(group.prompt_tokens), row.shape[1] - 1  # the shortest and the longest context
            if regimes is None:
                logits = last_logits(model, row, end - first + 2, origin)[:-1]
            else:
                spans = [(max(first, above - origin + 1), upto - origin) for above, upto in regimes.spans(origin + end)]
                spans = [(begin, stop) for begin, stop in spans if begin <= stop]
                logits = torch.cat([last_logits(model, row[:, :b], b - a + 1, origin) for a, b in spans])
            logit_stds.append(float(logits.std(dim=-1).mean()))
            parts.append(torch.log_softmax(logits, dim=-1).gather(-1, row[0, first:, None]).squeeze(-1))
    return torch.cat(parts), sum(logit_stds) / len(logit_stds)


@contextmanager
def _as_keel_error(model: nn.Module) -> Iterator[None]:
    """Turn any exception of a model's forward into a KeelError that names the model."""
    try:
        yield
    except (KeelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # third-party models may raise anything
        raise KeelError(
            f"{type(causal_lm(model)).__name__} cannot be scored: its forward raised "
            f"{type(error).__name__}: {first_line(error).rstrip('.')}; load a causal language model that needs only "
            "input_ids, or set model.scorer to your own function (module:attr)"
        ) from error


def last_logits(model: nn.Module, row: Tensor, count: int, origin: int) -> Tensor:
    """The logits `[count, V]` at the last positions of a plain row. The rotary tables are reset before the forward."""
    positions = {"position_ids": origin + torch.arange(row.shape[1], device=row.device)[None]} if origin else {}
    reset_rope(causal_lm(model))
    with _last_positions_only(model, count):
        logits: Tensor = model(input_ids=row, use_cache=False, **positions).logits[0, -count:]
    return logits.float()


@contextmanager
def _last_positions_only(model: nn.Module, count: int) -> Iterator[None]:
    """Within this context, the output embedding computes only the last `count` positions, to save gigabytes of logits.

    The head is applied per position, so the results are the same. `logits_to_keep` is not used because not every model
    has it.
    """
    module = head_of(model).module
    hook = module.register_forward_pre_hook(lambda _, inputs: (inputs[0][..., -count:, :], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _scored(model: nn.Module, groups: list[Group], shared_prefix: bool, origin: int = 0) -> Tensor:
    """The log-probabilities by `pack` and `score_tokens`."""
    longest = sum(len(g.prompt_tokens) + sum(len(c.tokens) for c in g.completions) for g in groups)
    packed = pack(groups, 0, shared_prefix=shared_prefix, max_row_tokens=longest if shared_prefix else None)
    packed = replace(packed, position_ids=packed.position_ids + origin).to(next(model.parameters()).device)
    return score_tokens(model, packed).logp[packed.completion_mask]
