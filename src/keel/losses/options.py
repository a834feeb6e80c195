"""Options of the policy loss: `loss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from keel.base.errors import KeelError
from keel.base.options import (
    Flag,
    Float,
    Fraction,
    NonNegativeFloat,
    Options,
    PositiveFloat,
    PositiveInt,
    RequiresOption,
)

CORRECTING_KINDS = ("truncate", "mask", "icepop")


@dataclass(frozen=True)
class Limits:
    """The resolved limits of a loss: the clip range around 1, and the level of the ratios."""

    low: float
    high: float
    level: str


class MismatchOptions(Options):
    """Importance weights that correct for the difference between sampler and trained model."""

    kind: Literal["none", "truncate", "mask", "icepop"] = Field(
        default="truncate",
        description="truncate: limit weights to cap; mask: drop tokens above cap; icepop: drop tokens outside "
        "[floor, cap]; none.",
    )
    cap: Annotated[Float, Field(ge=1), RequiresOption("kind", CORRECTING_KINDS)] = Field(
        default=2.0, description="Largest weight, a ratio of probabilities policy/sampler."
    )
    floor: Fraction | None = Field(
        default=None, description="Smallest weight of icepop, a ratio of probabilities policy/sampler."
    )
    level: Annotated[Literal["token", "sequence"], RequiresOption("kind", CORRECTING_KINDS)] = Field(
        default="token", description="Weights per token or per sequence."
    )


class SharedLossOptions(Options):
    """Options of every policy loss."""

    loss_type: str = Field(
        default="grpo",
        description="policy_gradient, grpo, bnpo, dr_grpo, dapo, gspo, cispo, gmpo, sapo, or module:attr.",
    )
    policy_weight: NonNegativeFloat = Field(
        default=1.0, description="Weight of the policy term; 0 trains with the KL term alone, as in distillation."
    )
    epsilon: NonNegativeFloat | None = Field(
        default=None, description="Clip range below a ratio of 1; null: the loss's default."
    )
    epsilon_high: NonNegativeFloat | None = Field(
        default=None,
        description="Clip range above a ratio of 1 (cispo: the cap itself); null: epsilon, or the loss's default.",
    )
    delta: PositiveFloat | None = Field(
        default=None, description="Largest ratio on the side without a clip; null: no limit."
    )
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        default=None,
        description="Divide advantages by the standard deviation of the group or batch; none: no division; "
        "null: as the loss.",
    )
    baseline: Literal["group_mean", "leave_one_out", "none"] = Field(
        default="group_mean",
        description="Subtracted from rewards: the group's mean, the mean of the other completions, or nothing.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Ratios per token or per sequence; null: the loss's default."
    )
    num_iterations: PositiveInt = Field(default=1, description="Passes of updates over each batch of rollouts.")
    mask_truncated_completions: Flag = Field(
        default=False, description="Leave truncated completions out of the policy term; they keep their KL penalty."
    )
    dynamic_sampling: Flag = Field(
        default=False,
        description="Draw new problems in place of groups with equal rewards (DAPO); the replaced groups stay in the "
        "KL term only.",
    )
    dynamic_sampling_rounds: Annotated[PositiveInt, RequiresOption("dynamic_sampling", (True,))] = Field(
        default=3, description="Maximum further rounds of sampling per step."
    )
    entropy_coef: NonNegativeFloat = Field(
        default=0.0, description="Coefficient of the entropy bonus, per nat per token."
    )

    @property
    def further_rounds(self) -> int:
        """The maximum number of additional sampling rounds per step; 0 without dynamic sampling."""
        return self.dynamic_sampling_rounds if self.dynamic_sampling else 0


class SapoOptions(Options):
    """The steepness of sapo's gate."""

    sapo_temperature_pos: PositiveFloat = Field(
        default=1.0, description="Steepness of sapo's gate where the advantage is positive."
    )
    sapo_temperature_neg: PositiveFloat = Field(
        default=1.05, description="Steepness of sapo's gate where the advantage is negative."
    )


class LossOptions(SapoOptions, SharedLossOptions):
    """The policy loss. A user's own loss adds its options (`keel.losses.recipes.declared_options`)."""

    model_config = ConfigDict(extra="allow")
    named_by = "loss_type"
    of_parts = frozenset(SapoOptions.model_fields) - frozenset(SharedLossOptions.model_fields)

    mismatch: MismatchOptions = Field(default=MismatchOptions(), description="Correction of the sampler mismatch.")


def check_mismatch(options: MismatchOptions) -> None:
    """Refuse icepop without a floor, and any other kind with a floor."""
    if options.kind == "icepop" and options.floor is None:
        raise KeelError("loss.mismatch.kind=icepop needs a floor between 0 and 1: the paper uses floor 0.5, cap 5")
    if options.kind != "icepop" and options.floor is not None:
        raise KeelError(f"loss.mismatch.floor does not apply to kind={options.kind}: use kind=icepop")
