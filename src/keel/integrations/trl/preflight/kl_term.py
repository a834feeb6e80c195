"""Check the KL term that TRL computes: whether it acts, the direction of its gradient, and how much KL it allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from keel.doctor.findings import Finding, finding, propose
from keel.doctor.probes.balance import ADVISED_KL, PULLED_AT, Balance
from keel.doctor.probes.kl_term import GradientNorms
from keel.doctor.subject import RELATIVE_NOISE
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.subject import TrlSubject, signs
from keel.integrations.trl.scoring import action_mask

_TRIES = 16
FAR = 1e-3  # if policy and reference differ by more nats than this, the term must have a gradient


def measure_kl(subject: TrlSubject) -> Outcome:
    """β·KL by the loss at β and at 0, where noise has moved the policy: at the start it has no gradient."""
    if subject.beta == 0:
        return _without(subject)
    if why := subject.lacks("loss"):
        return Outcome("kl_term", unchecked=(f"kl/no-gradient, kl/reversed, kl/too-strong: {why}",))
    before = subject.forward_logp()
    with subject.perturbed(_noise(subject)):
        figures = {"moved": _distance(subject, before)}
        micro = subject.micro(subject.rescored())
        micro |= {"advantages": subject.advantages[: len(micro["completion_ids"])]}
        both, policy = subject.gradients(micro), subject.gradients(micro, beta=0.0)
        norms = GradientNorms(_norm(policy), _norm([b - p for b, p in zip(both, policy, strict=True)]) / subject.beta)
        figures |= norms.figures(subject.beta, (0.1, 0.5))
        findings = [*_wrong(subject, micro, norms, figures)]
    share = norms.share(subject.beta)
    line = f"KL is {share:.1%} of the gradient at β = {subject.beta:g}, {figures['moved']:.2g} nats per token away"
    return Outcome("kl_term", tuple(findings), figures, (line,))


def _noise(subject: TrlSubject) -> float:
    """The size of noise that moves the policy by a KL of about `PULLED_AT`, or less."""
    before, noise = subject.forward_logp(), RELATIVE_NOISE
    for _ in range(_TRIES):
        with subject.perturbed(noise):
            if _distance(subject, before) <= 4 * PULLED_AT:
                break
        noise /= 2
    return noise


def _distance(subject: TrlSubject, before: Tensor) -> float:
    """The KL to the policy that gave `before`, in nats per token to second order."""
    return float((subject.forward_logp() - before)[subject.sampled].double().square().mean() / 2)


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def _without(subject: TrlSubject) -> Outcome:
    """The outcome for β = 0: an error if there are settings that only a penalty uses, otherwise a note."""
    intent = _intent(subject)
    absent = finding(
        "kl/no-gradient",
        f"β is 0, so that the loss has no KL term{', although ' if intent else ''}{' and '.join(intent)}",
        "what was set up for a KL penalty is not used: nothing holds the policy near its reference"
        if intent
        else "nothing points to a penalty that was meant",
        propose("set {} in GRPOConfig before the trainer is built, or take the reference out", {"beta": 0.04})
        if intent
        else "none, if no penalty is meant",
        severity=None if intent else "note",
    )
    return Outcome("kl_term", (absent,), {"beta": 0.0}, unchecked=("kl/reversed, kl/too-strong: β is 0",))


def _intent(subject: TrlSubject) -> list[str]:
    """Settings that show that a penalty was intended. Keel's own trainer refuses them without a β."""
    trainer, args = subject.trainer, subject.trainer.args
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    names = [n for n in ("beta", "ref_model_mixup_alpha", "ref_model_sync_steps") if getattr(args, n) != defaults[n]]
    shown = [f"GRPOConfig sets {name}={getattr(args, name):g}" for name in names]
    shown += ["the trainer holds a ref_model"] if trainer.ref_model is not None else []
    shown += ["the model has an adapter called ref"] if "ref" in getattr(trainer.model, "peft_config", {}) else []
    return [] if subject.keel else shown


def _wrong(
    subject: TrlSubject, micro: Mapping[str, Any], norms: GradientNorms, figures: dict[str, float]
) -> Iterator[Finding]:
    """Findings if the term has no gradient, points away from the reference, or holds the policy at its start.

    With token-level ratios, every KL form of TRL pulls each token back to the reference. A sequence-level ratio couples
    tokens and is not checked. The pairings of `KeelGRPOTrainer` are verified elsewhere.
    """
    if norms.kl == 0:
        yield finding(
            "kl/no-gradient",
            f"the loss has the same gradient at β = {subject.beta:g} and at 0, {figures['moved']:.2g} nats a token "
            "from the reference",
            "the KL term is dropped or detached on its way into the loss",
            "let _compute_loss return TRL's loss, or add beta times the KL to your own",
        )
        return
    args, mask = subject.trainer.args, action_mask(micro)
    pull = subject.logp_gradient(micro) - subject.logp_gradient(micro, beta=0.0)
    rows = len(mask)
    apart = subject.of_batch_width(subject.score(subject.groups[:rows]))
    apart = (apart - micro["ref_per_token_logps"]).double()
    far = mask & (apart.abs() > FAR)
    coupled = subject.keel or (args.use_bias_correction_kl and args.importance_sampling_level != "token")
    if bool(far.any()) and not coupled:
        figures["wrong_way"] = float(((pull * apart)[far] < 0).double().mean())
        if figures["wrong_way"] > subject.thresholds["loss_wrong_way"]:
            yield finding(
                "kl/reversed",
                f"the KL term pushes {100 * figures['wrong_way']:.0f} % of {int(far.sum())} tokens away from the "
                "reference",
                "its sign is turned, or its two log-probabilities are swapped",
                "add beta times the KL to the loss that is minimized",
            )
            return
    yield from _too_strong(subject, micro, pull, apart.masked_fill(~mask, 0.0), figures)


def _too_strong(
    subject: TrlSubject, micro: Mapping[str, Any], pull: Tensor, apart: Tensor, figures: dict[str, float]
) -> Iterator[Finding]:
    """The KL at which the term balances this batch's advantages: KL* = ½·(W·A / (β·v))² nats per completion."""
    mask, advantages = action_mask(micro), signs(micro["advantages"])
    nats = float(apart.square().sum() / mask.sum().clamp_min(1) / 2)
    if nats == 0 or not bool(pull.any()):  # an exact KL acts on the whole distribution
        return
    column = (advantages if advantages.dim() == 2 else advantages[:, None]).double()
    pushed = subject.logp_gradient({**micro, "advantages": advantages}, beta=0.0)
    weight = float(-(pushed / column)[mask].sum())  # −Σ ∂loss/∂logp per unit of advantage
    kl_weight = float((pull * apart).sum()) / subject.beta / (2 * nats)
    size = float(subject.advantages.double().square().mean().sqrt())
    if not (weight > 0 and kl_weight > 0):
        return
    balance = Balance(weight * size, kl_weight, float(mask.sum()) / len(mask))
    figures["equilibrium"] = balance.equilibrium(subject.beta)
    if figures["equilibrium"] < subject.thresholds["kl_equilibrium"]:
        yield finding(
            "kl/too-strong",
            f"at β = {subject.beta:g} the KL term balances advantages of size {size:.2g} at "
            f"{figures['equilibrium']:.2g} nats per completion, whatever the learning rate",
            "the policy is held where it starts",
            propose("lower β, as with {}", {"beta": float(f"{balance.beta_for(ADVISED_KL):.1g}")}),
        )


__all__ = ["measure_kl"]
