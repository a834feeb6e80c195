"""Scorers of every day: a mask on the other side, the wrong part of a row, a temperature of somewhere else."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.base import edited, lookalike, path_of
from faults.scorers import is_scored_natively, logits_of, right, scorer_fault
from keel.models.scorer import ScoreRows

MULTIPLE = 64  # what widths are padded to


def padded_on_the_left(model: nn.Module, rows: ScoreRows, temperature: float, is_moved: bool) -> Tensor:
    """Log-probabilities of rows that stand at the right end of a width that is a multiple of 64."""
    lengths, width = rows.attention_mask.sum(1), rows.tokens.shape[1]
    wide = -(-(width + 1) // MULTIPLE) * MULTIPLE
    places = torch.arange(wide, device=rows.tokens.device)[None] - (wide - lengths)[:, None]
    real = places >= 0
    tokens = torch.where(real, rows.tokens.gather(1, places.clamp(0, width - 1)), 0)
    mask = real if is_moved else real.flip(1)
    logp = (
        model(tokens, attention_mask=mask.long(), position_ids=places.clamp_min(0)).logits[:, :-1].float() / temperature
    ).log_softmax(-1)
    scored = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    back = torch.arange(width - 1, device=scored.device)[None] + (wide - lengths)[:, None]
    return rows.completion(scored.gather(1, back.clamp_max(wide - 2)))


def mask_on_the_other_side(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return padded_on_the_left(model, rows, temperature, is_moved=False)


def left_padding_masked(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return padded_on_the_left(model, rows, temperature, is_moved=True)


def the_prompts_part(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Log-probabilities from the row's first token on, as many as a completion has."""
    logp = (logits_of(model, rows) / temperature).log_softmax(-1)
    scored = logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1)
    width = rows.completion_mask.shape[1]
    first = functional.pad(scored, (0, max(0, width - scored.shape[1])))[:, :width]
    return first * rows.completion_mask


def temperature_of_the_evaluation(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return right(model, rows, temperature=0.5)


scorer_fault(
    "scorer/mask-padded-on-the-other-side",
    "rows are padded on the left and their masks on the right, so that padding is attended to and text is not",
    "mask/attention",
    "scoring/mismatch",
    scorers=[mask_on_the_other_side],
)
scorer_fault(
    "scorer/prompts-part-of-the-row",
    "the part that is cut out of a row begins at its first token: the prompt's log-probabilities are trained on",
    "scoring/shifted",
    "scoring/mismatch",
    scorers=[the_prompts_part],
)
scorer_fault(
    "scorer/temperature-of-the-evaluation",
    "log-probabilities are taken at the temperature of the evaluation, a half, and not at that of the rollout",
    "scoring/temperature",
    scorers=[temperature_of_the_evaluation],
    also={"rollout.temperature": (1.0, 1.2)},
)


# Healthy


@lookalike("scorer that pads rows on the left to a multiple of 64, and masks it", is_scored_natively)
def healthy_left_padding(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(left_padding_masked)})
