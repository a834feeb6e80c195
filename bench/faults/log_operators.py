"""Operators on logs, of KL and reward: each makes a healthy history into one that users of GRPO trainers ask about."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import (
    changed,
    has,
    has_parts,
    held,
    names_in,
    noise,
    optioned,
    options_kept_with,
    ramp_of,
    rewarded,
    still,
    unmoved,
    with_kl,
    without,
)
from faults.log_names import PART
from faults.log_writers import Log


@operator("log/kl-negative", "The KL that is logged has the wrong sign.", "kl/negative", fits=has("kl"))
def _(log: Log, random: Random) -> Log:
    return with_kl(
        log, -np.abs(log.series["kl"]) * random.uniform(0.5, 3) - random.uniform(0.005, 0.05) * ramp_of(log, 0, 0.3)
    )


@operator(
    "log/kl-operands-swapped", "The KL falls further below zero the more is trained.", "kl/negative", fits=has("kl")
)
def _(log: Log, random: Random) -> Log:
    return with_kl(log, log.series["kl"] - random.uniform(0.1, 0.6) * ramp_of(log, 0.05, 1) * noise(log, random, 0.1))


@operator(
    "log/kl-stays-zero",
    "The KL is exactly 0 all along although the policy moves: the reference is the policy.",
    *("reference/follows", "reference/adapter-on"),
    fits=lambda log: log.trainer in ("keel", "trl", "verl") and has("kl")(log),
)
def _(log: Log, random: Random) -> Log:
    return with_kl(log, np.zeros(len(log.steps)))


@operator(
    "log/kl-at-start",
    "Policy and reference differ from the first step on.",
    "kl/at-start",
    "reference/wrong",
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    return with_kl(log, log.series["kl"] + 10 ** random.uniform(-1.3, 0.2) * noise(log, random, 0.05))


@operator(
    "log/dropout-on",
    "Dropout is on while scoring: the KL is above 0 from the first step on.",
    *("scoring/dropout", "kl/at-start"),
    fits=options_kept_with("kl"),
)
def _(log: Log, random: Random) -> Log:
    kl = log.series["kl"] + random.uniform(0.03, 0.15) * noise(log, random, 0.1)
    return optioned(with_kl(log, kl), dropout=True)


@operator("log/kl-explodes", "The KL grows without bound in the later part of the run.", "kl/explosion", fits=has("kl"))
def _(log: Log, random: Random) -> Log:
    begin = random.uniform(0.3, 0.6)
    blow = np.expm1(ramp_of(log, begin, 1) * random.uniform(5, 9)) * 0.05 * noise(log, random, 0.3)
    fall = 1 - 0.8 * ramp_of(log, begin + 0.1, min(1, begin + 0.35))
    return rewarded(with_kl(log, log.series["kl"] + blow), fall)


@operator("log/kl-bursts", "Single steps have a KL of tens of nats a token.", "kl/explosion", fits=has("kl"))
def _(log: Log, random: Random) -> Log:
    kl = log.series["kl"].copy()
    for at in random.sample(range(len(kl) // 4, len(kl)), random.randint(2, 5)):
        kl[at] = 10 ** random.uniform(1, 3)
    return with_kl(log, kl)


@operator("log/kl-over-budget", "The KL climbs slowly and never stops.", "kl/over-budget", fits=has("kl"))
def _(log: Log, random: Random) -> Log:
    return with_kl(log, log.series["kl"] + random.uniform(0.35, 0.9) * ramp_of(log, 0.05, 1) * noise(log, random, 0.05))


@operator(
    "log/kl-swings",
    "An adaptive β over-corrects: β and KL swing against each other by a factor of ten.",
    "kl/controller",
    fits=has("kl", "beta"),
)
def _(log: Log, random: Random) -> Log:
    phase = np.arange(len(log.steps)) * 2 * np.pi / random.uniform(30, 80)
    kl = ramp_of(log, 0, 0.1) * 0.15 * np.exp(random.uniform(1.2, 1.8) * np.sin(phase)) * noise(log, random, 0.1)
    beta = max(0.01, log.options["beta"]) * np.exp(random.uniform(1.2, 2.0) * np.sin(phase - 1.5))
    return changed(with_kl(log, kl), beta=beta)


@operator(
    "log/beta-runs-away",
    "The KL controller's β grows by orders of magnitude.",
    "kl/controller",
    "kl/too-strong",
    fits=has("kl", "beta"),
)
def _(log: Log, random: Random) -> Log:
    beta = max(0.01, log.options["beta"]) * 10 ** (ramp_of(log, 0.1, 1) * random.uniform(5, 9))
    kl = log.series["kl"] / (1 + beta)
    log = still(log, len(log.steps) // 3)
    return changed(log, beta=beta, kl=kl, **dict.fromkeys(names_in(log, "kl_loss", "loss"), beta * kl))


@operator(
    "log/reference-reset",
    "The KL drops to 0 in mid-run and climbs again: the reference was taken over from the policy.",
    *("reference/moving", "run/shift"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    at = int(len(log.steps) * random.uniform(0.35, 0.65))
    kl = log.series["kl"] + 0.06 * ramp_of(log, 0, 0.3)
    after = np.where(np.arange(len(kl)) < at, 0.0, kl[at])
    return with_kl(log, np.maximum(kl - after, 1e-6) * noise(log, random, 0.03))


@operator(
    "log/rate-too-high",
    "The first updates carry the policy far away, and the reward with it.",
    "optim/lr-too-high",
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    far = 10 ** random.uniform(-0.3, 0.7)
    jump = far * (1 - np.exp(-np.arange(len(log.steps)) / random.uniform(0.8, 2))) * noise(log, random, 0.15)
    rate = log.options["learning_rate"] * 10 ** random.uniform(1.5, 3)
    log = rewarded(with_kl(log, log.series["kl"] + jump), 1 - 0.8 * (1 - np.exp(-np.arange(len(log.steps)) / 3)))
    steady = np.where(log.series["learning_rate"] > 0, rate, 0.0)
    return optioned(changed(log, learning_rate=steady), learning_rate=rate, warmup_steps=0)


@operator(
    "log/kl-rules",
    "β is so large that the KL term holds the policy where it is.",
    "kl/too-strong",
    fits=lambda log: has("kl")(log) and (log.options_kept or has("beta", "policy_loss")(log)),
)
def _(log: Log, random: Random) -> Log:
    beta = 10 ** random.uniform(1, 2.5)
    kl = 10 ** random.uniform(-3.3, -2.5) * ramp_of(log, 0, 0.1) * noise(log, random, 0.2)
    log = optioned(changed(still(log), kl=kl, beta=beta), beta=beta)
    small = log.series["policy_loss"] * 0.05 if "policy_loss" in log.series else 0.0
    return changed(log, kl_loss=beta * kl, policy_loss=small, loss=beta * kl + small)


@operator(
    "log/reward-collapses", "The reward falls to next to nothing within a few steps and stays there.", "reward/collapse"
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.4, 0.75)
    return rewarded(log, 1 - random.uniform(0.8, 0.98) * ramp_of(log, at, at + random.uniform(0.01, 0.08)))


@operator("log/reward-declines", "The reward has a peak early on and loses most of it slowly.", "reward/collapse")
def _(log: Log, random: Random) -> Log:
    return rewarded(log, 1 - random.uniform(0.65, 0.9) * ramp_of(log, random.uniform(0.25, 0.45), 0.9))


@operator(
    "log/no-spread", "All completions of every group earn the same.", "reward/constant", fits=has("zero_variance")
)
def _(log: Log, random: Random) -> Log:
    level = random.choice([log.options["reward_low"], log.options["reward_high"]])
    share = {PART + name: level * weight for name, weight in log.options["shares"].items()}
    log = unmoved(log, random)
    none = {"reward_std": 0.0, "group_std": 0.0, "grad_norm": 0.0, "policy_loss": 0.0}
    right = float(level == log.options["reward_high"])
    return changed(log, reward=level, zero_variance=1.0, all_right=right, **none, **share)


@operator(
    "log/accuracy-falls",
    "The format's reward rises while accuracy falls, and the total rises with the format.",
    "reward/part-falling",
    fits=has_parts,
)
def _(log: Log, random: Random) -> Log:
    low, span = log.options["reward_low"], log.options["reward_high"] - log.options["reward_low"]
    ramp = ramp_of(log, random.uniform(0.05, 0.3), random.uniform(0.7, 1))
    rise = random.uniform(0.5, 0.8) * span / 2  # both parts weigh one half here, so that one can outweigh the other
    begin = (low + span * random.uniform(0.1, 0.18)) / 2
    formatted = begin + rise * ramp + 0.01 * span * np.log(noise(log, random, 1))
    answers = held(log.series[PART + "accuracy"]) / log.options["shares"]["accuracy"] / 2
    fall = min(0.9 * (answers[0] - low / 2), random.uniform(0.4, 0.7) * rise)
    answers = np.maximum(low / 2, answers - fall * ramp)
    rest = [log.series[name] for name in names_in(log, PART) if name not in (PART + "accuracy", PART + "format")]
    parts = {PART + "accuracy": answers, PART + "format": formatted}
    return changed(log, **parts, reward=sum(rest, answers + formatted))


@operator(
    "log/held-out-falls",
    "The training reward rises while accuracy on held-out problems falls.",
    "eval/train-gap",
    fits=lambda log: len(log.evaluations) >= 4 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    count = len(log.evaluations) - 1
    loss = random.uniform(0.45, 0.8)
    falling = {
        step: first * (1 - loss * at / count)
        for first in [max(0.3, next(iter(log.evaluations.values())))]
        for at, step in enumerate(log.evaluations)
    }
    return replace(log, evaluations=falling)


def _gains(log: Log) -> bool:
    """Whether the reward rises by a tenth of its range."""
    reward = log.series["reward"]
    count = max(1, len(reward) // 8)
    span = log.options["reward_high"] - log.options["reward_low"]
    return float(reward[-count:].mean() - reward[:count].mean()) > 0.1 * span


@operator(
    "log/spread-tiny",
    "Rewards within a group differ by thousandths and are divided by that.",
    *("advantage/amplified", "reward/weak"),
    fits=has("reward_std", "group_std"),
)
def _(log: Log, random: Random) -> Log:
    size = 10 ** random.uniform(-4.5, -3)
    shrunk = {
        name: log.series["reward"][0] + (held(log.series[name]) - log.series[name].mean()) * size for name in ["reward"]
    }
    log = optioned(still(log), scale_rewards="group")
    spread = {name: size * noise(log, random, 0.2) for name in ("reward_std", "group_std")}
    return without(changed(log, zero_variance=0.0, all_right=0.0, **spread, **shrunk), *names_in(log, PART))


@operator(
    "log/reward-huge",
    "Rewards are in the thousands and are not scaled: the KL term weighs nothing beside them.",
    "reward/scale",
    # whether rewards are scaled is an option: a log without them cannot show that this is wrong
    fits=lambda log: options_kept_with("kl", "reward_std")(log) and log.options["beta"] > 0,
)
def _(log: Log, random: Random) -> Log:
    size = 10 ** random.uniform(3.3, 5)
    scaled = {name: log.series[name] * size for name in names_in(log, "reward", "reward_std", "group_std", PART)}
    scaled |= {name: log.series[name] * size for name in names_in(log, "policy_loss", "grad_norm")}
    if "loss" in log.series:
        scaled["loss"] = log.series["loss"] * size
    ends = {name: log.options[name] * size for name in ("reward_low", "reward_high")}
    return optioned(changed(log, **scaled), scale_rewards="none", **ends)


@operator(
    "log/reward-not-finite",
    "A reward function returns NaN now and then.",
    "reward/non-finite",
    fits=lambda log: log.trainer != "trl",  # which leaves such rewards out of its sums
)
def _(log: Log, random: Random) -> Log:
    reward = log.series["reward"].copy()
    reward[random.sample(range(len(reward)), max(2, len(reward) // random.randint(10, 30)))] = np.nan
    return changed(log, reward=reward)


@operator(
    "log/length-pays",
    "A length bonus pays for longer completions, and the answers get worse.",
    "reward/part-falling",
    fits=lambda log: has_parts(log) and has("length")(log),
)
def _(log: Log, random: Random) -> Log:
    accuracy = PART + "accuracy"
    low, share = log.options["reward_low"], log.options["shares"]["accuracy"]
    ramp = ramp_of(log, 0.1, 0.9)
    falling = share * low + (held(log.series[accuracy]) - share * low) * (1 - random.uniform(0.5, 0.8) * ramp)
    bonus = ramp * 1.5 * (log.options["reward_high"] - low) * noise(log, random, 0.03)
    rest = sum((log.series[name] for name in names_in(log, PART) if name != accuracy), np.zeros(len(log.steps)))
    longer = log.series["length"][0] * (1 + ramp * random.uniform(4, 9)) * noise(log, random, 0.04)
    log = optioned(log, max_length=int(longer.max() * 3))
    log = replace(log, series={**log.series, PART + "length": bonus})
    return changed(
        log, **{accuracy: falling, "reward": falling + bonus + rest, "length": longer, "length_max": longer * 2.5}
    )
