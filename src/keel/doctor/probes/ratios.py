"""What a loss makes of old and new log-probabilities: their ratio at each token, or something else of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.types import Batch, Scores
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.losses import objective

LENGTHS = (7, 4, 5, 3)  # of made-up completions, in two groups
ADVANTAGES = (1.0, -0.5, 2.0, -1.5)
COMMON = -1.0  # log-probability of every token, at first
RARER = 4.0  # nats by which all tokens are rarer then, for both policies: no ratio changes
STEP = 0.05  # nats by which one token's old log-probability is moved, within every clip range of tokens
ROUNDING = 1e-4  # of a push


def ratio_findings(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """A loss's derivative by the log-probabilities is a function of ratios, each of a token and its own old one."""
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < lengths[:, None]
    flat = torch.full(mask.shape, COMMON)
    try:
        common, rare = (_gradient(setup, mask, logp, logp) for logp in (flat, flat - RARER))
        moved = [_moved(setup, mask, flat, token, common) for token in mask.nonzero().tolist()]
    except Exception:  # a loss of one's own may raise anything on rows that it does not expect
        return
    alive = mask & (common != 0)
    if not bool(alive.any()) or not bool(torch.stack([common, rare]).isfinite().all()):
        return
    times = figures["pushed_rare"] = float((rare[alive] / common[alive]).abs().median())
    limit, loss_name = thresholds["loss_by_probability"], f"loss.loss_type={setup.config.loss.loss_type}"
    if misplaced(moved):
        yield finding(
            "loss/clip",
            f"of {len(moved)} tokens of made-up completions none is pushed otherwise where its own old log-probability "
            f"moves by {STEP:g} nats, and another token is for {sum(bool(move.others) for move in moved)} of them",
            f"{loss_name} takes ratios to the old log-probability of another token: they are far from 1 at the first "
            "update, and what is cut or weighed by them has nothing to do with how far the policy has moved",
            "take the ratio of inputs.logp and inputs.old_logp at the same place (no roll, slice or flip of one alone)",
        )
    elif not 1 / limit <= times <= limit:
        rule = "tokens that are rare" if times > 1 else "tokens that are sure already"
        yield finding(
            "loss/scale",
            f"where all tokens are e^{RARER:g} times as rare under old and new policy alike, so that ratios stay 1, "
            f"the median token is pushed {times:.3g} times as hard (beyond {limit:g} times, or one over it)",
            f"{loss_name} weighs tokens by their probability and not by the ratio: {rule} decide the update",
            "use the ratio exp(logp − old_logp), or logp by itself; nothing, if that weight is meant",
            severity="warning",
        )


@dataclass(frozen=True)
class Move:
    """What one token's old log-probability moves: its own push, and those of how many others, in its row or not."""

    own: bool
    in_row: int
    elsewhere: int

    @property
    def others(self) -> int:
        return self.in_row + self.elsewhere


def misplaced(moves: list[Move]) -> bool:
    """Whether old log-probabilities move one other token each, or other completions alone, and never their own.

    What comes before a token may weigh it, and then moves all that follow.
    """
    away = all(move.in_row <= 1 for move in moves) and any(move.others for move in moves)
    return away and not any(move.own for move in moves)


def _moved(setup: KeelSubject, mask: Tensor, logp: Tensor, token: list[int], before: Tensor) -> Move:
    row, column = token
    old = logp.clone()
    old[row, column] -= STEP
    change = (_gradient(setup, mask, logp, old) - before).abs() > ROUNDING * before.abs().max()
    own, in_row = bool(change[row, column]), int(change[row].sum())
    return Move(own, in_row - own, int(change.sum()) - in_row)


def _gradient(setup: KeelSubject, mask: Tensor, logp: Tensor, old: Tensor) -> Tensor:
    """∂loss/∂logp of made-up completions, at β = 0."""
    device = setup.mask.device
    logp = logp.clone().to(device).requires_grad_()
    rows = Batch(
        action_mask=mask.to(device),
        advantages=torch.tensor(ADVANTAGES, device=device),
        old_logp=old.to(device),
        ref_logp=logp.detach(),
        group=torch.arange(len(mask), device=device) // 2,
    )
    out = objective(
        Scores(logp, torch.zeros_like(logp), torch.zeros_like(logp)),
        rows,
        setup.run.loss,
        setup.run.kl,
        0.0,
        pairing=setup.run.pairing,
        max_completion_length=max(LENGTHS),
    )
    if not out.loss.requires_grad:
        return torch.zeros(mask.shape)
    (gradient,) = torch.autograd.grad(out.loss, logp, allow_unused=True)
    return torch.zeros(mask.shape) if gradient is None else gradient.cpu()
