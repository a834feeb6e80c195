"""Histories of runs that go wrong in spells, in circles or at the limit, as reports of them show."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import changed, has, has_parts, names_in, noise, optioned, ramp_of, rewarded, still, with_kl
from faults.log_names import PART
from faults.log_writers import Log


def evaluated(log: Log, curve: np.ndarray) -> Log:
    """Held-out accuracy times what `curve`, one value a line, is at each evaluation."""
    factors = np.interp(list(log.evaluations), log.steps, curve)
    held_out = zip(log.evaluations.items(), factors, strict=True)
    return replace(log, evaluations={step: float(np.clip(value * by, 0, 1)) for (step, value), by in held_out})


def scaled(log: Log, **factors: np.ndarray | float) -> Log:
    """The metrics that the log has, each times its factor."""
    return changed(log, **{name: log.series[name] * factor for name, factor in factors.items() if name in log.series})


def has_evaluations(log: Log) -> bool:
    return len(log.evaluations) >= 4


@operator(
    "log/always-at-the-limit-and-never-cut",
    "Every completion is as long as the limit allows, to the token, and none of them counts as cut.",
    "output/truncated",
    "mask/end",
    fits=has("length", "length_max", "truncated"),
)
def _(log: Log, random: Random) -> Log:
    limit = float(log.options["max_length"])
    log = rewarded(still(log), random.uniform(0.3, 0.6) * noise(log, random, 0.05))
    return changed(log, length=limit, length_max=limit, truncated=0.0)


@operator(
    "log/held-out-gone-at-one-step",
    "From one evaluation on next to nothing held out is solved, while training gains as before.",
    "eval/train-gap",
    fits=has_evaluations,
)
def _(log: Log, random: Random) -> Log:
    after = np.arange(len(log.steps)) >= random.uniform(0.35, 0.5) * len(log.steps)
    return evaluated(log, np.where(after, 0.01, 1.0))


@operator(
    "log/every-fourth-batch-unpaid",
    "Every fourth batch earns the lowest reward throughout: one of four reward workers fails, and its failures are 0.",
    "reward/failed",
    "reward/constant",
    "reward/collapse",
    fits=lambda log: log.options["every"] == 1,
)
def _(log: Log, random: Random) -> Log:
    batch = (log.steps - 1) // (log.options["updates"] if log.trainer == "trl" else 1)
    unpaid, low = batch % 4 == random.randrange(1, 4), log.options["reward_low"]
    lowest = {"reward": low, "reward_std": 0.0, "group_std": 0.0, "zero_variance": 1.0, "all_right": 0.0}
    lowest |= {PART + name: share * low for name, share in log.options["shares"].items()}
    curves = {name: np.where(unpaid, lowest[name], log.series[name]) for name in names_in(log, *lowest)}
    less = np.where(unpaid, 0.02, 1.0)  # the KL term's alone
    return scaled(changed(log, **curves), grad_norm=less, policy_loss=less, advantage_mean=less)


@operator(
    "log/nearly-all-too-hard",
    "One completion in a hundred earns anything, nearly every group has no spread, and that stays so.",
    "reward/constant",
    "reward/weak",
    "kl/not-learning",
    fits=has("reward", "zero_variance", "grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    level = random.uniform(0.01, 0.02)
    log = rewarded(still(log), level * noise(log, random, 0.3))
    log = evaluated(log, np.full(len(log.steps), level))
    log = changed(log, zero_variance=np.clip(0.97 * noise(log, random, 0.01), 0, 0.995), all_right=0.0)
    log = with_kl(log, 0.03 * log.series["kl"]) if "kl" in log.series else log
    return scaled(log, grad_norm=0.15, clip_fraction=0.1, old_kl=0.1)


@operator(
    "log/entropy-swings",
    "The entropy swings between a fifth and five times what it was, and the reward dips at either end.",
    "entropy/too-strong",
    "entropy/rising",
    "entropy/collapse",
    "reward/collapse",
    fits=has("entropy", "length"),
)
def _(log: Log, random: Random) -> Log:
    turns = random.uniform(3.2, 5.2) * 2 * np.pi
    swing = np.sin(turns * np.linspace(0, 1, len(log.steps))) * ramp_of(log, 0.05, 0.3)
    factor = (1 - 0.75 * swing**2) * noise(log, random, 0.04)
    return scaled(evaluated(rewarded(log, factor), factor), entropy=np.exp(1.65 * swing), length=np.exp(0.4 * swing))


@operator(
    "log/updates-leave-their-batch",
    "Within each step the policy goes a nat a token away from what it was sampled from, and half of it is clipped.",
    "ratio/all-clipped",
    "optim/lr-too-high",
    "loss/clip",
    fits=lambda log: log.options["updates"] > 1 and has("clip_fraction", "old_kl", "kl")(log),
)
def _(log: Log, random: Random) -> Log:
    way = ramp_of(log, 0.0, 0.6)
    log = with_kl(log, log.series["kl"] + random.uniform(2, 4) * way * noise(log, random, 0.15))
    log = rewarded(log, 1 - 0.7 * ramp_of(log, 0.1, 0.7))
    clipped = np.clip((0.45 + 0.1 * way) * noise(log, random, 0.08), 0, 0.8)
    return changed(evaluated(log, 1 - 0.7 * way), clip_fraction=clipped, old_kl=(0.6 + way) * noise(log, random, 0.2))


@operator(
    "log/reward-model-fooled",
    "The score of a reward model climbs to five times what it was and never stops, as does the KL; held-out falls.",
    "eval/train-gap",
    "kl/explosion",
    "kl/over-budget",
    "reward/exploit",
    fits=lambda log: log.trainer in ("verl", "openrlhf", "nemo-rl") and has_evaluations(log) and has("kl")(log),
)
def _(log: Log, random: Random) -> Log:
    low, high = log.options["reward_low"], log.options["reward_high"]
    way = ramp_of(log, 0.15, 1.0)
    log = optioned(log, reward_high=low + 7 * (high - low))
    log = with_kl(log, log.series["kl"] + random.uniform(6, 14) * way**1.5 * noise(log, random, 0.08))
    log = changed(log, reward=log.series["reward"] + 4 * (high - low) * way)
    log = scaled(log, entropy=1 - 0.8 * way, reward_std=1 + way, group_std=1 + way, zero_variance=0.2, all_right=0.0)
    return evaluated(log, 1 - 0.8 * way)


@operator(
    "log/template-changed-at-resume",
    "After a resume prompts are written otherwise: completions are longer, hardly any can be read, and it stays so.",
    "run/shift",
    "output/unparseable",
    "reward/collapse",
    "prompt/format",
    fits=lambda log: ("parsed" in log.series or has_parts(log)) and has("length", "entropy")(log),
)
def _(log: Log, random: Random) -> Log:
    at = int(random.uniform(0.4, 0.6) * len(log.steps))
    after = np.arange(len(log.steps)) >= at
    level = np.where(after, random.uniform(0.08, 0.15) * noise(log, random, 0.1), 1.0)
    stopped = int(log.steps[at - 1])
    log = evaluated(rewarded(replace(log, resumed=(stopped, stopped)), level), level)
    return scaled(log, parsed=level, length=np.where(after, 1.6, 1.0), entropy=np.where(after, 1.8, 1.0))


@operator(
    "log/falls-apart-and-recovers",
    "Three times over the policy falls apart, earns next to nothing for a good while, and comes back.",
    "reward/collapse",
    "run/shift",
    "optim/spike",
    "kl/explosion",
    fits=has("kl", "grad_norm", "entropy"),
)
def _(log: Log, random: Random) -> Log:
    begins = [begin + random.uniform(-0.03, 0.03) for begin in (0.25, 0.5, 0.77)]
    spells = [ramp_of(log, begin, begin + 0.02) - ramp_of(log, begin + 0.12, begin + 0.15) for begin in begins]
    down = np.clip(np.sum(spells, axis=0), 0, 1)
    log = with_kl(log, log.series["kl"] + 3 * down * noise(log, random, 0.3))
    log = evaluated(rewarded(log, 1 - 0.95 * down), 1 - 0.95 * down)
    return scaled(log, grad_norm=1 + 20 * down * noise(log, random, 0.4), entropy=1 + 2.5 * down)


@operator(
    "log/same-stretch-again-and-again",
    "A checkpoint is restored again and again while steps are counted on: one stretch comes back to the last digit.",
    "optim/no-update",
    "task/repeats",
    "run/shift",
    "guard/rolled-back",
    fits=lambda log: len(log.steps) >= 50,
)
def _(log: Log, random: Random) -> Log:
    begin = int(random.uniform(0.25, 0.4) * len(log.steps))
    stretch = max(6, int(random.uniform(0.08, 0.12) * len(log.steps)))
    lines = np.arange(len(log.steps))
    lines = np.where(lines < begin, lines, begin + (lines - begin) % stretch)
    kept = still(log, begin).evaluations
    return replace(log, series={name: curve[lines] for name, curve in log.series.items()}, evaluations=kept)


@operator(
    "log/guesses-without-thinking",
    "Completions shrink to a few words of the right form, and fewer and fewer of their answers are right.",
    "length/collapse",
    "reward/part-falling",
    "reward/collapse",
    fits=lambda log: has_parts(log) and has("length", "length_max")(log),
)
def _(log: Log, random: Random) -> Log:
    way, share, low = ramp_of(log, 0.05, 0.5), log.options["shares"]["accuracy"], log.options["reward_low"]
    right = log.series[PART + "accuracy"] - share * low
    lost = random.uniform(0.6, 0.8) * way * right
    log = changed(log, **{PART + "accuracy": log.series[PART + "accuracy"] - lost}, reward=log.series["reward"] - lost)
    shorter = np.exp(-3 * way)
    log = scaled(log, length=shorter, length_max=np.round(shorter, 3), truncated=1 - way, entropy=1 - 0.4 * way)
    return evaluated(log, 1 - 0.7 * way)


@operator(
    "log/drifts-without-a-gradient",
    "Gradients are next to nothing at every step, and the policy goes ever further away: decay eats its weights.",
    "optim/weight-decay",
    "loss/no-gradient",
    "kl/explosion",
    "reward/collapse",
    fits=has("kl", "grad_norm", "entropy"),
)
def _(log: Log, random: Random) -> Log:
    way = ramp_of(log, 0.0, 1.0)
    log = with_kl(still(log), random.uniform(2, 5) * way**1.5 * noise(log, random, 0.05))
    log = evaluated(rewarded(log, 1 - 0.85 * way), 1 - 0.85 * way)
    return scaled(log, grad_norm=1e-7, entropy=1 + 3 * way, clip_fraction=0.0, policy_loss=1e-6)


@operator(
    "log/verifier-of-one-part-goes-down",
    "From some step on one part of the reward is at its lowest to the last digit, and only form is paid.",
    "reward/failed",
    "reward/part-falling",
    "reward/constant",
    "reward/collapse",
    fits=has_parts,
)
def _(log: Log, random: Random) -> Log:
    down = np.arange(len(log.steps)) >= random.uniform(0.35, 0.55) * len(log.steps)
    part, lowest = log.series[PART + "accuracy"], log.options["shares"]["accuracy"] * log.options["reward_low"]
    lost = np.where(down, part - lowest, 0.0)
    log = changed(log, **{PART + "accuracy": part - lost}, reward=log.series["reward"] - lost)
    less = np.where(down, 0.2, 1.0)
    curves = {name: np.where(down, 0.9, log.series[name]) for name in names_in(log, "zero_variance")}
    return scaled(changed(log, **curves), reward_std=less, group_std=less, grad_norm=less, all_right=1.0 - down)


@operator(
    "log/grows-to-the-limit-and-falls-silent",
    "Completions grow until most are cut, the penalty for that drives them to a few tokens, and no reward is left.",
    "length/collapse",
    "length/explosion",
    "output/truncated",
    "reward/collapse",
    fits=has("length", "length_max", "truncated"),
)
def _(log: Log, random: Random) -> Log:
    limit, up, down = log.options["max_length"], ramp_of(log, 0.1, 0.45), ramp_of(log, 0.55, 0.65)
    long = log.series["length"] ** (1 - up) * (0.85 * limit) ** up
    length = long ** (1 - down) * 4.0**down * noise(log, random, 0.02)
    cut = (log.series["truncated"] + (0.7 - log.series["truncated"]) * up) * (1 - down)
    longest = np.where(down > 0.9, 16.0, np.where(up > 0, limit, log.series["length_max"]))
    log = rewarded(log, (1 - 0.6 * up) * (1 - 0.9 * down))
    return changed(evaluated(log, 1 - 0.95 * down), length=length, truncated=cut, length_max=longest)


@operator(
    "log/kl-of-either-sign",
    "The KL is a tenth of a nat above or below 0 at random from the first step on: two passes disagree on the tokens.",
    "kl/negative",
    "kl/at-start",
    "scoring/mismatch",
    "scoring/nondeterministic",
    "reference/wrong",
    fits=lambda log: log.trainer in ("verl", "openrlhf", "nemo-rl") and has("kl")(log),
)
def _(log: Log, random: Random) -> Log:
    draws = np.random.default_rng(random.getrandbits(64)).normal(0, random.uniform(0.08, 0.2), len(log.steps))
    return with_kl(log, log.series["kl"] + draws)


@operator(
    "log/loss-falls-without-bound",
    "What is bad is pushed down without bound: the loss falls to minus hundreds, and the policy turns to noise.",
    "loss/clip",
    "kl/explosion",
    "optim/lr-too-high",
    "reward/collapse",
    fits=lambda log: has("kl", "grad_norm", "entropy")(log) and bool(names_in(log, "loss", "policy_loss")),
)
def _(log: Log, random: Random) -> Log:
    way = ramp_of(log, 0.25, 0.9)
    deep = np.expm1(random.uniform(5, 6.5) * way) * noise(log, random, 0.1)
    log = with_kl(log, log.series["kl"] + 15 * way**2 * noise(log, random, 0.1))
    log = changed(log, **{name: log.series[name] - deep for name in names_in(log, "loss", "policy_loss")})
    log = evaluated(rewarded(log, 1 - 0.95 * ramp_of(log, 0.35, 0.7)), 1 - 0.95 * way)
    return scaled(log, grad_norm=np.exp(4 * way), entropy=1 + 4 * way)
