"""Other ways to draw than the policy's own: penalties, blocked n-grams, banned tokens, a least length.

Each is a fixed distribution, so that p_other/p_policy of all drawn tokens is 1 on average if the policy drew them, and
so is a mean over many: odds of e^x for any of them come about with a chance of e^−x at most (Markov).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from keel.lab.doctor.probes.draws import Draws, filters
from keel.rollout.sampling import SamplingParams

_REPETITION = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
_PENALTIES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)  # presence and frequency
_NGRAMS = (2, 3, 4)
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_BIASES = (-3.0, -1.0, 1.0, 3.0)
_FITTED = 1000  # tokens that a value is fitted to
_COLUMNS = 256  # tokens whose bias is looked at
_RANKS = 256  # likeliest tokens that a filter may leave

Edit = Callable[[Sequence[int], int, Any], dict[int, float]]


@dataclass(frozen=True)
class Alternative:
    """One other way to draw: its name, what changes in the logits, and how much likelier it makes the drawn tokens."""

    name: str
    cause: str
    edit: Edit  # text before the token, how many tokens of that the prompt has, logits → new logits of some tokens
    gain: float  # nats over the policy
    value: float = math.nan  # of its parameter, where it has one that can be fitted
    at: Callable[[float], tuple[str, Edit]] | None = None  # the same with another value


def alternatives(drawn: Draws, params: SamplingParams, ends: Iterable[int]) -> tuple[list[Alternative], float]:
    """All of them, the likeliest first, and the evidence in nats that it is any of them."""
    kinds = [
        [*kind] for kind in (_seen_kinds(drawn, params), _token_kinds(drawn, params), _lengths(drawn, params, ends))
    ]
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
    masses = logp.topk(min(_RANKS, logp.shape[-1])).values.exp().cumsum(-1)
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


def fitted(drawn: Draws, alternative: Alternative, params: SamplingParams) -> Alternative:
    """The alternative with the value of its parameter that fits best, by a search between its neighbours."""
    if alternative.at is None:
        return alternative
    drawn = drawn.where(torch.arange(len(drawn), device=drawn.tokens.device) < _FITTED)
    best, step = replace(alternative, gain=-math.inf), abs(alternative.value) / 4
    plain = drawn.logp(params).sum()
    for _ in range(3):
        for value in (best.value - 2 * step, best.value - step, best.value, best.value + step, best.value + 2 * step):
            name, edit = alternative.at(value)
            tried = replace(best, name=name, edit=edit, value=value)
            gain = float((applied(drawn, tried, params).logp(params).sum() - plain).nan_to_num(-math.inf))
            best = replace(tried, gain=gain) if gain > best.gain else best
        step /= 3
    return best


def applied(drawn: Draws, alternative: Alternative, params: SamplingParams) -> Draws:
    """The same tokens under the logits that the alternative would have."""
    logits = drawn.logits / (params.temperature or 1.0)
    changed = logits.clone()
    for i, (before, prompt) in enumerate(_contexts(drawn)):
        for token, value in alternative.edit(before, prompt, logits[i]).items():
            changed[i, token] = value
    return replace(drawn, logits=changed * (params.temperature or 1.0))


def _contexts(drawn: Draws) -> Iterator[tuple[Sequence[int], int]]:
    assert drawn.position is not None
    for row, position in zip(drawn.row.tolist(), drawn.position.tolist(), strict=True):
        prompt = drawn.prompts[row]
        yield drawn.texts[row][: prompt + position], prompt


def _seen_kinds(drawn: Draws, params: SamplingParams) -> Iterator[Alternative]:
    """What depends on the tokens that stand before: penalties and blocked n-grams."""
    if drawn.position is None:
        return
    cause = (
        "the engine makes tokens less likely that stand in the prompt or were written before, so that the samples are "
        "not the policy's"
    )
    families = (
        ("a repetition penalty", _repetition),
        ("a presence penalty", _presence),
        ("a frequency penalty", _frequency),
    )
    named = [
        (value, _with_value(name, make))
        for (name, make), values in zip(families, (_REPETITION, _PENALTIES, _PENALTIES), strict=True)
        for value in values
    ]
    logits = (drawn.logits / (params.temperature or 1.0)).cpu()
    totals, rows, tokens = logits.logsumexp(-1).tolist(), logits.numpy(), drawn.tokens.tolist()
    gains = np.zeros(len(named) + len(_NGRAMS))
    for i, (before, prompt) in enumerate(_contexts(drawn)):
        gains += _gains(np.asarray(before), prompt, rows[i] - totals[i], totals[i], tokens[i])
    for (value, at), gain in zip(named, gains, strict=False):
        yield Alternative(*_named(at, value, cause), float(gain), value, at)
    for n, gain in zip(_NGRAMS, gains[len(named) :], strict=True):
        yield Alternative(f"no repeated {n}-gram", cause, _no_ngram(n), float(gain))


def _with_value(name: str, make: Callable[[float], Edit]) -> Callable[[float], tuple[str, Edit]]:
    return lambda value: (f"{name} of {value:.3g}", make(value))


def _named(at: Callable[[float], tuple[str, Edit]], value: float, cause: str) -> tuple[str, str, Edit]:
    name, edit = at(value)
    return name, cause, edit


def _gains(before: Any, prompt: int, logp: Any, total: float, own: int) -> Any:
    """log p_other − log p_policy of one token for each of those, in their order; only what they touch is looked at."""
    seen = np.unique(before)
    values = logp[seen] + total
    factors = np.asarray(_REPETITION)[:, None]
    gains = [_moved(seen, np.where(values > 0, values / factors, values * factors) - total, logp, own)]
    written, counts = np.unique(before[prompt:], return_counts=True)
    for lowered in (np.ones_like(counts), counts):
        gains.append(_moved(written, logp[written] - np.asarray(_PENALTIES)[:, None] * lowered, logp, own))
    for n in _NGRAMS:
        blocked = np.asarray(sorted(_no_ngram(n)(before, prompt, logp)), dtype=int)
        gains.append(_moved(blocked, np.full((1, len(blocked)), -np.inf), logp, own))
    return np.concatenate(gains)


def _moved(touched: Any, new: Any, logp: Any, own: int) -> Any:
    """The same for distributions that give the tokens `touched` `[K]` the log-probabilities `[P, K]`, unscaled."""
    if not len(touched):
        return np.zeros(len(new))
    mass = 1.0 - np.exp(logp[touched]).sum() + np.exp(new).sum(-1)
    at = np.flatnonzero(touched == own)
    moved = new[:, at[0]] - logp[own] if len(at) else np.zeros(len(new))
    return np.where(mass > 1e-12, moved - np.log(np.maximum(mass, 1e-12)), -np.inf)


def _repetition(penalty: float) -> Edit:
    def edit(before: Sequence[int], prompt: int, logits: Any) -> dict[int, float]:
        values = {token: float(logits[token]) for token in set(before)}
        return {token: value / penalty if value > 0 else value * penalty for token, value in values.items()}

    return edit


def _presence(penalty: float) -> Edit:
    def edit(before: Sequence[int], prompt: int, logits: Any) -> dict[int, float]:
        return {token: float(logits[token]) - penalty for token in set(before[prompt:])}

    return edit


def _frequency(penalty: float) -> Edit:
    def edit(before: Sequence[int], prompt: int, logits: Any) -> dict[int, float]:
        counts = Counter(before[prompt:])
        return {token: float(logits[token]) - penalty * count for token, count in counts.items()}

    return edit


def _no_ngram(n: int) -> Edit:
    def edit(before: Sequence[int], prompt: int, logits: Any) -> dict[int, float]:
        text = np.asarray(before)
        ends = np.flatnonzero(text[n - 2 : -1] == text[-1]) + n - 2 if len(text) >= n else np.zeros(0, int)
        for back in range(1, n - 1):
            ends = ends[text[ends - back] == text[-1 - back]]
        return dict.fromkeys(text[ends + 1].tolist(), -math.inf)

    return edit


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
            cause = "the engine bans tokens or adds a bias to their logits"
            yield Alternative(*_named(at, bias, cause), gain, bias, None if bias == -math.inf else at)


def _on_token(token: int, figures: str) -> Callable[[float], tuple[str, Edit]]:
    def at(bias: float) -> tuple[str, Edit]:
        what = "a ban" if bias == -math.inf else f"a bias of {bias:+.3g}"
        return f"{what} on token {token} ({figures})", lambda before, prompt, logits: {
            token: float(logits[token]) + bias
        }

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
            _no_end(stops, least),
            gain,
        )


def _no_end(stops: Sequence[int], least: int) -> Edit:
    def edit(before: Sequence[int], prompt: int, logits: Any) -> dict[int, float]:
        return dict.fromkeys(stops, -math.inf) if len(before) - prompt < least else {}

    return edit
