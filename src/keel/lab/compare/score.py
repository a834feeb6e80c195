"""Sample the completions of one side, and score them under both in microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Group, Problem
from keel.lab.compare.sides import Side
from keel.models.head import causal_lm, frozen_head
from keel.models.logprobs import hidden_states, score_hidden
from keel.models.pack import microbatches, pack
from keel.rollout import Request, SamplingParams
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import build_engine
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
