"""The share of the KL term in the gradient: the norms of both terms' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.update import loss_gradients
from keel.trainer.batch import StepBatch, score_policy, score_reference
from keel.trainer.step import penalize_rewards, sampled_kl, with_advantages


@dataclass(frozen=True)
class GradientNorms:
    """Norms of the policy gradient and the KL gradient, the latter for β = 1."""

    policy: float
    kl: float

    def share(self, beta: float) -> float:
        total = self.policy + beta * self.kl
        return beta * self.kl / total if total > 0 else 0.0

    def beta_for(self, share: float) -> float | None:
        """The β at which KL has this share of the gradient; None if one of the two is zero."""
        return share / (1 - share) * self.policy / self.kl if self.policy > 0 and self.kl > 0 else None

    def figures(self, beta: float, shares: Sequence[float]) -> dict[str, float]:
        betas = {f"beta_for_{share:.0%}": self.beta_for(share) for share in shares}
        figures = {"gradient_policy": self.policy, "gradient_kl": self.kl, "gradient_share": self.share(beta)}
        return figures | {name: value for name, value in betas.items() if value is not None}

    def line(self, beta: float, shares: Sequence[float], kl: float) -> str:
        if self.beta_for(0.5) is None:
            nothing = "the rewards do not differ" if self.policy == 0 else "the KL term has no gradient"
            return f"the KL's share of the gradient cannot be told: {nothing}"
        betas = ", ".join(f"{self.beta_for(share):.2g} for {share:.0%}" for share in shares)
        return (
            f"KL is {self.share(beta):.1%} of the gradient at kl.beta={beta:g} and {kl:.2g} nats per token; "
            f"kl.beta would be {betas}"
        )


def gradient_norms(setup: KeelSubject) -> GradientNorms:
    """Gradient norms over the trained weights. The policy must be perturbed, since at step 0 the KL has no gradient."""
    batch = score_policy(score_reference(setup.batch, setup.run), setup.run)
    warm = setup.run.reward.warmup_steps
    with_policy = with_advantages(batch, setup.run, warm)
    still = batch.with_rows(advantages=torch.zeros_like(setup.batch.rows.rewards))  # type: ignore[arg-type]
    if setup.run.kl.placement == "reward":
        still = still.with_rows(kl_advantages=_in_reward(setup, replace(batch, kl=sampled_kl(batch, setup.run))))
    return GradientNorms(_norm(setup, with_policy, 0.0), _norm(setup, still, 1.0))


def _in_reward(setup: KeelSubject, batch: StepBatch) -> Tensor:
    """What a KL penalty in the reward adds to the advantages per unit of β, with the step's normalisation."""
    beta = setup.full_beta or 1.0
    shaped = with_advantages(penalize_rewards(batch, setup.run, beta), setup.run, setup.run.reward.warmup_steps)
    assert shaped.rows.kl_advantages is not None
    return shaped.rows.kl_advantages / beta


def _norm(setup: KeelSubject, batch: StepBatch, beta: float) -> float:
    # without the values of the sampling policy
    own = batch.with_rows(old_logp=None, sample_logp=None, filtered_logp=None, stale=False)
    gradients, _ = loss_gradients(setup, own, beta=beta, entropy_coef=0.0)
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0
