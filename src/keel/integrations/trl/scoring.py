"""Convert TRL's tensors to Keel's: rows, denominators, and the exact KL over the vocabulary from hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.types import Batch, Scores
from keel.kl import KLOptions
from keel.kl.exact import penalty_divergence
from keel.losses.reductions import Denominators
from keel.models.chunked import StatsOptions, default_chunk, token_stats
from keel.models.head import LogitsOf, body_of, head_of

# Inputs of a vision-language model's forward in addition to the tokens. TRL stores them with the completions.
FORWARD = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def action_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The mask of tokens that the policy sampled: completions without padding and tool answers."""
    mask: Tensor = inputs["completion_mask"]
    return (mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]).bool()


def rows_of(inputs: Mapping[str, Any], *, filtered: bool) -> Batch:
    """The microbatch as a `Batch`. `filtered` means that vLLM's log-probabilities are those after filters."""
    drawn = inputs.get("sampling_per_token_logps")
    return Batch(
        action_mask=action_mask(inputs),
        advantages=inputs["advantages"],
        old_logp=inputs.get("old_per_token_logps"),
        ref_logp=inputs.get("ref_per_token_logps"),
        sample_logp=None if filtered else drawn,
        filtered_logp=drawn if filtered else None,
    )


def denominators(args: Any, kl: KLOptions, inputs: Mapping[str, Any], accumulated: int | None) -> Denominators:
    """The denominators of a microbatch. The loss of an update is the mean over processes of sums over microbatches.

    `accumulated` is the number of microbatches of the update, None in evaluation. Like TRL for dapo, the tokens are
    counted over the batch of rollouts and scaled to one update. Only under bnpo's own reduction the count is local.
    """
    mask, microbatches = action_mask(inputs), accumulated or 1
    own = kl.placement != "loss" or kl.reduction == "loss"
    if own and args.loss_type == "bnpo":
        tokens = mask.sum().double() * microbatches
    else:
        updates = 1.0 if accumulated is None else accumulated / args.steps_per_generation
        tokens = inputs["num_items_in_batch"].double() / args.world_size * updates
    longest = 1 if args.loss_type == "luspo" else args.max_completion_length
    return Denominators(float(len(mask) * microbatches), tokens, longest)


@contextmanager
def hidden_states(model: nn.Module, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect the last hidden states, after the final norm, of every forward in this context; empty unless `wanted`."""
    states: list[Tensor] = []
    if not wanted:
        yield states
        return

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output[0])

    hook = body_of(model).register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()


def of_completions(states: list[Tensor], length: int) -> Tensor:
    """The hidden states `[B, T, H]` that score the last `length` tokens."""
    return torch.cat(states)[:, -length - 1 : -1]


def with_exact_kl(
    scores: Scores,
    hidden: Tensor,
    model: nn.Module,
    inputs: Mapping[str, Any],
    kl: KLOptions,
    temperature: float,
    ref_head: LogitsOf,
) -> Scores:
    """Add the exact KL in both directions over the vocabulary to the scores, in chunks of tokens."""
    mask, head = action_mask(inputs), head_of(model)
    weight = getattr(head.module, "weight", None)
    options = StatsOptions(
        temperature=temperature,
        ref_policy=True,
        ref_head=ref_head,
        chunk_tokens=default_chunk(len(weight) if weight is not None else 2**17, hidden.device),
        ref_policy_grad=kl.estimator == "exact_reverse",
        divergence=penalty_divergence(kl),
    )
    stats = token_stats(hidden[mask], head, inputs["completion_ids"][mask], options, inputs["ref_hidden"][mask])

    def scatter(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.new_zeros(mask.shape).masked_scatter(mask, values)

    return Scores(scores.logp, scores.entropy, *map(scatter, (stats.kl, stats.ref_policy_kl, stats.divergence)))
