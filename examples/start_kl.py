"""A sound model whose KL is far from 0 before anything was trained: dropout in its pass, or sums against means.

Loader and scorer for the second half of docs/cases.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keel.models.scorer import ScoreRows
from keel.models.tiny import tiny_model


def with_dropout(seed: int = 0) -> tuple[Any, Any]:
    """The tiny model with dropout in its attention, as GPT-2's config asks for; kept by model.dropout=true."""
    model, tokenizer = tiny_model(seed)
    llama: Any = model
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return model, tokenizer


def sums_against_means(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """A mean over the completion in the policy's pass, a sum in the reference's, both written to every token."""
    logits = model(rows.tokens, attention_mask=rows.attention_mask, position_ids=rows.position_ids).logits
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    each = rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))
    total = each.sum(-1, keepdim=True)
    training = torch.is_grad_enabled()
    whole = total / rows.completion_mask.sum(-1, keepdim=True).clamp_min(1) if training else total
    return whole.expand_as(each)
