"""The reference: equal to the policy at the start, still when it should be, moving when it should."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keel.base.imports import import_object, is_import_path
from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import either, setting
from keel.lab.doctor.advice import reference as as_kind
from keel.lab.doctor.bench import Bench
from keel.lab.doctor.findings import Advice, Finding, found
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.probes.start import at_start, largest_gap, reference_logp, token_kl
from keel.models.fingerprint import effective_weights, fingerprint
from keel.reference import KINDS, Reference, build_reference

STILL = ("frozen", "adapter_off")
MOST_UPDATES = 512
FAR = 1e3  # nats per token: any threshold of a reference that waits for KL is below it


def probe_reference(bench: Bench, thresholds: Thresholds) -> ProbeResult:
    """KL at step 0, then the same on a perturbed policy, then the loop's calls of `update`."""
    if bench.run.reference is None:
        return ProbeResult(
            "reference",
            lines=("no reference is built: kl.beta is 0 and kl.measure_every is 0",),
            unchecked=("reference/*: this run has no reference",),
        )
    figures: dict[str, float] = {}
    placed = tuple(misplaced(bench))
    if placed:
        return ProbeResult("reference", placed, figures)
    saved, start = _saved(bench.run.reference), held_fingerprint(bench)
    findings = at_start(bench, thresholds, figures)
    try:
        findings += _while_policy_moves(bench, thresholds, figures)
        findings += [] if findings else [*_round_trip(bench, saved, start)]
    finally:
        _mend(bench, saved, start)
    line = (
        f"KL to the reference at step 0: {figures['kl_at_start']:.3g} nats per token; policy perturbed: its "
        f"log-probabilities move by {figures['policy_moved']:.3g}, the reference's by {figures['reference_moved']:.3g}"
    )
    return ProbeResult("reference", tuple(findings), figures, (line,))


# -- where things lie ---------------------------------------------------------------------------------------------


def devices(model: nn.Module) -> dict[str, int]:
    """How many parameters lie on which device."""
    places: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        places[str(tensor.device)] = places.get(str(tensor.device), 0) + tensor.numel()
    return places


def misplaced(bench: Bench) -> Iterator[Finding]:
    """Everything on one device; a reference that rests elsewhere has to visit for its pass."""
    assert bench.run.reference is not None
    with bench.run.reference.model() as held:
        places = {"policy": devices(bench.policy.model), "reference": devices(held)}
    if len({place for found_on in places.values() for place in found_on}) <= 1:
        return
    where = "; ".join(
        f"{who}: " + ", ".join(f"{count:,} numbers on {place}" for place, count in found_on.items())
        for who, found_on in places.items()
    )
    yield found(
        "device/placement",
        where,
        "a model loader or a reference of your own leaves a part where it was made",
        "move all of it to one device, or set model.device",
    )


# -- while the policy moves ---------------------------------------------------------------------------------------


def _while_policy_moves(bench: Bench, thresholds: Thresholds, figures: dict[str, float]) -> list[Finding]:
    """On the perturbed policy: the reference must not follow it, not by scoring and not by `update`."""
    mask = bench.mask
    logp, ref, print_before = bench.logp(), reference_logp(bench), held_fingerprint(bench)
    noise = thresholds["scoring_difference"] + figures["reference_repeats_to"]
    with bench.perturbed():
        print_perturbed = held_fingerprint(bench)
        moved_logp, moved_ref = bench.logp(), reference_logp(bench)
        figures["policy_moved"] = largest_gap(logp, moved_logp, mask)
        figures["reference_moved"] = largest_gap(ref, moved_ref, mask)
        figures["kl_perturbed"] = token_kl(moved_logp, moved_ref, mask)
        steady = figures["reference_repeats_to"] <= thresholds["scoring_difference"]  # else its scores tell nothing
        if (steady and figures["reference_moved"] > noise) or print_perturbed != print_before:
            return [_follows(bench, figures)]
        for _ in range(2):
            reference_logp(bench)
        print_scored = held_fingerprint(bench)
        if print_scored != print_perturbed:
            figures["reference_moved"] = largest_gap(ref, reference_logp(bench), mask)
            return [_moving(bench, "scoring with it changed its weights", figures)]
        return _updates(bench, figures, ref, print_scored, thresholds)


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
            either(
                setting("set {}", as_kind(bench.config.to_dict(), "adapter_off")),
                "switch the adapter off inside your reference's model()",
            ),
        )
    return found(
        "reference/moving",
        evidence,
        "the reference shares its weights with the policy, so every update moves both",
        either(
            setting("set {}", as_kind(bench.config.to_dict(), "frozen")),
            "hold a deep copy of the policy in your reference",
        ),
    )


def _moving(bench: Bench, how: str, figures: Mapping[str, float]) -> Finding:
    return found(
        "reference/moving",
        f"{how}: the reference's log-probabilities moved by {figures['reference_moved']:.3g} nats",
        f"reference.kind={bench.config.reference.kind} changes without saying so (its kind is "
        f"{_kind(bench)!r}): the KL is measured from a point that follows the policy",
        either(
            setting("set {}", as_kind(bench.config.to_dict(), "frozen")),
            "for one that is meant to move use ema, snapshot or kl_triggered",
            joined="; ",
        ),
    )


def _kind(bench: Bench) -> str:
    return str(getattr(bench.run.reference, "kind", bench.config.reference.kind))


def _updates(
    bench: Bench, figures: dict[str, float], ref: Tensor, before: str, thresholds: Thresholds
) -> list[Finding]:
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
    figures["reference_moved"] = largest_gap(ref, reference_logp(bench), bench.mask)
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
    return [*_at_once(bench, figures, thresholds)] if changed and step == 1 and kind != "kl_triggered" else []


def _at_once(bench: Bench, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    """A reference that moves at every step must stay behind, or there is nothing left to measure the KL from."""
    left = token_kl(bench.logp(), reference_logp(bench), bench.mask) / max(figures["kl_perturbed"], 1e-12)
    figures["kl_left_after_update"] = left
    if not left < thresholds["reference_follows"]:
        return
    yield found(
        "reference/follows",
        f"one update() at step 1 leaves {left:.2g} of the KL between policy and reference",
        f"reference.kind={bench.config.reference.kind} takes the policy over at every step: the KL stays near 0 "
        "and holds nothing, however far the policy goes",
        _slower(bench),
    )


def _slower(bench: Bench) -> Advice:
    """Rarer or smaller steps of Keel's own kinds; one that never moves for any."""
    tree, now = bench.config.to_dict(), _parameters(bench)
    rarer = {"reference.every": 100} if not is_import_path(bench.config.reference.kind) and "every" in now else {}
    still = setting("{}, which never moves", as_kind(tree, "frozen"))
    return either(setting("set {}", rarer), still)


def _parameters(bench: Bench) -> dict[str, Any]:
    """The reference's parameters, its factory's defaults included."""
    kind, given = bench.config.reference.kind, bench.config.reference.params
    own = is_import_path(kind)
    factory: Callable[..., Reference] = import_object(kind, "reference") if own else KINDS[_kind(bench)]
    defaults = inspect.signature(factory).parameters
    return {**{name: p.default for name, p in defaults.items() if p.default is not p.empty}, **given}


def _round_trip(bench: Bench, saved: Mapping[str, Any] | None, expected: str) -> Iterator[Finding]:
    """A reference of one's own, built anew beside a policy that has moved on, must be the saved one after loading."""
    config = bench.config.reference
    if not is_import_path(config.kind):
        return
    why = "its state_dict() raises" if saved is None else "its state_dict() is empty" if not saved else ""
    if saved:
        kept = bench.run.reference
        try:
            with bench.perturbed():
                bench.run.reference = build_reference(config.kind, bench.policy, **config.params)
                bench.run.reference.load_state_dict(saved)
                why = "" if held_fingerprint(bench) == expected else "load_state_dict() does not bring its weights back"
        except Exception as error:  # a user's reference may raise anything
            why = f"load_state_dict() raises {type(error).__name__}"
        finally:
            bench.run.reference = kept
    if not why:
        return
    yield found(
        "reference/not-saved",
        f"saved, built anew beside a policy that has moved and loaded again, the reference is another one: {why}",
        f"reference.kind={config.kind} does not save its weights: after a resume or a rollback the KL is measured "
        "from another point",
        "let state_dict() hold the reference's weights and load_state_dict() restore them",
    )


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
