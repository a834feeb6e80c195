"""The reference of a policy that TRL has prepared, and TRL's tensors as Keel's rows, denominators and exact KL.

The reference is a copy with its own head, or the policy with disabled adapters. For each sync, TRL merges the LoRA
adapter for its sampler and unmerges it again. In floating point (W + Δ) − Δ is not W, so every sync would slightly
change the base and therefore the reference. Keel restores the base bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from trl.trainer.utils import add_fused_lm_head

from keel.base.errors import KeelError
from keel.base.types import Batch, Scores
from keel.kl import KLOptions
from keel.kl.exact import penalty_divergence
from keel.losses.reductions import Denominators
from keel.models.chunked import StatsOptions, default_chunk, token_stats
from keel.models.head import LogitsOf, body_of, causal_lm, head_of
from keel.models.options import LoadedModel
from keel.reference import Reference
from keel.reference.kinds import build_reference
from keel.reference.options import ReferenceOptions


def reference_of(trainer: Any, options: ReferenceOptions, *, exact: bool) -> Reference:
    """A reference with the policy's current weights. With `exact`, it also supports the KL over the vocabulary."""
    policy = trainer.model
    reference = build_reference(options.kind, policy_of(trainer), **options.params)
    with reference.model() as model:
        inner = causal_lm(model)
        if inner is not causal_lm(policy):
            _give_own_head(inner, trainer.temperature, in_fp32=trainer.args.cast_lm_head_to_fp32)
        if exact:  # measure the head now, because accelerate later runs the forward in mixed precision
            head_of(model), head_of(policy)
    return reference


def policy_of(trainer: Any) -> LoadedModel:
    """The trained model of a trainer, as a `LoadedModel`."""
    policy, tokenizer = trainer.model, trainer._tokenizer
    return LoadedModel(
        model=policy,
        tokenizer=tokenizer,
        name=str(getattr(policy.config, "_name_or_path", "")),
        context_length=getattr(policy.config, "max_position_embeddings", None),
        eos_ids=tuple(trainer.eos_token_ids),
        pad_id=tokenizer.pad_token_id,
        device=trainer.accelerator.device,
        dtype=policy.dtype,
    )


def _give_own_head(copy: Any, temperature: float, *, in_fp32: bool) -> None:
    """Patch TRL's fused head into a copy of the policy. The copied forwards would use the policy's own weights."""
    copy.__dict__.pop("forward", None)
    head: Any = copy.get_output_embeddings()
    if in_fp32:

        def forward(hidden: Any) -> Any:
            return linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

        head.forward = forward
    add_fused_lm_head(copy, temperature=temperature, cast_lm_head_to_fp32=in_fp32)


def is_needed(kl: KLOptions, step: int, updates: int) -> bool:
    """Whether any update of a batch of rollouts, from `step` on, penalizes or measures the KL."""
    return kl.penalizes or any(kl.measures(step + ahead) for ahead in range(updates))


def keeping_base(model: nn.Module, sync: Callable[[], Any]) -> Callable[[], Any]:
    """A function that calls `sync` and then restores the weights of adapted layers from a copy in host memory."""
    kept = [(weight, weight.detach().to("cpu", copy=True)) for weight in adapted_weights(model)]

    @wraps(sync)
    def synced() -> Any:
        try:
            return sync()
        finally:
            with torch.no_grad():
                for weight, copy in kept:
                    weight.copy_(copy)

    return synced


def adapted_weights(model: nn.Module) -> list[Tensor]:
    """The base's tensors in layers with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    distinct: dict[int, Tensor] = {id(x): x for layer in layers for x in layer.parameters(recurse=False)}
    weights = list(distinct.values())
    if any(not weight.is_floating_point() for weight in weights):
        raise KeelError(
            "use_vllm does not work with an adapter on a quantized model: TRL merges the adapter into the base for "
            "every sync, which rounds the base and so changes the reference; load the base in bfloat16, or set "
            "use_vllm=False"
        )
    return weights


# Inputs of a vision-language model's forward in addition to the tokens. TRL stores them with the completions.
FORWARD = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def action_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The mask of tokens that the policy sampled: all of a completion except padding and tool answers."""
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

    `accumulated` is the number of microbatches of the update, None in evaluation. As in TRL's dapo, tokens are
    counted over the batch of rollouts and scaled to one update. Only bnpo's own reduction counts tokens per microbatch.
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
