"""Operators on logs, of ratios, the sampler and the run as a whole."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import (
    changed,
    has,
    has_sampler,
    mismatched,
    noise,
    optioned,
    options_kept_with,
    ramp_of,
    rewarded,
    without,
)
from faults.log_writers import Log

_SAMPLER = ("sampler/mismatch", "sampler/precision")  # a constant gap: a log cannot tell what it is from
_STALE = ("sampler/stale", "sampler/too-old", "sampler/mismatch")


@operator(
    "log/all-clipped",
    "Nearly all ratios are clipped.",
    "ratio/all-clipped",
    fits=lambda log: has("clip_fraction")(log) and log.trainer != "nemo-rl",  # which logs ratios, and not how many
)
def _(log: Log, random: Random) -> Log:
    clipped = np.clip(random.uniform(0.8, 0.99) * noise(log, random, 0.02), 0, 1)
    return changed(log, clip_fraction=clipped, old_kl=random.uniform(0.5, 3) * noise(log, random, 0.1))


@operator(
    "log/never-clipped",
    "Many updates a batch and not one ratio ever differs from 1: old log-probabilities are taken anew at each.",
    "loss/clip",
    fits=options_kept_with("clip_fraction"),
)
def _(log: Log, random: Random) -> Log:
    return optioned(changed(log, clip_fraction=0.0, old_kl=0.0), updates=random.choice([4, 8, 16]))


@operator(
    "log/sampler-apart",
    "The sampler's log-probabilities are far from the trainer's from the first step on.",
    *_SAMPLER,
    fits=has_sampler,
)
def _(log: Log, random: Random) -> Log:
    return mismatched(log, random.uniform(0.25, 0.8) * noise(log, random, 0.08))


@operator("log/sampler-drifts", "The sampler falls further and further behind the policy.", *_STALE, fits=has_sampler)
def _(log: Log, random: Random) -> Log:
    return mismatched(log, 0.005 + random.uniform(0.4, 1.2) * ramp_of(log, 0, 1) * noise(log, random, 0.08))


@operator(
    "log/sampler-jumps",
    "At one step the sampler comes apart from the policy, and stays apart.",
    *_STALE,
    fits=has_sampler,
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.3, 0.7)
    return mismatched(log, 0.005 + random.uniform(0.3, 0.9) * (ramp_of(log, at, at) > 0) * noise(log, random, 0.08))


@operator("log/sampler-saw-tooth", "Weights reach the sampler only every so many steps.", *_STALE, fits=has_sampler)
def _(log: Log, random: Random) -> Log:
    period = random.randint(8, 25)
    behind = np.arange(len(log.steps)) % period / period
    return mismatched(log, (0.005 + random.uniform(0.6, 1.2) * behind) * noise(log, random, 0.08))


@operator(
    "log/probabilities-differ",
    "The one measure that is logged, of probabilities, shows sampler and trainer apart.",
    *_SAMPLER,
    fits=lambda log: any(name in log.series for name in ("sampler_probability_gap", "sampler_factor")),
)
def _(log: Log, random: Random) -> Log:
    log = mismatched(log, random.uniform(0.25, 0.7) * noise(log, random, 0.08))
    return without(
        log, "sampler_kl", "sampler_k1", "sampler_gap", "sampler_gap_max", "weight_mean", "weight_max", "ess"
    )


@operator(
    "log/weights-degenerate",
    "The effective sample size of the importance weights falls to a few percent.",
    *_STALE,
    fits=has("ess"),
)
def _(log: Log, random: Random) -> Log:
    ess = 1 - ramp_of(log, 0.05, 0.9) * random.uniform(0.85, 0.97) * np.minimum(1, noise(log, random, 0.03))
    log = without(log, "sampler_kl", "sampler_k1", "sampler_gap", "sampler_gap_max", "sampler_probability_gap")
    return changed(without(log, "sampler_correlation"), ess=np.clip(ess, 0.01, 1), weight_max=2.0)


@operator(
    "log/sampler-silent", "The engine reports no log-probabilities.", "sampler/unreported", fits=has("unreported")
)
def _(log: Log, random: Random) -> Log:
    silent = without(log, "sampler_kl", "sampler_k1", "sampler_gap", "sampler_gap_max")
    return changed(silent, unreported=random.uniform(0.9, 1.0))


@operator(
    "log/shift-at-resume",
    "A resumed run goes on from other weights: several metrics jump at one step.",
    "run/shift",
    fits=has("entropy", "length"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.35, 0.7)
    after = (ramp_of(log, at, at) > 0).astype(float)
    log = rewarded(log, 1 - random.uniform(0.3, 0.5) * after)
    entropy = log.series["entropy"] * (1 + random.uniform(0.5, 1.2) * after)
    length = log.series["length"] * (1 + random.choice([-0.45, 0.7, 1.2]) * after)
    step = int(log.steps[int(at * (len(log.steps) - 1))])
    resumed = (step, max(int(log.steps[0]), step - 1))
    return replace(changed(log, entropy=entropy, length=length, length_max=length * 2.5), resumed=resumed)


@operator(
    "log/shift-of-data",
    "The data changes in mid-run: reward, length and spread jump at one step.",
    "run/shift",
    fits=has("length"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.3, 0.7)
    after = (ramp_of(log, at, at) > 0).astype(float)
    log = rewarded(log, 1 - random.uniform(0.35, 0.6) * after)
    length = log.series["length"] * (1 + random.choice([0.6, 1.0, 1.5]) * after)
    curves = {"entropy": log.series["entropy"] * (1 + 0.4 * after)} if "entropy" in log.series else {}
    return changed(log, length=length, length_max=length * 2.5, **curves)


@operator(
    "log/forgets",
    "A skill that is not trained is lost on the way.",
    "retention/dropping",
    fits=lambda log: len(log.retention) >= 2,
)
def _(log: Log, random: Random) -> Log:
    left = random.uniform(0.05, 0.5)
    count = len(log.retention) - 1
    first = next(iter(log.retention.values()))
    falling = {step: first * (1 - (1 - left) * at / count) for at, step in enumerate(log.retention)}
    return replace(log, retention=falling)
