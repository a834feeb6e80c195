"""Options of the policy loss: `loss`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from keel.base.options import Above0, Flag, Float, NotNegative, Options, Positive, Share
from keel.losses.sapo import SapoOptions


class MismatchOptions(Options):
    """Weights that repair the difference between the engine that sampled and the model that trains."""

    kind: Literal["none", "truncate", "mask", "icepop"] = Field(
        default="truncate", description="Truncate the weight, mask what is above the cap, or mask outside [floor, cap]."
    )
    cap: Annotated[Float, Field(ge=1)] = Field(default=2.0, description="Largest weight, a ratio of probabilities.")
    floor: Share | None = Field(default=None, description="Smallest weight under icepop, a ratio of probabilities.")
    level: Literal["token", "sequence"] = Field(default="token", description="Weights per token or per sequence.")


class SharedLossOptions(Options):
    """What every policy loss has."""

    loss_type: str = Field(
        default="grpo",
        description="policy_gradient, grpo, bnpo, dr_grpo, dapo, gspo, cispo, gmpo, sapo, or module:attr.",
    )
    epsilon: NotNegative | None = Field(
        default=None, description="Clip range below 1, a ratio; null is the loss's own."
    )
    epsilon_high: NotNegative | None = Field(
        default=None, description="Clip range above 1 (cispo: the cap itself); null is epsilon, or the loss's own."
    )
    delta: Above0 | None = Field(default=None, description="Cap of the ratio on the unclipped side; null for none.")
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        default=None,
        description="Divide advantages by the group's or the batch's deviation, or not; null is the loss's own.",
    )
    baseline: Literal["group_mean", "leave_one_out", "none"] = Field(
        default="group_mean", description="What a reward is compared with: its group's mean, the others' mean, or 0."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Ratios per token or per sequence; null is the loss's own."
    )
    num_iterations: Positive = Field(default=1, description="Passes of updates over each batch of rollouts.")
    mask_truncated_completions: Flag = Field(
        default=False, description="Leave completions that were cut off out of the policy term; their KL penalty stays."
    )
    dynamic_sampling: Flag = Field(
        default=False, description="Sample further problems in place of groups with equal rewards; their KL stays."
    )
    dynamic_sampling_rounds: Positive = Field(default=3, description="Most further rounds of sampling a step.")
    entropy_coef: NotNegative = Field(default=0.0, description="Coefficient of the entropy bonus, per nat per token.")

    @property
    def further_rounds(self) -> int:
        """Further rounds of sampling that a step may take; 0 without dynamic sampling."""
        return self.dynamic_sampling_rounds if self.dynamic_sampling else 0


class LossOptions(SapoOptions, SharedLossOptions):
    """The policy loss; the parameters of a user's own stand beside the rest (`keel.losses.policy.declared_options`)."""

    model_config = ConfigDict(extra="allow")

    mismatch: MismatchOptions = Field(default=MismatchOptions(), description="Correction of the sampler's mismatch.")
