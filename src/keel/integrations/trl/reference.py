"""The reference of a policy that TRL has prepared: a copy with a head of its own, or the adapters off."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear
from trl.trainer.utils import add_fused_lm_head

from keel.kl import KLOptions
from keel.models.head import causal_lm, head_of
from keel.models.load import LoadedModel
from keel.reference import Reference, build_reference
from keel.reference.options import ReferenceOptions


def reference_of(trainer: Any, options: ReferenceOptions, *, exact: bool) -> Reference:
    """The reference of the trainer's policy as it is now; `exact`: the KL over the vocabulary is taken from it."""
    policy, tokenizer = trainer.model, trainer._tokenizer
    loaded = LoadedModel(
        model=policy,
        tokenizer=tokenizer,
        name=str(getattr(policy.config, "_name_or_path", "")),
        context_length=None,
        eos_ids=tuple(trainer.eos_token_ids),
        pad_id=tokenizer.pad_token_id,
        device=trainer.accelerator.device,
        dtype=policy.dtype,
    )
    reference = build_reference(options.kind, loaded, **options.params)
    with reference.model() as model:
        inner = causal_lm(model)
        if inner is not causal_lm(policy):
            _give_own_head(inner, trainer.temperature, in_fp32=trainer.args.cast_lm_head_to_fp32)
        if exact:  # measured now: later accelerate runs the forward in mixed precision
            head_of(model), head_of(policy)
    return reference


def _give_own_head(copy: Any, temperature: float, *, in_fp32: bool) -> None:
    """TRL's fused head on a copy of the policy, whose patched forwards still run the policy's weights."""
    copy.__dict__.pop("forward", None)
    head: Any = copy.get_output_embeddings()
    if in_fp32:

        def forward(hidden: Any) -> Any:
            return linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

        head.forward = forward
    add_fused_lm_head(copy, temperature=temperature, cast_lm_head_to_fp32=in_fp32)


def is_needed(kl: KLOptions, step: int, updates: int) -> bool:
    """Whether a batch of rollouts is penalized or measured at any of the updates that it serves, from `step` on."""
    return kl.penalizes or any(kl.measures(step + ahead) for ahead in range(updates))
