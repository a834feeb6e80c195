"""The run as a whole: metrics that jump together."""

from __future__ import annotations

from keel.base.thresholds import Thresholds
from keel.lab.doctor.checks.base import CheckResults, level, not_recorded
from keel.lab.doctor.findings import finding
from keel.lab.doctor.history import History
from keel.lab.doctor.shapes import Change, jumps

# What jumps for the same reason counts once: one name a family is looked at, the first that was recorded.
FAMILIES = (
    ("reward/mean",),
    ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean", "kl/policy_ref/k1/mean"),
    ("entropy/mean",),
    ("length/mean", "length/truncated_fraction"),
    ("grad/norm",),
    ("kl/sampler_policy/k3/mean", "logp/sampler_gap_mean", "sampler/probability_gap_mean"),
    ("parse/ok_fraction",),
    ("prompt/length_mean",),
)
Jump = tuple[str, Change]


def shifts(history: History, thresholds: Thresholds) -> dict[int, list[Jump]]:
    """Steps at which metrics of two families or more jump and stay, with these jumps; neighbouring steps are one."""
    at: dict[int, list[Jump]] = {}
    moves = history.moves_reference
    for family in FAMILIES:
        if moves and family[0].startswith("kl/policy_ref"):
            continue  # falls whenever the reference moves, and the gradient with it
        name = next((name for name in family if history.get(name) is not None), None)
        if name is None:
            continue
        for jump in jumps(history.series[name], level(thresholds)):
            near = next((step for step in at if abs(step - jump.step) <= 1), jump.step)
            at.setdefault(near, []).append((name, jump))
    return {step: together for step, together in at.items() if len({name for name, _ in together}) > 1}


def shift_steps(history: History, thresholds: Thresholds) -> tuple[int, ...]:
    """Only the steps."""
    return tuple(shifts(history, thresholds))


def shift(history: History, thresholds: Thresholds) -> CheckResults:
    """Several metrics at another level from one step to the next."""
    if sum(any(history.get(name) is not None for name in family) for family in FAMILIES) < 2:
        yield not_recorded("run/shift", "more than one metric that could jump")
    for step, together in shifts(history, thresholds).items():
        changes = ", ".join(f"{name} {jump.before:.3g} → {jump.after:.3g}" for name, jump in together)
        yield finding(
            "run/shift",
            f"at step {step}: {changes}; they stay there (chance under noise: "
            f"{max(jump.chance for _, jump in together):.1g} each)",
            "something other than an update changed there: a resume from another checkpoint or with other options, "
            "other data or another prompt, another reference or reward",
            f"compare options, data and checkpoint before and after step {step}; what was meant needs no cure, but "
            "both sides are different runs",
        )


CHECKS = (shift,)
