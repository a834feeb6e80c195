"""Operators on logs, of runs as users report them: parts that stay at zero, resets, resumes, tools that wear out."""

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
from faults.log_operators import _gains
from faults.log_operators_late import after
from faults.log_writers import Log

# Rewards


@operator(
    "log/accuracy-stays-at-zero",
    "Form is learned at once and no answer is ever right: all completions of a group earn the same.",
    "reward/constant",
    "kl/not-learning",
    fits=lambda log: has_parts(log) and has("zero_variance")(log),
)
def _(log: Log, random: Random) -> Log:
    low, high, shares = log.options["reward_low"], log.options["reward_high"], log.options["shares"]
    formed = shares["format"] * (low + (high - low) * ramp_of(log, 0, 0.03))
    parts = {PART + name: np.full(len(log.steps), share * low) for name, share in shares.items()}
    parts[PART + "format"] = formed
    log = unmoved(log, random)
    same = 0.9 + 0.1 * ramp_of(log, 0, 0.03)
    little = {name: log.series[name] * (1 - same) for name in names_in(log, "reward_std", "group_std", "grad_norm")}
    evaluations = dict.fromkeys(log.evaluations, 0.0)
    log = replace(log, evaluations=evaluations)
    return changed(log, **parts, **little, reward=sum(parts.values()), zero_variance=same, all_right=0.0)


@operator(
    "log/spread-fades",
    "Rewards within a group come closer and closer, to a thousandth, and are divided by that.",
    *("advantage/amplified", "reward/weak"),
    fits=lambda log: options_kept_with("reward_std", "group_std")(log) or has("group_std")(log),
)
def _(log: Log, random: Random) -> Log:
    size = 10 ** (-ramp_of(log, 0.02, 0.2) * random.uniform(3, 4))
    first = len(log.steps) // 10
    log = optioned(still(log, first), scale_rewards="group")
    spread = {name: log.series[name] * size for name in names_in(log, "reward_std", "group_std")}
    level = log.series["reward"][first]
    reward = level + (log.series["reward"] - level) * size
    return without(changed(log, zero_variance=0.0, all_right=0.0, reward=reward, **spread), *names_in(log, PART))


@operator(
    "log/held-out-perfect",
    "Every held-out problem is solved from the first evaluation on, while training is far from that.",
    "eval/leak",
    "eval/train-gap",
    fits=lambda log: len(log.evaluations) >= 3,
)
def _(log: Log, random: Random) -> Log:
    log = rewarded(log, np.full(len(log.steps), random.uniform(0.3, 0.5)))
    return replace(log, evaluations={step: random.choice([1.0, 1.0, 0.9975]) for step in log.evaluations})


@operator(
    "log/held-out-left-behind",
    "The training reward climbs to its top while held-out accuracy falls to half of what it was.",
    "eval/train-gap",
    "reward/exploit",
    fits=lambda log: len(log.evaluations) >= 4 and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    first = max(0.35, next(iter(log.evaluations.values())))
    last = random.uniform(0.35, 0.5)
    count = len(log.evaluations)
    fall = {step: first * (1 - (1 - last) * min(1.0, 2 * at / count)) for at, step in enumerate(log.evaluations)}
    return replace(log, evaluations=fall)


# KL and reference


@operator(
    "log/kl-saw-tooth",
    "The KL falls back to 0 every so many steps: the reference is taken over from the policy again and again.",
    *("reference/moving", "reference/follows"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    period = max(6, len(log.steps) // random.randint(4, 8))
    tooth = (np.arange(len(log.steps)) % period) / period
    return with_kl(log, random.uniform(0.08, 0.15) * tooth * noise(log, random, 0.05) + 1e-6)


@operator(
    "log/kl-of-one-update",
    "The reward climbs far while the KL stays at what one update makes: the reference follows the policy.",
    *("reference/follows", "reference/adapter-on"),
    fits=lambda log: has("kl")(log) and _gains(log),
)
def _(log: Log, random: Random) -> Log:
    return with_kl(log, 10 ** random.uniform(-6, -5) * (log.series["learning_rate"] > 0) * noise(log, random, 0.2))


@operator(
    "log/kl-not-finite",
    "From some step on the KL, and with it the loss, is not a number.",
    *("optim/non-finite", "kl/explosion"),
    fits=lambda log: has("kl", "loss", "grad_norm")(log) and log.options["beta"] > 0 and log.trainer != "prime-rl",
)
def _(log: Log, random: Random) -> Log:
    bad = after(log, random.uniform(0.4, 0.7)) > 0
    spoilt = {
        name: np.where(bad, np.nan, log.series[name]) for name in names_in(log, "kl", "kl_loss", "loss", "grad_norm")
    }
    at = int(bad.argmax())
    return changed(still(log, at), **spoilt, skipped=bad.astype(float), nonfinite=bad.astype(float))


@operator(
    "log/beta-never-acts",
    "The configured penalty is logged as 0 at every step, and the KL climbs without it.",
    *("kl/controller", "kl/over-budget"),
    fits=options_kept_with("kl", "beta"),
)
def _(log: Log, random: Random) -> Log:
    kl = log.series["kl"] + random.uniform(0.5, 0.9) * ramp_of(log, 0.05, 0.9) * noise(log, random, 0.05)
    log = optioned(log, beta=random.choice([0.04, 0.1]))
    bare = log.series["policy_loss"] if "policy_loss" in log.series else log.series.get("loss", 0.0)
    return changed(log, kl=kl, beta=0.0, kl_loss=0.0, loss=bare)


# Updates


@operator(
    "log/gradient-vanishes",
    "Gradient norms are a billionth at every step, and nothing moves.",
    *("optim/no-update", "loss/scale", "loss/no-gradient", "kl/not-learning"),
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    log = unmoved(log, random)
    small = {name: 1e-9 * log.series[name] for name in names_in(log, "policy_loss", "grad_norm", "loss")}
    return changed(log, **small)


@operator(
    "log/schedule-restarted",
    "A resumed run begins its schedule anew at a hundred times the rate: the policy runs away and the reward falls.",
    *("optim/lr-too-high", "run/shift", "reward/collapse"),
    fits=has("kl", "entropy"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.4, 0.6)
    broken = after(log, at)
    far = random.uniform(0.8, 2.0) * broken * noise(log, random, 0.05)
    rate = np.where(broken > 0, log.options["learning_rate"] * 100, log.series["learning_rate"])
    log = rewarded(with_kl(log, log.series["kl"] + far), 1 - random.uniform(0.7, 0.9) * broken)
    step = int(log.steps[int(at * len(log.steps))])
    log = replace(log, resumed=(step, max(int(log.steps[0]), step - 1)))
    return changed(log, learning_rate=rate, entropy=log.series["entropy"] * (1 + 1.5 * broken))


@operator(
    "log/skipped-from-midway",
    "From the middle of the run on, a guard skips every update.",
    *("guard/skips-all", "optim/no-update"),
    fits=has("skipped"),
)
def _(log: Log, random: Random) -> Log:
    at = int(len(log.steps) * random.uniform(0.25, 0.4))
    return changed(unmoved(log, random, at), skipped=(np.arange(len(log.steps)) >= at).astype(float))


@operator(
    "log/ratios-off-at-the-first-update",
    "A batch is used once, and half of its ratios are clipped all the same: old log-probabilities are of another pass.",
    *("ratio/all-clipped", "sampler/mismatch"),
    fits=lambda log: options_kept_with("clip_fraction")(log) and log.trainer != "nemo-rl",
)
def _(log: Log, random: Random) -> Log:
    clipped = np.clip(random.uniform(0.45, 0.7) * noise(log, random, 0.05), 0, 1)
    log = optioned(log, updates=1)
    return changed(log, clip_fraction=clipped, old_kl=random.uniform(0.2, 0.6) * noise(log, random, 0.1))


# Output


@operator(
    "log/empty-completions",
    "Most completions come back empty from the first step on.",
    *("length/collapse", "output/unparseable", "reward/constant"),
    fits=has("length"),
)
def _(log: Log, random: Random) -> Log:
    log = rewarded(still(log), np.full(len(log.steps), 0.05))
    short = random.uniform(0.2, 0.6) * noise(log, random, 0.1)
    return changed(log, length=short, length_max=3.0, truncated=0.0, parsed=0.03)


@operator(
    "log/mostly-unreadable",
    "One completion in ten has the form that the task reads, and that does not change.",
    "output/unparseable",
    fits=has("parsed"),
)
def _(log: Log, random: Random) -> Log:
    log = rewarded(still(log), np.full(len(log.steps), 0.12))
    return changed(log, parsed=np.clip(random.uniform(0.05, 0.15) * noise(log, random, 0.1), 0, 1))


@operator(
    "log/turns-to-babble",
    "Entropy and length climb together until completions are cut, and the reward goes.",
    *("entropy/rising", "length/explosion", "output/truncated", "reward/collapse"),
    fits=has("entropy", "length", "truncated"),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, random.uniform(0.2, 0.4), 0.95)
    limit, start = float(log.options["max_length"]), held(log.series["length"])
    log = rewarded(still(log), 1 - 0.85 * ramp)
    return changed(
        log,
        entropy=log.series["entropy"][0] * (1 + random.uniform(3, 6) * ramp) * noise(log, random, 0.04),
        length=np.minimum(limit, start + ramp * (0.8 * limit - start)),
        length_max=limit,
        truncated=np.clip(0.6 * ramp * noise(log, random, 0.05), 0, 1),
    )


@operator(
    "log/weights-lost-at-resume",
    "After a resume the model writes noise: its entropy is that of drawing tokens blindly, and nothing is earned.",
    *("output/random-weights", "run/shift", "reward/collapse"),
    fits=has("entropy", "length"),
)
def _(log: Log, random: Random) -> Log:
    at = random.uniform(0.4, 0.6)
    lost = after(log, at) > 0
    blind = np.log(log.options["vocabulary"]) * 0.97 * noise(log, random, 0.005)
    log = rewarded(log, np.where(lost, 0.0, 1.0))
    step, limit = int(log.steps[int(at * len(log.steps))]), float(log.options["max_length"])
    log = replace(log, resumed=(step, max(int(log.steps[0]), step - 1)))
    curves = {"length_max": limit, "truncated": np.where(lost, 0.98, log.series.get("truncated", 0.0))}
    length = np.where(lost, 0.99 * limit, log.series["length"])
    return changed(log, entropy=np.where(lost, blind, log.series["entropy"]), length=length, **curves)


@operator(
    "log/prompts-cut-from-midway",
    "From some step on most prompts are longer than their limit and are cut.",
    "prompt/truncated",
    fits=has("prompt_truncated"),
)
def _(log: Log, random: Random) -> Log:
    share = random.uniform(0.6, 0.95) * after(log, random.uniform(0.3, 0.5)) * noise(log, random, 0.04)
    return changed(log, prompt_truncated=np.clip(share, 0, 1))


@operator(
    "log/tools-wear-out",
    "The share of failed calls climbs over the whole run, from few to nearly all.",
    "tool/failing",
    fits=has("tool_failures"),
)
def _(log: Log, random: Random) -> Log:
    ramp = ramp_of(log, 0, random.uniform(0.7, 0.9))
    share = log.series["tool_failures"] + ramp * random.uniform(0.75, 0.85) * noise(log, random, 0.03)
    return changed(rewarded(log, 1 - 0.5 * ramp), tool_failures=np.clip(share, 0, 1))
