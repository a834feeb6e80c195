"""Compare the reference with the policy at step 0. Their KL must be 0; otherwise find the cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.config import Config
from keel.doctor.advice import changes, either, setting
from keel.doctor.advice import reference as as_kind
from keel.doctor.findings import Advice, Finding, finding
from keel.doctor.gap import eval_mode, no_dropout
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.exploration import policy_states, reference_states
from keel.kl import k3
from keel.models.fingerprint import effective_weights
from keel.models.lora import adapter_is_zero


def not_trained(config: Config) -> Advice:
    """Advice: a reference that Keel makes from the policy at step 0."""
    advice = setting("set {} (frozen, or adapter_off under LoRA)", as_kind(config.to_dict(), "auto"))
    return advice if str(advice) else Advice("load one checkpoint for both")


@dataclass(frozen=True)
class WeightDifference:
    """How the weights of two models differ: sizes, tensors that differ, and the largest difference."""

    policy_size: int
    reference_size: int
    compared: int
    differing: tuple[str, ...]
    largest: float
    dtypes: tuple[str, str]

    @property
    def same(self) -> bool:
        return self.compared > 0 and not self.differing


def compare_weights(
    policy: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, fresh: bool = True
) -> WeightDifference:
    """Compare effective weights by name. Either side may lack a `fresh` adapter, which changes nothing yet."""
    common = [name for name in policy if name in reference]
    differing, largest = [], 0.0
    for name in common:
        mine, theirs = policy[name].detach(), reference[name].detach()
        if mine is theirs or (mine.shape == theirs.shape and torch.equal(mine, theirs.to(mine))):
            continue
        differing.append(name)
        if mine.shape == theirs.shape:
            largest = max(largest, (mine.float() - theirs.to(mine.device).float()).abs().max().item())
    missing = [
        name
        for name in (*policy, *reference)
        if (name in policy) != (name in reference) and not (fresh and _adapter(name))
    ]
    return WeightDifference(
        sum(tensor.numel() for name, tensor in policy.items() if not _adapter(name)),
        sum(tensor.numel() for name, tensor in reference.items() if not _adapter(name)),
        len(common),
        (*differing, *sorted(missing)),
        largest,
        (_dtype(policy), _dtype(reference)),
    )


def _adapter(name: str) -> bool:
    return ".lora_" in name


def _dtype(weights: Mapping[str, Tensor]) -> str:
    first = next((tensor for tensor in weights.values() if tensor.is_floating_point()), None)
    return "none" if first is None else str(first.dtype).removeprefix("torch.")


def token_kl(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> float:
    """Mean k3 of the batch's tokens, sampled from the policy, in nats per token."""
    return k3((ref_logp - logp)[mask].double()).mean().item()


def largest_gap(first: Tensor, second: Tensor, mask: Tensor) -> float:
    """The largest |difference| of log-probabilities over the mask, in nats."""
    gap = (first - second)[mask].abs()
    return gap.max().item() if gap.numel() else 0.0


def sums_against_means(first: Tensor, second: Tensor, mask: Tensor) -> bool:
    """Whether one is the other times the completion's length, on completions of more than one token."""
    lengths = mask.sum(-1, keepdim=True).expand_as(mask)
    where = mask & (lengths > 1)
    a, b, n = first[where], second[where], lengths[where]
    return bool(where.any()) and (torch.allclose(a * n, b, rtol=1e-3) or torch.allclose(b * n, a, rtol=1e-3))


def reference_logp(setup: KeelSubject) -> Tensor:
    ref = setup.ref_logp()
    assert ref is not None
    return ref


def at_start(setup: KeelSubject, figures: dict[str, float]) -> list[Finding]:
    assert setup.run.reference is not None
    mine = dict(effective_weights(setup.policy.model))
    fresh = setup.policy.lora is None or adapter_is_zero(setup.policy.model)
    with setup.run.reference.model() as model:
        difference = compare_weights(mine, dict(effective_weights(model)), fresh=fresh)
        training = model.training
    logp, ref, again = setup.logp(), reference_logp(setup), reference_logp(setup)
    setup.of_batch["start"] = logp, again
    mask = setup.mask
    figures["kl_at_start"] = token_kl(logp, ref, mask)
    figures["sums_against_means"] = float(sums_against_means(logp, ref, mask))
    figures["reference_repeats_to"] = largest_gap(ref, again, mask)
    figures["parameters_policy"] = float(difference.policy_size)
    figures["parameters_reference"] = float(difference.reference_size)
    figures["tensors_that_differ"] = float(len(difference.differing))
    limit = setup.thresholds["kl_at_start"]
    start = figures["kl_at_start"]
    if not difference.same:
        return [_wrong(setup, difference, figures)]
    if start <= limit:
        return []
    with eval_mode(setup.policy.model):
        figures["kl_at_start_evaluation_mode"] = token_kl(setup.logp(), ref, mask)
    cause, advice = explain_start(figures, limit, difference, training, _scale(setup), setup.config)
    size = largest_gap(logp, ref, mask)
    evidence = (
        f"KL(policy‖reference) is {start:.3g} nats per token before any update (over {limit:g}; largest log-ratio "
        f"{size:.3g}), or {start * float(mask.sum(-1).float().mean()):.3g} nats per completion"
    )
    return [finding("kl/at-start", evidence, cause, advice)]


def _wrong(setup: KeelSubject, difference: WeightDifference, figures: Mapping[str, float]) -> Finding:
    sizes = f"policy {difference.policy_size:,} parameters, reference {difference.reference_size:,}"
    names = ", ".join(difference.differing[:2]) or "no tensor has the same name"
    return finding(
        "reference/wrong",
        f"{len(difference.differing)} tensors differ from the policy's start ({names}; largest difference "
        f"{difference.largest:.3g}); {sizes}; KL at step 0 is {figures['kl_at_start']:.3g} nats per token",
        f"reference.kind={setup.config.reference.kind} has other weights than model.name={setup.policy.name}: another "
        "checkpoint, or a copy made before a warm start or an adapter was loaded",
        either(not_trained(setup.config), "this makes the reference from the initial policy", joined=": ")
        if as_kind(setup.config.to_dict(), "auto")
        else not_trained(setup.config),
    )


def explain_start(
    figures: Mapping[str, float],
    limit: float,
    difference: WeightDifference,
    reference_trains: bool,
    scale: float,
    config: Config,
) -> tuple[str, Advice]:
    """Cause and advice for a KL that is not 0 between equal weights, by recomputing under each hypothesis."""
    if figures["kl_at_start_evaluation_mode"] <= limit:
        return (
            "dropout: with the policy in evaluation mode the KL is "
            f"{figures['kl_at_start_evaluation_mode']:.3g}; its training pass drops units, the reference's does not",
            no_dropout(config),
        )
    if figures["reference_repeats_to"] > 0 or reference_trains:
        return (
            "the reference's own passes differ from each other by up to "
            f"{figures['reference_repeats_to']:.3g} nats: it is scored in training mode, with dropout",
            either("call eval() on the reference's model", not_trained(config)),
        )
    if figures["sums_against_means"]:
        return (
            "sums against means: one pass returns the sum over the completion for every token, the other the mean",
            either(
                "let the scorer return one log-probability a token",
                setting("set {}", changes(config.to_dict(), {"model.scorer": "native"})),
            ),
        )
    if difference.dtypes[0] != difference.dtypes[1]:
        return (
            f"the policy computes in {difference.dtypes[0]}, the reference in {difference.dtypes[1]}",
            either("use one type for both", not_trained(config)),
        )
    if abs(scale - 1.0) > 0.01:  # this selects the cause only; the finding is reported anyway
        return (
            f"the reference's logits are {scale:.3g} times the policy's: the two are computed at different "
            "temperatures",
            Advice("score both at rollout.temperature"),
        )
    return (
        "the weights are equal, but the log-probabilities are not: the two passes use different tokens or positions",
        either("compare the two scorings token by token", not_trained(config)),
    )


def _scale(setup: KeelSubject) -> float:
    """The factor from the policy's centred logits to the reference's, by least squares; 1 if it explains nothing."""
    mine, theirs = policy_states(setup), reference_states(setup)
    mine, theirs = mine - mine.mean(-1, keepdim=True), theirs - theirs.mean(-1, keepdim=True)
    factor = ((mine * theirs).sum() / mine.square().sum().clamp_min(1e-12)).item()
    residual = (theirs - factor * mine).square().sum() / theirs.square().sum().clamp_min(1e-12)
    return factor if residual.item() < 1e-4 else 1.0  # rounding
