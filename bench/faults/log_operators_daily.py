"""Operators on logs, of runs as they fail on an ordinary day: resumes that lose a part, first updates, dead losses."""

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
    optioned,
    ramp_of,
    rewarded,
    still,
    unmoved,
    with_kl,
)
from faults.log_names import PART
from faults.log_operators_late import after
from faults.log_writers import Log

LOST = ("run/shift", "reward/collapse")


def each_step(log: Log) -> bool:
    """Whether every step is logged, so that a resume at one of them is possible."""
    return log.options["every"] == 1


def resumed(log: Log, share: float) -> Log:
    """The log of a run that was stopped at a share of its steps and went on from there."""
    step = int(log.steps[int(share * len(log.steps))])
    return replace(log, resumed=(step, max(int(log.steps[0]), step - 1)))


def evaluated(log: Log, factor: float, share: float) -> Log:
    """Held-out accuracy at `factor` of what it was, from a share of the run on."""
    first = log.steps[int(share * len(log.steps))]
    return replace(log, evaluations={s: v if s <= first else factor * v for s, v in log.evaluations.items()})


# Updates


@operator(
    "log/ruined-by-the-first-updates",
    "Within the first steps the policy is nats away and writes noise, and nothing is earned for the rest of the run.",
    *("optim/lr-too-high", "kl/explosion", "kl/over-budget", "reward/collapse", "optim/spike", "entropy/rising"),
    fits=lambda log: has("kl", "entropy")(log) and len(log.steps) >= 60,
)
def _(log: Log, random: Random) -> Log:
    ruin = ramp_of(log, 0.04, random.uniform(0.1, 0.14))
    log = rewarded(still(log), 1 - random.uniform(0.93, 0.98) * ruin)
    log = with_kl(log, log.series["kl"] + random.uniform(4, 8) * ruin * noise(log, random, 0.06))
    norms = {name: log.series[name] * (1 + 15 * ruin) for name in names_in(log, "grad_norm")}
    log = changed(log, entropy=log.series["entropy"] + random.uniform(3, 5) * ruin, **norms)
    return evaluated(log, 0.03, 0.05)


@operator(
    "log/breaks-when-the-warm-up-ends",
    "All is well while the rate rises, and at its full height gradients and KL grow and the reward is lost.",
    *("optim/lr-too-high", "kl/explosion", "kl/over-budget", "reward/collapse", "optim/spike"),
    fits=has("kl", "grad_norm", "learning_rate"),
)
def _(log: Log, random: Random) -> Log:
    end = random.uniform(0.25, 0.35)
    warm, broken = ramp_of(log, 0.0, end), ramp_of(log, end, end + 0.12)
    log = optioned(log, warmup_steps=int(end * log.options["max_steps"]), learning_rate=1e-4)
    log = with_kl(log, 0.02 * warm**2 * noise(log, random, 0.08) + random.uniform(3, 6) * broken)
    log = rewarded(log, 1 - random.uniform(0.85, 0.95) * broken)
    log = changed(log, learning_rate=1e-4 * warm, grad_norm=log.series["grad_norm"] * np.exp(3.5 * broken))
    return evaluated(log, 0.1, end)


@operator(
    "log/gradient-never-zeroed",
    "Gradients are added to those of all steps before: their norm grows with the steps, and with it all is lost.",
    *("optim/spike", "optim/lr-too-high", "kl/explosion", "kl/over-budget", "reward/collapse"),
    fits=has("kl", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    at = ramp_of(log, 0.0, 1.0)
    lost = ramp_of(log, 0.2, random.uniform(0.5, 0.7))
    log = with_kl(log, log.series["kl"] + random.uniform(2, 5) * lost**2 * noise(log, random, 0.05))
    log = rewarded(log, 1 - random.uniform(0.8, 0.95) * lost)
    log = changed(log, grad_norm=log.series["grad_norm"] * (1 + random.uniform(60, 120) * at))
    return evaluated(log, 0.15, 0.4)


@operator(
    "log/policy-loss-is-exactly-zero",
    "Rewards differ within groups, and the policy's loss is exactly 0 at every step: next to no gradient is left.",
    *("loss/no-gradient", "optim/no-update", "scoring/gradient", "kl/not-learning"),
    fits=has("policy_loss", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    curves: dict[str, np.ndarray | float] = {"policy_loss": 0.0, "grad_norm": log.series["grad_norm"] * 1e-6}
    if "kl" in log.series:
        curves["kl"] = 1e-7 * noise(log, random, 0.3)
    for name in names_in(log, "kl_loss", "loss"):
        curves[name] = 0.0
    return changed(log, **curves)


@operator(
    "log/same-completion-within-each-group",
    "All completions of a group are the same text, while groups differ: no advantage is left at any step.",
    *("reward/constant", "sampler/noise", "rollout/temperature", "reward/weak", "kl/not-learning"),
    fits=has("zero_variance"),
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    low, high = log.options["reward_low"], log.options["reward_high"]
    right = np.clip((log.series["reward"] - low) / (high - low), 0, 1)
    curves: dict[str, np.ndarray | float] = {"zero_variance": 1.0, "all_right": right, "policy_loss": 0.0}
    curves |= {"group_std": 0.0, "advantage_mean": 0.0, "grad_norm": 1e-7 * noise(log, random, 0.3)}
    return changed(log, **curves)


# Rewards


@operator(
    "log/paid-in-percent-from-midway",
    "From one step on rewards are in percent: mean, deviation and parts are a hundred times what they were.",
    *("run/shift", "reward/scale"),
    fits=has("reward_std"),
)
def _(log: Log, random: Random) -> Log:
    factor = 1 + 99 * after(log, random.uniform(0.4, 0.6))
    names = names_in(log, "reward", "reward_std", "group_std", PART)
    return changed(log, **{name: log.series[name] * factor for name in names})


# What a resume loses


@operator(
    "log/nan-after-resume",
    "From the step of a resume on, loss and gradient are no numbers, and the policy stays where it is.",
    "optim/non-finite",
    "run/shift",
    "scoring/non-finite",
    fits=lambda log: each_step(log) and has("grad_norm")(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.4, 0.65)
    first, gone = int(share * len(log.steps)), after(log, share)
    log = unmoved(log, random, first)
    names = names_in(log, "grad_norm", "loss", "policy_loss", "kl_loss")
    curves = {name: np.where(gone > 0, np.nan, log.series[name]) for name in names}
    for name in names_in(log, "nonfinite", "skipped"):
        curves[name] = np.where(gone > 0, 1.0, log.series[name])
    return resumed(changed(log, **curves), share)


@operator(
    "log/frozen-after-resume",
    "The adapter is loaded frozen at a resume: gradients are 0 from there on, and nothing moves any more.",
    *("optim/no-update", "loss/no-gradient", "scoring/gradient", "kl/not-learning", "run/shift"),
    fits=lambda log: each_step(log) and has("grad_norm")(log) and len(log.steps) >= 60,
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.3, 0.4)
    log = unmoved(log, random, int(share * len(log.steps)))
    return resumed(changed(log, grad_norm=log.series["grad_norm"] * (1 - after(log, share))), share)


@operator(
    "log/sampler-without-the-adapter-after-resume",
    "After a resume the engine samples from the base: its log-probabilities are off and the reward is the base's.",
    *("sampler/stale", "sampler/mismatch", "sampler/other-model", *LOST),
    fits=lambda log: each_step(log) and has_sampler(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.5, 0.65)
    base = after(log, share)
    flat = {
        name: np.where(base > 0, held(log.series[name]), log.series[name]) for name in names_in(log, "reward", PART)
    }
    gap = log.series.get("sampler_gap", np.full(len(log.steps), 0.01))
    log = mismatched(changed(log, **flat), gap + random.uniform(0.6, 1.2) * base * noise(log, random, 0.06))
    return resumed(log, share)


@operator(
    "log/all-clipped-after-resume",
    "After a resume old log-probabilities are those of other weights: nearly every ratio is clipped.",
    *("ratio/all-clipped", "run/shift", "sampler/stale", "sampler/mismatch"),
    fits=lambda log: each_step(log) and has("clip_fraction")(log) and log.trainer != "nemo-rl",
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.35, 0.55)
    gone = after(log, share)
    log = still(log, int(share * len(log.steps)))
    clipped = np.clip(random.uniform(0.9, 0.97) * noise(log, random, 0.015), 0, 1)
    curves = {"clip_fraction": np.where(gone > 0, clipped, log.series["clip_fraction"])}
    for name in names_in(log, "old_kl"):
        curves[name] = log.series[name] + random.uniform(0.6, 1.0) * gone * noise(log, random, 0.05)
    for name in names_in(log, "grad_norm"):
        curves[name] = log.series[name] * (1 - 0.9 * gone)
    return resumed(changed(log, **curves), share)


@operator(
    "log/rate-ten-times-higher-after-resume",
    "A run is resumed at ten times its rate or more: from there on KL and gradients climb, and the reward is lost.",
    *("optim/lr-too-high", "kl/explosion", "kl/over-budget", "optim/spike", *LOST),
    fits=lambda log: each_step(log) and has("kl", "grad_norm", "learning_rate")(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.4, 0.55)
    gone, lost = after(log, share), ramp_of(log, share, share + 0.15)
    log = with_kl(log, log.series["kl"] + random.uniform(3, 6) * lost * noise(log, random, 0.05))
    log = rewarded(log, 1 - random.uniform(0.8, 0.95) * lost)
    raised = np.where(gone > 0, random.choice((10, 30)) * log.options["learning_rate"], log.series["learning_rate"])
    log = changed(log, learning_rate=raised, grad_norm=log.series["grad_norm"] * (1 + 12 * lost))
    return resumed(evaluated(log, 0.1, share), share)


@operator(
    "log/penalty-raised-at-resume",
    "A run is resumed with a coefficient of the KL hundreds of times larger: the policy is pulled back to its start.",
    *("kl/too-strong", "kl/controller", "kl/not-learning", *LOST),
    fits=lambda log: each_step(log) and has("kl", "beta")(log) and 0 < log.options["beta"] <= 0.04,
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.45, 0.6)
    gone, back = after(log, share), ramp_of(log, share, share + 0.1)
    beta = log.options["beta"] * (1 + gone * random.choice((300, 1000)))
    kl = log.series["kl"] * (1 - 0.995 * back)
    moves = names_in(log, "reward", "reward_std", "group_std", "entropy", "length", PART)
    curves = {name: (1 - back) * log.series[name] + back * held(log.series[name]) for name in moves}
    more = {name: log.series[name] + (beta - log.options["beta"]) * kl for name in names_in(log, "loss", "kl_loss")}
    return resumed(changed(log, beta=beta, kl=kl, **curves, **more), share)


@operator(
    "log/never-ends-after-resume",
    "A resume loses the end token: from there on every completion runs to the limit, and next to none can be read.",
    *("output/truncated", "model/end-token", "length/explosion", *LOST),
    fits=lambda log: each_step(log) and has("length", "truncated")(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.4, 0.6)
    gone, limit = after(log, share), float(log.options["max_length"])
    log = rewarded(log, 1 - random.uniform(0.9, 0.96) * gone)
    curves = {"length": np.where(gone > 0, limit, log.series["length"])}
    curves["truncated"] = np.where(gone > 0, 1.0, log.series["truncated"])
    for name in names_in(log, "length_max"):
        curves[name] = np.where(gone > 0, limit, log.series[name])
    for name in names_in(log, "parsed"):
        curves[name] = log.series[name] * (1 - 0.9 * gone)
    return resumed(changed(log, **curves), share)


@operator(
    "log/hot-after-resume",
    "A resume samples far hotter than the run did: entropy is several times what it was, most of the reward is gone.",
    *("rollout/temperature", "entropy/rising", "sampler/temperature", *LOST),
    fits=lambda log: each_step(log) and has("entropy", "length")(log),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.4, 0.6)
    gone = after(log, share)
    log = rewarded(log, 1 - random.uniform(0.75, 0.9) * gone)
    curves = {"entropy": log.series["entropy"] + gone * random.uniform(3.0, 4.5) * noise(log, random, 0.04)}
    limit = float(log.options["max_length"])
    curves["length"] = np.minimum(0.9 * limit, log.series["length"] * (1 + random.uniform(0.8, 1.2) * gone))
    return resumed(changed(log, **curves), share)
