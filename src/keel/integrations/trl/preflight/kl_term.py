"""Check the KL term: whether it acts, the direction of its gradient, and how much KL it allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from keel.doctor.findings import Finding, finding, propose
from keel.doctor.probes.balance import ADVISED_KL, PULLED_AT, Balance
from keel.doctor.probes.share import GradientNorms
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject, signs
from keel.integrations.trl.scoring import action_mask

FAR = 1e-3  # nats between policy and reference above which the term must have a gradient


def probe_kl(subject: Subject, thresholds: Thresholds) -> Outcome:
    """β·KL by the loss at β and at 0, where noise has moved the policy: at the start it has no gradient."""
    if subject.beta == 0:
        return _without(subject)
    if not subject.weights:
        return Outcome("kl_term", unchecked=("kl/no-gradient, kl/too-strong: no weight is trainable",))
    if subject.noisy:
        return Outcome("kl_term", unchecked=("kl/*: two passes over the same tokens differ",))
    with subject.perturbed() as moved:
        micro = _micro(subject)
        both, policy = subject.gradients(micro), subject.gradients(micro, beta=0.0)
        norms = GradientNorms(_norm(policy), _norm([b - p for b, p in zip(both, policy, strict=True)]) / subject.beta)
        figures = {"moved": moved, **norms.figures(subject.beta, (0.1, 0.5))}
        if norms.kl == 0:
            return Outcome("kl_term", (_no_gradient(subject, moved),), figures)
        findings = list(_direction(subject, micro, figures, thresholds))
    if not findings:
        with subject.perturbed(PULLED_AT):
            findings = list(_balance(subject, _micro(subject), figures, thresholds))
    share = norms.share(subject.beta)
    line = f"KL is {share:.1%} of the gradient at β = {subject.beta:g}, {moved:.2g} nats per token away"
    return Outcome("kl_term", tuple(findings), figures, (line,))


def _micro(subject: Subject) -> dict[str, Any]:
    """The first microbatch with the scores of the weights of now, and with advantages."""
    micro = subject.micro(subject.rescored())
    return micro | {"advantages": subject.advantages[: len(micro["completion_ids"])]}


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def _without(subject: Subject) -> Outcome:
    """β = 0: a finding if settings exist that only a penalty uses, else a note."""
    unchecked = ("kl/reversed, kl/too-strong: β is 0",)
    signs_of_intent = list(_intent(subject))
    if signs_of_intent:
        absent = finding(
            "kl/no-gradient",
            f"β is 0, so that the loss has no KL term, although {' and '.join(signs_of_intent)}",
            "what was set up for a KL penalty is not used: nothing holds the policy near its reference",
            propose("set {} in GRPOConfig before the trainer is built, or take the reference out", {"beta": 0.04}),
        )
        return Outcome("kl_term", (absent,), {"beta": 0.0}, unchecked=unchecked)
    measured = "Keel measures the KL all the same" if subject.keel else "0 is the default of GRPOConfig"
    note = finding(
        "kl/no-gradient",
        f"β is 0: there is no KL term ({measured})",
        "nothing points to a penalty that was meant",
        "none, if no penalty is meant",
        severity="note",
    )
    return Outcome("kl_term", (note,), {"beta": 0.0}, unchecked=unchecked)


def _intent(subject: Subject) -> Iterator[str]:
    """Settings of the trainer that show that a penalty was intended."""
    trainer, args = subject.trainer, subject.trainer.args
    if subject.keel:  # it reads β from one place, and refuses to have none
        return
    if args.beta != 0:
        yield f"GRPOConfig says beta={args.beta:g}"
    if trainer.ref_model is not None:
        yield "the trainer holds a ref_model"
    if "ref" in getattr(trainer.model, "peft_config", {}):
        yield "the model has an adapter called ref"
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if name in defaults and getattr(args, name) != defaults[name]:
            yield f"GRPOConfig sets {name}={getattr(args, name):g}"


def _no_gradient(subject: Subject, moved: float) -> Finding:
    return finding(
        "kl/no-gradient",
        f"the loss has the same gradient at β = {subject.beta:g} and at 0, {moved:.2g} nats a token from the reference",
        "the KL term is dropped or detached on its way into the loss",
        "let _compute_loss return TRL's loss, or add beta times the KL to your own",
    )


def _direction(
    subject: Subject, micro: Mapping[str, Any], figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Whether the term pulls each token back to the reference, as every form of TRL's does under ratios of tokens.

    A sequence's ratio couples its tokens, and the pairings of `KeelGRPOTrainer` are proven elsewhere.
    """
    args = subject.trainer.args
    if subject.keel or (args.use_bias_correction_kl and args.importance_sampling_level != "token"):
        return
    pull, apart = _pull(subject, micro)
    far = action_mask(micro) & (apart.abs() > FAR)
    if not bool(far.any()):
        return
    figures["wrong_way"] = float(((pull * apart)[far] < 0).double().mean())
    if figures["wrong_way"] > thresholds["loss_wrong_way"]:
        yield finding(
            "kl/reversed",
            f"the KL term pushes {100 * figures['wrong_way']:.0f} % of {int(far.sum())} tokens away from the reference",
            "its sign is turned, or its two log-probabilities are swapped",
            "add beta times the KL to the loss that is minimized",
        )


def _pull(subject: Subject, micro: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """∂(β·KL)/∂logp, and log π − log π_ref, both `[B, T]`."""
    pull = subject.logp_gradient(micro) - subject.logp_gradient(micro, beta=0.0)
    return pull, (subject.scored(micro) - micro["ref_per_token_logps"]).double()


def _balance(
    subject: Subject, micro: Mapping[str, Any], figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Where the term balances advantages of this batch's size: KL* = ½·(W·A / (β·v))² nats per completion."""
    pull, apart = _pull(subject, micro)
    mask = action_mask(micro)
    nats = float(apart[mask].square().mean() / 2) if bool(mask.any()) else 0.0
    if nats == 0 or not bool(pull.any()):  # an exact KL acts on the whole distribution
        return
    weight = _advantage_weight(subject, micro, mask)
    kl_weight = float((pull * apart)[mask].sum()) / subject.beta / (2 * nats)
    size = float(subject.advantages.double().square().mean().sqrt())
    if not (weight > 0 and kl_weight > 0):
        return
    balance = Balance(weight * size, kl_weight, float(mask.sum()) / len(mask))
    figures["equilibrium"] = balance.equilibrium(subject.beta)
    if figures["equilibrium"] < thresholds["kl_equilibrium"]:
        yield finding(
            "kl/too-strong",
            f"at β = {subject.beta:g} the KL term balances advantages of size {size:.2g} at "
            f"{figures['equilibrium']:.2g} nats per completion, whatever the learning rate",
            "the policy is held where it starts",
            propose("lower β, as with {}", {"beta": float(f"{balance.beta_for(ADVISED_KL):.1g}")}),
        )


def _advantage_weight(subject: Subject, micro: Mapping[str, Any], mask: Tensor) -> float:
    """−Σ ∂loss/∂logp for each unit of advantage."""
    advantages = signs(micro["advantages"])
    gradient = subject.logp_gradient({**micro, "advantages": advantages}, beta=0.0)
    column = advantages if advantages.dim() == 2 else advantages[:, None]
    return float(-(gradient / column.double())[mask].sum())


__all__ = ["probe_kl"]
