"""The balance of the loss terms: the KL that the KL term permits, the entropy bonus, and the scale of the rewards.

With J = W·A − β·v·KL in each completion the optimum is π* ∝ π_ref·exp(W·A / (β·v)). Its KL is ½·(W·A / (β·v))² nats per
completion to second order, independent of the learning rate. W, the weight of an advantage, and v, the weight of a nat
of KL, are measured on the configured loss. A is the typical advantage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.advice import changes, no_penalty
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.formula import formula_of
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.exploration import mean_kl, policy_states
from keel.doctor.probes.objective import ADVANTAGES, group_spreads, loss_gradient
from keel.doctor.probes.reach import course
from keel.doctor.probes.update import FirstUpdate, gradient_norm, loss_gradients, moved
from keel.doctor.subject import backup
from keel.losses import scale_rewards, zero_variance
from keel.trainer.batch import StepBatch, rewards_of
from keel.trainer.step import with_advantages

PULLED_AT = 0.02  # nats per token at which the KL gradient is measured: above rounding, and still quadratic
MOST_STEPS = 2_000
SMALL_ADVANTAGE = 0.05
ADVISED_KL = 100.0  # nats per completion that an advised β permits; β = 0.07 for advantages of size 1


@dataclass(frozen=True)
class Balance:
    """The weights of a typical advantage and of a nat of KL in the loss, for β = 1."""

    advantage: float
    kl: float
    length: float  # tokens per completion

    def equilibrium(self, beta: float) -> float:
        """The KL, in nats per completion, at which the two terms balance."""
        return 0.5 * (self.advantage / (beta * self.kl)) ** 2 if beta * self.kl > 0 else math.inf

    def beta_for(self, kl: float) -> float:
        """The β whose equilibrium is `kl` nats per completion."""
        return self.advantage / (self.kl * math.sqrt(2 * kl))


def probe_balance(setup: KeelSubject) -> Outcome:
    """Measure the equilibrium KL under the run's controller, the entropy bonus's share, and the scale of rewards."""
    first: FirstUpdate | None = setup.of_batch.get("update")
    if first is None or not math.isfinite(first.loss):
        return Outcome("balance", unchecked=("kl/too-strong, entropy/too-strong: no update could be tried",))
    figures: dict[str, float] = {}
    lines: list[str] = []
    findings = list(_entropy(setup, first, figures))
    measured = _balance(setup, first, figures)
    if measured is not None:
        betas, levels = steered(setup, measured, setup.thresholds["kl_equilibrium"])
        figures |= {"equilibrium": statistics.median(levels), "typical_beta": statistics.median(betas)}
        lines.append(
            f"balance: at β = {figures['typical_beta']:.3g} the KL term permits a KL to the reference of at most "
            f"{figures['equilibrium']:.2g} nats per completion"
        )
        findings += _too_strong(setup, measured, figures)
    findings += _reward_scale(setup, figures)
    if "entropy_share" in figures:
        lines.append(f"entropy bonus: {figures['entropy_share']:.0%} of the gradient")
    return Outcome("balance", tuple(findings), figures, tuple(lines))


def _balance(setup: KeelSubject, first: FirstUpdate, figures: dict[str, float]) -> Balance | None:
    """Measure both weights; None if no KL term is active, or if the scale of the advantages is unknown."""
    if setup.run.reference is None or not setup.run.kl.penalizes or not first.peak_kl > 0:
        return None
    figures["advantage"] = typical_advantage(setup, first)
    warmup, steps = setup.run.reward.warmup_steps, setup.config.run.max_steps
    if warmup:
        figures["advantage"] *= course(lambda step: min(1.0, (step + 1) / warmup), steps).mean
    weight = _advantage_weight(setup)
    pull = kl_weight(setup, first, weight)
    if not (pull > 0 and weight > 0 and figures["advantage"] > 0):
        return None  # another probe reports a KL term with a zero or wrong gradient
    figures |= {"advantage_weight": weight, "kl_weight": pull}
    return Balance(weight * figures["advantage"], pull, setup.completion_length)


def typical_advantage(setup: KeelSubject, first: FirstUpdate) -> float:
    """Root mean square of the advantages of all sampled groups whose rewards differ.

    Without such groups: 0, or 1 if advantages are divided by a standard deviation.
    """
    if not first.real_rewards:
        return float(scale_rewards(setup.run.loss) != "none")
    return advantage_size(with_advantages(setup.whole.batch, setup.run, setup.run.reward.warmup_steps))


def advantage_size(batch: StepBatch) -> float:
    """Root mean square of a batch's advantages, without groups of equal rewards."""
    rows = batch.rows
    assert rows.advantages is not None
    assert rows.rewards is not None
    assert rows.group is not None
    alive = ~zero_variance(rows.rewards, rows.group)
    chosen = rows.advantages[alive] if bool(alive.any()) else rows.advantages
    return float(chosen.double().square().mean().sqrt())


def _advantage_weight(setup: KeelSubject) -> float:
    """−Σ ∂loss/∂logp per unit of advantage; 1 for a mean over tokens or sequences."""
    mask = setup.mask
    advantage = torch.tensor([ADVANTAGES[i % len(ADVANTAGES)] for i in range(len(mask))], device=mask.device)
    gradient = loss_gradient(setup, advantage).double()
    return float(-(gradient / advantage[:, None].double())[mask].sum())


def kl_weight(setup: KeelSubject, first: FirstUpdate, advantage_weight: float) -> float:
    """The weight of a nat of KL for β = 1: that of an advantage in reward and advantage placement, else measured."""
    if setup.run.kl.placement == "loss":
        return measured_kl_weight(setup, first)
    divided = setup.run.kl.placement == "reward" and scale_rewards(setup.run.loss) != "none"
    return advantage_weight / (typical_spread(setup) if divided else 1.0)


def typical_spread(setup: KeelSubject) -> float:
    """The median standard deviation within groups whose rewards differ; 1 without such groups."""
    rows = setup.whole.batch.rows
    assert rows.rewards is not None
    assert rows.group is not None
    spreads = group_spreads(rows.rewards, rows.group)
    return float(spreads.median()) if len(spreads) else 1.0


def measured_kl_weight(setup: KeelSubject, first: FirstUpdate) -> float:
    """The derivative of the KL term along a real update, divided by twice the KL there; 1 for a mean over tokens.

    KL is quadratic in the distance, so its derivative along the path is twice its value.
    """
    optimizer = setup.run.optimizer
    start = backup(optimizer.parameters)
    factor = math.sqrt(PULLED_AT / first.peak_kl)
    with moved(setup, first.gradients, first.loss, factor, weight_decay=0.0):
        kl = mean_kl(policy_states(setup), first.before)
        gradients, _ = loss_gradients(setup, _without_advantages(first.batch), beta=1.0, entropy_coef=0.0)
        pull = sum(
            float((gradient.double() * (p.detach() - before.to(p)).double()).sum())
            for p, before, gradient in zip(optimizer.parameters, start, gradients, strict=True)
            if gradient is not None
        )
    return pull / (2 * kl) if kl > 0 else 0.0


def _without_advantages(batch: StepBatch) -> StepBatch:
    """The batch with zero advantages, as if the current policy had sampled it."""
    assert batch.rows.advantages is not None
    still = torch.zeros_like(batch.rows.advantages)
    return batch.with_rows(advantages=still, old_logp=None, sample_logp=None, filtered_logp=None, stale=False)


def steered(setup: KeelSubject, balance: Balance, most: float) -> tuple[list[float], list[float]]:
    """β and the equilibrium at every step, while the controller reads a KL of at most `most` nats per completion.

    With such low readings, a controller lowers β as far as it can.
    """
    controller = setup.run.controller
    state, betas, levels = controller.init(), [], []
    for _ in range(min(setup.config.run.max_steps, MOST_STEPS)):
        level = balance.equilibrium(float(state.beta))
        betas.append(float(state.beta))
        levels.append(level)
        read = min(level, most)
        state = controller.update(state, read if controller.unit == "per_sequence" else read / balance.length)
    return betas, levels


def _too_strong(setup: KeelSubject, balance: Balance, figures: dict[str, float]) -> Iterator[Finding]:
    limit, beta = setup.thresholds["kl_equilibrium"], figures["typical_beta"]
    if not figures["equilibrium"] < limit:
        return
    tree, steers = setup.config.to_dict(), setup.config.kl.adapts_beta
    advised = float(f"{balance.beta_for(ADVISED_KL):.1g}")
    small = scale_rewards(setup.run.loss) == "none" and figures["advantage"] < SMALL_ADVANTAGE
    warmup = setup.run.reward.warmup_steps
    yield finding(
        "kl/too-strong",
        f"β = {beta:.3g} (the median over {setup.config.run.max_steps} steps) keeps the policy within "
        f"{figures['equilibrium']:.2g} nats per completion of the reference (under {limit:g}: no success rate can "
        f"change by more than {math.sqrt(figures['equilibrium'] / 2):.1%}); in the loss, a typical advantage of "
        f"{figures['advantage']:.2g} weighs {balance.advantage:.2g}, and a nat of KL weighs {beta * balance.kl:.2g}",
        "the KL term dominates the update: it pulls the policy back to the reference before the policy can learn much"
        + ("; the controller does not lower β enough within the run" if steers else "")
        + ("; rewards differ by little, and loss.scale_rewards=none does not scale them" if small else "")
        + (f"; reward.warmup_steps={warmup} keeps the advantages small" if warmup > setup.config.run.max_steps else ""),
        propose(
            "set {}, which permits more KL, or {}",
            changes(tree, {"kl.beta": advised, **({"kl.controller": {"name": "fixed"}} if steers else {})}),
            no_penalty(tree),
        ),
    )


def _reward_scale(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """Find rewards far above a scale of 1 that nothing normalises, so that β or the entropy bonus has no effect."""
    rows, scale, kl = setup.whole.batch.rows, scale_rewards(setup.run.loss), setup.config.kl
    assert rows.rewards is not None
    assert rows.group is not None
    in_reward = kl.placement == "reward" and "equilibrium" in figures
    terms = {"kl.beta": figures.get("typical_beta", 0.0), "loss.entropy_coef": setup.run.loss.entropy_coef}
    drowned = {name: value for name, value in terms.items() if value > 0 and (scale == "none" or name == "kl.beta")}
    if not bool(rows.rewards.isfinite().all()) or not drowned or (scale != "none" and not in_reward):
        return
    spreads, limit = group_spreads(rows.rewards, rows.group), setup.thresholds["reward_scale"]
    if not len(spreads) or not float(spreads.max()) > limit:
        return

    def too_wide(spreads: Tensor) -> bool:
        return least_typical(spreads, level(setup.thresholds)) > limit

    def undecided(groups: Sequence[Group]) -> bool:
        spreads = group_spreads(*rewards_of(groups))
        return bool(len(spreads)) and float(spreads.median()) > limit and not too_wide(spreads)

    spreads = group_spreads(*rewards_of(more_groups(setup.whole, "reward/scale", undecided)))
    if not too_wide(spreads):
        return
    spread = float(spreads.median())
    figures["reward_spread"] = spread
    yield finding(
        "reward/scale",
        f"the typical standard deviation of rewards within a group is {spread:.3g} (over {limit:g}; {len(spreads)} "
        "groups), so "
        + " and ".join(f"{name}={value:.3g} has the effect of {value / spread:.2g}" for name, value in drowned.items())
        + " on rewards of scale 1",
        f"rewards are not divided by their standard deviation before they are combined with {' and '.join(drowned)} "
        f"(loss.scale_rewards={scale}, kl.placement={kl.placement}), which has almost no effect on this scale",
        propose(
            "set {}, or let the reward have a scale of 1",
            _after_division(setup) if in_reward else {"loss.scale_rewards": "group"},
        ),
    )


def _after_division(setup: KeelSubject) -> dict[str, object]:
    """The options for a penalty in the loss, after the normalisation, with a correct estimator."""
    tree = setup.config.to_dict()
    loss = {"loss.scale_rewards": "group"} if scale_rewards(setup.run.loss) == "none" else {}
    placed = {**tree, "kl": {**tree["kl"], "placement": "loss"}}
    formula = formula_of(placed)
    return {"kl.placement": "loss", **({} if formula is None else formula.change), **loss}


def least_typical(spreads: Tensor, chance: float) -> float:
    """A lower confidence bound of the median spread, at level `chance`, from order statistics.

    All of n groups lie above the median with probability 2⁻ⁿ.
    """
    ordered, count = spreads.sort().values, len(spreads)
    below = next((k for k in range(count) if sum(math.comb(count, i) for i in range(k + 1)) / 2**count > chance), 0)
    return float(ordered[below - 1]) if below else 0.0


def _entropy(setup: KeelSubject, first: FirstUpdate, figures: dict[str, float]) -> Iterator[Finding]:
    """The norm of the entropy bonus's gradient over that of the policy term, as if every group's rewards differed."""
    coefficient = setup.run.loss.entropy_coef
    if coefficient == 0.0:
        return
    batch = first.batch.with_rows(policy_mask=None)
    rows = batch.rows
    assert rows.advantages is not None
    assert rows.rewards is not None
    assert rows.group is not None
    alone = batch.with_rows(advantages=torch.zeros_like(rows.advantages), kl_advantages=None)
    bonus = gradient_norm(loss_gradients(setup, alone, beta=0.0)[0])
    policy = gradient_norm(loss_gradients(setup, batch.with_rows(kl_advantages=None), beta=0.0, entropy_coef=0.0)[0])
    if first.real_rewards:
        alive = float((~zero_variance(rows.rewards, rows.group)).double().mean())
        if alive > 0:  # a cut batch contains the groups with the largest advantages
            policy *= typical_advantage(setup, first) / advantage_size(batch) / alive
    if not policy > 0:
        return
    figures["entropy_share"] = bonus / (bonus + policy)
    limit = setup.thresholds["entropy_share"]
    if figures["entropy_share"] <= limit or (not first.real_rewards and scale_rewards(setup.run.loss) == "none"):
        return
    advised = float(f"{coefficient * 0.05 * policy / bonus:.1g}")
    yield finding(
        "entropy/too-strong",
        f"the entropy bonus is {figures['entropy_share']:.1%} of the gradient (over {limit:.0%}): its norm is "
        f"{bonus:.2g}, that of the policy term {policy:.2g}",
        f"loss.entropy_coef={coefficient:g} weighs entropy more than the rewards, so the policy drifts to noise",
        propose("set {}, or {}", {"loss.entropy_coef": 0.0}, {"loss.entropy_coef": advised}),
    )
