"""Options of the KL term: `kl`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.base.options import Above0, Count, Flag, Float, NotNegative, Options, PluginOptions, as_number


class ControllerOptions(PluginOptions):
    """The controller of β and its own parameters."""

    name: str = Field(
        default="fixed",
        description="fixed, warmup, linear, cosine, step, ziegler, dual, pid; its parameters beside it.",
    )


class KLBudget(Options):
    """The KL that a run may spend: its mean may not pass `max`, its 95th percentile not twice that."""

    max: Above0 = Field(description="Largest mean KL to the reference, in `unit`.")
    unit: Literal["per_token", "per_sequence"] = Field(
        default="per_token", description="Nats per token or per sequence."
    )
    action: Literal["warn", "stop", "rollback"] = Field(default="stop", description="What happens when it is broken.")


def _budget(value: Any) -> Any:
    """A bare number is the largest mean KL in nats per token."""
    value = as_number(value) if not isinstance(value, dict) else value
    return {"max": value} if isinstance(value, int | float) else value


class KLOptions(Options):
    """The KL term: how it is estimated, where it acts, how strongly."""

    beta: NotNegative = Field(
        default=0.0, description="Coefficient of the KL penalty; 0 means none, KL is still measured."
    )
    estimator: str = Field(
        default="k3", description="Estimator of the penalty: k1, k2, k3, abs, exact, exact_reverse, or module:attr."
    )
    gradient: str = Field(default="auto", description="Gradient form; auto picks one that is right for this pairing.")
    placement: Literal["loss", "reward", "advantage"] = Field(default="loss", description="Where the penalty enters.")
    level: Literal["token", "sequence"] = Field(
        default="token", description="A token answers for its own KL, or for that of the sequence."
    )
    reduction: Literal["token_mean", "loss"] = Field(
        default="token_mean",
        description="Mean over all action tokens, so β means the same under every loss; or the loss's own.",
    )
    log_ratio_clamp: Above0 | None = Field(
        default=20.0, description="Log-ratios are held within ± this many nats; null for no limit."
    )
    ratio_cap: Annotated[Float, Field(ge=1)] | None = Field(
        default=None,
        description="Largest importance weight of the KL term when a batch serves several updates; null: none.",
    )
    exact: Flag = Field(
        default=False, description="Also compute the exact KL over the whole vocabulary, nats per token."
    )
    measure_every: Count = Field(default=1, description="Steps between measurements of the KL; 0 is never.")
    collect_max: Above0 | None = Field(
        default=None,
        description="A completion above this KL (nats per token) leaves the policy term and keeps its KL penalty.",
    )
    allow_biased: Flag = Field(default=False, description="Run pairings whose expected gradient is zero or wrong.")
    controller: ControllerOptions = Field(default=ControllerOptions(), description="What sets β over time.")
    budget: Annotated[KLBudget | None, BeforeValidator(_budget)] = Field(
        default=None, description="Largest KL of the run: nats per token, or {max, unit, action}; null for no limit."
    )

    @property
    def penalizes(self) -> bool:
        """Whether β is ever above 0: from the start, or because a controller may raise it."""
        return self.beta > 0 or self.controller.name != "fixed"

    @property
    def needs_exact(self) -> bool:
        """Whether the full-vocabulary KL is computed, because it is asked for or because the penalty is made of it."""
        return self.exact or self.estimator.startswith("exact")
