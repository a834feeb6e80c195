"""Measure the drift between two models: sample, score under both, and estimate KL with its standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Group, Problem
from keel.kl import log_ratio, token_statistics
from keel.kl.estimators import ESTIMATORS
from keel.kl.ratios import select
from keel.lab.compare.sides import Side, load_pair, resolve
from keel.models.head import causal_lm, frozen_head
from keel.models.options import LoadedModel
from keel.models.pack import microbatches, pack
from keel.models.scorer import hidden_states, score_hidden
from keel.rollout import Request, SamplingParams
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import build_engine, find_engine
from keel.rollout.render import Renderer
from keel.trainer.batch import stitch


@dataclass(frozen=True)
class Scored:
    """Scores of B completions of up to T tokens, `[B, T]`, float64 on the CPU, 0 outside the mask.

    `exact` is KL(sampler‖other) at each state, `other_way` KL(other‖sampler).
    """

    tokens: Tensor
    mask: Tensor
    logp: Tensor
    other_logp: Tensor
    exact: Tensor
    other_way: Tensor
    entropy: Tensor


def check_comparable(first: Side, second: Side) -> None:
    """Refuse two models with different vocabularies or devices."""
    if first.loaded is second.loaded:
        return
    names = f"{first.name!r} and {second.name!r}"
    if first.loaded.device != second.loaded.device:
        devices = f"{first.loaded.device} and {second.loaded.device}"
        raise KeelError(f"{names} are on {devices}: put both on one device with --device")
    mine, theirs = (side.loaded.tokenizer.get_vocab() for side in (first, second))
    if mine != theirs:
        differ = min((t for t in {*mine, *theirs} if mine.get(t) != theirs.get(t)), key=str)
        raise KeelError(
            f"{names} have different vocabularies ({len(mine)} and {len(theirs)} tokens, {differ!r} differs): "
            "the KL needs two models with the same vocabulary"
        )
    sizes = [causal_lm(side.loaded.model).get_output_embeddings().weight.shape[0] for side in (first, second)]
    if sizes[0] != sizes[1]:
        raise KeelError(f"{names} have heads of {sizes[0]} and {sizes[1]} tokens: the KL needs heads of the same size")


def render(
    first: Side, second: Side, problems: Sequence[Problem], max_tokens: int, **rendering: Any
) -> list[tuple[int, ...]]:
    """Tokens of every prompt; refused if prompt and completion may exceed the context of either model."""
    renderer = Renderer(first.loaded.tokenizer, **rendering)
    limits = [side.loaded.context_length for side in (first, second) if side.loaded.context_length is not None]
    rendered = [renderer.prompt(problem) for problem in problems]
    for problem, tokens in zip(problems, rendered, strict=True):
        if limits and len(tokens) + max_tokens > min(limits):
            raise KeelError(
                f"prompt {problem.key!r} has {len(tokens)} tokens, which with --max-tokens {max_tokens} exceed the "
                f"model's context of {min(limits)}: shorten it, or lower --max-tokens"
            )
    return rendered


def sample(
    side: Side,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    engine: str = "native",
    seed: int,
    attempt: int,
) -> list[Group]:
    """The side's completions of every prompt, by the named engine; another `attempt` gives other noise."""
    requests = [Request(problem.key, tokens) for problem, tokens in zip(problems, prompts, strict=True)]
    options, tokenizer = RolloutOptions(engine=engine), side.loaded.tokenizer
    with side.model() as model, closing(build_engine(options, model, tokenizer)) as sampler:
        drawn = sampler.generate(requests, sampling, seed=seed, attempt=attempt)
    return [Group(*parts) for parts in zip(problems, prompts, map(tuple, drawn), strict=True)]


def score(sampler: Side, other: Side, groups: Sequence[Group], *, temperature: float, microbatch_tokens: int) -> Scored:
    """Score completions under both models. Frozen heads make equal weights give bitwise equal results."""
    loaded = sampler.loaded
    shared = loaded.shared_prefix and other.loaded.shared_prefix
    heads = []
    for side in (sampler, other):
        with side.model() as model:
            heads.append(frozen_head(model))
    parts = []
    for part in microbatches(groups, microbatch_tokens, shared_prefix=shared):
        packed = pack(part, loaded.pad_id, shared_prefix=shared).to(loaded.device)
        with other.model() as model:
            ref_hidden = hidden_states(model, packed)
        with sampler.model() as model:
            scores = score_hidden(
                hidden_states(model, packed),
                heads[0],
                packed,
                temperature=temperature,
                entropy=True,
                exact_kl=True,
                ref_policy=True,
                ref_hidden=ref_hidden,
                ref_head=heads[1],
            )
        columns = (scores.logp, scores.ref_logp, scores.exact_kl, scores.ref_policy_kl, scores.entropy)
        assert all(x is not None for x in columns)
        parts.append(
            [packed.tokens.cpu(), packed.action_mask.cpu(), *(x.cpu().double() for x in columns if x is not None)]
        )
    width = max(part[0].shape[1] for part in parts)
    return Scored(*(stitch(column, width) for column in zip(*parts, strict=True)))


EXACT = "exact"


@dataclass(frozen=True)
class DriftEstimate:
    """A mean in nats with its standard error (None for a single value)."""

    mean: float
    se: float | None


@dataclass(frozen=True)
class TokenDrift:
    """A sampled vocabulary token: its count, its mean log-ratio and its share of Σ k3 (k3 terms are never negative)."""

    id: int
    text: str
    count: int
    log_ratio: float
    share: float


@dataclass(frozen=True)
class PositionDrift:
    """Exact KL at completion tokens `first` to `last` (1-based), over `count` tokens, and its share of the sum."""

    first: int
    last: int
    count: int
    exact: DriftEstimate
    share: float


@dataclass(frozen=True)
class MeasuredCompletion:
    """One completion: per token, the log-ratio of the sampled token and the exact KL of the distribution."""

    prompt: str
    tokens: tuple[str, ...]
    log_ratio: tuple[float, ...]
    exact: tuple[float, ...]


@dataclass(frozen=True)
class Direction:
    """KL(sampler‖other) on the sampler's own completions.

    `per_token` is the mean over all sampled tokens, `per_sequence` the mean over completions of the sum over a
    completion's tokens, by estimator: k1, k2, k3, abs, and `exact`, the sum over the vocabulary at every sampled
    state. The sum of `exact` is the Rao-Blackwell estimate of the sequence's KL. `other_way` is the exact per-token
    KL(other‖sampler) on the same states. `clamped` counts tokens whose log-ratio was clamped at ±20 nats; `truncated`
    is the fraction of truncated completions. `positions` has every position, `bands` the same in bands that double in
    width.
    """

    sampler: str
    completions: int
    sampled_tokens: int
    truncated: float
    clamped: int
    entropy: float
    per_token: Mapping[str, DriftEstimate]
    per_sequence: Mapping[str, DriftEstimate]
    other_way: DriftEstimate
    positions: tuple[PositionDrift, ...]
    bands: tuple[PositionDrift, ...]
    tokens: tuple[TokenDrift, ...]
    largest: MeasuredCompletion

    @property
    def moved(self) -> bool:
        """Whether the probability of any sampled token differs between the models."""
        return any(token.log_ratio for token in self.tokens)

    def common_positions(self) -> list[PositionDrift]:
        """Positions that at least a tenth of the completions (and at least two) reach; later ones are too noisy."""
        return [p for p in self.positions if p.count >= max(2, self.completions / 10)]


@dataclass(frozen=True)
class Drift:
    """The measured KL between two models, in nats of the tempered distributions.

    `clustered_by` is the unit of the standard errors: prompts if there are several (completions of a prompt are not
    independent), else completions, else tokens.
    """

    policy: str
    reference: str
    temperature: float
    seed: int
    prompts: int
    samples: int
    max_tokens: int
    dtype: tuple[str, str]
    clustered_by: str
    policy_ref: Direction
    ref_policy: Direction | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def measure_drift(
    policy: str | LoadedModel | Side,
    reference: str | LoadedModel | Side,
    prompts: Sequence[str | Sequence[Mapping[str, str]] | Problem],
    *,
    samples: int = 4,
    max_tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    chat_template: str = "auto",
    system_prompt: str | None = None,
    allow_control_tokens: bool = False,
    reverse_samples: bool = True,
    microbatch_tokens: int = 8192,
    max_batch: int = 64,
    engine: str = "native",
) -> Drift:
    """KL between two models on `prompts`, by every estimator, exactly, and in both directions.

    `policy` and `reference` are names as on the command line (a folder, a hub name, a .gguf file, an adapter, a run,
    `RUN@start`), models from `keel.models.load_model`, or `Side`s of one model. `prompts` are texts, lists of chat
    messages, or problems. The policy answers each `samples` times at `temperature`; both models then score every
    sampled token over the whole vocabulary, in chunks. With `reverse_samples` the reference answers too, since
    KL(reference‖policy) per sequence needs its samples. `microbatch_tokens` and `max_batch` (completions sampled at a
    time) bound the memory. `engine` is native, or a `module:attr` as for `rollout.engine`. Equal arguments give equal
    results; a model against itself gives exactly 0.

    >>> drift = measure_drift("runs/default", "runs/default@start", ["2+3=", "7+1="])
    >>> drift.policy_ref.per_token["exact"].mean, drift.policy_ref.per_sequence["exact"].se
    """
    problems = _problems(prompts)
    find_engine(engine)
    if not 0 < temperature < float("inf"):
        raise KeelError(f"temperature is {temperature}: the KL needs a positive, finite temperature; use 1")
    sampling = SamplingParams(
        temperature=temperature, max_completion_length=max_tokens, num_generations=samples, max_batch=max_batch
    )
    first, second = _sides(policy, reference)
    check_comparable(first, second)
    rendering = {
        "chat_template": chat_template,
        "system_prompt": system_prompt,
        "allow_control_tokens": allow_control_tokens,
    }
    rendered = render(first, second, problems, max_tokens, **rendering)

    def direction(sampler: Side, other: Side, attempt: int) -> Direction:
        groups = sample(sampler, problems, rendered, sampling, engine=engine, seed=seed, attempt=attempt)
        scored = score(sampler, other, groups, temperature=temperature, microbatch_tokens=microbatch_tokens)
        return _direction(sampler, groups, scored)

    return Drift(
        policy=first.name,
        reference=second.name,
        temperature=temperature,
        seed=seed,
        prompts=len(problems),
        samples=samples,
        max_tokens=max_tokens,
        dtype=(_dtype(first), _dtype(second)),
        clustered_by="prompt" if len(problems) > 1 else "completion" if samples > 1 else "token",
        policy_ref=direction(first, second, 0),
        ref_policy=direction(second, first, 1) if reverse_samples else None,
    )


def _problems(prompts: Sequence[Any]) -> list[Problem]:
    if isinstance(prompts, str):
        raise KeelError("prompts is one text: give a list of prompts")
    if not prompts:
        raise KeelError("prompts is empty: give at least one")
    return [p if isinstance(p, Problem) else Problem(str(i), p) for i, p in enumerate(prompts, start=1)]


def _sides(policy: Any, reference: Any) -> tuple[Side, Side]:
    if isinstance(policy, str) and isinstance(reference, str):
        return load_pair(resolve(policy), resolve(reference))
    if isinstance(policy, str) or isinstance(reference, str):
        raise KeelError(
            "policy and reference must be two names or two models: load the named one with keel.models.load_model"
        )
    first, second = (x if isinstance(x, Side) else Side(x.name, x) for x in (policy, reference))
    return first, second


def _dtype(side: Side) -> str:
    return str(side.loaded.dtype).removeprefix("torch.")


def _direction(sampler: Side, groups: Sequence[Group], scored: Scored) -> Direction:
    mask, prompts = scored.mask, len(groups)
    ratio = log_ratio(scored.logp, scored.other_logp, mask)
    d = ratio.d.double()
    values = {name: select(of(d), mask) for name, of in ESTIMATORS.items()} | {EXACT: scored.exact}
    completions = [completion for group in groups for completion in group.completions]
    widths = range(mask.shape[1])
    return Direction(
        sampler=sampler.name,
        completions=len(completions),
        sampled_tokens=int(mask.sum()),
        truncated=sum(c.stop_reason == "length" for c in completions) / len(completions),
        clamped=int((ratio.clamped & mask).sum()),
        entropy=scored.entropy[mask].mean().item(),
        per_token={name: _estimate(x, mask, prompts) for name, x in values.items()},
        per_sequence={name: _of_sequences(x, prompts) for name, x in values.items()},
        other_way=_estimate(scored.other_way, mask, prompts),
        positions=tuple(_position(scored.exact, mask, prompts, slice(t, t + 1)) for t in widths),
        bands=tuple(_position(scored.exact, mask, prompts, band) for band in _bands(mask.shape[1])),
        tokens=_by_token(scored.tokens[mask], -d[mask], values["k3"][mask], sampler.loaded.tokenizer),
        largest=_largest(groups, scored, -d, sampler.loaded.tokenizer),
    )


def _estimate(values: Tensor, mask: Tensor, prompts: int) -> DriftEstimate:
    """The mean over the mask. Completions `[B, T]` are ordered by group, so each row of the view is a prompt."""
    rows = prompts if prompts > 1 else len(values)
    statistics = token_statistics(values.reshape(rows, -1), mask.reshape(rows, -1))
    return DriftEstimate(statistics["mean"], statistics["se"] if int(mask.sum()) > 1 else None)


def _of_sequences(values: Tensor, prompts: int) -> DriftEstimate:
    sums = values.sum(-1, keepdim=True)
    return _estimate(sums, torch.ones_like(sums, dtype=torch.bool), prompts)


def _position(exact: Tensor, mask: Tensor, prompts: int, at: slice) -> PositionDrift:
    total, part = exact[mask].sum().item(), exact[:, at][mask[:, at]].sum().item()
    estimate = _estimate(exact[:, at], mask[:, at], prompts)
    return PositionDrift(at.start + 1, at.stop, int(mask[:, at].sum()), estimate, part / total if total else 0.0)


def _bands(width: int) -> list[slice]:
    """1, 2, 3–4, 5–8, 9–16, …, up to the longest completion."""
    edges = [0, 1]
    while edges[-1] < width:
        edges.append(min(2 * edges[-1], width))
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _by_token(tokens: Tensor, log_ratios: Tensor, k3: Tensor, tokenizer: Any) -> tuple[TokenDrift, ...]:
    """Every sampled token of the vocabulary, the largest share of Σ k3 first."""
    ids, inverse, counts = tokens.unique(return_inverse=True, return_counts=True)
    ratios = torch.bincount(inverse, log_ratios, minlength=len(ids))
    k3_sums = torch.bincount(inverse, k3, minlength=len(ids))
    total = k3.sum().item()
    drifts = [
        TokenDrift(i, tokenizer.decode([i]), count, ratio / count, part / total if total else 0.0)
        for i, count, ratio, part in zip(ids.tolist(), counts.tolist(), ratios.tolist(), k3_sums.tolist(), strict=True)
    ]
    return tuple(sorted(drifts, key=lambda token: (-token.share, -token.count, token.id)))


def _largest(groups: Sequence[Group], scored: Scored, log_ratios: Tensor, tokenizer: Any) -> MeasuredCompletion:
    """The completion with the largest sum of exact KL."""
    row = int(scored.exact.sum(-1).argmax())
    mask = scored.mask[row]
    group = groups[row * len(groups) // len(scored.mask)]
    return MeasuredCompletion(
        prompt=tokenizer.decode(list(group.prompt_tokens)),
        tokens=tuple(tokenizer.decode([i]) for i in scored.tokens[row][mask].tolist()),
        log_ratio=tuple(log_ratios[row][mask].tolist()),
        exact=tuple(scored.exact[row][mask].tolist()),
    )
