"""Options of the KL term: `kl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.base.errors import KeelError
from keel.base.options import (
    Flag,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PluginOptions,
    PositiveFloat,
    PositiveInt,
    RequiresOption,
    as_number,
)
from keel.kl.facts import Fact, Pairing, check_pairing, over_vocabulary, term_reduction

DEFAULT_CLAMP = 20.0  # nats; e^20 is finite in fp32 and fp64: overflow protection only


class ControllerOptions(PluginOptions):
    """The controller of β and its own parameters."""

    name: str = Field(
        default="fixed",
        description="fixed, warmup, linear, cosine, step, ziegler, dual, pid; its parameters beside it.",
    )


class KLBudget(Options):
    """The KL budget of a run. The mean may not exceed `max`, and the 95th percentile may not exceed twice `max`."""

    max: PositiveFloat = Field(description="Largest mean KL to the reference, in `unit`.")
    unit: Literal["per_token", "per_sequence"] = Field(
        default="per_token", description="Nats per token or per sequence."
    )
    action: Literal["warn", "stop", "rollback"] = Field(
        default="stop", description="What the run does when the KL exceeds the budget."
    )


def _budget(value: Any) -> Any:
    """Convert a plain number, which is the largest mean KL in nats per token."""
    value = as_number(value) if not isinstance(value, dict) else value
    return {"max": value} if isinstance(value, int | float) else value


class KLTermOptions(Options):
    """One KL term: estimator, placement and coefficient."""

    beta: NonNegativeFloat = Field(
        default=0.0,
        description="Coefficient of the KL penalty; at 0 there is no penalty, and the KL is still measured.",
    )
    estimator: str = Field(
        default="k3",
        description="Estimator of the penalty: k1, k2, k3, abs, exact, exact_reverse, jsd, topk, "
        "topk_unbiased, or module:attr.",
    )
    gradient: str = Field(
        default="auto",
        description="Gradient form, such as plain, k2 or sg_rho*k2; auto selects a correct one for the estimator.",
    )
    placement: Literal["loss", "reward", "advantage"] = Field(default="loss", description="Where the penalty enters.")
    level: Literal["token", "sequence"] = Field(
        default="token",
        description="token: each token is penalised for its own KL; sequence: also for the KL of later tokens.",
    )
    reduction: Literal["token_mean", "loss"] = Field(
        default="token_mean",
        description="token_mean: over all action tokens, so β means the same under every loss; loss: as the loss does.",
    )
    log_ratio_clamp: PositiveFloat | None = Field(
        default=DEFAULT_CLAMP, description="Log-ratios are clamped to ± this many nats; null: no limit."
    )
    jsd_weight: Annotated[Float, Field(gt=0, lt=1), RequiresOption("estimator", ("jsd",))] = Field(
        default=0.5, description="The reference's weight in the mixture of jsd, between 0 and 1; 0.5 is symmetric."
    )
    topk: Annotated[PositiveInt, RequiresOption("estimator", ("topk", "topk_unbiased"))] = Field(
        default=64, description="k of topk and topk_unbiased: the policy's most likely tokens."
    )
    ratio_cap: Annotated[Float, Field(ge=1)] | None = Field(
        default=None,
        description="Largest importance weight of the KL term on off-policy samples; null: no limit.",
    )
    exact: Flag = Field(
        default=False, description="Also compute the exact KL over the whole vocabulary, nats per token."
    )
    allow_biased: Flag = Field(default=False, description="Run pairings whose expected gradient is zero or wrong.")
    controller: ControllerOptions = Field(default=ControllerOptions(), description="The controller of β.")

    @property
    def penalizes(self) -> bool:
        """Whether β is, or may become, positive."""
        return self.beta > 0 or self.controller.name != "fixed"

    @property
    def adapts_beta(self) -> bool:
        """Whether the controller changes β with the measured KL."""
        return self.controller.name not in ("fixed", "warmup", "linear", "cosine")

    @property
    def needs_exact(self) -> bool:
        """Whether the full-vocabulary KL is computed, as a metric or for the penalty."""
        return self.exact or over_vocabulary(self.estimator)

    def effective_reduction(self, loss_reduction: str) -> str:
        """The KL term's reduction over tokens, given the loss's reduction."""
        return term_reduction(self.placement, self.reduction, loss_reduction)

    def pairing(
        self,
        loss_reduction: str = "token_mean",
        *,
        off_policy: bool = False,
        facts: Sequence[Fact] = (),
        acts: bool | None = None,
    ) -> Pairing:
        """The checked pairing under a loss with this reduction. `facts` are those of a user's own estimator.

        `acts` (default: `penalizes`) says whether the term is a penalty. If not, biased pairings are accepted.
        """
        if self.reduction == "loss" and self.level == "sequence":
            raise KeelError(
                "kl.reduction=loss does not apply to kl.level=sequence, which averages over sequences: leave it out"
            )
        pairing = check_pairing(
            self.estimator,
            self.placement,
            self.gradient,
            level=self.level,
            off_policy=off_policy,
            allow_biased=self.allow_biased or not (self.penalizes if acts is None else acts),
            reduction=self.effective_reduction(loss_reduction),
            facts=facts,
        )
        if self.ratio_cap is not None and self.estimator == "topk_unbiased":
            raise KeelError(
                "kl.ratio_cap does not apply to kl.estimator=topk_unbiased, whose exact part has no weight: "
                "leave it out"
            )
        weighted = self.placement != "loss" or self.level == "sequence" or pairing.form.weight is not None
        if self.ratio_cap is not None and not weighted:
            raise KeelError(
                f"kl.ratio_cap does not apply to kl.estimator={self.estimator} and kl.gradient={pairing.form}, "
                "which have no importance ratio: leave it out, or set kl.gradient to rho or sg_rho"
            )
        return pairing


class TeacherOptions(KLTermOptions, PluginOptions):
    """A second KL term, to a teacher. The teacher is loaded with the parameters of `reference.kind=frozen`."""

    named_by = ""

    model: str | dict[str, str] = Field(min_length=1, description="The teacher, named as in reference.model.")
    beta: NonNegativeFloat = Field(default=1.0, description="Coefficient of the KL to the teacher.")


class KLOptions(KLTermOptions):
    """The KL term to the reference, its measurement, and an additional KL term to a teacher."""

    measure_every: NonNegativeInt = Field(default=1, description="Steps between measurements of the KL; 0: never.")
    collect_max: PositiveFloat | None = Field(
        default=None,
        description="Completions above this KL (nats per token) are left out of the policy term and keep their "
        "KL penalty.",
    )
    budget: Annotated[KLBudget | None, BeforeValidator(_budget)] = Field(
        default=None, description="Largest KL of the run: nats per token, or {max, unit, action}; null: no limit."
    )
    teacher: TeacherOptions | None = Field(
        default=None,
        description="A teacher in addition to the reference, with its own KL term and controller; null: none.",
    )

    def measures(self, step: int) -> bool:
        """Whether the KL is measured at this step even at β = 0."""
        return self.measure_every > 0 and step % self.measure_every == 0


def check_term(term: KLTermOptions, measure_every: int, facts: Sequence[Fact] = ()) -> None:
    """Refuse combinations of one term that are meaningless or have no gradient, under any loss."""
    term.pairing(facts=facts)
    if term.placement != "loss" and term.reduction == "loss":
        raise KeelError(f"kl.reduction=loss does not apply to kl.placement={term.placement}: leave it out")
    if measure_every == 0 and term.adapts_beta:
        raise KeelError(
            f"kl.controller.name={term.controller.name} needs the measured KL, but kl.measure_every is 0: set it to 1"
        )


def check_kl(kl: KLOptions, facts: Sequence[Fact] = ()) -> None:
    """Check the reference's term (`check_term`), and refuse options that need a KL that is never measured."""
    check_term(kl, kl.measure_every, facts)
    if kl.measure_every > 0:
        return
    for option, used in (
        ("kl.budget", kl.budget is not None),
        ("kl.collect_max", kl.collect_max is not None),
    ):
        if used:
            raise KeelError(f"{option} needs the measured KL, but kl.measure_every is 0: set it to 1")
    if kl.beta > 0:
        raise KeelError(
            "kl.measure_every is 0 with kl.beta above 0: the reference pass runs anyway, so measuring costs "
            "nothing: set kl.measure_every=1, or kl.beta=0"
        )
