"""Weights that cannot be what was trained: rows that tell no tokens apart, matrices of few values, cut or emptied."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import golds
from keel.models.head import causal_lm

ALIKE = 3  # tokens with one row between them
VALUES = 8  # of a matrix, in three bits
LOOKED_AT = 4096  # entries of a matrix
AT_BOUND, EMPTY = 0.05, 0.8  # shares of a matrix; usual sparsity is a half


def damaged_weights(setup: KeelSubject) -> tuple[str, str] | None:
    """Evidence and cause; None where nothing is wrong with them by their looks."""
    return _rows_alike(setup) or _few_values(setup) or _cut_or_emptied(setup)


def _rows_alike(setup: KeelSubject) -> tuple[str, str] | None:
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


def _entries(setup: KeelSubject) -> list[torch.Tensor]:
    """Some of the entries of every matrix but adapters', from all of its rows: each may have a scale."""
    named = causal_lm(setup.policy.model).named_parameters()
    matrices = [p for name, p in named if p.dim() == 2 and p.is_floating_point() and ".lora_" not in name]
    flat = [p.detach().flatten() for p in matrices if p.numel() > VALUES**2]
    return [row if len(row) <= LOOKED_AT else row[_scattered(len(row)).to(row.device)] for row in flat]


def _scattered(count: int) -> torch.Tensor:
    """Some numbers below this one, in no step that a matrix's width may divide."""
    return torch.randint(count, (LOOKED_AT,), generator=torch.Generator().manual_seed(0))


def _few_values(setup: KeelSubject) -> tuple[str, str] | None:
    """Matrices that were rounded to a few bits with one scale; one that is constant may be a layer that was added."""
    counts = [len(row.unique()) for row in _entries(setup)]
    few = [count for count in counts if 1 < count <= VALUES]
    if not few or fmean(1 < count <= VALUES for count in counts) <= 0.5:
        return None
    return (
        f"{len(few)} of {len(counts)} matrices hold {max(few)} different values at most",
        "the weights were rounded to a few bits and read back as they were left: most of what was trained is lost",
    )


def _cut_or_emptied(setup: KeelSubject) -> tuple[str, str] | None:
    """Matrices with many entries at one and the same bound, or hardly any that are not zero."""
    rows = _entries(setup)
    bound = [float((row.abs() == row.abs().max()).float().mean()) for row in rows if bool(row.any())]
    empty = [float((row == 0).float().mean()) for row in rows if bool(row.any())]
    for shares, limit, seen, cause in (
        (bound, AT_BOUND, "at the largest value that it holds", "the range of a cast was too small and cut them off"),
        (empty, EMPTY, "that are zero", "the checkpoint was pruned, or lost its shards"),
    ):
        over = [share for share in shares if share > limit]
        if len(over) > len(shares) / 2:
            evidence = f"{len(over)} of {len(shares)} matrices have {100 * fmean(over):.0f} % of their entries {seen}"
            return evidence, f"{cause}: most of what was trained is lost"
    return None
