"""The reference: equal to the policy at the start, still when it should be, moving when it should."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keel.doctor.bench import Bench
from keel.doctor.findings import Finding, found
from keel.doctor.probes.outcome import Outcome
from keel.doctor.probes.states import policy_states, reference_states
from keel.doctor.thresholds import Thresholds
from keel.kl import k3
from keel.models.fingerprint import effective_weights, fingerprint
from keel.models.head import evaluating
from keel.models.load import import_attr, is_users_own
from keel.models.lora import adapter_is_zero
from keel.reference import KINDS, Reference, build_reference
from keel.train.batch import score_micro, stitch

STILL = ("frozen", "adapter_off")
MOST_UPDATES = 512
FAR = 1e3  # nats per token: any threshold of a reference that waits for KL is below it
NOT_TRAINED = "set reference.kind=auto (frozen, or adapter_off under LoRA)"


def probe_reference(bench: Bench, thresholds: Thresholds) -> Outcome:
    """KL at step 0, then the same on a perturbed policy, then the loop's calls of `update`."""
    if bench.run.reference is None:
        return Outcome(
            "reference",
            lines=("no reference is built: kl.beta is 0 and kl.measure_every is 0",),
            unchecked=("reference/*: this run has no reference",),
        )
    figures: dict[str, float] = {}
    placed = misplaced(bench)
    if placed:
        return Outcome("reference", placed, figures)
    saved, start = _saved(bench.run.reference), held_fingerprint(bench)
    findings = _at_start(bench, thresholds, figures)
    try:
        findings += _while_policy_moves(bench, thresholds, figures)
    finally:
        _mend(bench, saved, start)
    line = (
        f"KL to the reference at step 0: {figures['kl_at_start']:.3g} nats per token; policy perturbed: its "
        f"log-probabilities move by {figures['policy_moved']:.3g}, the reference's by {figures['reference_moved']:.3g}"
    )
    return Outcome("reference", tuple(findings), figures, (line,))


# -- where things lie ---------------------------------------------------------------------------------------------


def devices(model: nn.Module) -> dict[str, int]:
    """How many parameters lie on which device."""
    places: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        places[str(tensor.device)] = places.get(str(tensor.device), 0) + tensor.numel()
    return places


def misplaced(bench: Bench) -> tuple[Finding, ...]:
    """Everything on one device; a reference that rests elsewhere has to visit for its pass."""
    assert bench.run.reference is not None
    with bench.run.reference.model() as held:
        places = {"policy": devices(bench.policy.model), "reference": devices(held)}
    if len({place for found_on in places.values() for place in found_on}) <= 1:
        return ()
    where = "; ".join(
        f"{who}: " + ", ".join(f"{count:,} numbers on {place}" for place, count in found_on.items())
        for who, found_on in places.items()
    )
    return (
        found(
            "device/placement",
            where,
            "a model loader or a reference of your own leaves a part where it was made",
            "move all of it to one device, or set model.device",
        ),
    )


# -- at the start -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How the weights of two models differ: sizes, tensors that differ, and the largest difference."""

    policy_size: int
    held_size: int
    compared: int
    differing: tuple[str, ...]
    largest: float
    dtypes: tuple[str, str]

    @property
    def same(self) -> bool:
        return self.compared > 0 and not self.differing


def compare_weights(policy: Mapping[str, Tensor], held: Mapping[str, Tensor], *, fresh: bool = True) -> Difference:
    """The weights in effect by name. A `fresh` adapter changes nothing yet, so that it may be missing."""
    common = [name for name in policy if name in held]
    differing, largest = [], 0.0
    for name in common:
        mine, theirs = policy[name].detach(), held[name].detach()
        if mine is theirs or (mine.shape == theirs.shape and torch.equal(mine, theirs.to(mine))):
            continue
        differing.append(name)
        if mine.shape == theirs.shape:
            largest = max(largest, (mine.float() - theirs.to(mine.device).float()).abs().max().item())
    missing = [
        name for name in (*policy, *held) if (name in policy) != (name in held) and not (fresh and _adapter(name))
    ]
    return Difference(
        sum(tensor.numel() for name, tensor in policy.items() if not _adapter(name)),
        sum(tensor.numel() for name, tensor in held.items() if not _adapter(name)),
        len(common),
        (*differing, *sorted(missing)),
        largest,
        (_dtype(policy), _dtype(held)),
    )


def _adapter(name: str) -> bool:
    return ".lora_" in name


def _dtype(weights: Mapping[str, Tensor]) -> str:
    first = next((tensor for tensor in weights.values() if tensor.is_floating_point()), None)
    return "none" if first is None else str(first.dtype).removeprefix("torch.")


def token_kl(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> float:
    """k3 of the batch's tokens, nats per token: samples are the policy's own."""
    return k3((ref_logp - logp)[mask].double()).mean().item()


def largest_gap(first: Tensor, second: Tensor, mask: Tensor) -> float:
    """The largest |difference| of log-probabilities over the mask, in nats."""
    gap = (first - second)[mask].abs()
    return gap.max().item() if gap.numel() else 0.0


def _ref_logp(bench: Bench) -> Tensor:
    ref = bench.ref_logp()
    assert ref is not None
    return ref


def _training_logp(bench: Bench) -> Tensor:
    """The policy's log-probabilities by the very pass that trains, its graph included."""
    batch = bench.batch
    return stitch((score_micro(micro, batch, bench.run).logp for micro in batch.micros), batch.width)


def _at_start(bench: Bench, thresholds: Thresholds, figures: dict[str, float]) -> list[Finding]:
    assert bench.run.reference is not None
    mine = dict(effective_weights(bench.policy.model))
    fresh = bench.policy.lora is None or adapter_is_zero(bench.policy.model)
    with bench.run.reference.model() as held:
        difference = compare_weights(mine, dict(effective_weights(held)), fresh=fresh)
        training = held.training
    logp, ref, again = _training_logp(bench), _ref_logp(bench), _ref_logp(bench)
    with evaluating(bench.policy.model):
        still = bench.logp()
    mask = bench.mask
    figures["kl_at_start"] = token_kl(logp, ref, mask)
    figures["kl_at_start_evaluation_mode"] = token_kl(still, ref, mask)
    figures["reference_repeats_to"] = largest_gap(ref, again, mask)
    figures["parameters_policy"] = float(difference.policy_size)
    figures["parameters_reference"] = float(difference.held_size)
    figures["tensors_that_differ"] = float(len(difference.differing))
    limit = thresholds["kl_at_start"]
    start = figures["kl_at_start"]
    if not difference.same:
        return [_wrong(bench, difference, figures)]
    if start <= limit:
        return []
    cause, advice = explain_start(figures, limit, difference, training, _scale(bench))
    size = largest_gap(logp, ref, mask)
    evidence = (
        f"KL(policy‖reference) is {start:.3g} nats per token before any update (over {limit:g}; largest log-ratio "
        f"{size:.3g}), a sum of {start * float(mask.sum(-1).float().mean()):.3g} nats a completion"
    )
    return [found("kl/at-start", evidence, cause, advice)]


def _wrong(bench: Bench, difference: Difference, figures: Mapping[str, float]) -> Finding:
    sizes = f"policy {difference.policy_size:,} parameters, reference {difference.held_size:,}"
    names = ", ".join(difference.differing[:2]) or "no tensor has the same name"
    return found(
        "reference/wrong",
        f"{len(difference.differing)} tensors differ from the policy's start ({names}; largest difference "
        f"{difference.largest:.3g}); {sizes}; KL at step 0 is {figures['kl_at_start']:.3g} nats per token",
        f"reference.kind={bench.config.reference.kind} holds other weights than model.name={bench.policy.name} "
        "gives: another checkpoint, or a copy made before a warm start or an adapter was loaded",
        f"{NOT_TRAINED}: it is made from the policy as it starts",
    )


def explain_start(
    figures: Mapping[str, float], limit: float, difference: Difference, held_trains: bool, scale: float
) -> tuple[str, str]:
    """Cause and advice for a KL that is not 0 between equal weights, by recomputing under each hypothesis."""
    if figures["kl_at_start_evaluation_mode"] <= limit:
        return (
            "dropout: with the policy in evaluation mode the KL is "
            f"{figures['kl_at_start_evaluation_mode']:.3g}; its training pass drops units, the reference's does not",
            "set model.dropout=false and model.lora.dropout=0",
        )
    if figures["reference_repeats_to"] > 0 or held_trains:
        return (
            "the reference's own passes differ from each other by up to "
            f"{figures['reference_repeats_to']:.3g} nats: it is scored in training mode, with dropout",
            f"call eval() on the reference's model, or {NOT_TRAINED}",
        )
    if difference.dtypes[0] != difference.dtypes[1]:
        return (
            f"the policy computes in {difference.dtypes[0]}, the reference in {difference.dtypes[1]}",
            f"give both one type, or {NOT_TRAINED}",
        )
    if abs(scale - 1.0) > 0.01:
        return (
            f"the reference's logits are {scale:.3g} times the policy's: the two are taken at different temperatures",
            "score both at rollout.temperature",
        )
    return (
        "the weights agree and the log-probabilities do not: the two passes read other tokens or positions, or one "
        "sums over tokens where the other takes a mean",
        f"compare the two scorings token by token, or {NOT_TRAINED}",
    )


def _scale(bench: Bench) -> float:
    """The factor from the policy's centred logits to the reference's, by least squares; 1 if it explains nothing."""
    mine, theirs = policy_states(bench), reference_states(bench)
    mine, theirs = mine - mine.mean(-1, keepdim=True), theirs - theirs.mean(-1, keepdim=True)
    factor = ((mine * theirs).sum() / mine.square().sum().clamp_min(1e-12)).item()
    left = (theirs - factor * mine).square().sum() / theirs.square().sum().clamp_min(1e-12)
    return factor if left.item() < 1e-4 else 1.0


# -- while the policy moves ---------------------------------------------------------------------------------------


def _while_policy_moves(bench: Bench, thresholds: Thresholds, figures: dict[str, float]) -> list[Finding]:
    """On the perturbed policy: the reference must not follow it, not by scoring and not by `update`."""
    mask = bench.mask
    logp, ref, print_before = bench.logp(), _ref_logp(bench), held_fingerprint(bench)
    noise = thresholds["scoring_difference"] + figures["reference_repeats_to"]
    with bench.perturbed():
        print_perturbed = held_fingerprint(bench)
        moved_logp, moved_ref = bench.logp(), _ref_logp(bench)
        figures["policy_moved"] = largest_gap(logp, moved_logp, mask)
        figures["reference_moved"] = largest_gap(ref, moved_ref, mask)
        figures["kl_perturbed"] = token_kl(moved_logp, moved_ref, mask)
        if figures["reference_moved"] > noise or print_perturbed != print_before:
            return [_follows(bench, figures)]
        for _ in range(2):
            _ref_logp(bench)
        print_scored = held_fingerprint(bench)
        if print_scored != print_perturbed:
            figures["reference_moved"] = largest_gap(ref, _ref_logp(bench), mask)
            return [_moving(bench, "scoring with it changed its weights", figures)]
        return _updates(bench, figures, ref, print_scored)


def held_fingerprint(bench: Bench) -> str:
    """The digest of the weights that the reference's pass uses, not the one that it says it has."""
    assert bench.run.reference is not None
    with bench.run.reference.model() as held:
        return fingerprint(held)


def shares_trained_weights(bench: Bench) -> bool:
    """Whether the reference's pass uses a tensor that training changes."""
    assert bench.run.reference is not None
    trained = {p.data_ptr() for p in bench.run.optimizer.parameters}
    with bench.run.reference.model() as held:
        return any(tensor.data_ptr() in trained for _, tensor in effective_weights(held))


def _follows(bench: Bench, figures: Mapping[str, float]) -> Finding:
    evidence = (
        f"noise on the policy's trainable weights moved its log-probabilities by {figures['policy_moved']:.3g} nats "
        f"and the reference's by {figures['reference_moved']:.3g}; KL between them is {figures['kl_perturbed']:.3g}"
    )
    if not shares_trained_weights(bench):
        return _moving(bench, "scoring with it changed its weights", figures)
    if bench.policy.lora is not None:
        return found(
            "reference/adapter-on",
            evidence,
            "the reference is scored with the policy's adapter on: both are the same model, and the KL stays near 0 "
            "however far the policy goes",
            "set reference.kind=adapter_off, or switch the adapter off inside your reference's model()",
        )
    return found(
        "reference/moving",
        evidence,
        "the reference shares its weights with the policy, so every update moves both",
        "set reference.kind=frozen, or hold a deep copy of the policy in your reference",
    )


def _moving(bench: Bench, how: str, figures: Mapping[str, float]) -> Finding:
    return found(
        "reference/moving",
        f"{how}: the reference's log-probabilities moved by {figures['reference_moved']:.3g} nats",
        f"reference.kind={bench.config.reference.kind} changes without saying so (its kind is "
        f"{_kind(bench)!r}): the KL is measured from a point that follows the policy",
        "set reference.kind=frozen; for one that is meant to move use ema, snapshot or kl_triggered",
    )


def _kind(bench: Bench) -> str:
    return str(getattr(bench.run.reference, "kind", bench.config.reference.kind))


def _updates(bench: Bench, figures: dict[str, float], ref: Tensor, before: str) -> list[Finding]:
    """Call `update` as the loop would and look at the weights at every doubling of the steps."""
    reference = bench.run.reference
    assert reference is not None
    kind, every = _kind(bench), _parameters(bench).get("every")
    due = kind in ("ema", "snapshot", "kl_triggered") and (every is not None or kind == "kl_triggered")
    last = (int(every) if every else 1) if due else min(bench.config.run.max_steps, MOST_UPDATES)
    said = changed = False
    step = 0
    for step in range(1, last + 1):
        kl = FAR if kind == "kl_triggered" or step == last else figures["kl_perturbed"]
        said = bool(reference.update(bench.policy.model, step, kl)) or said
        if step & (step - 1) == 0 or step == last or said:
            changed = held_fingerprint(bench) != before
        if changed or said:
            break
    figures["reference_moved_at_step"] = float(step) if changed else 0.0
    figures["reference_moved"] = largest_gap(ref, _ref_logp(bench), bench.mask)
    if changed and (kind in STILL or not said):
        return [_moving(bench, f"update() at step {step} changed its weights and returned {said}", figures)]
    if not changed and (said or due):
        return [
            found(
                "reference/moving",
                f"update() was called up to step {step} and returned {said}; the weights are those of the start",
                f"a reference of kind {kind!r} is meant to move after {last} steps and did not",
                "check reference.every, reference.threshold, or the update() of your own reference",
            )
        ]
    return []


def _parameters(bench: Bench) -> dict[str, Any]:
    """The reference's parameters, its factory's defaults included."""
    kind, given = bench.config.reference.kind, bench.config.reference.params
    own = is_users_own(kind)
    factory: Callable[..., Reference] = import_attr(kind, "reference") if own else KINDS[_kind(bench)]
    defaults = inspect.signature(factory).parameters
    return {**{name: p.default for name, p in defaults.items() if p.default is not p.empty}, **given}


def _mend(bench: Bench, saved: Mapping[str, Any] | None, expected: str) -> None:
    """The reference as it was before it was made to move; rebuilt from the policy where it cannot restore itself."""
    reference, config = bench.run.reference, bench.config.reference
    assert reference is not None
    try:
        if saved is not None:
            reference.load_state_dict(saved)
        whole = held_fingerprint(bench) == expected
    except Exception:  # a user's reference may raise anything
        whole = False
    if not whole:
        bench.run.reference = build_reference(config.kind, bench.policy, **config.params)


def _saved(reference: Reference) -> Mapping[str, Any] | None:
    try:
        return copy.deepcopy(reference.state_dict())
    except Exception:  # a reference of one's own need not be able to save itself to be looked at
        return None
