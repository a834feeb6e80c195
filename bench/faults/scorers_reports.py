"""Scorers as their users report them: windows, softmaxes, adapters that stay off, prompts without a gradient."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.base import edited, lookalike, option, path_of
from faults.scorers import given, is_scored_natively, logits_of, picked, right, scorer_fault
from faults.scorers_passes import _trains_all
from keel.models.scorer import ScoreRows

# What is attended to


def sliding_window(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Each token attends to as many before it as a quarter of the shortest prompt has."""
    window = max(2, int(rows.prompt_lengths.min()) // 4)
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    behind = places[:, None] - places[None]
    near = (behind >= 0) & (behind < window)
    seen = near[None, None] & rows.attention_mask[:, None, None].bool()
    mask = (~seen).to(next(model.parameters()).dtype) * -1e9
    return given(model, rows, temperature, attention_mask=mask)


scorer_fault(
    "scorer/sliding-window",
    "the training pass attends to a window of a few tokens, sampling to all",
    "mask/attention",
    "scoring/mismatch",
    scorers=[sliding_window],
)

# Which numbers


def softmax_over_the_sequence(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Logits are normalised over the places of a row in place of the vocabulary."""
    return picked((logits_of(model, rows) / temperature).log_softmax(1), rows)


scorer_fault(
    "scorer/softmax-over-the-sequence",
    "the softmax runs over the places of a row, the wrong dimension, and not over the vocabulary",
    "scoring/mismatch",
    scorers=[softmax_over_the_sequence],
)

# Which gradient


def prompt_without_gradient(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Keys and values of the prompt are shared by its group and have no gradient."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    shared = (places < rows.prompt_lengths[:, None])[..., None]
    parts = [part for name, part in model.named_modules() if name.endswith(("k_proj", "v_proj"))]
    hooks = [part.register_forward_hook(lambda m, i, out: torch.where(shared, out.detach(), out)) for part in parts]
    try:
        return right(model, rows, temperature=temperature)
    finally:
        for hook in hooks:
            hook.remove()


def adapter_off(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The adapter, switched off for the reference, is never switched on again."""
    whole: Any = model
    with whole.disable_adapter():
        logp = right(model, rows, temperature=temperature)
    return logp.detach() + 0.0 * right(model, rows, temperature=temperature)


scorer_fault(
    "scorer/prompt-without-gradient",
    "the prompt is passed once for its whole group and without a gradient, so that nothing learns to read it",
    "scoring/gradient",
    scorers=[prompt_without_gradient],
    fits=_trains_all,
)
scorer_fault(
    "scorer/adapter-off",
    "training scores with the adapter switched off, as the reference's pass has left it, and so trains nothing",
    "scoring/gradient",
    "scoring/mismatch",
    "optim/no-update",
    "loss/no-gradient",
    scorers=[adapter_off],
    fits=lambda config: is_scored_natively(config) and option(config, "model.lora") is not None,
)

# Healthy


def under_checkpointing(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The pass is computed once more on the way back."""
    if not torch.is_grad_enabled():
        return right(model, rows, temperature=temperature)

    def passed(tokens: Tensor) -> Tensor:
        return picked((logits_of(model, rows) / temperature).log_softmax(-1), rows)

    scored: Tensor = checkpoint(passed, rows.tokens, use_reentrant=False)
    return scored


@lookalike("scorer that computes its pass once more on the way back", is_scored_natively)
def healthy_checkpointing(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(under_checkpointing)})
