"""Tokens that were drawn, beside the policy's own logits: which sampling explains them, and what was reported.

Two questions with two answers: do the *reported* log-probabilities belong to the policy, and do the *drawn* tokens?
The second is a test without any assumption: with F the policy's distribution, the randomised tail mass of each drawn
token is uniform on (0, 1), token by token, if and only if the token was drawn from F (Rosenblatt's transform).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from keel.base.types import Group
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.sampling import SamplingParams, filter_threshold

_TEMPERATURES = tuple(2.0 ** (i / 8) for i in range(-24, 25))
_TOP_P = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
_TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
_MAX_TOKENS = 4000
_MAX_ELEMENTS = 50_000_000  # tokens × vocabulary held at once
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Draws:
    """N action tokens: the policy's logits `[N, V]` (fp64, temperature 1), what was drawn, what was reported."""

    logits: Tensor
    tokens: Tensor  # [N]
    sample_logp: Tensor  # [N]: the engine's sample_logp; NaN where it gave none
    row: Tensor  # [N]: number of the completion
    seen: Tensor | None = None  # [N, V] bool: tokens that stood in the context already
    filtered_logp: Tensor | None = None  # [N]: the engine's, after filters; NaN where it gave none

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, keep: Tensor) -> Draws:
        """Some of them."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor[keep] for name, tensor in tensors.items() if tensor is not None})

    def distribution(self, params: SamplingParams) -> Tensor:
        """Log-probabilities `[N, V]` under these sampling parameters, filters included."""
        logits = self.logits / (params.temperature or 1.0)
        if params.filtered:
            logits = logits.masked_fill(logits < filter_threshold(logits, params) - 1e-9, -torch.inf)
        return logits.log_softmax(-1)

    def logp(self, params: SamplingParams) -> Tensor:
        """Log-probability `[N]` of what was drawn, under these sampling parameters."""
        return self.distribution(params).gather(-1, self.tokens[:, None]).squeeze(-1)

    def penalized(self, params: SamplingParams, penalty: float) -> Draws:
        """The same tokens under logits with a repetition penalty: of seen tokens divided by it, or times it below 0."""
        if self.seen is None:
            return self
        logits = self.logits / (params.temperature or 1.0)
        lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
        penalized = torch.where(self.seen, lowered, logits) * (params.temperature or 1.0)
        return replace(self, logits=penalized)


def draws(setup: ProbeSetup, groups: Sequence[Group]) -> Draws:
    """The action tokens of groups (as many as fit), with the logits of the weights as they are now."""
    completions = [c for group in groups for c in group.completions]
    limit = min(_MAX_TOKENS, max(64, _MAX_ELEMENTS // setup.vocabulary))
    chosen: list[tuple[int, Tensor, Tensor]] = []
    for b, logits in setup.each_logits(groups, at_once=32):
        if limit <= 0:
            break
        positions = torch.tensor(
            [t for t, action in enumerate(completions[b].action) if action][:limit], dtype=torch.long
        )
        limit -= len(positions)
        chosen.append((b, positions, logits[positions.to(logits.device)].double()))
    chosen.sort(key=lambda entry: entry[0])
    device = setup.policy.device
    prompts = [group.prompt_tokens for group in groups for _ in group.completions]
    drawn = [
        (completions[b].tokens[t], completions[b].sample_logp[t], completions[b].filtered_logp[t], b)
        for b, positions, _ in chosen
        for t in positions
    ]
    before, after = (torch.tensor([d[i] for d in drawn], dtype=torch.float64, device=device) for i in (1, 2))
    return Draws(
        logits=torch.cat([logits for _, _, logits in chosen]),
        tokens=torch.tensor([token for token, *_ in drawn], dtype=torch.long, device=device),
        sample_logp=before,
        filtered_logp=after,
        row=torch.tensor([b for *_, b in drawn], dtype=torch.long, device=device),
        seen=torch.cat(
            [_seen(prompts[b], completions[b].tokens, positions, logits.shape[-1]) for b, positions, logits in chosen]
        ).to(device),
    )


def _seen(prompt: Sequence[int], tokens: Sequence[int], positions: Tensor, vocabulary: int) -> Tensor:
    """`[n, V]`: which tokens the context of each position holds."""
    seen = torch.zeros(len(positions), vocabulary, dtype=torch.bool)
    seen[:, list(prompt)] = True
    for row, position in enumerate(positions.tolist()):
        seen[row, list(tokens[:position])] = True
    return seen


def unfiltered(params: SamplingParams) -> SamplingParams:
    """The same temperature without top-p, top-k and min-p: what `sample_logp` is meant to be."""
    return replace(params, top_p=1.0, top_k=0, min_p=0.0)


def filters(params: SamplingParams) -> Iterable[tuple[str, SamplingParams]]:
    """Filters that an engine may have on, with or without saying so; the configured ones first."""
    plain = unfiltered(params)
    if params.filtered:
        yield f"top_p {params.top_p:g}, top_k {params.top_k}, min_p {params.min_p:g} (as configured)", params
    for value in _TOP_P:
        yield f"top_p {value:g}", replace(plain, top_p=value)
    for number in _TOP_K:
        yield f"top_k {number}", replace(plain, top_k=number)
    for value in _MIN_P:
        yield f"min_p {value:g}", replace(plain, min_p=value)


def best_temperature(params: SamplingParams, cost: Callable[[SamplingParams], float]) -> float:
    """The temperature with the lowest cost, by a grid in logarithms that is refined three times."""
    grid, step = list(_TEMPERATURES), 2.0 ** (1 / 8)
    best = min(grid, key=lambda t: cost(replace(params, temperature=t)))
    for _ in range(3):
        step = step ** (1 / 8)
        grid = [best * step**i for i in range(-8, 9)]
        best = min(grid, key=lambda t: cost(replace(params, temperature=t)))
    return best


def tail_masses(drawn: Draws, params: SamplingParams, seed: int = 0) -> Tensor:
    """Randomised tail mass `[N]` of each drawn token: uniform on (0, 1) if the tokens came from this distribution."""
    logp = drawn.distribution(params)
    drawn_logp = logp.gather(-1, drawn.tokens[:, None])
    p = logp.exp()
    below = torch.where(logp < drawn_logp - 1e-9, p, 0.0).sum(-1)
    same = torch.where((logp - drawn_logp).abs() <= 1e-9, p, 0.0).sum(-1)
    coin = torch.rand(len(drawn), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.device)
    return torch.where(torch.isfinite(drawn_logp.squeeze(-1)), below + coin * same, 0.0)


def uniform_p_value(masses: Tensor) -> float:
    """The chance of tail masses like these if they are uniform: Kolmogorov-Smirnov, and empty or full lower tails."""
    from scipy.special import bdtr, kolmogorov

    n = len(masses)
    if n == 0:
        return 1.0
    ordered = masses.sort().values.cpu()
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum(steps - ordered, ordered - steps + 1 / n).max())
    chances = [float(kolmogorov(math.sqrt(n) * distance))]
    for edge in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4):
        count = int((ordered < edge).sum())
        chances.append(2 * float(min(bdtr(count, n, edge), bdtr(n - count, n, 1 - edge))))
    return min(1.0, len(chances) * min(chances))


def repetition_penalty(drawn: Draws, params: SamplingParams) -> tuple[float, float]:
    """The likeliest repetition penalty, and how many nats the best odds for any of them are worth.

    The mean over penalties of p_penalty/p_policy of all drawn tokens has expectation 1 if the policy drew them, so that
    odds of e^x come about with a chance of e^−x at most (Markov).
    """
    plain = drawn.logp(params)
    gains = {
        penalty: float((drawn.penalized(params, penalty).logp(params) - plain).nan_to_num(0.0).sum())
        for penalty in _PENALTIES
    }
    best = max(gains, key=gains.__getitem__)
    return best, float(torch.tensor(list(gains.values())).double().logsumexp(0)) - math.log(len(gains))


def improbable_runs(drawn: Draws, params: SamplingParams, chance: float = 1e-9) -> Tensor:
    """`[N]` bool: tokens in runs that the policy would not have drawn, as tool output is.

    −Σ ln(tail mass) over a window of n tokens is at most Gamma(n)-distributed if they were drawn; a window is called
    improbable where that chance is below `chance`, whatever the model's entropy.
    """
    from scipy.special import gammainccinv

    masses = tail_masses(drawn, params).clamp_min(1e-300)
    surprise = -masses.log().cpu()
    rows = drawn.row.cpu()
    flagged = torch.zeros(len(drawn), dtype=torch.bool)
    for width in (3, 4, 6, 8, 12, 16):
        if len(drawn) < width:
            break
        windows = surprise.unfold(0, width, 1).sum(-1)
        alone = rows.unfold(0, width, 1)
        within = alone[:, 0] == alone[:, -1]
        for start in ((windows > float(gammainccinv(width, chance))) & within).nonzero().squeeze(-1).tolist():
            inside = torch.arange(start, start + width)
            flagged[inside[surprise[inside] > 2.0]] = True
    return flagged.to(drawn.tokens.device)
