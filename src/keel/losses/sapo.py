"""SAPO (2511.20347): a soft gate in place of a clip, and its own options."""

from __future__ import annotations

import torch
from pydantic import Field

from keel.base.options import Above0, Options
from keel.losses.inputs import LossInputs, PolicyTerm


class SapoOptions(Options):
    """The gate's steepness."""

    sapo_temperature_pos: Above0 = Field(
        default=1.0, description="Steepness of sapo's gate where the advantage is positive."
    )
    sapo_temperature_neg: Above0 = Field(default=1.05, description="Steepness of sapo's gate where it is negative.")


def sapo(inputs: LossInputs, options: SapoOptions) -> PolicyTerm:
    """−(4/τ)·σ(τ(ρ−1))·A (SAPO 2511.20347): a soft gate instead of a clip; τ differs with the advantage's sign."""
    ratio = inputs.ratio()
    tau = torch.where(inputs.advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return PolicyTerm(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages, ratio)
