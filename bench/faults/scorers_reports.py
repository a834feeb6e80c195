"""Scorers as their users report them: windows, norms, adapters that stay off, prompts without a gradient."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.base import edited, lookalike, option, path_of
from faults.scorers import given, is_scored_natively, logits_of, picked, right, scorer_fault
from faults.scorers_passes import _last_hidden, _trains_all, _with_head
from keel.models.scorer import ScoreRows

# What is attended to


def sliding_window(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Each token attends to as many before it as half of the shortest prompt has."""
    window = max(3, int(rows.prompt_lengths.min()) // 2)
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


def normed_twice(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The last hidden states, which are normed already, go through the last norm once more."""
    whole: Any = model
    hidden = whole.model.norm(_last_hidden(model, rows))
    return _with_head(hidden, whole.get_output_embeddings().weight, rows, temperature)


scorer_fault(
    "scorer/normed-twice",
    "the head of a fused kernel is put on hidden states that went through the last norm twice",
    "scoring/mismatch",
    scorers=[normed_twice],
    fits=_trains_all,
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
