"""The defect of docs/cases.md as a scorer: one 0/1 vector is the loss mask and the attention mask.

PYTHONPATH=examples keel doctor configs/musique_small.yaml model.scorer=one_mask:score kl.estimator=k3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def score(model: Any, rows: Any, *, temperature: float) -> Tensor:
    """Log-probabilities by a pass that sees the policy's own tokens and neither the prompt nor what tools returned."""
    trained = torch.zeros_like(rows.attention_mask)
    for row, start in enumerate(rows.prompt_lengths.tolist()):
        marks = rows.action_mask[row, : trained.shape[1] - start].to(trained.dtype)
        trained[row, start : start + len(marks)] = marks
    logits = model(input_ids=rows.tokens, attention_mask=trained, position_ids=rows.position_ids).logits
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    return rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))
