"""Operators on logs, of runs as users ask about them: evaluations that stand still, queues, spikes, memories."""

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
    options_kept_with,
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

# Evaluations


@operator(
    "log/evaluation-stands-still",
    "Every evaluation gives the same number to the last digit while training gains: it runs the first weights.",
    "eval/train-gap",
    fits=lambda log: len(log.evaluations) >= 4 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    first = next(iter(log.evaluations.values()))
    return replace(log, evaluations=dict.fromkeys(log.evaluations, first))


@operator(
    "log/memorised",
    "All that is trained on is solved early, to the last problem, and held-out problems stay where they were.",
    *("eval/train-gap", "task/repeats", "reward/constant"),
    fits=lambda log: len(log.evaluations) >= 4 and has("zero_variance")(log),
)
def _(log: Log, random: Random) -> Log:
    learned = ramp_of(log, 0.02, random.uniform(0.25, 0.4))
    first = min(0.4, next(iter(log.evaluations.values())))
    curves = {"reward": log.series["reward"] + learned * (log.options["reward_high"] - log.series["reward"])}
    for name, share in log.options["shares"].items():
        if PART + name in log.series:
            top = share * log.options["reward_high"]
            curves[PART + name] = log.series[PART + name] + learned * (top - log.series[PART + name])
    for name in names_in(log, "zero_variance", "all_right"):
        curves[name] = log.series[name] + 0.98 * learned * (1 - log.series[name])
    for name in names_in(log, "reward_std", "group_std", "policy_loss"):
        curves[name] = log.series[name] * (1 - 0.97 * learned)
    evaluations = {step: first * random.uniform(0.97, 1.03) for step in log.evaluations}
    return replace(changed(log, **curves), evaluations=evaluations)


# Rewards


@operator(
    "log/groups-agree",
    "The completions of nearly every group come to agree, half of the groups right and half of them wrong.",
    *("reward/constant", "reward/weak", "entropy/collapse"),
    fits=has("zero_variance", "entropy"),
)
def _(log: Log, random: Random) -> Log:
    same = ramp_of(log, 0.05, random.uniform(0.2, 0.35))
    share = log.series["zero_variance"] + same * (random.uniform(0.97, 0.99) - log.series["zero_variance"])
    at = len(log.steps) // 4
    log = still(log, at)
    less = {name: log.series[name] * (1 - 0.95 * same) for name in names_in(log, "group_std", "grad_norm")}
    entropy = log.series["entropy"] * np.exp(np.log(0.03) * same)
    return changed(log, zero_variance=share, all_right=0.5 * share, entropy=entropy, **less)


@operator(
    "log/style-falls",
    "A graded part of the reward falls to a fraction of itself while the total rises.",
    "reward/part-falling",
    fits=lambda log: PART + "similarity" in log.series and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    name, low = PART + "similarity", log.options["reward_low"]
    floor = log.options["shares"]["similarity"] * low
    ramp = ramp_of(log, random.uniform(0.05, 0.2), random.uniform(0.7, 0.9))
    part = floor + (held(log.series[name]) - floor) * (1 - random.uniform(0.75, 0.9) * ramp)
    lost = log.series[name] - part  # the answers' part makes up for it
    accuracy = PART + "accuracy"
    gained = {accuracy: log.series[accuracy] + 1.2 * lost} if accuracy in log.series else {}
    return changed(log, **{name: part, "reward": log.series["reward"] + 0.2 * lost}, **gained)


@operator(
    "log/unlearns",
    "The reward falls from the first step on, to next to nothing, while the policy moves away.",
    *("reward/collapse", "loss/sign", "reward/gold"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, 0.0, random.uniform(0.5, 0.8))
    log = rewarded(still(log), 1 - random.uniform(0.9, 0.97) * ramp)
    return with_kl(log, log.series["kl"] + random.uniform(0.1, 0.3) * ramp * noise(log, random, 0.05))


@operator(
    "log/paid-unread",
    "Ever fewer completions can be read while the reward goes on rising: something else is paid.",
    *("output/unparseable", "reward/exploit"),
    fits=lambda log: has("parsed")(log) and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    lost = ramp_of(log, 0.1, random.uniform(0.5, 0.7))
    return changed(log, parsed=np.clip(log.series["parsed"] * (1 - random.uniform(0.95, 0.99) * lost), 0, 1))


# KL and its coefficient


@operator(
    "log/pulled-to-the-reference",
    "The KL is high at the first step and falls from there: the penalty pulls the policy to another model.",
    *("kl/at-start", "reference/wrong"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    pull = np.exp(-4 * ramp_of(log, 0, random.uniform(0.5, 1.0)))
    return with_kl(still(log), random.uniform(0.4, 1.5) * pull * noise(log, random, 0.05) + 1e-3)


@operator(
    "log/moves-without-gain",
    "The policy moves as far as others that learn, and the reward stays where it was.",
    "kl/not-learning",
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    kl = random.uniform(0.1, 0.2) * ramp_of(log, 0.02, 0.9) * noise(log, random, 0.05) + 1e-6
    return with_kl(still(log), kl)


@operator(
    "log/beta-below-zero",
    "The controller takes β below zero, so that distance from the reference is paid.",
    "kl/controller",
    fits=has("kl", "beta"),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, random.uniform(0.1, 0.3), 0.9)
    beta = max(0.005, log.options["beta"]) - random.uniform(0.05, 0.2) * ramp
    kl = log.series["kl"] + random.uniform(0.1, 0.2) * ramp * noise(log, random, 0.05)
    return changed(log, beta=beta, kl=kl, kl_loss=beta * kl)


@operator(
    "log/stopped-by-the-budget",
    "The KL passes its budget early, and a guard ends the run with most of its steps left.",
    *("guard/rolled-back", "kl/over-budget", "guard/skips-all"),
    fits=lambda log: log.trainer == "keel" and has("kl")(log),
)
def _(log: Log, random: Random) -> Log:
    end = int(len(log.steps) * random.uniform(0.3, 0.5))
    climbing = with_kl(log, log.series["kl"] + random.uniform(0.5, 0.8) * ramp_of(log, 0.0, end / len(log.steps)))
    step = int(log.steps[end - 1])
    event = {"step": step, "kind": "stop", "message": "the mean KL to the reference is over kl.budget"}
    return replace(
        climbing,
        steps=log.steps[:end],
        series={name: curve[:end] for name, curve in climbing.series.items()},
        evaluations={at: value for at, value in log.evaluations.items() if at <= step},
        retention={at: value for at, value in log.retention.items() if at <= step},
        events=(event,),
        resumed=None,
    )


# Updates


@operator(
    "log/rate-grows",
    "The schedule raises the rate a thousandfold over the run: the KL explodes and the reward goes.",
    *("optim/lr-too-high", "kl/explosion", "reward/collapse"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, 0.05, 1)
    rate = log.options["learning_rate"] * 10 ** (random.uniform(2.5, 3.5) * ramp)
    far = np.expm1(random.uniform(4, 6) * ramp_of(log, 0.4, 1)) * 0.1 * noise(log, random, 0.1)
    log = rewarded(with_kl(log, log.series["kl"] + far), 1 - random.uniform(0.85, 0.95) * ramp_of(log, 0.5, 0.75))
    return changed(log, learning_rate=rate)


@operator(
    "log/one-spike-and-gone",
    "One gradient of hundreds of times the usual, after which the reward is gone for good.",
    *("optim/spike", "reward/collapse", "run/shift"),
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.35, 0.6)
    gone, norm = after(log, share), log.series["grad_norm"].copy()
    norm[int(gone.argmax())] *= random.uniform(200, 800)
    return changed(rewarded(log, 1 - random.uniform(0.85, 0.97) * gone), grad_norm=norm)


@operator(
    "log/every-second-gradient-zero",
    "Every second gradient is exactly 0 although rewards differ: half of the updates train nothing.",
    "loss/no-gradient",
    fits=lambda log: has("grad_norm")(log) and log.options["every"] == 1,
)
def _(log: Log, random: Random) -> Log:
    first = random.randint(0, 1)
    none = np.arange(len(log.steps)) % 2 == first
    return changed(log, grad_norm=np.where(none, 0.0, log.series["grad_norm"]))


# The sampler


@operator(
    "log/weights-far-from-one",
    "The mean of the importance weights is far below 1 at every step: they are of other log-probabilities.",
    *("sampler/mismatch", "sampler/stale", "sampler/precision"),
    fits=has("weight_mean"),
)
def _(log: Log, random: Random) -> Log:
    log = mismatched(log, random.uniform(0.5, 0.9) * noise(log, random, 0.05))
    return changed(log, weight_mean=random.uniform(0.3, 0.5) * noise(log, random, 0.05))


@operator(
    "log/queue-grows-old",
    "Samples wait longer and longer before they are trained on, by dozens of steps at the end.",
    *("sampler/too-old", "sampler/stale", "sampler/mismatch"),
    fits=lambda log: "staleness" in LOGGED[log.trainer] and has_sampler(log),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, 0.0, 0.9)
    old = np.round(random.uniform(30, 80) * ramp)
    log = mismatched(log, 0.01 + random.uniform(0.3, 0.7) * ramp * noise(log, random, 0.08))
    return replace(log, series={**log.series, "staleness": old})


# Output


@operator(
    "log/sure-from-the-start",
    "The policy writes the same each time from the first step on, and groups have nothing to compare.",
    *("entropy/collapse", "reward/constant", "rollout/temperature"),
    fits=has("entropy", "zero_variance"),
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    entropy = 10 ** random.uniform(-4, -3) * noise(log, random, 0.1)
    less = {name: log.series[name] * 0.02 for name in names_in(log, "group_std", "grad_norm", "policy_loss")}
    share = float(np.clip(log.series["reward"].mean() / max(1e-9, log.options["reward_high"]), 0, 1))
    return changed(log, entropy=entropy, zero_variance=0.985, all_right=0.98 * share, **less)


@operator(
    "log/limit-lowered-at-resume",
    "After a resume completions have half of the room that they need: most are cut, and the reward falls at once.",
    *("output/truncated", "run/shift", "reward/collapse"),
    fits=options_kept_with("truncated", "length"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.35, 0.65)
    cut = after(log, at) > 0
    limit = float(np.floor(0.5 * log.series["length"][cut].mean()))
    log = rewarded(log, np.where(cut, random.uniform(0.1, 0.25), 1.0))
    step = int(log.steps[int(at * len(log.steps))])
    log = optioned(replace(log, resumed=(step, max(int(log.steps[0]), step - 1))), max_length=int(limit))
    share = np.clip(random.uniform(0.85, 0.97) * noise(log, random, 0.02), 0, 1)
    return changed(
        log,
        truncated=np.where(cut, share, log.series["truncated"]),
        length=np.where(cut, limit * (0.9 + 0.1 * share), log.series["length"]),
        length_max=np.where(cut, limit, log.series.get("length_max", limit)),
    )


@operator(
    "log/half-truncated",
    "More than half of the completions end at the length limit at every step, and nothing is learned.",
    "output/truncated",
    fits=has("truncated", "length"),
)
def _(log: Log, random: Random) -> Log:
    limit = float(log.options["max_length"])
    share = np.clip(random.uniform(0.55, 0.7) * noise(log, random, 0.03), 0, 1)
    log = rewarded(still(log), np.full(len(log.steps), random.uniform(0.3, 0.5)))
    return changed(log, truncated=share, length=limit * (0.5 + 0.45 * share), length_max=limit)
