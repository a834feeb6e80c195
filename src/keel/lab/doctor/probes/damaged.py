"""Weights that cannot be what was trained: rows that tell no tokens apart, matrices of a handful of values."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from keel.lab.doctor.probes.gold_likelihood import golds
from keel.lab.doctor.setup import ProbeSetup
from keel.models.head import causal_lm

ALIKE = 3  # tokens with one row between them
VALUES = 8  # of a matrix, in three bits
LOOKED_AT = 4096  # entries of a matrix


def damaged_weights(setup: ProbeSetup) -> tuple[str, str] | None:
    """Evidence and cause; None where nothing is wrong with them by their looks."""
    return _rows_alike(setup) or _few_values(setup)


def _rows_alike(setup: ProbeSetup) -> tuple[str, str] | None:
    """Ordinary tokens of prompts and answers that the embeddings do not tell apart; added ones may be untrained yet."""
    tokenizer: Any = setup.policy.tokenizer
    apart = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    used = sorted({token for gold in golds(setup) for token in (*gold.prompt, *gold.answer)} - apart)
    embeddings = causal_lm(setup.policy.model).get_input_embeddings()
    if not used or not isinstance(embeddings, torch.nn.Embedding):
        return None
    rows = embeddings.weight.detach()[torch.tensor(used, device=embeddings.weight.device)]
    _, which, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    if int(counts.max()) < ALIKE:
        return None
    same = [token for token, row in zip(used, which.tolist(), strict=True) if row == int(counts.argmax())]
    names = ", ".join(repr(tokenizer.decode([token])) for token in same[:4])
    return (
        f"{len(same)} of {len(used)} tokens of prompts and gold answers have one and the same row of the embeddings, "
        f"such as {names}",
        "rows were lost or filled up where the vocabulary was resized or merged: the model cannot tell these tokens "
        "apart",
    )


def _few_values(setup: ProbeSetup) -> tuple[str, str] | None:
    """Matrices that were rounded to a few bits with one scale; one that is constant may be a layer that was added."""
    named = causal_lm(setup.policy.model).named_parameters()
    matrices = [p for name, p in named if p.dim() == 2 and p.is_floating_point() and ".lora_" not in name]
    entries = [p.detach().flatten() for p in matrices if p.numel() > VALUES**2]
    counts = [len(row[:: max(1, len(row) // LOOKED_AT)].unique()) for row in entries]  # of all rows: each has a scale
    few = [count for count in counts if 1 < count <= VALUES]
    if not few or fmean(1 < count <= VALUES for count in counts) <= 0.5:
        return None
    return (
        f"{len(few)} of {len(counts)} matrices hold {max(few)} different values at most",
        "the weights were rounded to a few bits and read back as they were left: most of what was trained is lost",
    )
