"""Check the reference: equal to the policy at step 0, unchanged if frozen, and updated if its kind moves."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keel.base.parts import import_object, is_import_path
from keel.doctor.advice import either, setting
from keel.doctor.advice import reference as as_kind
from keel.doctor.findings import Advice, Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.start import at_start, largest_gap, reference_logp, token_kl
from keel.models.fingerprint import effective_weights, fingerprint
from keel.reference import Reference
from keel.reference.kinds import KINDS, build_reference

STILL_KINDS = ("frozen", "adapter_off")
MAX_UPDATES = 512
AT_ONCE = 2  # steps; a reference that copies the policy within them leaves no KL to measure
HUGE_KL = 1e3  # nats per token, above the threshold of any kl_triggered reference


def probe_reference(setup: KeelSubject) -> Outcome:
    """Measure the KL at step 0 and on a perturbed policy, then call the reference's `update` as the loop does."""
    if setup.run.reference is None:
        return Outcome(
            "reference",
            lines=("no reference is built: kl.beta is 0 and kl.measure_every is 0",),
            unchecked=("reference/*: this run has no reference",),
        )
    figures: dict[str, float] = {}
    placed = tuple(misplaced(setup))
    if placed:
        return Outcome("reference", placed, figures)
    saved, start = _saved(setup.run.reference), reference_fingerprint(setup)
    findings = at_start(setup, figures)
    try:
        findings += _while_policy_moves(setup, figures)
        findings += [] if findings else [*_round_trip(setup)]
    finally:
        _restore(setup, saved, start)
    line = (
        f"KL to the reference at step 0: {figures['kl_at_start']:.3g} nats per token; when the policy is perturbed, "
        f"its log-probabilities change by {figures['policy_moved']:.3g} and the reference's by "
        f"{figures['reference_moved']:.3g}"
    )
    return Outcome("reference", tuple(findings), figures, (line,))


# -- devices --------------------------------------------------------------------------------------------------------


def devices(model: nn.Module) -> dict[str, int]:
    """The number of parameters and buffer elements on each device."""
    counts: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        counts[str(tensor.device)] = counts.get(str(tensor.device), 0) + tensor.numel()
    return counts


def misplaced(setup: KeelSubject) -> Iterator[Finding]:
    """Policy and reference must be on one device; an offloaded reference is moved there for its pass."""
    assert setup.run.reference is not None
    with setup.run.reference.model() as model:
        devices_of = {"policy": devices(setup.policy.model), "reference": devices(model)}
    if len({device for counts in devices_of.values() for device in counts}) <= 1:
        return
    where = "; ".join(
        f"{who}: " + ", ".join(f"{count:,} elements on {device}" for device, count in counts.items())
        for who, counts in devices_of.items()
    )
    yield finding(
        "device/placement",
        where,
        "your own model loader or reference leaves a part on another device",
        "move everything to one device, or set model.device",
    )


# -- after a change of the policy ----------------------------------------------------------------------------------


def _while_policy_moves(setup: KeelSubject, figures: dict[str, float]) -> list[Finding]:
    """Check that noise on the policy and scoring do not move the reference, and that `update` does if it is due."""
    mask = setup.mask
    (logp, ref), print_before = setup.of_batch["start"], reference_fingerprint(setup)
    noise = setup.thresholds["scoring_difference"] + figures["reference_repeats_to"]
    with setup.perturbed():
        print_perturbed = reference_fingerprint(setup)
        moved_logp, moved_ref = setup.logp(), reference_logp(setup)
        figures["policy_moved"] = largest_gap(logp, moved_logp, mask)
        figures["reference_moved"] = largest_gap(ref, moved_ref, mask)
        figures["kl_perturbed"] = token_kl(moved_logp, moved_ref, mask)
        # unsteady scores vary even if the weights do not
        steady = figures["reference_repeats_to"] <= setup.thresholds["scoring_difference"]
        if (steady and figures["reference_moved"] > noise) or print_perturbed != print_before:
            return [_follows(setup, figures)]
        reference_logp(setup)
        print_scored = reference_fingerprint(setup)
        if print_scored != print_perturbed:
            figures["reference_moved"] = largest_gap(ref, reference_logp(setup), mask)
            return [_moving(setup, "scoring with it changed its weights", figures)]
        return _updates(setup, figures, ref, print_scored, noise if steady else math.inf)


def reference_fingerprint(setup: KeelSubject) -> str:
    """The digest of the weights that the reference's pass uses, rather than the digest that it reports."""
    assert setup.run.reference is not None
    with setup.run.reference.model() as model:
        return fingerprint(model)


def shares_trained_weights(setup: KeelSubject) -> bool:
    """Whether the reference's pass uses a tensor that training changes."""
    assert setup.run.reference is not None
    trained = {p.data_ptr() for p in setup.run.optimizer.parameters}
    with setup.run.reference.model() as model:
        return any(tensor.data_ptr() in trained for _, tensor in effective_weights(model))


def _follows(setup: KeelSubject, figures: Mapping[str, float]) -> Finding:
    evidence = (
        f"noise on the policy's trainable weights moved its log-probabilities by {figures['policy_moved']:.3g} nats "
        f"and the reference's by {figures['reference_moved']:.3g}; KL between them is {figures['kl_perturbed']:.3g}"
    )
    if not shares_trained_weights(setup):
        return _moving(setup, "scoring with it changed its weights", figures)
    if setup.policy.lora is not None:
        return finding(
            "reference/adapter-on",
            evidence,
            "the reference is scored with the policy's adapter enabled: both are the same model, so the KL stays near "
            "0, whatever the policy learns",
            either(
                setting("set {}", as_kind(setup.config.to_dict(), "adapter_off")),
                "disable the adapter in your reference's model()",
            ),
        )
    return finding(
        "reference/moving",
        evidence,
        "the reference shares its weights with the policy, so every update moves both",
        either(
            setting("set {}", as_kind(setup.config.to_dict(), "frozen")),
            "keep a deep copy of the policy in your reference",
        ),
    )


def _moving(setup: KeelSubject, how: str, figures: Mapping[str, float]) -> Finding:
    return finding(
        "reference/moving",
        f"{how}: the reference's log-probabilities moved by {figures['reference_moved']:.3g} nats",
        f"reference.kind={setup.config.reference.kind} changes without reporting it (its kind is {_kind(setup)!r}), "
        "so the KL is measured against a model that moves",
        either(
            setting("set {}", as_kind(setup.config.to_dict(), "frozen")),
            "for a moving reference, use ema, snapshot or kl_triggered",
            joined="; ",
        ),
    )


def _kind(setup: KeelSubject) -> str:
    assert setup.run.reference is not None
    return setup.run.reference.kind


def _updates(setup: KeelSubject, figures: dict[str, float], ref: Tensor, before: str, noise: float) -> list[Finding]:
    """Call `update` as the loop does. Compare weights at steps that are powers of two, and scores at the end.

    A reference that adds to its layers' outputs, such as an EMA under LoRA, changes its scores but not its weights.
    """
    reference = setup.run.reference
    assert reference is not None
    kind, every = _kind(setup), _parameters(setup).get("every")
    due = kind in ("ema", "snapshot", "kl_triggered") and (every is not None or kind == "kl_triggered")
    last = (int(every) if every else 1) if due else min(setup.config.run.max_steps, MAX_UPDATES)
    reported = changed = False
    step = 0
    for step in range(1, last + 1):
        kl = HUGE_KL if kind == "kl_triggered" or step == last else figures["kl_perturbed"]
        reported = bool(reference.update(setup.policy.model, step, kl)) or reported
        if step & (step - 1) == 0 or step == last or reported:
            changed = reference_fingerprint(setup) != before
        if changed or reported:
            break
    figures["reference_moved"] = largest_gap(ref, reference_logp(setup), setup.mask)
    changed = changed or figures["reference_moved"] > noise
    figures["reference_moved_at_step"] = float(step) if changed else 0.0
    if changed and (kind in STILL_KINDS or not reported):
        return [_moving(setup, f"update() at step {step} changed its weights and returned {reported}", figures)]
    if not changed and (reported or due):
        return [
            finding(
                "reference/moving",
                f"update() was called up to step {step} and returned {reported}; the weights have not changed",
                f"a reference of kind {kind!r} should move after {last} steps, but did not",
                "check reference.every, reference.threshold, or the update() of your own reference",
            )
        ]
    if not changed or kind == "kl_triggered" or step > AT_ONCE:
        return []
    for later in range(step + 1, AT_ONCE + 1):
        reference.update(setup.policy.model, later, figures["kl_perturbed"])
    return [*_at_once(setup, figures)]


def _at_once(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """A reference that moves every few steps must keep a distance from the policy, or the KL stays near 0."""
    remaining = token_kl(setup.logp(), reference_logp(setup), setup.mask) / max(figures["kl_perturbed"], 1e-12)
    figures["kl_left_after_update"] = remaining
    if not remaining < setup.thresholds["reference_follows"]:
        return
    yield finding(
        "reference/follows",
        f"after update() at steps 1 to {AT_ONCE}, {remaining:.1%} of the KL to a perturbed policy is left (under "
        f"{setup.thresholds['reference_follows']:.0%})",
        f"reference.kind={setup.config.reference.kind} follows the policy within {AT_ONCE} steps: the KL covers only "
        "these steps, stays near 0 and does not keep the policy near its start",
        either(
            _slower(setup), "no change is needed if the KL should limit single steps, as in mirror descent", joined="; "
        ),
    )


def _slower(setup: KeelSubject) -> Advice:
    """Advice: rarer updates for Keel's own kinds, or a frozen reference."""
    tree, now = setup.config.to_dict(), _parameters(setup)
    rarer = {"reference.every": 100} if not is_import_path(setup.config.reference.kind) and "every" in now else {}
    still = setting("{}, which never moves", as_kind(tree, "frozen"))
    return either(setting("set {}", rarer), still)


def _parameters(setup: KeelSubject) -> dict[str, Any]:
    """The reference's parameters, including its factory's defaults."""
    config = setup.config.reference
    users_own = is_import_path(config.kind)
    factory: Callable[..., Reference] = import_object(config.kind, "reference") if users_own else KINDS[_kind(setup)]
    defaults = inspect.signature(factory).parameters
    return {**{name: p.default for name, p in defaults.items() if p.default is not p.empty}, **config.params}


def _round_trip(setup: KeelSubject) -> Iterator[Finding]:
    """Save a user's reference with a perturbed policy and load it with another: its weights must be equal.

    At step 0 the policy equals the reference, so a wrong save would not show.
    """
    config, original = setup.config.reference, setup.run.reference
    if not is_import_path(config.kind) or original is None:
        return
    with setup.perturbed(seed=1):
        saved, expected = _saved(original), reference_fingerprint(setup)
    why = "its state_dict() raises an error" if saved is None else "its state_dict() is empty" if not saved else ""
    if saved:
        try:
            with setup.perturbed():
                setup.run.reference = build_reference(config.kind, setup.policy, **config.params)
                setup.run.reference.load_state_dict(saved)
                why = (
                    "" if reference_fingerprint(setup) == expected else "load_state_dict() does not restore its weights"
                )
        except Exception as error:  # a user's reference may raise anything
            why = f"load_state_dict() raises {type(error).__name__}"
        finally:
            setup.run.reference = original
    if not why:
        return
    yield finding(
        "reference/not-saved",
        f"after it is saved, rebuilt with a perturbed policy and loaded, the reference is different: {why}",
        f"reference.kind={config.kind} does not save its weights: after a resume or a rollback, the KL is measured "
        "against another model",
        "let state_dict() return the reference's weights and load_state_dict() restore them",
    )


def _restore(setup: KeelSubject, saved: Mapping[str, Any] | None, expected: str) -> None:
    """Restore the reference to its state before the test, or rebuild it from the policy if it cannot be restored."""
    reference, config = setup.run.reference, setup.config.reference
    assert reference is not None
    try:
        if saved is not None:
            reference.load_state_dict(saved)
        restored = reference_fingerprint(setup) == expected
    except Exception:  # a user's reference may raise anything
        restored = False
    if not restored:
        setup.run.reference = build_reference(config.kind, setup.policy, **config.params)


def _saved(reference: Reference) -> Mapping[str, Any] | None:
    try:
        return copy.deepcopy(reference.state_dict())
    except Exception:  # a user's reference need not support saving for this test
        return None
