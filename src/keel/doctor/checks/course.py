"""Checks on the run as a whole: metrics that jump at the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown
from keel.doctor.findings import finding
from keel.doctor.history import Series
from keel.doctor.shapes import Change, around, jumps

# Metrics of one family jump for the same reason and count once: the first one recorded is tested.
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
WRITTEN = ("reward/mean", "entropy/mean", "length/mean", "length/truncated_fraction", "parse/ok_fraction")
REWRITTEN = 0.25  # relative change of a metric; learning changes it by less within a few steps
LITTLE, TINY = 1e-4, 1e-300  # smallest values in log space: as a share of the largest value, and absolute
Jump = tuple[str, Change]


def shifts(log: Log) -> dict[int, list[Jump]]:
    """Steps at which metrics of at least two families jump and stay, with the jumps. Adjacent steps are merged.

    Steps of an entropy collapse are left out: a policy that writes one text changes every metric.
    """
    at: dict[int, list[Jump]] = {}
    for family in FAMILIES:
        if log.moves_reference and family[0].startswith("kl/policy_ref"):
            continue  # the KL falls at every reference update
        name = next((name for name in family if log.get(name) is not None), None)
        for jump in _jumps(name, log.series[name], log.level) if name is not None else ():
            near = next((step for step in at if abs(step - jump.step) <= 1), jump.step)
            at.setdefault(near, []).append((str(name), jump))
    least, share = log.limits["entropy_rise_least"], log.limits["entropy_collapse_share"]
    collapsed = {
        step
        for step, row in at.items()
        if any(name == "entropy/mean" and jump.after < min(least, share * jump.before) for name, jump in row)
    }
    return {step: row for step, row in at.items() if len({name for name, _ in row}) > 1 and step not in collapsed}


def _jumps(name: str, series: Series, chance: float) -> list[Change]:
    """Jumps of a metric. The gradient norm is tested in log space, because its noise is multiplicative."""
    if name != "grad/norm" or min(series.finite.values) <= 0:
        return jumps(series, chance)
    least = max(LITTLE * max(map(abs, series.finite.values)), TINY)
    found = jumps(series.finite.mapped(lambda value: math.log(max(value, least))), chance)
    return [replace(jump, before=math.exp(jump.before), after=math.exp(jump.after)) for jump in found]


def rewritten(log: Log, step: int, names: Sequence[str] = WRITTEN) -> bool:
    """Whether the policy writes different text from that step on: one of these metrics changes significantly."""
    shown = (series for name in names if (series := log.get(name)) is not None)
    changes = (change for series in shown if (change := around(series, step, RECENT)) is not None)
    return any(log.clear(c) and abs(c.size) > REWRITTEN * max(abs(c.before), abs(c.after)) for c in changes)


@check("run/shift")
def shift(log: Log) -> CheckResults:
    """Several metrics jump from one step to the next."""
    if sum(any(log.get(name) is not None for name in family) for family in FAMILIES) < 2:
        raise not_shown("two of the metrics that are tested for jumps")
    for step, together in shifts(log).items():
        changes = ", ".join(f"{name} {jump.before:.3g} → {jump.after:.3g}" for name, jump in together)
        yield finding(
            "run/shift",
            f"at step {step}: {changes}; the metrics stay at the new level (chance under noise: "
            f"{max(jump.chance for _, jump in together):.1g} each)",
            "the run itself changed at this step: it was resumed from another checkpoint or with other options, or the "
            "data, the prompt, the reference or the reward changed",
            f"compare options, data and checkpoint before and after step {step}; if the change is intended, treat both "
            "parts as different runs",
        )
