"""Compare the KL term's expected gradient on a perturbed policy with the exact one, and measure its share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keel.base.parts import is_import_path
from keel.doctor.advice import no_penalty
from keel.doctor.expected import GRADIENT_MEANINGS, MeasuredGradient, measure_term
from keel.doctor.findings import Advice, Finding, finding, propose
from keel.doctor.formula import formula_of
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.exploration import mean_kl, policy_states, reference_states
from keel.doctor.probes.update import loss_gradients
from keel.kl import advise
from keel.kl.facts import JSD, MEANINGS, POLICY_REF, REF_POLICY, TOPK, divergence_of
from keel.losses import scale_rewards
from keel.trainer.batch import StepBatch, score_policy, score_reference
from keel.trainer.step import penalize_rewards, sampled_kl, with_advantages

# ------------------------------------------------------------------------ share of the gradient


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
            return f"the KL's share of the gradient is unknown: {nothing}"
        betas = ", ".join(f"kl.beta={self.beta_for(share):.2g} for {share:.0%}" for share in shares)
        return (
            f"KL is {self.share(beta):.1%} of the gradient at kl.beta={beta:g} and {kl:.2g} nats per token; for other "
            f"shares: {betas}"
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
    """The advantages that a KL penalty in the reward adds per unit of β, with the step's normalisation."""
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


# ------------------------------------------------------------------------ expected gradient

KLS = (POLICY_REF, REF_POLICY)
DIVERGENCES = (*KLS, "total-variation", JSD, TOPK)
SHARES = (0.01, 0.1, 0.5)
NOISE = 0.2  # share of each weight's RMS: enough for a KL above rounding
MEASURED_ELEMENTS = 1 << 21  # limit of states × vocabulary in fp64; a part of the states suffices
SEEN_KL = 0.1  # nats per token that training typically reaches
NEAR_KL = 1e-4  # nats per token near the start of a run
ROUNDING = 1e-12  # nats per token; a smaller KL in fp64 is rounding


def probe_kl_term(setup: KeelSubject) -> Outcome:
    """Measure the configured term's gradient: direction, size, its share of the total, and β for other shares."""
    config, kl = setup.config, setup.run.kl
    unneeded = _unneeded(setup)
    if setup.run.reference is None:  # only for β = 0 without measurements
        return Outcome("kl_term", unneeded, lines=("kl.beta is 0: no KL term acts, and this run has no reference",))
    with setup.perturbed(_noise(setup)):
        policy, reference = policy_states(setup), reference_states(setup)
        figures = {"kl_perturbed": mean_kl(policy, reference)}
        if not math.isfinite(figures["kl_perturbed"]):
            overflows = (
                "kl/no-gradient, kl/reversed: the logits of policy or reference are not finite at the visited states"
            )
            return Outcome("kl_term", unneeded, figures, unchecked=(overflows,))
        if figures["kl_perturbed"] <= 0.0:
            together = "kl/no-gradient, kl/reversed: the perturbed policy and the reference are equal (see reference)"
            return Outcome("kl_term", unneeded, figures, unchecked=(together,))
        norms = gradient_norms(setup)
    named = setup.thresholds["kl_gradient_named"]
    few = slice(None, None, max(1, len(policy) * setup.vocabulary // MEASURED_ELEMENTS))
    measure = partial(measure_term, policy[few], reference[few], kl, setup.run.pairing, named=named)
    measured = measure()
    if is_import_path(config.kl.estimator):  # a user's estimator may be zero within the KL range of training
        near = measure(target=NEAR_KL)
        measured = near if near.size < setup.thresholds["kl_gradient_zero"] else measured
    if measured.kl < ROUNDING:
        certain = "kl/no-gradient, kl/reversed: the policy is certain of every token, so its KL is only rounding"
        return Outcome("kl_term", unneeded, figures, unchecked=(certain,))
    used = setup.full_beta > 0 or config.kl.controller.name != "fixed"
    figures |= measured.figures()
    expected = _expected(setup)
    if expected is not None and expected in measured.cosines:
        figures["cosine_expected"] = measured.cosines[expected]
    figures |= norms.figures(setup.full_beta, SHARES)
    lines = [_gradient_line(setup, measured), norms.line(setup.full_beta, SHARES, figures["kl_perturbed"])]
    if not used:
        return Outcome("kl_term", unneeded, figures, ("kl.beta is 0: no KL term acts; " + lines[1],))
    findings = (*_findings(setup, measured), *_reward_scale(setup, figures), *unneeded)
    return Outcome("kl_term", findings, figures, tuple(lines))


def _noise(setup: KeelSubject) -> float:
    """The noise level that gives a KL as in training. LoRA's B starts at 0 and needs far less."""
    with setup.perturbed(NOISE):
        kl = mean_kl(policy_states(setup), reference_states(setup))
    return NOISE * math.sqrt(SEEN_KL / kl) if kl > SEEN_KL and math.isfinite(kl) else NOISE


def _term_label(setup: KeelSubject) -> str:
    kl = setup.config.kl
    pairing = setup.run.pairing
    return f"kl.estimator={kl.estimator} in the {kl.placement} (gradient={pairing.form}, level={pairing.level})"


def _gradient_line(setup: KeelSubject, measured: MeasuredGradient) -> str:
    return (
        f"{_term_label(setup)}: expected gradient is {measured.meaning}; cosine to ∇KL(policy‖ref) "
        f"{measured.cosine:.3f}, size {measured.size:.3g} times it (at {measured.kl:.2g} nats per token)"
    )


def _findings(setup: KeelSubject, measured: MeasuredGradient) -> Iterator[Finding]:
    """Findings about the configured term. A user's estimator must have a KL's gradient, Keel's the configured one."""
    expected = _expected(setup)
    asked = KLS if is_import_path(setup.config.kl.estimator) else DIVERGENCES
    expected = expected if expected in asked else None
    size = f"{measured.size:.3g} times the size of ∇KL(policy‖ref), cosine {measured.cosine:.3f}"
    if measured.size < setup.thresholds["kl_gradient_zero"]:
        yield finding(
            "kl/no-gradient",
            f"the expected gradient, summed over the vocabulary at {measured.states} visited states, is {size} (at "
            f"{measured.kl:.2g} nats per token)",
            f"{_term_label(setup)} has no expected gradient on the policy's own samples: the term costs a pass and "
            "does not constrain the policy",
            _proven_pairing(setup),
            # a penalty may intentionally start at this distance only
            severity="warning" if measured.kl < 2 * NEAR_KL else None,
        )
        return
    beta = setup.full_beta
    allowed = KLS if expected is None else (expected,)
    if measured.name in allowed and abs(measured.factor - 1) <= setup.thresholds["kl_gradient_named"]:
        return
    near = measured.name is None and POLICY_REF in allowed and measured.cosine > setup.thresholds["kl_gradient_cosine"]
    if near or (measured.name in allowed and measured.factor > 0):
        factor = measured.size if near else measured.factor
        along = (GRADIENT_MEANINGS[POLICY_REF] if near else measured.meaning).partition(":")[0]
        yield finding(
            "kl/scale",
            f"the expected gradient is {factor:.3g} times {along} ({size}): β = {beta:g} has the effect of "
            f"{beta * factor:.3g}",
            f"{_term_label(setup)} has the direction of {along} but another size",
            _proven_pairing(setup, f"divide the estimator by {factor:.3g}"),
        )
        return
    times = "" if measured.name is None or abs(measured.factor - 1) < 0.05 else f"{measured.factor:.3g} times "
    yield finding(
        "kl/reversed",
        f"the expected gradient, summed over the vocabulary at {measured.states} visited states, is {size}; the "
        f"term's mean is {measured.value:.3g} where the KL is {measured.kl:.3g}",
        f"{_term_label(setup)} follows {times}{measured.meaning}"
        + (": it rewards distance from the reference" if measured.factor < 0 else _instead_of(expected)),
        _proven_pairing(setup),
    )


def _expected(setup: KeelSubject) -> str | None:
    """The gradient that the configured formula has in the table of pairings."""
    formula = formula_of(setup.config.to_dict())
    return None if formula is None else divergence_of(formula.expected)


def _instead_of(expected: str | None) -> str:
    if expected is not None:
        return f"; the configured formula has {MEANINGS[expected].partition(':')[0]}, so its code is wrong"
    return ", which is no KL between policy and reference"


def _proven_pairing(setup: KeelSubject, otherwise: str = "") -> Advice:
    """The nearest correct pairing. If it is configured already, the estimator's code is wrong."""
    formula = formula_of(setup.config.to_dict())
    change = {} if formula is None else formula.change
    if not change:
        return Advice(otherwise or "fix the code of the estimator or of the loss: the configured formula is correct")
    return propose(f"{otherwise}, or set {{}}" if otherwise else "set {}", change)


def _reward_scale(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """With the penalty in the reward, the division by the standard deviation also divides β."""
    rows = setup.batch.rows
    scale = scale_rewards(setup.run.loss)
    assert rows.rewards is not None
    std = rows.rewards.double().std().item() if bool(torch.isfinite(rows.rewards).all()) else 0.0
    if setup.config.kl.placement != "reward" or scale == "none" or std <= 0.0:
        return
    figures["effective_beta"] = setup.full_beta / std
    yield finding(
        "kl/scale",
        f"rewards have a standard deviation of {std:.3g}, so β = {setup.full_beta:g} has the effect of "
        f"{setup.full_beta / std:.3g}",
        "with kl.placement=reward, the penalty is divided by the standard deviation of the rewards "
        f"(loss.scale_rewards={scale})",
        propose(
            "set {}, or {}, which adds the penalty after the division",
            {"loss.scale_rewards": "none"},
            {"kl.placement": "advantage"},
        ),
        severity="note",
    )


def _unneeded(setup: KeelSubject) -> tuple[Finding, ...]:
    config = setup.config
    notes = [note for note in advise(config.loss.loss_type, config.kl.beta) if note.startswith("kl/unneeded: ")]
    return tuple(
        finding(
            "kl/unneeded",
            f"kl.beta={config.kl.beta:g} with loss.loss_type={config.loss.loss_type}",
            note.removeprefix("kl/unneeded: "),
            propose(
                "set {} (the KL is still measured), or keep the penalty if the policy must keep skills that the "
                "reward does not measure",
                no_penalty(config.to_dict()),
            ),
        )
        for note in notes
    )
