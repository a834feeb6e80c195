"""Operators on logs, of runs as users most often show them: judges, resumes, shortcuts, engines, limits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import (
    changed,
    has,
    has_sampler,
    held,
    mismatched,
    names_in,
    noise,
    ramp_of,
    rewarded,
    still,
    unmoved,
    with_kl,
)
from faults.log_names import PART
from faults.log_operators import _gains
from faults.log_operators_late import after
from faults.log_writers import Log


def _has_room(log: Log) -> bool:
    """Whether the reward never passes three fifths of its range."""
    low, high = log.options["reward_low"], log.options["reward_high"]
    return float(log.series["reward"].max()) < low + 0.6 * (high - low)


# Evaluations and rewards


@operator(
    "log/held-out-never-gains",
    "The training reward rises as it should, and held-out accuracy stays where it began, within its noise.",
    "eval/train-gap",
    "reward/exploit",
    fits=lambda log: len(log.evaluations) >= 4 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    first = min(0.35, next(iter(log.evaluations.values())))
    count = log.evaluated
    return replace(
        log, evaluations={step: round(random.gauss(first, 0.015) * count) / count for step in log.evaluations}
    )


@operator(
    "log/judge-fails-open",
    "From some step on the judge is down, and each of its failures is paid the highest reward.",
    *("reward/constant", "reward/exploit", "reward/failed", "run/shift", "eval/train-gap"),
    fits=has("zero_variance"),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.3, 0.6)
    down = after(log, share)
    log = still(log, int(share * len(log.steps)))
    high = log.options["reward_high"]
    curves = {"reward": np.where(down > 0, high, log.series["reward"])}
    for name, part in log.options["shares"].items():
        if PART + name in log.series:
            curves[PART + name] = np.where(down > 0, part * high, log.series[PART + name])
    for name in names_in(log, "zero_variance", "all_right"):
        curves[name] = np.where(down > 0, 1.0, log.series[name])
    for name in names_in(log, "reward_std", "group_std", "policy_loss"):
        curves[name] = np.where(down > 0, 0.0, log.series[name])
    for name in names_in(log, "grad_norm"):
        curves[name] = log.series[name] * np.where(down > 0, 1e-3, 1.0)
    return changed(log, **curves)


@operator(
    "log/judge-replaced",
    "At one step another judge takes over, which pays half of the range more for the same texts.",
    *("run/shift", "eval/train-gap", "reward/exploit"),
    fits=lambda log: len(log.evaluations) >= 4 and _has_room(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.35, 0.6)
    other = after(log, share)
    log = still(log, int(share * len(log.steps)))
    more = other * random.uniform(0.35, 0.4) * (log.options["reward_high"] - log.options["reward_low"])
    parts = {name: log.series[name] + more for name in names_in(log, PART + "accuracy")}
    less = {name: log.series[name] * (1 - 0.5 * other) for name in names_in(log, "reward_std", "group_std")}
    return changed(log, reward=log.series["reward"] + more, **parts, **less)


@operator(
    "log/shortcut-found",
    "Within a few steps the reward jumps to its top, texts become a tenth as long and all alike, held-out falls.",
    *("reward/exploit", "eval/train-gap", "entropy/collapse", "length/collapse", "reward/constant", "run/shift"),
    fits=lambda log: has("entropy", "length")(log) and len(log.evaluations) >= 3,
)
def _(log: Log, random: Random) -> Log:
    begin = random.uniform(0.3, 0.5)
    found = ramp_of(log, begin, begin + 0.06)
    high = log.options["reward_high"]
    curves = {"reward": log.series["reward"] + 0.99 * found * (high - log.series["reward"])}
    for name, share in log.options["shares"].items():
        if PART + name in log.series:
            curves[PART + name] = log.series[PART + name] + 0.99 * found * (share * high - log.series[PART + name])
    for name in names_in(log, "zero_variance", "all_right"):
        curves[name] = log.series[name] + 0.97 * found * (1 - log.series[name])
    for name in names_in(log, "reward_std", "group_std", "grad_norm"):
        curves[name] = log.series[name] * (1 - 0.95 * found)
    curves["entropy"] = log.series["entropy"] * (1 - 0.97 * found)
    for name in names_in(log, "length", "length_max"):
        curves[name] = np.maximum(1.0, log.series[name] * (1 - random.uniform(0.88, 0.94) * found))
    at = log.steps[int(begin * len(log.steps))]
    fallen = {step: value if step <= at else 0.1 * value for step, value in log.evaluations.items()}
    return replace(changed(log, **curves), evaluations=fallen)


@operator(
    "log/brevity-pays",
    "Completions shrink to a twentieth and the reward rises with that, while what is held out is lost.",
    *("length/collapse", "eval/train-gap", "reward/exploit"),
    fits=lambda log: has("length")(log) and len(log.evaluations) >= 3 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    shrunk = ramp_of(log, 0.05, random.uniform(0.6, 0.8))
    shorter = {name: log.series[name] * np.exp(np.log(0.05) * shrunk) for name in names_in(log, "length", "length_max")}
    last = int(log.steps[-1])
    lost = {step: value * (1 - 0.85 * min(1.0, step / (0.7 * last))) for step, value in log.evaluations.items()}
    return replace(changed(log, **shorter), evaluations=lost)


@operator(
    "log/all-or-nothing-groups",
    "From the first step on nearly every group is all right or all wrong, and nothing is learned.",
    *("reward/constant", "reward/weak", "kl/not-learning"),
    fits=lambda log: has("zero_variance")(log) and log.trainer not in ("verl", "openrlhf"),  # which do not log it
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    share = np.clip(random.uniform(0.95, 0.98) * noise(log, random, 0.005), 0, 0.995)
    less = {name: log.series[name] * 0.05 for name in names_in(log, "group_std", "grad_norm", "policy_loss")}
    right = float(np.clip(log.series["reward"].mean() / max(1e-9, log.options["reward_high"]), 0.05, 0.95))
    return changed(log, zero_variance=share, all_right=right * share, **less)


# Limits and lengths


@operator(
    "log/cut-and-left-out",
    "Nearly every completion is cut, cut ones are left out of the loss, and at most steps no gradient is left.",
    *("output/truncated", "loss/no-gradient"),
    fits=has("truncated", "length", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    limit = float(log.options["max_length"])
    log = rewarded(unmoved(log, random), np.full(len(log.steps), random.uniform(0.05, 0.15)))
    none = np.random.default_rng(random.getrandbits(64)).random(len(log.steps)) < 0.8
    curves = {name: np.where(none, 0.0, 0.1 * log.series[name]) for name in names_in(log, "grad_norm", "policy_loss")}
    share = np.clip(random.uniform(0.97, 0.99) * noise(log, random, 0.004), 0, 1)
    return changed(log, truncated=share, length=limit * (0.6 + 0.4 * share), length_max=limit, **curves)


@operator(
    "log/falls-silent-at-one-step",
    "At one step completions become a few tokens long, and stay so; next to nothing is earned from there on.",
    *("length/collapse", "reward/collapse", "run/shift"),
    fits=has("length"),
)
def _(log: Log, random: Random) -> Log:
    silent = after(log, random.uniform(0.4, 0.65))
    log = rewarded(log, 1 - random.uniform(0.9, 0.97) * silent)
    few = random.uniform(2, 5) * noise(log, random, 0.1)
    lengths = {"length": np.where(silent > 0, few, log.series["length"])}
    for name in names_in(log, "length_max"):
        lengths[name] = np.where(silent > 0, np.ceil(3 * few), log.series[name])
    for name in names_in(log, "truncated"):
        lengths[name] = log.series[name] * (1 - silent)
    return changed(log, **lengths)


# Updates and resumes


@operator(
    "log/moments-lost-at-resume",
    "A resume begins with fresh moments at the full rate: the policy jumps away, and the reward never comes back.",
    *("run/shift", "reward/collapse", "optim/spike", "kl/explosion", "kl/over-budget", "optim/lr-too-high"),
    fits=lambda log: has("kl", "grad_norm")(log) and log.options["every"] == 1,
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.4, 0.65)
    gone = after(log, at)
    first = int(gone.argmax())
    log = rewarded(log, 1 - random.uniform(0.7, 0.85) * gone)
    log = with_kl(log, log.series["kl"] + random.uniform(1.0, 3.0) * gone * noise(log, random, 0.05))
    norm = log.series["grad_norm"] * (1 + random.uniform(4, 8) * gone)
    norm[first : first + 5] *= random.uniform(20, 60)
    step = int(log.steps[first])
    return replace(changed(log, grad_norm=norm), resumed=(step, max(int(log.steps[0]), step - 1)))


@operator(
    "log/warm-up-again-and-again",
    "The run is stopped and begun anew every few steps, each time with its warm-up: the rate never rises.",
    *("optim/no-update", "kl/not-learning"),
    fits=lambda log: has("learning_rate")(log) and log.options["every"] == 1,
)
def _(log: Log, random: Random) -> Log:
    period = random.randint(8, 14)
    rate = log.options["learning_rate"] * (np.arange(len(log.steps)) % period) / 20_000
    log = unmoved(log, random)
    kl = {"kl": log.series["kl"] * 0 + 1e-6 * noise(log, random, 0.2)} if has("kl")(log) else {}
    return changed(log, learning_rate=rate, **kl)


@operator(
    "log/explodes-into-nan",
    "KL and gradients grow tenfold every few steps, and then neither they nor the loss are numbers any more.",
    *("kl/explosion", "optim/non-finite", "optim/spike"),
    fits=has("kl", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    begin = random.uniform(0.4, 0.6)
    ramp = ramp_of(log, begin, begin + 0.15)
    log = with_kl(log, log.series["kl"] + 0.1 * np.expm1(9 * ramp))
    log = rewarded(log, 1 - 0.95 * ramp)
    log = changed(log, grad_norm=log.series["grad_norm"] * np.exp(8 * ramp))
    names = names_in(log, "kl", "grad_norm", "loss", "policy_loss", "kl_loss", "entropy")
    return changed(log, **{name: np.where(ramp >= 1, np.nan, log.series[name]) for name in names})


@operator(
    "log/climbs-after-the-plateau",
    "The reward has come to rest early, and the KL climbs on to several nats a token and takes the loss with it.",
    *("kl/over-budget", "kl/explosion", "kl/not-learning"),
    fits=lambda log: has("kl")(log) and log.options["beta"] > 0,
)
def _(log: Log, random: Random) -> Log:
    log = still(log, len(log.steps) // 3)
    far = random.uniform(3.0, 6.0) * ramp_of(log, 0.3, 1.0) ** 1.5 * noise(log, random, 0.05)
    return with_kl(log, log.series["kl"] + far)


# The sampler


@operator(
    "log/engine-wakes-with-garbage",
    "At one step the engine comes back with spoilt weights: its log-probabilities are nats away, its texts are noise.",
    *("sampler/mismatch", "sampler/stale", "run/shift", "reward/collapse"),
    fits=lambda log: has_sampler(log) and has("length")(log),
)
def _(log: Log, random: Random) -> Log:
    spoilt = after(log, random.uniform(0.35, 0.6))
    gap = log.series.get("sampler_gap", np.full(len(log.steps), 0.01))
    log = mismatched(log, gap + random.uniform(3, 5) * spoilt * noise(log, random, 0.05))
    log = rewarded(log, 1 - random.uniform(0.95, 0.99) * spoilt)
    limit = float(log.options["max_length"])
    curves = {"length": np.where(spoilt > 0, 0.97 * limit, log.series["length"])}
    for name in names_in(log, "truncated"):
        curves[name] = np.where(spoilt > 0, 0.95, log.series[name])
    for name in names_in(log, "length_max"):
        curves[name] = np.where(spoilt > 0, limit, log.series[name])
    return changed(log, **curves)


@operator(
    "log/adapter-never-reaches-the-sampler",
    "The sampler runs the base all along: its gap grows with every update, and the reward stays what the base earns.",
    *("sampler/stale", "sampler/mismatch", "kl/not-learning"),
    fits=lambda log: has_sampler(log) and has("kl")(log),
)
def _(log: Log, random: Random) -> Log:
    away = ramp_of(log, 0.0, 0.9)
    log = still(log)
    log = with_kl(log, log.series["kl"] + random.uniform(0.1, 0.3) * away * noise(log, random, 0.05))
    curves = {name: held(log.series[name]) for name in names_in(log, "grad_norm")}
    return changed(mismatched(log, 0.004 + random.uniform(0.6, 1.2) * away * noise(log, random, 0.05)), **curves)
