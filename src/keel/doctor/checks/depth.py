"""The sampler's gap by depth of the context: one that grows is a difference in positions or in the KV cache."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keel.doctor.checks.base import RECENT, CheckResults
from keel.doctor.findings import Finding, finding
from keel.doctor.history import History
from keel.doctor.thresholds import Thresholds

DEPTH = "kl/sampler_policy/depth_"  # of the metrics, with where a stretch begins behind it
SIGMAS = 4.0  # standard errors that lie between the deepest stretch and the first
CODE = "sampler/depth"


def depth(history: History, thresholds: Thresholds) -> CheckResults:
    """KL(sampler‖policy) of the last steps, in each stretch of the context."""
    stretches: dict[int, tuple[float, float]] = {}
    for name in history.series:
        if match := re.fullmatch(rf"{DEPTH}(\d+)/mean", name):
            mean, se = (history.get(f"{DEPTH}{match[1]}/{part}") for part in ("mean", "se"))
            if mean is not None and se is not None:
                steps = min(RECENT, len(se))  # each a sample of its own
                stretches[int(match[1])] = mean.tail(RECENT).mean, se.tail(RECENT).mean / max(1, steps) ** 0.5
    if (found := growing(stretches, thresholds)) is not None:
        yield found


def growing(stretches: Mapping[int, tuple[float, float]], thresholds: Thresholds) -> Finding | None:
    """The finding where the deepest stretch is far above the first, `{start: (mean, standard error)}`."""
    if len(stretches) < 2:
        return None
    first, deepest = min(stretches), max(stretches)
    (near, near_se), (far, far_se) = stretches[first], stretches[deepest]
    apart = far - near > SIGMAS * (near_se**2 + far_se**2) ** 0.5
    grows = far > thresholds["sampler_gap_growth"] * max(near, thresholds["sampler_rounding"])
    if not (apart and grows and far > thresholds["sampler_depth_kl"]):
        return None
    rows = ", ".join(f"from token {start} on {mean:.2g}" for start, (mean, _) in sorted(stretches.items()))
    return finding(
        CODE,
        f"KL(sampler‖policy) in nats per token: {rows}",
        "the gap grows with the depth of the context: sampler and trainer use different positions, or the sampler's KV "
        "cache loses precision",
        "compare rotary scaling, context length and positions of padded prompts on both sides (rope_scaling, "
        "rope_theta, max_model_len), and sample with kv_cache_dtype=auto",
    )


CHECKS = (depth,)
