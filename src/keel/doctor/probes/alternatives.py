"""Other ways to draw than the policy's own: penalties, blocked n-grams, banned tokens, a least length.

Each is a fixed distribution, so that p_other/p_policy of all drawn tokens is 1 on average if the policy drew them, and
so is a mean over many: odds of e^x for any of them come about with a chance of e^−x at most (Markov).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.doctor.draws import Draws, filters
from keel.rollout.sampling import SamplingParams

_REPETITION = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
_PENALTIES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)  # presence and frequency
_NGRAMS = (2, 3, 4)
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_BIASES = (-3.0, -1.0, 1.0, 3.0)
_FITTED = 1000  # tokens that a value is fitted to
_BIASED = "the engine bans tokens or adds a bias to their logits"
_OFTEN = 12.0  # times that a token should be drawn: none at all is a chance of 6e-6
_COLUMNS = 256  # tokens whose bias is looked at
_RANKS = 256  # likeliest tokens that a filter may leave


@dataclass(frozen=True)
class Context:
    """What stands before N drawn tokens: up to U distinct tokens, and how often. A row is filled up with tokens of −1.

    `repeating[n]` says which of them would end an n-gram that stands there already.
    """

    tokens: Any  # [N, U]
    counts: Any  # [N, U]: in prompt and completion
    written: Any  # [N, U]: in the completion alone
    length: Any  # [N]: tokens of the completion before the drawn one
    repeating: dict[int, Any]  # n: [N, U]

    @classmethod
    def of(cls, drawn: Draws) -> Context:
        assert drawn.position is not None
        rows, positions = drawn.row.cpu().numpy(), drawn.position.cpu().numpy()
        parts = [
            _in_text(drawn.texts[rows[i[0]]], drawn.prompts[rows[i[0]]], tuple(positions[i].tolist()))
            for i in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows)) + 1)
        ]
        width = max(part.tokens.shape[1] for part in parts)

        def joined(arrays: Iterable[Any], filler: int) -> Any:
            filled = np.full((len(rows), width), filler)
            first = 0
            for array in arrays:
                filled[first : first + len(array), : array.shape[1]] = array
                first += len(array)
            return filled

        return cls(
            joined((part.tokens for part in parts), -1),
            joined((part.counts for part in parts), 0),
            joined((part.written for part in parts), 0),
            np.concatenate([part.length for part in parts]),
            {n: joined((part.repeating[n] for part in parts), 0) > 0 for n in _NGRAMS},
        )


@lru_cache(maxsize=4096)
def _in_text(text: tuple[int, ...], prompt: int, positions: tuple[int, ...]) -> Context:
    """The same of the tokens drawn at these positions of one completion."""
    line, length = np.asarray(text), np.asarray(positions)
    before = prompt + length
    tokens, kinds = np.unique(line, return_inverse=True)
    marks = kinds[:, None] == np.arange(len(tokens))  # [L, U]
    sums = np.concatenate((np.zeros((1, len(tokens)), int), marks.cumsum(0)))
    last = np.arange(len(line) - 1)  # of the n−1 tokens before the one that would be repeated
    alike, repeating = last < before[:, None] - 1, {}
    for n in range(2, _NGRAMS[-1] + 1):
        back = n - 2
        own = line[np.maximum(before - 1 - back, 0)]
        alike = alike & (line[np.maximum(last - back, 0)] == own[:, None]) & (last >= back)
        repeating[n] = alike.astype(np.float32) @ marks[1:] > 0
    spread = np.broadcast_to(tokens, (len(before), len(tokens)))
    return Context(spread, sums[before], sums[before] - sums[prompt], length, repeating)


Edit = Callable[[Context, Any], Any]  # logits [N, U] of the tokens that it may change → new ones


@dataclass(frozen=True)
class Alternative:
    """One other way to draw: its name, what changes in the logits, and how much likelier it makes the drawn tokens."""

    name: str
    cause: str
    edit: Edit
    gain: float  # nats over the policy
    value: float = math.nan  # of its parameter, where it has one that can be fitted
    at: Callable[[float], tuple[str, Edit]] | None = None  # the same with another value
    columns: tuple[int, ...] | None = None  # tokens that it changes; None: those that stand before


def alternatives(drawn: Draws, params: SamplingParams, ends: Iterable[int]) -> tuple[list[Alternative], float]:
    """All of them, the likeliest first, and the evidence in nats that it is any of them."""
    of_tokens = _seen_kinds(drawn, params), _token_kinds(drawn, params), _several_banned(drawn, params)
    kinds = [[*kind] for kind in (*of_tokens, _lengths(drawn, params, ends))]
    kinds = [kind for kind in kinds if kind]
    if not kinds or not len(drawn):
        return [], 0.0
    prior = [alternative.gain - math.log(len(kinds) * len(kind)) for kind in kinds for alternative in kind]
    every = sorted((a for kind in kinds for a in kind), key=lambda a: -a.gain)
    return [a for a in every if a.gain > 0], float(torch.tensor(prior, dtype=torch.float64).logsumexp(0))


def filter_odds(drawn: Draws, params: SamplingParams) -> float:
    """The evidence in nats that filters are on beyond `params`: the mean of p_filtered/p over those of `filters`.

    A nucleus of more than the likeliest `_RANKS` tokens counts as the whole distribution.
    """
    logp = drawn.distribution(params)
    own, best = logp.gather(-1, drawn.tokens[:, None]), logp.max(-1, keepdim=True).values
    masses = _masses(logp)
    above = logp > own + 1e-9
    rank, nucleus = above.sum(-1), torch.where(above, logp.exp(), 0.0).sum(-1)
    whole = torch.cat((masses, torch.ones_like(masses[:, :1])), -1)
    gains = []
    for _, other in filters(SamplingParams()):
        if other.top_k:
            inside, left = rank < other.top_k, whole[:, min(other.top_k, whole.shape[-1]) - 1]
        elif other.min_p:
            among = logp >= best + math.log(other.min_p)
            inside, left = among.gather(-1, drawn.tokens[:, None]).squeeze(-1), logp.exp().where(among, 0.0).sum(-1)
        else:
            last = (masses < other.top_p).sum(-1, keepdim=True)
            left = whole.gather(-1, last).squeeze(-1)
            inside = (nucleus < other.top_p) | (last.squeeze(-1) == masses.shape[-1])
        gains.append(-float(left.clamp(1e-12, 1.0).log().sum()) if bool(inside.all()) else -math.inf)
    return float(torch.tensor(gains, dtype=torch.float64).logsumexp(0)) - math.log(len(gains))


def _masses(logp: Tensor) -> Tensor:
    """`[N, ranks]`: what the likeliest 1, 2, … tokens have together with all that are as likely as the last of them."""
    ordered = logp.topk(min(_RANKS, logp.shape[-1])).values
    tied = ordered[:, 1:] >= ordered[:, :-1] - 1e-9  # with the next one
    whole = logp.exp().where(logp >= ordered[:, -1:] - 1e-9, 0.0).sum(-1, keepdim=True)
    sums = torch.cat((ordered.exp().cumsum(-1)[:, :-1].masked_fill(tied, torch.inf), whole), -1)
    return sums.flip(-1).cummin(-1).values.flip(-1)


def fitted(drawn: Draws, alternative: Alternative, params: SamplingParams) -> Alternative:
    """The alternative with the value of its parameter that fits best, by a search between its neighbours."""
    if alternative.at is None:
        return alternative
    drawn = drawn.where(torch.arange(len(drawn), device=drawn.tokens.device) < _FITTED)
    best, step = replace(alternative, gain=-math.inf), abs(alternative.value) / 4
    scaled = _Scaled(drawn, params)
    for _ in range(3):
        for value in (best.value - 2 * step, best.value - step, best.value, best.value + step, best.value + 2 * step):
            name, edit = alternative.at(value)
            gain = scaled.gain(edit, alternative.columns)
            if gain > best.gain:
                best = replace(best, name=name, edit=edit, value=value, gain=gain)
        step /= 3
    return best


def applied(drawn: Draws, alternative: Alternative, params: SamplingParams) -> Draws:
    """The same tokens under the logits that the alternative would have."""
    scaled = _Scaled(drawn, params)
    tokens = scaled.columns(alternative.columns)
    row, column = np.nonzero(tokens >= 0)
    logits = (drawn.logits / (params.temperature or 1.0)).cpu().numpy().copy()
    logits[row, tokens[row, column]] = alternative.edit(scaled.context, scaled.logits(tokens))[row, column]
    return replace(drawn, logits=torch.from_numpy(logits).to(drawn.logits.device) * (params.temperature or 1.0))


class _Scaled:
    """Drawn tokens at a temperature, and what stands before them."""

    def __init__(self, drawn: Draws, params: SamplingParams) -> None:
        self.context, self.tokens = Context.of(drawn), drawn.tokens.cpu().numpy()
        self.every = (drawn.logits / (params.temperature or 1.0)).cpu().numpy()  # [N, V]
        self.totals = torch.from_numpy(self.every).logsumexp(-1, keepdim=True).numpy()

    def columns(self, columns: Sequence[int] | None) -> Any:
        """`[N, U]`: these tokens for each drawn one, or those that stand before it."""
        return self.context.tokens if columns is None else np.tile(columns, (len(self.tokens), 1))

    def logits(self, tokens: Any) -> Any:
        return np.take_along_axis(self.every, np.maximum(tokens, 0), -1)

    def gain(self, edit: Edit, columns: Sequence[int] | None = None) -> float:
        """Σ log p_edited − log p over the drawn tokens, by the tokens that are edited alone."""
        tokens = self.columns(columns)
        logits = self.logits(tokens)
        new = edit(self.context, logits)
        mass = 1.0 + (np.exp(new - self.totals) - np.exp(logits - self.totals)).sum(-1)
        own = tokens == self.tokens[:, None]
        moved = np.where(own, new, 0.0).sum(-1) - np.where(own, logits, 0.0).sum(-1)
        return float(np.where(mass > 1e-12, moved - np.log(np.maximum(mass, 1e-12)), -np.inf).sum())


def _seen_kinds(drawn: Draws, params: SamplingParams) -> Iterator[Alternative]:
    """What depends on the tokens that stand before: penalties and blocked n-grams."""
    if drawn.position is None or not len(drawn):
        return
    cause = (
        "the engine makes tokens less likely that stand in the prompt or were written before, so that the samples are "
        "not the policy's"
    )
    families = (
        ("a repetition penalty", _repetition, _REPETITION),
        ("a presence penalty", _presence, _PENALTIES),
        ("a frequency penalty", _frequency, _PENALTIES),
    )
    scaled = _Scaled(drawn, params)
    for name, make, values in families:
        at = _with_value(name, make)
        yield from (Alternative(at(v)[0], cause, make(v), scaled.gain(make(v)), v, at) for v in values)
    for n in _NGRAMS:
        yield Alternative(f"no repeated {n}-gram", cause, _no_ngram(n), scaled.gain(_no_ngram(n)))


def _with_value(name: str, make: Callable[[float], Edit]) -> Callable[[float], tuple[str, Edit]]:
    return lambda value: (f"{name} of {value:.3g}", make(value))


def _repetition(penalty: float) -> Edit:
    return lambda context, logits: np.where(
        context.counts > 0, np.where(logits > 0, logits / penalty, logits * penalty), logits
    )


def _presence(penalty: float) -> Edit:
    return lambda context, logits: logits - penalty * (context.written > 0)


def _frequency(penalty: float) -> Edit:
    return lambda context, logits: logits - penalty * context.written


def _no_ngram(n: int) -> Edit:
    return lambda context, logits: np.where(context.repeating[n], -np.inf, logits)


def _token_kinds(drawn: Draws, params: SamplingParams) -> Iterator[Alternative]:
    """A bias on one token, or a ban: it is drawn more or less often than the policy would."""
    p = (drawn.logits / (params.temperature or 1.0)).softmax(-1)
    expected = p.sum(0)
    counts = torch.bincount(drawn.tokens, minlength=p.shape[-1]).double()
    columns = (expected + counts).topk(min(_COLUMNS, p.shape[-1])).indices
    p, expected, counts = p[:, columns], expected[columns], counts[columns]
    for bias in (-math.inf, *_BIASES):
        weight = math.exp(bias) - 1
        spread = torch.log1p((weight * p).clamp_min(-1 + 1e-12)).sum(0)
        gains = -spread + (torch.where(counts > 0, -torch.inf, 0.0) if bias == -math.inf else bias * counts)
        for token, gain, count, often in zip(
            columns.tolist(), gains.tolist(), counts.tolist(), expected.tolist(), strict=True
        ):
            at = _on_token(token, f"drawn {count:.0f} times where {often:.3g} are expected")
            name, edit = at(bias)
            yield Alternative(name, _BIASED, edit, gain, bias, None if bias == -math.inf else at, (token,))


def _several_banned(drawn: Draws, params: SamplingParams) -> Iterator[Alternative]:
    """A ban on all tokens that are never drawn although the policy would; which ones they are is paid for."""
    p = (drawn.logits / (params.temperature or 1.0)).softmax(-1)
    never = (torch.bincount(drawn.tokens, minlength=p.shape[-1]) == 0) & (p.sum(0) >= _OFTEN)
    tokens = never.nonzero().flatten().tolist()
    if 1 < len(tokens) <= _COLUMNS:
        gain = -float(torch.log1p(-p[:, tokens].sum(-1).clamp_max(1 - 1e-12)).sum())
        gain -= len(tokens) * math.log(p.shape[-1])
        named = ", ".join([*map(str, tokens[:4]), *(["…"] if len(tokens) > 4 else [])])
        name = f"a ban on {len(tokens)} tokens ({named}: never drawn)"
        yield Alternative(name, _BIASED, lambda context, logits: logits - math.inf, gain, columns=tuple(tokens))


def _on_token(token: int, figures: str) -> Callable[[float], tuple[str, Edit]]:
    def at(bias: float) -> tuple[str, Edit]:
        what = "a ban" if bias == -math.inf else f"a bias of {bias:+.3g}"
        return f"{what} on token {token} ({figures})", lambda context, logits: logits + bias

    return at


def _lengths(drawn: Draws, params: SamplingParams, ends: Iterable[int]) -> Iterator[Alternative]:
    """No end token before a least length."""
    stops = list(ends)
    if drawn.position is None or not stops:
        return
    p = (drawn.logits / (params.temperature or 1.0)).softmax(-1)[:, stops].sum(-1)
    is_end = torch.isin(drawn.tokens, torch.tensor(stops, device=drawn.tokens.device))
    for least in _LENGTHS:
        early = drawn.position < least
        gain = -math.inf if bool((is_end & early).any()) else -float(torch.log1p(-p[early].clamp_max(1 - 1e-12)).sum())
        yield Alternative(
            f"no end before {least} tokens",
            "the engine lets no completion end before a least length",
            _no_end(least),
            gain,
            columns=tuple(stops),
        )


def _no_end(least: int) -> Edit:
    return lambda context, logits: np.where((context.length < least)[:, None], -np.inf, logits)
