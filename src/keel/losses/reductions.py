"""Reductions of per-token terms, with denominators counted over the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.base.metrics import Number
from keel.kl.ratios import check_mask, select


@dataclass(frozen=True)
class Denominators:
    """A minibatch's denominators, counted over all processes before the microbatch loop, so that the loss does not
    depend on the split into microbatches.

    Counts of a mask are tensors on the mask's device.
    """

    sequences: Number
    tokens: Number
    max_completion_length: int | None = None


def count_denominators(
    mask: Tensor, max_completion_length: int | None = None, weight: Tensor | None = None
) -> Denominators:
    """Count sequences and tokens of a minibatch `[B, T]`. An episode's rows count as one: their `weight` sums to 1."""
    check_mask(mask, mask.shape)
    sequences = float(len(mask)) if weight is None else weight.sum().double()
    return Denominators(sequences, mask.sum().double(), max_completion_length)


def divide(total: Tensor, count: Number) -> Tensor:
    """total / max(count, 1), in the type of `total`."""
    return total / (count.clamp_min(1.0).to(total.dtype) if isinstance(count, Tensor) else max(count, 1.0))


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    check_mask(mask, values.shape)
    return select(values, mask)


def sequence_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over each sequence's tokens, then over sequences (DeepSeekMath). Tokens of long answers have less weight."""
    per_sequence = _selected(values, mask).sum(-1) / mask.sum(-1).clamp_min(1)
    return divide(per_sequence.sum(), by.sequences)


def token_mean(values: Tensor, mask: Tensor, by: Denominators) -> Tensor:
    """Mean over all tokens of the minibatch (DAPO, BNPO)."""
    return divide(_selected(values, mask).sum(), by.tokens)


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
    "constant": constant,
}


def get_reduction(name: str, weight: Tensor | None = None) -> Reduction:
    """The named reduction. With `weight`, the sum of an episode's row means is the mean over its tokens."""
    if name not in REDUCTIONS:
        raise unknown("reduction", name, REDUCTIONS)
    if weight is None or name != "sequence_mean":
        return REDUCTIONS[name]
    return lambda values, mask, by: sequence_mean(values * weight.unsqueeze(-1).to(values.dtype), mask, by)
