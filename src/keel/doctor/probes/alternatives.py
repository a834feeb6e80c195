"""Sampling distributions other than the policy's, and which of them explains the drawn tokens.

Alternatives are filters, penalties, biases, banned tokens and a minimum length. Each is a fixed distribution. If the
policy drew the tokens, the likelihood ratio p_other/p_policy has expectation 1, and so has a mean over several
alternatives. Its logarithm is a log evidence ratio (see evidence.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from keel.doctor.advice import setting
from keel.doctor.advice import unfiltered as whole_distribution
from keel.doctor.draws import (
    Draws,
    best_temperature,
    chance_of,
    filters,
    tightest,
    unfiltered,
)
from keel.doctor.findings import Finding, Severity, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.rollout.sampling import SamplingParams

_REPETITION = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0)
_PENALTIES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)  # values of the presence and frequency penalties
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_BIASES = (-math.inf, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0)
Texts = tuple[tuple[int, ...], ...]
_COLUMNS = 256  # number of tokens whose bias is tested


@dataclass(frozen=True)
class Scaled:
    """Drawn tokens with logits at the sampling temperature, and their contexts."""

    drawn: Draws
    logits: Tensor  # [N, V]

    @classmethod
    def of(cls, drawn: Draws, params: SamplingParams) -> Scaled:
        return cls(drawn, drawn.logits / (params.temperature or 1.0))

    @property
    def position(self) -> Tensor:
        assert self.drawn.position is not None
        return self.drawn.position

    @cached_property
    def _standing(self) -> tuple[Texts, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        drawn, size = self.drawn, self.logits.shape[-1]
        return drawn.texts, drawn.prompts, tuple(drawn.row.tolist()), tuple(self.position.tolist()), size

    @cached_property
    def written(self) -> Tensor:
        """`[N, V]`: the count of each token in the completion before the drawn one."""
        return _counts(*self._standing, prompted=False).to(self.logits)

    @cached_property
    def seen(self) -> Tensor:
        """`[N, V]`: the count of each token in the prompt and the completion before the drawn one."""
        return _counts(*self._standing, prompted=True).to(self.logits)

    def gain(self, logits: Tensor) -> float:
        """Σ (log p_edited − log p) over the drawn tokens."""
        edited, own = (
            values.log_softmax(-1).gather(-1, self.drawn.tokens[:, None]) for values in (logits, self.logits)
        )
        return float((edited - own).nan_to_num(nan=-math.inf, neginf=-math.inf).sum())


@lru_cache(maxsize=4)
def _counts(
    texts: Texts, prompts: tuple[int, ...], rows: tuple[int, ...], places: tuple[int, ...], size: int, *, prompted: bool
) -> Tensor:
    counts = []
    for row, place in zip(rows, places, strict=True):
        before = texts[row][0 if prompted else prompts[row] : prompts[row] + place]
        counts.append(torch.bincount(torch.tensor(before, dtype=torch.long), minlength=size)[:size].short())
    return torch.stack(counts)


@dataclass(frozen=True)
class Alternative:
    """One alternative distribution: name, cause, logits `[N, V]`, and the log-likelihood gain on the drawn tokens."""

    name: str
    cause: str
    edit: Callable[[Scaled], Tensor]
    gain: float  # nats above the policy's log-likelihood


def alternatives(drawn: Draws, params: SamplingParams, ends: Iterable[int]) -> tuple[list[Alternative], float]:
    """All alternatives, the most likely first, and the log evidence ratio, in nats, that one of them is in use."""
    scaled = Scaled.of(drawn, params)
    placed = len(drawn) > 0 and drawn.position is not None
    kinds = [[*_of_tokens(scaled)], *([[*_of_text(scaled)], [*_of_length(scaled, [*ends])]] if placed else [])]
    kinds = [kind for kind in kinds if kind]
    if not kinds or not len(drawn):
        return [], 0.0
    prior = [alternative.gain - math.log(len(kinds) * len(kind)) for kind in kinds for alternative in kind]
    every = sorted((a for kind in kinds for a in kind), key=lambda a: -a.gain)
    return [a for a in every if a.gain > 0], float(torch.tensor(prior, dtype=torch.float64).logsumexp(0))


def filter_odds(drawn: Draws, params: SamplingParams) -> float:
    """The log evidence ratio, in nats, of a filter beyond `params`: log of the mean of p_filtered/p over `filters`."""
    if not len(drawn):
        return 0.0
    whole, own = replace(drawn, logits=drawn.distribution(params)), drawn.logp(params)
    edge = {name.split()[0]: other for name, other in tightest(whole, SamplingParams())}
    others = [other for _, other in filters(SamplingParams())]
    passing = [
        other
        for other in others
        if (other.top_p == 1.0 or ("top_p" in edge and other.top_p >= edge["top_p"].top_p - 1e-6))
        and (other.top_k == 0 or other.top_k >= edge["top_k"].top_k)
        and other.min_p <= edge["min_p"].min_p
    ]
    gains = [float((whole.logp(other) - own).sum()) for other in passing]
    return float(torch.tensor([-math.inf, *gains], dtype=torch.float64).logsumexp(0)) - math.log(len(others))


def applied(drawn: Draws, alternative: Alternative, params: SamplingParams) -> Draws:
    """The same tokens with the logits of an alternative."""
    return replace(drawn, logits=alternative.edit(Scaled.of(drawn, params)) * (params.temperature or 1.0))


def _of_text(scaled: Scaled) -> Iterator[Alternative]:
    """Alternatives that depend on earlier tokens: penalties."""
    cause = "the engine lowers the probability of tokens that occurred before, so the samples are not the policy's"

    def repetition(penalty: float) -> Callable[[Scaled], Tensor]:
        return lambda s: torch.where(
            s.seen > 0, torch.where(s.logits > 0, s.logits / penalty, s.logits * penalty), s.logits
        )

    edits: list[tuple[str, Callable[[Scaled], Tensor]]] = [
        *((f"a repetition penalty of {v:.3g}", repetition(v)) for v in _REPETITION),
        *((f"a presence penalty of {v:.3g}", lambda s, v=v: s.logits - v * (s.written > 0)) for v in _PENALTIES),
        *((f"a frequency penalty of {v:.3g}", lambda s, v=v: s.logits - v * s.written) for v in _PENALTIES),
    ]
    for name, edit in edits:
        yield Alternative(name, cause, edit, scaled.gain(edit(scaled)))


def _of_tokens(scaled: Scaled) -> Iterator[Alternative]:
    """A bias on one token, or a ban on it, by its frequency among the drawn tokens."""
    p, tokens = scaled.logits.softmax(-1), scaled.drawn.tokens
    expected, counts = p.sum(0), torch.bincount(tokens, minlength=p.shape[-1]).double()
    columns = (expected + counts).topk(min(_COLUMNS, p.shape[-1])).indices
    p, expected, counts = p[:, columns], expected[columns], counts[columns]
    for bias in _BIASES:
        spread = torch.log1p((math.expm1(bias) * p).clamp_min(-1 + 1e-12)).sum(0)
        gains = -spread + (torch.where(counts > 0, -torch.inf, 0.0) if bias == -math.inf else bias * counts)
        what = "a ban" if bias == -math.inf else f"a bias of {bias:+.3g}"
        for token, gain, count, often in zip(*(v.tolist() for v in (columns, gains, counts, expected)), strict=True):
            name = f"{what} on token {token} (drawn {count:.0f} times, {often:.3g} expected)"
            edit = _on_columns(_is_token(token), bias)
            yield Alternative(name, "the engine bans tokens or adds a bias to their logits", edit, gain)


def _of_length(scaled: Scaled, ends: list[int]) -> Iterator[Alternative]:
    """No end token before a minimum length."""
    p = scaled.logits.softmax(-1)[:, ends].sum(-1)
    is_end = torch.isin(scaled.drawn.tokens, torch.tensor(ends, device=p.device))
    for least in _LENGTHS if ends else ():
        early = scaled.position < least
        gain = -math.inf if bool((is_end & early).any()) else -float(torch.log1p(-p[early].clamp_max(1 - 1e-12)).sum())

        def stopped(s: Scaled, least: int = least) -> Tensor:
            any_end = one_hot(torch.tensor(ends), s.logits.shape[-1]).sum(0) > 0
            return (s.position < least)[:, None] & any_end.to(s.logits.device)

        cause = "the engine enforces a minimum length of completions"
        yield Alternative(f"no end before {least} tokens", cause, _on_columns(stopped, -math.inf), gain)


def _is_token(token: int) -> Callable[[Scaled], Tensor]:
    return lambda s: (torch.arange(s.logits.shape[-1]) == token)[None]


def _on_columns(where: Callable[[Scaled], Tensor], bias: float) -> Callable[[Scaled], Tensor]:
    return lambda s: torch.where(where(s).to(s.logits.device), s.logits + bias, s.logits)


# ------------------------------------------------------------------------ explanation of the draws

_TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)  # temperatures that are combined with a filter
_OTHERS = 2  # number of other alternatives that are tried
_PRICE = 5.0  # nats of log-likelihood that each further parameter must gain
_TRIED, _ELEMENTS = 2000, 20_000_000  # limits on tokens, and on tokens × vocabulary, for testing explanations


@dataclass(frozen=True)
class Explanation:
    """One tested distribution: the log-likelihood of the tokens under it, and its p-value."""

    code: str
    name: str
    cause: str
    logp: float  # log-likelihood of all tokens, in nats
    drawn: Draws
    params: SamplingParams

    @cached_property
    def chance(self) -> float:
        return chance_of(self.drawn, self.params)

    def explains(self, thresholds: Thresholds, ends: Iterable[int]) -> bool:
        """Whether the tokens are consistent with this distribution, so that no other one is needed."""
        if self.chance <= thresholds["sampler_explained"]:
            return False
        left = replace(self.drawn, logits=self.drawn.distribution(self.params))
        return alternatives(left, SamplingParams(), ends)[1] < -math.log(thresholds["sampler_explained"])


def _explanation(code: str, name: str, cause: str, drawn: Draws, params: SamplingParams, free: int = 1) -> Explanation:
    """Test one explanation. Each further `free` parameter must improve the likelihood by `_PRICE`."""
    logp = -_unlikelihood(drawn, params) - _PRICE * (free - 1)
    return Explanation(code, name, cause, logp, drawn, params)


def _explanations(more: Draws, sampling: SamplingParams, others: Sequence[Alternative]) -> Iterator[Explanation]:
    plain = unfiltered(sampling)
    cause = "the engine does not use the configured sampling options, so the samples are not the policy's"
    fitted = best_temperature(plain, lambda params: _unlikelihood(more, params))
    warm = replace(plain, temperature=fitted)
    yield _explanation("sampler/temperature", f"temperature {fitted:.3g}", cause, more, warm)
    for name, params in (*filters(plain), *tightest(more, plain)):
        yield _explanation("sampler/filter", name, cause, more, params)
    for temperature in _TEMPERATURES:
        for name, params in tightest(more, replace(plain, temperature=temperature)):
            both = f"temperature {temperature:g} with {name}"
            yield _explanation("sampler/filter", both, cause, more, params, free=2)
    kinds = {other.name.partition(" of ")[0].partition(" (")[0]: other for other in reversed(others)}
    for other in sorted(kinds.values(), key=lambda other: -other.gain)[:_OTHERS]:
        yield _explanation("sampler/filter", other.name, other.cause, applied(more, other, plain), plain)


def drawn_finding(
    more: Draws, setup: KeelSubject, chance: float, others: Sequence[Alternative], odds: float
) -> Finding:
    """The finding for the most likely distribution that the tokens do not reject."""
    sampling = setup.sampling
    size = f"the p-value of {len(more)} drawn tokens under the policy's distribution is {chance:.1g}"
    if chance >= setup.thresholds["sampler_draws"]:
        size = f"{len(more)} drawn tokens are e^{odds:.3g} times more likely under other sampling options"
    small = more.where(torch.arange(len(more), device=more.tokens.device) < min(_TRIED, _ELEMENTS // setup.vocabulary))
    tried = sorted(_explanations(small, sampling, others), key=lambda entry: -entry.logp)
    better = (entry for entry in tried if entry.logp > -_unlikelihood(small, sampling))
    if setup.shared.get("reported") == "sampler/mismatch":  # no known distribution explains the reported values
        better = (entry for entry in better if _agrees(entry, small, sampling, setup.thresholds))
    best = next((entry for entry in better if entry.explains(setup.thresholds, setup.policy.eos_ids)), None)
    if best is not None:
        configured = (
            f"the configuration has rollout.temperature={sampling.temperature:g}, top_p={sampling.top_p:g} and "
            f"top_k={sampling.top_k}"
        )
        return finding(
            best.code,
            f"{size}; {best.name} explains them (p-value {best.chance:.2g}), while {configured}",
            best.cause,
            "pass rollout.temperature, top_p, top_k and min_p to the engine unchanged, without penalties, bans or a "
            "minimum length (repetition_penalty=1); engines may take defaults from generation_config.json",
        )
    nearest = "; ".join(f"{entry.name}: p-value {entry.chance:.1g}" for entry in tried[:3])
    return finding(
        "sampler/mismatch",
        f"{size}; no tested alternative explains them ({nearest})",
        "the engine does not sample from this policy: it uses other weights, another prompt, or another sampling "
        "method",
        "check the engine's weights and its input tokens (Request.tokens, without encoding them again)",
    )


def _agrees(entry: Explanation, drawn: Draws, sampling: SamplingParams, thresholds: Thresholds) -> bool:
    """Whether the reported log-probabilities fit the policy, or their gap is halved by this explanation."""
    reported = drawn.sample_logp.isfinite()
    policy, own = drawn.logp(unfiltered(sampling)), entry.drawn.logp(entry.params)
    before, after = (float((drawn.sample_logp - logp)[reported].abs().nan_to_num(0.0).mean()) for logp in (policy, own))
    return not before > thresholds["scoring_gap_half"] or after <= before / 2


def _unlikelihood(drawn: Draws, params: SamplingParams) -> float:
    return -float(drawn.logp(params).nan_to_num(neginf=-1e9).sum())


def configured_finding(setup: KeelSubject, more: Draws) -> Finding:
    """The finding for configured filters, under which samples are not from the policy's own distribution."""
    sampling = setup.sampling
    lost = more.logp(sampling) - more.logp(unfiltered(sampling))
    lost = lost[lost.isfinite()]  # a token that the filters exclude was drawn by another rule
    kl, cut = float(lost.mean()), 1 - float((-lost).exp().mean())
    return finding(
        "sampler/filter",
        f"rollout.top_p={sampling.top_p:g}, top_k={sampling.top_k}, min_p={sampling.min_p:g} cut off "
        f"{100 * cut:.1f} % of the probability on average: KL(sampler‖policy) is {kl:.3g} nats per token",
        "completions come from the filtered distribution, but ratios and KL refer to the unfiltered policy",
        setting("set {} for training", whole_distribution(setup.config.to_dict())),
        severity=_severity(kl, setup.thresholds) if cut > setup.thresholds["filtered_mass"] else "note",
    )


def _severity(kl: float, thresholds: Thresholds) -> Severity:
    if kl > thresholds["sampler_kl_error"]:
        return "error"
    return "warning" if kl > thresholds["sampler_kl_warning"] else "note"
