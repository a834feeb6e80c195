"""Tokens that the engine drew, tests of whether they came from the policy, and random prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.keel_subject import KeelSubject
from keel.rollout.sampling import SamplingParams, filter_threshold

_TEMPERATURES = tuple(2.0 ** (i / 8) for i in range(-24, 25))
_TOP_P = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
_TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
_HOTTEST = 4.0  # factor over the configured temperature; sampling that is even more uniform has another cause
_MAX_TOKENS = 4000
_MAX_ELEMENTS = 25_000_000  # limit of tokens × vocabulary in memory
FEW = 20  # number of tokens that suffices for the test of draws
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
_UNSURE = 0.25  # a policy is unsure at entropies above this share of the largest one


@dataclass(frozen=True)
class Draws:
    """N action tokens: the policy's logits `[N, V]` (fp64, temperature 1), token ids and reported log-probabilities."""

    logits: Tensor
    tokens: Tensor  # [N]
    sample_logp: Tensor  # [N]: the engine's sample_logp; NaN if missing
    row: Tensor  # [N]: index of the completion
    filtered_logp: Tensor | None = None  # [N]: the engine's filtered_logp, after filters; NaN if missing
    position: Tensor | None = None  # [N]: position of the token in its completion
    texts: tuple[tuple[int, ...], ...] = ()  # prompt and completion tokens of each row
    prompts: tuple[int, ...] = ()  # length of each prompt

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, keep: Tensor) -> Draws:
        """The selected draws."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {name: value[keep] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **chosen)

    def without(self, tokens: Iterable[int]) -> Draws:
        """The draws without these tokens. The policy's distribution is renormalised over the others."""
        outside = torch.tensor(sorted(set(tokens)), dtype=torch.long, device=self.tokens.device)
        return replace(self, logits=self.logits.index_fill(-1, outside, -torch.inf)).where(
            ~torch.isin(self.tokens, outside)
        )

    def distribution(self, params: SamplingParams) -> Tensor:
        """Log-probabilities `[N, V]` under these sampling parameters, including filters."""
        logits = self.logits / (params.temperature or 1.0)
        if params.filtered:
            logits = logits.masked_fill(logits < filter_threshold(logits, params) - 1e-9, -torch.inf)
        return logits.log_softmax(-1)

    def logp(self, params: SamplingParams) -> Tensor:
        """Log-probabilities `[N]` of the drawn tokens under these sampling parameters."""
        return self.distribution(params).gather(-1, self.tokens[:, None]).squeeze(-1)


def most_tokens(setup: KeelSubject) -> int:
    """The largest number of tokens whose logits are held in memory."""
    return min(_MAX_TOKENS, max(64, _MAX_ELEMENTS // setup.vocabulary))


def batch_draws(setup: KeelSubject) -> Draws:
    if "draws" not in setup.of_batch:
        setup.of_batch["draws"] = draws(setup, setup.groups)
    drawn: Draws = setup.of_batch["draws"]
    return drawn


def draws(setup: KeelSubject, groups: Sequence[Group]) -> Draws:
    """The action tokens of groups, as many as fit in memory, with the logits of the current weights."""
    groups = first_tokens(groups, most_tokens(setup))
    completions = [c for group in groups for c in group.completions]
    chosen: list[tuple[int, Tensor, Tensor]] = []
    for b, logits in setup.each_logits(groups):
        positions = torch.tensor([t for t, action in enumerate(completions[b].action) if action], dtype=torch.long)
        chosen.append((b, positions, logits[positions.to(logits.device)].double()))
    chosen.sort(key=lambda entry: entry[0])
    device = setup.policy.device
    prompts = [group.prompt_tokens for group in groups for _ in group.completions]
    drawn = [
        (completions[b].tokens[t], completions[b].sample_logp[t], completions[b].filtered_logp[t], b)
        for b, positions, _ in chosen
        for t in positions
    ]
    each = [logits for _, _, logits in chosen]
    before, after = (torch.tensor([d[i] for d in drawn], dtype=torch.float64, device=device) for i in (1, 2))
    return Draws(
        logits=torch.cat([torch.empty(0, setup.vocabulary, dtype=torch.float64, device=device), *each]),
        tokens=torch.tensor([token for token, *_ in drawn], dtype=torch.long, device=device),
        sample_logp=before,
        filtered_logp=after,
        row=torch.tensor([b for *_, b in drawn], dtype=torch.long, device=device),
        position=torch.cat([torch.empty(0, dtype=torch.long), *(places for _, places, _ in chosen)]).to(device),
        texts=tuple((*prompt, *c.tokens) for prompt, c in zip(prompts, completions, strict=True)),
        prompts=tuple(map(len, prompts)),
    )


def first_tokens(groups: Sequence[Group], limit: int) -> list[Group]:
    """The first completions with about `limit` tokens in total, at least one. A selection by length would be biased."""
    chosen, count = [], 0
    for group in groups:
        members = []
        for completion in group.completions:
            if count < limit:
                members.append(completion)
                count += sum(completion.action)
        if members:
            chosen.append(replace(group, completions=tuple(members), rewards=group.rewards[: len(members)]))
    return chosen


def unfiltered(params: SamplingParams) -> SamplingParams:
    """The same temperature without top-p, top-k and min-p, as `sample_logp` is defined."""
    return replace(params, top_p=1.0, top_k=0, min_p=0.0)


def filters(params: SamplingParams) -> Iterable[tuple[str, SamplingParams]]:
    """Filters that an engine may apply, the configured ones first."""
    plain = unfiltered(params)
    if params.filtered:
        yield f"top_p {params.top_p:g}, top_k {params.top_k}, min_p {params.min_p:g} (as configured)", params
    for value in _TOP_P:
        yield f"top_p {value:g}", replace(plain, top_p=value)
    for number in _TOP_K:
        yield f"top_k {number}", replace(plain, top_k=number)
    for value in _MIN_P:
        yield f"min_p {value:g}", replace(plain, min_p=value)


def tightest(drawn: Draws, params: SamplingParams) -> Iterable[tuple[str, SamplingParams]]:
    """For each kind of filter, the tightest one that permits every drawn token."""
    plain = unfiltered(params)
    logp = drawn.distribution(plain)
    own = logp.gather(-1, drawn.tokens[:, None])
    above = logp > own + 1e-9
    nucleus = float(torch.where(above, logp.exp(), 0.0).sum(-1).max())
    if 0 < nucleus < 1:
        yield f"top_p {nucleus:.3g}", replace(plain, top_p=min(1.0, nucleus + 1e-6))
    yield f"top_k {int(above.sum(-1).max()) + 1}", replace(plain, top_k=int(above.sum(-1).max()) + 1)
    ratio = float((own.squeeze(-1) - logp.max(-1).values).min().exp())
    yield f"min_p {ratio:.3g}", replace(plain, min_p=min(1.0, ratio * (1 - 1e-6)))


def best_temperature(params: SamplingParams, cost: Callable[[SamplingParams], float]) -> float:
    """The temperature with the lowest cost: a logarithmic grid, refined three times."""
    hottest, step = _HOTTEST * max(1.0, params.temperature), 2.0 ** (1 / 8)
    grid = [temperature for temperature in _TEMPERATURES if temperature <= hottest]
    best = min(grid, key=lambda t: cost(replace(params, temperature=t)))
    for _ in range(3):
        step = step ** (1 / 8)
        grid = [best * step**i for i in range(-8, 9)]
        best = min(grid, key=lambda t: cost(replace(params, temperature=t)))
    return best


def tail_masses(drawn: Draws, params: SamplingParams, seed: int = 0) -> Tensor:
    """Randomised tail mass `[N]` of each drawn token; uniform on (0, 1) if the tokens came from this distribution."""
    logp = drawn.distribution(params)
    drawn_logp = logp.gather(-1, drawn.tokens[:, None])
    p = logp.exp()
    below = torch.where(logp < drawn_logp - 1e-9, p, 0.0).sum(-1)
    same = torch.where((logp - drawn_logp).abs() <= 1e-9, p, 0.0).sum(-1)
    coin = torch.rand(len(drawn), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.device)
    return torch.where(torch.isfinite(drawn_logp.squeeze(-1)), below + coin * same, 0.0)


def chance_of(drawn: Draws, params: SamplingParams) -> float:
    """The p-value of the draws: over all tokens, over first tokens, and over those where the policy is least sure.

    The tokens of each part are selected by their context only, so the null distribution is the same.
    """
    masses, logp = tail_masses(drawn, params), drawn.logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp_min(-1e3)).sum(-1)
    chances = [1.0]
    for part in (torch.ones_like(drawn.tokens) > 0, *([] if drawn.position is None else [drawn.position == 0])):
        unsure = part & (entropy > _UNSURE * entropy[part].max()) if bool(part.any()) else part
        chances += [uniform_p_value(masses[chosen]) for chosen in (part, unsure) if bool(chosen.any())]
    return min(1.0, len(chances) * min(chances))


def uniform_p_value(masses: Tensor) -> float:
    """The p-value of tail masses under uniformity: Kolmogorov-Smirnov and lower-tail counts, Bonferroni-corrected."""
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


def nll_p_value(drawn: Draws, params: SamplingParams) -> float:
    """The p-value of the joint likelihood of the tokens: −Σ ln(tail mass) of n draws is Gamma(n)-distributed."""
    from scipy.special import gammaincc

    nll = -float(tail_masses(drawn, params).clamp_min(1e-300).log().sum())
    return float(gammaincc(len(drawn), nll)) if len(drawn) else 1.0


def improbable_runs(drawn: Draws, params: SamplingParams, chance: float = 1e-9) -> Tensor:
    """`[N]` bool: tokens in runs that the policy is very unlikely to have drawn, such as tool output.

    −Σ ln(tail mass) over a window of n drawn tokens is at most Gamma(n)-distributed. A window is flagged if its p-value
    is below `chance`, whatever the model's entropy.
    """
    from scipy.special import gammainccinv

    masses = tail_masses(drawn, params).clamp_min(1e-300)
    nll = -masses.log().cpu()
    rows = drawn.row.cpu()
    flagged = torch.zeros(len(drawn), dtype=torch.bool)
    for width in (3, 4, 6, 8, 12, 16):
        if len(drawn) < width:
            break
        windows = nll.unfold(0, width, 1).sum(-1)
        alone = rows.unfold(0, width, 1)
        within = alone[:, 0] == alone[:, -1]
        for start in ((windows > float(gammainccinv(width, chance))) & within).nonzero().squeeze(-1).tolist():
            inside = torch.arange(start, start + width)
            flagged[inside[nll[inside] > 2.0]] = True
    return flagged.to(drawn.tokens.device)


# ------------------------------------------------------------------------ random prompts

Tokens = tuple[int, ...]

STRANGE_STEPS = 4_000_037, 4_000_039  # step numbers beyond any run, so that their noise is separate
_SHORT = (3, 6)  # short lengths in tokens, at which each token matters; the third length is that of the run's prompts
_TEXTS, _SAMPLES, _LENGTH = 2, 8, 8  # texts per length, completions per text, and their length in tokens
_TRIES = 8


def ordinary_tokens(setup: KeelSubject) -> list[int]:
    """All tokens except special ones."""
    tokenizer = setup.policy.tokenizer
    special = {*tokenizer.all_special_ids, *setup.policy.eos_ids}
    return [token for token in range(min(setup.vocabulary, len(tokenizer))) if token not in special]


def strange_turns(setup: KeelSubject, step: int, texts: int = 0, samples: int = _SAMPLES) -> list[Group]:
    """Completions of random prompts with the noise of a step; sampled once per set of arguments."""
    known: dict[tuple[int, int, int], list[Group]] = setup.shared.setdefault("random prompts", {})
    key = step, texts, samples
    if key not in known:
        known[key] = setup.complete(strange_prompts(setup, texts), samples=samples, length=_LENGTH, step=step)
    return known[key]


def strange_prompts(setup: KeelSubject, texts: int = 0) -> list[Tokens]:
    """Random texts of a few tokens and of the length of the run's prompts, after BOS if those start with it."""
    prompts = [group.prompt_tokens for group in setup.groups]
    bos = setup.policy.tokenizer.bos_token_id
    head = (bos,) if bos is not None and all(prompt[0] == bos for prompt in prompts) else ()
    return [(*head, *text) for length in (*_SHORT, max(map(len, prompts))) for text in _texts(setup, length, texts)]


def _texts(setup: KeelSubject, length: int, number: int) -> Iterator[Tokens]:
    """Texts of about `length` tokens, with spaces and capitals, that survive decoding and encoding.

    An engine that encodes text itself then gets the same tokens, unless it changes the text.
    """
    tokenizer, ordinary = setup.policy.tokenizer, ordinary_tokens(setup)
    draw = Random(f"{setup.config.run.seed} {length} {number}")

    def encoded(text: str) -> Tokens:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))

    spaces = encoded(" ") or encoded("\n")
    texts: list[Tokens] = []
    for _ in range(_TRIES):
        tokens = [draw.choice(ordinary) for _ in range(length)]
        tokens[length // 2 : length // 2 + 1] = spaces
        text = str(tokenizer.decode(tokens))
        tokens_again = encoded(text)[:length]
        same = tokens_again and encoded(str(tokenizer.decode(list(tokens_again)))) == tokens_again
        if same and max(tokens_again) < setup.vocabulary and tokens_again not in texts:
            texts.append(tokens_again)
        if len(texts) == _TEXTS:
            break
    yield from texts
