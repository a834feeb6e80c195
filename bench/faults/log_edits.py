"""Edits that operators on logs are made of; each leaves its log as it is and returns another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from faults.log_names import PART
from faults.log_writers import Log

Curve = np.ndarray
_NEVER_MOVED = ("reward", "reward_std", "group_std", "zero_variance", "all_right", "entropy", "length", "parsed")


def has(*names: str) -> Callable[[Log], bool]:
    """Whether the log has these metrics; a KL that is all zeros counts as none."""
    return lambda log: all(name in log.series and (name != "kl" or log.series["kl"].any()) for name in names)


def options_kept_with(*names: str) -> Callable[[Log], bool]:
    return lambda log: log.options_kept and has(*names)(log)


def has_parts(log: Log) -> bool:
    return {PART + "accuracy", PART + "format"} <= set(log.series)


def changed(log: Log, **curves: Curve | float) -> Log:
    """The log with other values of what it has: a metric that it does not log stays away."""
    count = len(log.steps)
    new = {name: np.broadcast_to(curve, count).astype(float) for name, curve in curves.items() if name in log.series}
    return replace(log, series={**log.series, **new})


def without(log: Log, *names: str) -> Log:
    return replace(log, series={name: curve for name, curve in log.series.items() if name not in names})


def optioned(log: Log, **options: Any) -> Log:
    return replace(log, options={**log.options, **options})


def noise(log: Log, random: Random, size: float) -> Curve:
    """Factors around 1."""
    return np.exp(np.random.default_rng(random.getrandbits(64)).normal(0, size, len(log.steps)))


def ramp_of(log: Log, begin: float, end: float) -> Curve:
    """0 up to the share `begin` of the run, 1 from the share `end` on."""
    at = np.arange(len(log.steps)) / max(1, len(log.steps) - 1)
    return np.clip((at - begin) / max(end - begin, 1e-9), 0, 1)


def trend_of(curve: Curve) -> Curve:
    at = np.linspace(-1, 1, len(curve))
    return np.polynomial.Polynomial.fit(at, curve, min(3, len(curve) - 1))(at)


def held(curve: Curve, at: int = 0) -> Curve:
    """The curve with its noise, without its trend from `at` on."""
    trend = trend_of(curve)
    return np.where(np.arange(len(curve)) < at, curve, curve - trend + trend[at])


def names_in(log: Log, *stems: str) -> list[str]:
    return [name for name in log.series if name in stems or (PART in stems and name.startswith(PART))]


def still(log: Log, at: int = 0) -> Log:
    """Reward, entropy, length and evaluations stay as they are at `at`, with their noise."""
    shares = ("zero_variance", "all_right", "parsed")
    curves = {}
    for name in names_in(log, *_NEVER_MOVED, PART):
        curve = held(log.series[name], at)
        curves[name] = np.clip(curve, 0, 1) if name in shares else curve
    first = int(log.steps[at])
    level = [value for step, value in log.evaluations.items() if step <= first] or list(log.evaluations.values())[:1]
    evaluations = {step: value if step <= first else level[-1] for step, value in log.evaluations.items()}
    return replace(changed(log, **curves), evaluations=evaluations)


def unmoved(log: Log, random: Random, at: int = 0) -> Log:
    """As `_still`, and the KL stays where it is: nothing updates the policy any more."""
    log = still(log, at)
    curves: dict[str, Curve | float] = {}
    if "kl" in log.series:
        level = log.series["kl"][max(0, at - 1)] if at else 0.0
        curves["kl"] = np.where(np.arange(len(log.steps)) < at, log.series["kl"], level * noise(log, random, 0.03))
    for name in ("clip_fraction", "old_kl"):
        if name in log.series:
            curves[name] = np.where(np.arange(len(log.steps)) < at, log.series[name], 0.0)
    return changed(log, **curves)


def rewarded(log: Log, factor: Curve) -> Log:
    """Reward and parts at `factor` of their distance from the lowest reward; spread and shares follow."""
    low = log.options["reward_low"]
    curves: dict[str, Curve | float] = {"reward": low + factor * (log.series["reward"] - low)}
    for name, share in log.options["shares"].items():
        if PART + name in log.series:
            curves[PART + name] = share * low + factor * (log.series[PART + name] - share * low)
    for name in names_in(log, "reward_std", "group_std"):
        curves[name] = log.series[name] * np.sqrt(np.clip(factor, 0, 1))
    for name in names_in(log, "zero_variance"):
        curves[name] = log.series[name] + (1 - log.series[name]) * 0.7 * np.clip(1 - factor, 0, 1) ** 2
    for name in names_in(log, "all_right"):
        curves[name] = log.series[name] * np.clip(factor, 0, 1) ** 4
    return changed(log, **curves)


def with_kl(log: Log, kl: Curve) -> Log:
    """Another KL; the loss follows."""
    more = log.options["beta"] * (kl - log.series["kl"])
    losses = {name: log.series[name] + more for name in names_in(log, "loss", "kl_loss")}
    return changed(log, kl=kl, **losses)


def mismatched(log: Log, gap: Curve) -> Log:
    """Sampler and trainer apart by `gap` nats a token: every measure of it that the log has."""
    k3 = 0.8 * gap**2 / (1 + 0.3 * gap)
    return changed(
        log,
        sampler_gap=gap,
        sampler_gap_max=gap * 12,
        sampler_kl=k3,
        sampler_k1=k3,
        sampler_probability_gap=np.minimum(0.6, 0.4 * gap),
        sampler_correlation=np.clip(1 - 0.7 * gap, 0, 1),
        sampler_factor=np.exp(gap),
        weight_max=1 + np.minimum(gap * 10, 8),
        ess=1 / (1 + 2 * k3 + gap**2),
    )


def has_sampler(log: Log) -> bool:
    measures = ("sampler_gap", "sampler_kl", "sampler_k1", "sampler_probability_gap", "sampler_factor")
    return any(name in log.series for name in measures)
