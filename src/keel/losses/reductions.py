"""From per-token terms to one number, with denominators that were counted over the global batch beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.ratios import check_mask, select


@dataclass(frozen=True)
class Denominators:
    """What a minibatch is divided by. Counted before the microbatch loop, so that any split gives the same loss.

    `sequences` and `tokens` span all ranks; `local_tokens` this rank only (bnpo's mean), `ranks` how many there are.
    """

    sequences: float
    tokens: float
    local_tokens: float
    ranks: int = 1
    max_completion_length: int | None = None


def count_denominators(mask: Tensor, max_completion_length: int | None = None) -> Denominators:
    """Sequences and tokens of a minibatch `[B, T]`, summed over ranks with one all-reduce when distributed."""
    check_mask(mask, mask.shape)
    local = torch.tensor([float(mask.shape[0]), float(mask.sum())], dtype=torch.float64, device=mask.device)
    local_tokens, ranks = local[1].item(), 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(local)
        ranks = torch.distributed.get_world_size()
    return Denominators(local[0].item(), local[1].item(), local_tokens, ranks, max_completion_length)


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    check_mask(mask, values.shape)
    return select(values, mask)


def sequence_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over each sequence's tokens, then over sequences (DeepSeekMath): a long answer's token weighs less."""
    per_sequence = _selected(values, mask).sum(-1) / mask.sum(-1).clamp_min(1)
    return per_sequence.sum() / max(by.sequences, 1.0)


def token_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over all tokens of the global batch (DAPO)."""
    return _selected(values, mask).sum() / max(by.tokens, 1.0)


def local_token_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over this rank's tokens, averaged over ranks (BNPO)."""
    return _selected(values, mask).sum() / (max(by.local_tokens, 1.0) * by.ranks)


def constant(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Sum over a constant, sequences × max_completion_length (Dr. GRPO): no length bias."""
    if not by.max_completion_length or by.max_completion_length < 1:
        raise KeelError(
            "the constant reduction (dr_grpo) needs max_completion_length: set rollout.max_completion_length"
        )
    return _selected(values, mask).sum() / (max(by.sequences, 1.0) * by.max_completion_length)


Reduction = Callable[[Tensor, Tensor, Denominators], Tensor]
REDUCTIONS: dict[str, Reduction] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "local_token_mean": local_token_mean,
    "constant": constant,
}


def get_reduction(name: str) -> Reduction:
    """The reduction of that name."""
    if name not in REDUCTIONS:
        raise unknown("reduction", name, REDUCTIONS)
    return REDUCTIONS[name]
