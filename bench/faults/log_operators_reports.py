"""Operators on logs, of runs as users show them: gaps that grow, judges that go down, resumes that lose an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import (
    changed,
    has,
    has_parts,
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
from faults.log_names import LOGGED, PART
from faults.log_operators import _gains
from faults.log_operators_late import after
from faults.log_writers import Log


def cut_off(log: Log, share: float) -> int:
    """The place of the first line after this share of the run."""
    return int(share * len(log.steps))


def resumed_at(log: Log, share: float) -> Log:
    """The log of a run that stopped after this share and went on from a checkpoint just before."""
    stopped = int(log.steps[cut_off(log, share)])
    return replace(log, resumed=(stopped, max(int(log.steps[0]), stopped - 1)))


def evaluated(log: Log, scores: Mapping[int, float]) -> Log:
    return replace(log, evaluations={step: float(np.clip(value, 0, 1)) for step, value in scores.items()})


def without_spread(log: Log, none: np.ndarray) -> Log:
    """Groups agree to the share `none`, and what lives of their spread goes with it."""
    curves = {name: log.series[name] * (1 - none) for name in names_in(log, "reward_std", "group_std", "policy_loss")}
    share = {name: np.maximum(log.series[name], none) for name in names_in(log, "zero_variance")}
    return changed(log, **curves, **share)


# Rewards


@operator(
    "log/judge-goes-down",
    "From some step on every completion earns the lowest reward to the last digit: the judge has gone down.",
    *("reward/constant", "reward/failed", "reward/collapse", "run/shift"),
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    down = after(log, random.uniform(0.35, 0.6))
    log = without_spread(rewarded(still(log, int(down.argmax())), 1 - down), down)
    low = log.options["reward_low"]
    none = {name: np.where(down > 0, 0.0, log.series[name]) for name in names_in(log, "all_right", "grad_norm")}
    return changed(log, reward=np.where(down > 0, low, log.series["reward"]), **none)


@operator(
    "log/perfect-from-the-start",
    "Every completion earns the highest reward from the first step on, and nothing is left to learn from.",
    *("reward/constant", "reward/exploit"),
    fits=has("zero_variance", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    log = without_spread(unmoved(log, random), np.ones(len(log.steps)))
    high, shares = log.options["reward_high"], log.options["shares"]
    parts = {PART + name: share * high for name, share in shares.items() if PART + name in log.series}
    return changed(log, reward=high, all_right=1.0, grad_norm=0.0, parsed=1.0, **parts)


@operator(
    "log/graded-part-takes-over",
    "A graded part without a bound rises and takes the total with it, while fewer and fewer answers are right.",
    "reward/part-falling",
    fits=lambda log: has_parts(log) and PART + "similarity" in log.series,
)
def _(log: Log, random: Random) -> Log:
    low, high, shares = log.options["reward_low"], log.options["reward_high"], log.options["shares"]
    ramp = ramp_of(log, random.uniform(0.05, 0.15), random.uniform(0.7, 0.9))
    accuracy, graded = PART + "accuracy", PART + "similarity"
    floor = shares["accuracy"] * low
    right = floor + (held(log.series[accuracy]) - floor) * (1 - random.uniform(0.6, 0.8) * ramp)
    lost = held(log.series[accuracy]) - right
    risen = held(log.series[graded]) + 1.5 * lost + 0.1 * (high - low) * ramp
    parts = {accuracy: right, graded: risen}
    total = sum(parts.get(PART + name, log.series[PART + name]) for name in shares)
    score = {
        step: value * (1 - 0.6 * ramp[np.searchsorted(log.steps, step) - 1]) for step, value in log.evaluations.items()
    }
    return evaluated(changed(log, **parts, reward=total), score)


# Evaluations


@operator(
    "log/held-out-peaks-and-falls",
    "Held-out accuracy rises with the reward for a third of the run and then falls far below where it began.",
    *("eval/train-gap", "reward/exploit"),
    fits=lambda log: len(log.evaluations) >= 5 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    first, last = max(0.4, next(iter(log.evaluations.values()))), random.uniform(0.25, 0.4)
    at = np.linspace(0, 1, len(log.evaluations))
    course = first * np.interp(at, (0, 0.33, 1), (1, 1.1, last))
    return evaluated(log, dict(zip(log.evaluations, course, strict=True)))


@operator(
    "log/evaluated-without-the-adapter-after-resume",
    "After a resume every evaluation is back where the run began, and training goes on gaining.",
    "eval/train-gap",
    fits=lambda log: len(log.evaluations) >= 5 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    log = resumed_at(log, random.uniform(0.35, 0.45))
    first = max(0.1, 0.7 * next(iter(log.evaluations.values())))
    back = {step: value if step <= log.resumed[0] else first for step, value in log.evaluations.items()}
    return evaluated(log, {step: value * random.uniform(0.97, 1.03) for step, value in back.items()})


# KL and updates


@operator(
    "log/kl-comes-back-worse",
    "The KL climbs to tens of nats, comes half way back, and climbs higher than before; the reward goes with it.",
    *("kl/explosion", "kl/over-budget", "optim/lr-too-high"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    at = np.linspace(0, 1, len(log.steps))
    peak = random.uniform(20, 40)
    course = np.interp(at, (0, 0.08, 0.4, 0.7, 1), (0, 0.01, 1, 0.3, random.uniform(1.5, 2.5)))
    log = rewarded(still(log), 1 - random.uniform(0.5, 0.7) * ramp_of(log, 0.2, 0.9))
    return with_kl(log, log.series["kl"] + peak * course * noise(log, random, 0.1))


@operator(
    "log/nan-now-and-then",
    "At a fifth of the steps loss, KL and entropy are not numbers, and the update with them.",
    *("optim/non-finite", "scoring/non-finite"),
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    dice = np.random.default_rng(random.getrandbits(64)).random(len(log.steps))
    lost = (dice < random.uniform(0.15, 0.3)) & (np.arange(len(log.steps)) > 0)
    names = names_in(log, "loss", "policy_loss", "kl_loss", "kl", "entropy", "grad_norm")
    log = changed(log, **{name: np.where(lost, np.nan, log.series[name]) for name in names})
    return changed(log, nonfinite=lost.astype(float), skipped=lost.astype(float))


@operator(
    "log/nan-from-the-first-step",
    "Loss and gradient are not numbers at any step, and nothing moves.",
    "optim/non-finite",
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    lost = dict.fromkeys(names_in(log, "loss", "policy_loss", "kl_loss", "grad_norm"), np.nan)
    return changed(log, nonfinite=1.0, skipped=1.0, **lost)


@operator(
    "log/rate-lost-at-resume",
    "After a resume the learning rate is 0: the schedule of the checkpoint takes itself to be over.",
    *("optim/no-update", "kl/not-learning"),
    fits=has("learning_rate"),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.25, 0.4)
    gone = after(log, share)
    log = resumed_at(unmoved(log, random, at=int(gone.argmax())), share)
    return changed(log, learning_rate=np.where(gone > 0, 0.0, log.series["learning_rate"]))


# The sampler


@operator(
    "log/mismatch-then-collapse",
    "The sampler's gap grows a hundredfold over the run, and once it is wide the reward falls and stays down.",
    *("sampler/mismatch", "sampler/stale", "sampler/too-old", "sampler/precision", "reward/collapse"),
    fits=has_sampler,
)
def _(log: Log, random: Random) -> Log:
    at = np.linspace(0, 1, len(log.steps))
    gap = 0.006 * np.exp(np.log(random.uniform(80, 160)) * np.clip((at - 0.1) / 0.7, 0, 1))
    log = mismatched(log, gap * noise(log, random, 0.08))
    return rewarded(log, 1 - random.uniform(0.7, 0.9) * ramp_of(log, 0.65, 0.85))


@operator(
    "log/one-server-left-behind",
    "One of four servers keeps the first weights: a quarter of the samples drifts away, and the mean with them.",
    *("sampler/stale", "sampler/mismatch"),
    fits=has_sampler,
)
def _(log: Log, random: Random) -> Log:
    far = random.uniform(1.2, 2.0) * ramp_of(log, 0.0, 0.8) * noise(log, random, 0.1)
    log = mismatched(log, 0.005 + 0.25 * far)
    return changed(log, sampler_gap_max=0.1 + 8 * far)


@operator(
    "log/single-tokens-far-apart",
    "At every step some tokens are dozens of nats apart between sampler and trainer, from the first step on.",
    *("sampler/mismatch", "sampler/precision"),
    fits=lambda log: has("sampler_gap_max")(log) and has_sampler(log),
)
def _(log: Log, random: Random) -> Log:
    log = mismatched(log, random.uniform(0.15, 0.25) * noise(log, random, 0.05))
    return changed(log, sampler_gap_max=random.uniform(25, 40) * noise(log, random, 0.05))


@operator(
    "log/always-a-dozen-steps-old",
    "Samples are a dozen steps old from the start, and too far from the policy for any weight to repair.",
    *("sampler/too-old", "sampler/stale", "sampler/mismatch"),
    fits=lambda log: "staleness" in LOGGED[log.trainer] and has_sampler(log),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, 0.0, 0.1)
    log = mismatched(log, 0.01 + random.uniform(0.4, 0.7) * ramp * noise(log, random, 0.08))
    old = np.round(random.uniform(12, 20) * ramp)
    return replace(log, series={**log.series, "staleness": old})


# Output


@operator(
    "log/one-token-for-ever",
    "From one step on the model writes one token until it is cut off, and nothing is earned any more.",
    *("reward/collapse", "output/truncated", "run/shift", "entropy/collapse"),
    fits=has("entropy", "length", "truncated"),
)
def _(log: Log, random: Random) -> Log:
    gone = after(log, random.uniform(0.4, 0.65))
    log = without_spread(rewarded(log, 1 - gone), gone)
    limit = float(log.options["max_length"])
    ends = {"truncated": 1.0, "length": limit, "length_max": limit, "parsed": 0.0, "all_right": 0.0, "entropy": 1e-4}
    return changed(log, **{name: np.where(gone > 0, ends[name], log.series[name]) for name in names_in(log, *ends)})


@operator(
    "log/clip-higher-loosens",
    "The entropy climbs to several times what it was; the reward gains at first, and then loses all of it and more.",
    *("entropy/rising", "reward/collapse"),
    fits=has("entropy"),
)
def _(log: Log, random: Random) -> Log:
    climb = 1 + random.uniform(3, 5) * ramp_of(log, 0.1, 0.95)
    entropy = held(log.series["entropy"]) * climb
    return changed(rewarded(log, 1 - random.uniform(0.55, 0.7) * ramp_of(log, 0.35, 0.9)), entropy=entropy)


@operator(
    "log/greedy-after-resume",
    "After a resume sampling is that of the evaluation: the completions of a group are copies of each other.",
    *("rollout/temperature", "reward/constant", "run/shift"),
    fits=has("zero_variance", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.3, 0.45)
    gone = after(log, share)
    log = resumed_at(unmoved(log, random, at=int(gone.argmax())), share)
    log = without_spread(log, random.uniform(0.97, 0.995) * gone)
    span = log.options["reward_high"] - log.options["reward_low"]
    right = np.clip((log.series["reward"] - log.options["reward_low"]) / span, 0, 1)
    copies = {name: np.where(gone > 0, 0.98 * right, log.series[name]) for name in names_in(log, "all_right")}
    less = np.where(gone > 0, 0.05, 1.0) * log.series["grad_norm"]
    return changed(log, grad_norm=less, **copies)
