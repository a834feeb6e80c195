"""From per-token terms to one number, with denominators that were counted over the global batch beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.base.metrics import Number
from keel.kl.ratios import check_mask, select


@dataclass(frozen=True)
class Denominators:
    """What a minibatch is divided by. Counted before the microbatch loop, so that any split gives the same loss.

    `sequences` and `tokens` span all ranks; `local_tokens` this rank only (bnpo's mean), `ranks` how many there are.
    A count of a mask stays a tensor on the mask's device.
    """

    sequences: Number
    tokens: Number
    local_tokens: Number
    ranks: int = 1
    max_completion_length: int | None = None


def count_denominators(mask: Tensor, max_completion_length: int | None = None) -> Denominators:
    """Sequences and tokens of a minibatch `[B, T]`, summed over ranks with one all-reduce when distributed."""
    check_mask(mask, mask.shape)
    local_tokens = mask.sum().double()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Denominators(float(len(mask)), local_tokens, local_tokens, 1, max_completion_length)
    counts = torch.stack((torch.full_like(local_tokens, len(mask)), local_tokens))
    torch.distributed.all_reduce(counts)
    ranks = torch.distributed.get_world_size()
    return Denominators(counts[0], counts[1], local_tokens, ranks, max_completion_length)


def divide(total: Tensor, count: Number) -> Tensor:
    """total / max(count, 1), in the total's own type."""
    return total / (count.clamp_min(1.0).to(total.dtype) if isinstance(count, Tensor) else max(count, 1.0))


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    check_mask(mask, values.shape)
    return select(values, mask)


def sequence_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over each sequence's tokens, then over sequences (DeepSeekMath): a long answer's token weighs less."""
    per_sequence = _selected(values, mask).sum(-1) / mask.sum(-1).clamp_min(1)
    return divide(per_sequence.sum(), by.sequences)


def token_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over all tokens of the global batch (DAPO)."""
    return divide(_selected(values, mask).sum(), by.tokens)


def local_token_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over this rank's tokens, averaged over ranks (BNPO)."""
    return divide(_selected(values, mask).sum(), by.local_tokens * by.ranks)


def constant(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Sum over a constant, sequences × max_completion_length (Dr. GRPO): no length bias."""
    if not by.max_completion_length or by.max_completion_length < 1:
        raise KeelError(
            "the constant reduction (dr_grpo) needs max_completion_length: set rollout.max_completion_length"
        )
    return divide(_selected(values, mask).sum(), by.sequences * by.max_completion_length)


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
