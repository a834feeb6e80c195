"""The reference of a policy that TRL has prepared: a copy with its own head, or the policy with disabled adapters.

For each sync, TRL merges the LoRA adapter for its sampler and unmerges it again. In floating point (W + Δ) − Δ is not
W, so every sync would change the base slightly, and with it the reference. Keel therefore restores the base bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from trl.trainer.utils import add_fused_lm_head

from keel.base.errors import KeelError
from keel.kl import KLOptions
from keel.models.head import causal_lm, head_of
from keel.models.loaded import LoadedModel
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
            "use_vllm with an adapter on a quantized model: TRL merges the adapter into the base for every sync, which "
            "rounds the base anew each time and moves the reference; load the base in bfloat16, or give use_vllm=False"
        )
    return weights
