"""Operators on logs, of what goes wrong on the way: caps that take over, tools that break, references that change."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import changed, has, has_sampler, mismatched, names_in, noise, ramp_of, rewarded, still, with_kl
from faults.log_names import PART
from faults.log_writers import Log


def after(log: Log, at: float) -> np.ndarray:
    """0 before the share `at` of the run, 1 from there on."""
    return (np.arange(len(log.steps)) >= int(at * len(log.steps))).astype(float)


@operator(
    "log/clipping-takes-over",
    "The share of clipped ratios grows until next to nothing is trained.",
    "ratio/all-clipped",
    fits=lambda log: has("clip_fraction")(log) and log.trainer != "nemo-rl",
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, random.uniform(0.1, 0.3), random.uniform(0.5, 0.7))
    clipped = np.clip(log.series["clip_fraction"] + ramp * random.uniform(0.85, 0.97) * noise(log, random, 0.02), 0, 1)
    log = still(log, len(log.steps) // 2)
    return changed(log, clip_fraction=clipped, old_kl=ramp * random.uniform(0.5, 2) * noise(log, random, 0.1))


@operator(
    "log/held-out-at-zero",
    "Held-out accuracy is next to 0 from the first evaluation to the last, while training is paid.",
    "eval/train-gap",
    fits=lambda log: len(log.evaluations) >= 3,
)
def _(log: Log, random: Random) -> Log:
    return replace(log, evaluations={step: random.choice([0.0, 0.0, 0.0025]) for step in log.evaluations})


@operator(
    "log/all-solved-early",
    "From a third of the run on every completion is right, and nothing is left to compare.",
    "reward/constant",
    fits=has("zero_variance"),
)
def _(log: Log, random: Random) -> Log:
    solved = ramp_of(log, 0.05, random.uniform(0.2, 0.35))
    high = log.options["reward_high"]
    curves = {"reward": log.series["reward"] + solved * (high - log.series["reward"])}
    for name, share in log.options["shares"].items():
        if PART + name in log.series:
            curves[PART + name] = log.series[PART + name] + solved * (share * high - log.series[PART + name])
    for name in names_in(log, "zero_variance", "all_right", "parsed"):
        curves[name] = log.series[name] + solved * (1 - log.series[name])
    for name in names_in(log, "reward_std", "group_std", "grad_norm", "policy_loss"):
        curves[name] = log.series[name] * (1 - solved)
    evaluations = {step: max(value, 0.98) for step, value in log.evaluations.items()}
    return replace(changed(log, **curves), evaluations=evaluations)


@operator(
    "log/tools-break-midway",
    "Tools work at first, and from some step on nearly every call fails.",
    "tool/failing",
    fits=has("tool_failures"),
)
def _(log: Log, random: Random) -> Log:
    broken = after(log, random.uniform(0.3, 0.6))
    share = np.clip(random.uniform(0.8, 1.0) * noise(log, random, 0.04), 0, 1)
    log = rewarded(log, 1 - random.uniform(0.3, 0.6) * broken)
    return changed(log, tool_failures=np.where(broken > 0, share, log.series["tool_failures"]))


@operator(
    "log/form-lost",
    "Completions lose the form that is read, and the reward goes with it.",
    "output/unparseable",
    "reward/collapse",
    fits=has("parsed"),
)
def _(log: Log, random: Random) -> Log:
    lost = ramp_of(log, random.uniform(0.2, 0.4), random.uniform(0.5, 0.7))
    log = rewarded(log, 1 - 0.97 * lost)
    return changed(log, parsed=np.clip(log.series["parsed"] * (1 - 0.98 * lost), 0, 1))


@operator(
    "log/gradient-infinite",
    "Gradient norms are infinite at many steps while the loss is a number, as where 16 bits overflow.",
    "optim/non-finite",
    fits=lambda log: has("grad_norm")(log) and log.trainer != "prime-rl",  # whose file drops what is not finite
)
def _(log: Log, random: Random) -> Log:
    bad = np.random.default_rng(random.getrandbits(64)).random(len(log.steps)) < random.uniform(0.2, 0.5)
    bad[-3:] = True
    norm = np.where(bad, np.inf, log.series["grad_norm"])
    return changed(log, grad_norm=norm, skipped=bad.astype(float), nonfinite=bad.astype(float))


@operator(
    "log/reference-replaced",
    "At one step the KL jumps and stays there, and nothing else does: the reference became another model.",
    "reference/moving",
    "run/shift",
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    jump = random.uniform(0.4, 2.0) * after(log, random.uniform(0.3, 0.7)) * noise(log, random, 0.05)
    return with_kl(log, log.series["kl"] + jump)


@operator(
    "log/sampler-flickers",
    "Every few steps sampler and trainer are far apart, as where one of several engines holds other weights.",
    "sampler/mismatch",
    "sampler/stale",
    "sampler/too-old",
    fits=has_sampler,
)
def _(log: Log, random: Random) -> Log:
    apart = np.arange(len(log.steps)) % random.choice([2, 3, 4]) == 0
    return mismatched(log, (0.005 + random.uniform(0.5, 1.2) * apart) * noise(log, random, 0.08))


@operator(
    "log/beta-vanishes",
    "The KL controller lowers β by orders of magnitude while the KL climbs.",
    "kl/controller",
    "kl/over-budget",
    fits=has("kl", "beta"),
)
def _(log: Log, random: Random) -> Log:
    beta = max(0.01, log.options["beta"]) * 10 ** (-ramp_of(log, 0.1, 0.8) * random.uniform(5, 9))
    kl = log.series["kl"] + random.uniform(0.5, 1.0) * ramp_of(log, 0.1, 1) * noise(log, random, 0.05)
    losses = dict.fromkeys(names_in(log, "kl_loss"), beta * kl)
    return changed(log, beta=beta, kl=kl, **losses)


@operator(
    "log/falls-apart",
    "At one step gradient norm, entropy and length jump up, and the reward falls to next to nothing.",
    "reward/collapse",
    "run/shift",
    fits=has("grad_norm", "entropy", "length"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.4, 0.7)
    apart = after(log, at)
    limit = float(log.options["max_length"])
    log = rewarded(log, 1 - random.uniform(0.9, 0.98) * apart)
    length = np.where(apart > 0, 0.8 * limit, log.series["length"])
    return changed(
        log,
        grad_norm=log.series["grad_norm"] * (1 + random.uniform(10, 40) * apart),
        entropy=log.series["entropy"] * (1 + random.uniform(2, 5) * apart),
        length=length,
        length_max=np.where(apart > 0, limit, log.series.get("length_max", length)),
        truncated=np.where(apart > 0, 0.4, log.series.get("truncated", 0.0)),
    )
