"""The KL term: its expected gradient by summing over the vocabulary, against the exact one, on a perturbed policy."""

from __future__ import annotations

import torch

from keel.doctor.bench import Bench
from keel.doctor.findings import Finding, found
from keel.doctor.probes.expected import Measured, measure_term
from keel.doctor.probes.outcome import Outcome
from keel.doctor.probes.share import gradient_norms
from keel.doctor.probes.states import mean_kl, policy_states, reference_states
from keel.doctor.thresholds import Thresholds
from keel.kl import advise
from keel.kl.facts import POLICY_REF, REF_POLICY

SHARES = (0.01, 0.1, 0.5)
FAR_NOISE = 0.2  # of each weight's RMS: far enough that the KL is no rounding error


def probe_kl_term(bench: Bench, thresholds: Thresholds) -> Outcome:
    """Direction and size of the configured term, its share of the gradient, and the β that would change it."""
    config, kl = bench.config, bench.run.kl
    unneeded = _unneeded(bench)
    if bench.run.reference is None:
        return Outcome("kl_term", unneeded, unchecked=("kl/no-gradient, kl/reversed: this run has no reference",))
    with bench.perturbed(FAR_NOISE):
        policy, reference = policy_states(bench), reference_states(bench)
        figures = {"kl_perturbed": mean_kl(policy, reference)}
        norms = gradient_norms(bench)
    measured = measure_term(policy, reference, kl, off_policy=config.off_policy)
    used = config.kl.beta > 0 or config.kl.controller.name != "fixed"
    figures |= measured.figures()
    figures |= norms.figures(config.kl.beta, SHARES)
    lines = [_gradient_line(bench, measured), norms.line(config.kl.beta, SHARES, figures["kl_perturbed"])]
    if not used:
        return Outcome("kl_term", unneeded, figures, ("kl.beta is 0: no KL term acts; " + lines[1],))
    findings = (*_judged(bench, measured, thresholds), *_reward_scale(bench, figures), *unneeded)
    return Outcome("kl_term", findings, figures, tuple(lines))


def _what(bench: Bench) -> str:
    kl = bench.config.kl
    form = bench.run.kl.pairing.form
    return f"kl.estimator={kl.estimator} in the {kl.placement} (gradient={form}, level={bench.run.kl.pairing.level})"


def _gradient_line(bench: Bench, measured: Measured) -> str:
    return (
        f"{_what(bench)}: expected gradient is {measured.words}; cosine to ∇KL(policy‖ref) {measured.cosine:.3f}, "
        f"size {measured.size:.3g} times it (at {measured.kl:.2g} nats per token)"
    )


def _judged(bench: Bench, measured: Measured, thresholds: Thresholds) -> tuple[Finding, ...]:
    """What the experiment says of the configured term; the two KLs and the total variation are allowed."""
    proven = "kl.estimator=k3 with kl.gradient=auto"
    size = f"{measured.size:.3g} times the size of ∇KL(policy‖ref), cosine {measured.cosine:.3f}"
    if measured.size < thresholds["kl_gradient_zero"]:
        away = measured.off_policy_cosine is not None and measured.off_policy_cosine < 0
        return (
            found(
                "kl/no-gradient",
                f"the expected gradient, summed over the vocabulary at {measured.states} visited states, is {size}",
                f"{_what(bench)} has no expected gradient on the policy's own samples: β costs a pass and holds nothing"
                + (", and on older samples it pushes away" if away else ""),
                f"set {proven}; with kl.placement=reward or advantage use kl.estimator=k1",
            ),
        )
    if measured.name in (POLICY_REF, REF_POLICY, "total-variation"):
        return ()
    if measured.name is None and measured.cosine > thresholds["kl_gradient_cosine"]:
        return (
            found(
                "kl/scale",
                f"the expected gradient is {size}: kl.beta={bench.config.kl.beta:g} acts like "
                f"{bench.config.kl.beta * measured.size:.3g}",
                f"{_what(bench)} points along ∇KL(policy‖ref) and has another size",
                f"divide the estimator by {measured.size:.3g}, or set {proven}",
            ),
        )
    return (
        found(
            "kl/reversed",
            f"the expected gradient, summed over the vocabulary at {measured.states} visited states, is {size}; the "
            f"term's mean is {measured.value:.3g} where the KL is {measured.kl:.3g}",
            f"{_what(bench)} follows {measured.words}, no KL between policy and reference",
            f"set {proven}",
        ),
    )


def _reward_scale(bench: Bench, figures: dict[str, float]) -> tuple[Finding, ...]:
    """In the reward, before the division by the std, β is divided too."""
    rows = bench.batch.rows
    scale = bench.run.options.scale_rewards
    assert rows.rewards is not None
    std = rows.rewards.double().std().item() if bool(torch.isfinite(rows.rewards).all()) else 0.0
    if bench.config.kl.placement != "reward" or scale == "none" or std <= 0.0:
        return ()
    figures["effective_beta"] = bench.config.kl.beta / std
    return (
        found(
            "kl/scale",
            f"rewards have std {std:.3g}, so kl.beta={bench.config.kl.beta:g} acts like {bench.config.kl.beta / std:.3g}",
            f"kl.placement=reward is divided by the rewards' deviation (loss.scale_rewards={scale})",
            "set loss.scale_rewards=none, or kl.placement=advantage, which comes after the division",
            severity="note",
        ),
    )


def _unneeded(bench: Bench) -> tuple[Finding, ...]:
    config = bench.config
    said = [note for note in advise(config.loss.loss_type, config.kl.beta) if note.startswith("kl/unneeded: ")]
    return tuple(
        found(
            "kl/unneeded",
            f"kl.beta={config.kl.beta:g} with loss.loss_type={config.loss.loss_type}",
            note.removeprefix("kl/unneeded: "),
            "set kl.beta=0 (the KL is still measured), or keep it if a skill outside the reward has to stay",
        )
        for note in said
    )
