"""Operators on logs, of updates, entropy, length and output."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from faults.base import operator
from faults.log_edits import (
    changed,
    has,
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
from faults.log_writers import Log


@operator(
    "log/gradient-zero",
    "The gradient is exactly 0 although rewards differ: the loss is detached.",
    "loss/no-gradient",
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    return changed(unmoved(log, random), grad_norm=0.0)


@operator(
    "log/gradient-dies",
    "From some step on the gradient is exactly 0 although rewards differ.",
    "loss/no-gradient",
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    at = int(len(log.steps) * random.uniform(0.2, 0.5))
    log = unmoved(log, random, at)
    return changed(log, grad_norm=np.where(np.arange(len(log.steps)) < at, log.series["grad_norm"], 0.0))


@operator("log/rate-zero", "The learning rate is 0 throughout.", "optim/no-update")
def _(log: Log, random: Random) -> Log:
    return optioned(changed(unmoved(log, random), learning_rate=0.0), learning_rate=0.0)


@operator("log/rate-ends-early", "The schedule reaches 0 long before the run ends.", "optim/no-update")
def _(log: Log, random: Random) -> Log:
    at = int(len(log.steps) * random.uniform(0.15, 0.5))
    rate = np.where(np.arange(len(log.steps)) < at, log.series["learning_rate"], 0.0)
    return changed(unmoved(log, random, at), learning_rate=rate)


@operator("log/rate-tiny", "The learning rate is a million times too small.", "optim/no-update")
def _(log: Log, random: Random) -> Log:
    size = 10 ** random.uniform(-8, -5.5)
    rate = log.options["learning_rate"] * size
    return optioned(changed(unmoved(log, random), learning_rate=log.series["learning_rate"] * size), learning_rate=rate)


@operator("log/warm-up-endless", "The warm-up is a hundred times longer than the run.", "optim/no-update")
def _(log: Log, random: Random) -> Log:
    length = int(log.options["max_steps"] * random.uniform(80, 400))
    rate = log.options["learning_rate"] * log.steps / length
    return optioned(changed(unmoved(log, random), learning_rate=rate), warmup_steps=length)


@operator(
    "log/not-learning",
    "The policy hardly leaves the reference and the reward is flat.",
    *("kl/not-learning", "optim/no-update"),
    fits=has("kl"),
)
def _(log: Log, random: Random) -> Log:
    kl = 10 ** random.uniform(-4.5, -3.3) * ramp_of(log, 0, 0.6) * noise(log, random, 0.1)
    return with_kl(still(log), kl)


@operator("log/all-frozen", "Every figure is the same to the last digit from some step on.", "optim/no-update")
def _(log: Log, random: Random) -> Log:
    at = int(len(log.steps) * random.uniform(0.02, 0.3))
    names = [name for name in log.series if name != "learning_rate"]
    frozen = {name: np.where(np.arange(len(log.steps)) < at, log.series[name], log.series[name][at]) for name in names}
    return changed(still(log, at), **frozen)


@operator(
    "log/gradient-spikes",
    "Gradient norms of a hundred times the usual come again and again.",
    "optim/spike",
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    norm = log.series["grad_norm"].copy()
    for at in random.sample(range(len(norm) // 5, len(norm)), max(4, len(norm) // random.randint(8, 14))):
        norm[at] *= 10 ** random.uniform(1.5, 3)
    return changed(log, grad_norm=norm)


@operator(
    "log/gradient-grows",
    "The gradient norm doubles every few steps until the end.",
    *("optim/spike", "optim/lr-too-high"),
    fits=has("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    growth = 10 ** (ramp_of(log, random.uniform(0.3, 0.6), 1) * random.uniform(2.5, 4.5))
    return rewarded(changed(log, grad_norm=log.series["grad_norm"] * growth), 1 - 0.6 * ramp_of(log, 0.7, 1))


@operator("log/not-finite", "Loss and gradient become NaN.", "optim/non-finite", fits=has("grad_norm"))
def _(log: Log, random: Random) -> Log:
    bad = np.arange(len(log.steps)) >= int(len(log.steps) * random.uniform(0.3, 0.8))
    if random.random() < 0.5:  # or only in some of the steps
        bad &= np.random.default_rng(random.getrandbits(64)).random(len(bad)) < 0.4
        bad[-3] = True
    curves = {
        name: np.where(bad, np.nan, log.series[name]) for name in names_in(log, "loss", "policy_loss", "grad_norm")
    }
    return changed(log, **curves, skipped=bad.astype(float), nonfinite=bad.astype(float))


@operator(
    "log/always-clipped",
    "The gradient norm is hundreds of times the limit at every step: the loss is summed, not averaged.",
    "loss/scale",
    fits=options_kept_with("grad_norm"),
)
def _(log: Log, random: Random) -> Log:
    size = 10 ** random.uniform(2.3, 4)
    scaled = {name: log.series[name] * size for name in names_in(log, "policy_loss", "loss", "kl_loss")}
    return changed(log, grad_norm=log.options["max_grad_norm"] * size * noise(log, random, 0.25), **scaled)


@operator("log/skipped-by-guards", "A guard skips most updates.", "guard/skips-all", fits=has("skipped"))
def _(log: Log, random: Random) -> Log:
    draws = np.random.default_rng(random.getrandbits(64)).random(len(log.steps))
    skipped = (draws < random.uniform(0.7, 1)).astype(float)
    return changed(unmoved(log, random), skipped=skipped)


@operator(
    "log/rolled-back", "The run went back to a checkpoint several times.", "guard/rolled-back", fits=has("rollbacks")
)
def _(log: Log, random: Random) -> Log:
    marks = sorted(random.sample(range(len(log.steps) // 4, len(log.steps)), random.randint(1, 3)))
    count = sum((np.arange(len(log.steps)) >= mark).astype(float) for mark in marks)
    events = tuple(
        {"step": int(log.steps[mark]), "kind": "rollback", "message": "5 updates in a row were not finite"}
        for mark in marks
    )
    return replace(changed(log, rollbacks=count), events=events)


@operator(
    "log/entropy-collapses",
    "The policy writes the same each time, and the reward stops at half way.",
    "entropy/collapse",
    fits=has("entropy"),
)
def _(log: Log, random: Random) -> Log:
    end = random.uniform(0.15, 0.4)
    left = 10 ** random.uniform(-2.3, -1.7)
    log = rewarded(still(log, int(len(log.steps) * end)), 1 - 0.25 * ramp_of(log, end, 1))
    fall = np.exp(np.log(left) * ramp_of(log, 0.02, end + 0.2))
    return changed(log, entropy=log.series["entropy"][0] * fall * noise(log, random, 0.08))


@operator(
    "log/entropy-rises",
    "The entropy rises several-fold and the reward gains nothing.",
    "entropy/rising",
    fits=has("entropy"),
)
def _(log: Log, random: Random) -> Log:
    growth = 1 + random.uniform(2, 6) * ramp_of(log, random.uniform(0, 0.3), 1)
    log = rewarded(still(log), 1 - 0.3 * ramp_of(log, 0.3, 1))
    return changed(log, entropy=log.series["entropy"][0] * growth * noise(log, random, 0.04))


@operator(
    "log/entropy-bonus-rules",
    "The entropy bonus is larger than the policy's own term: outputs turn to noise.",
    "entropy/too-strong",
    fits=options_kept_with("entropy"),
)
def _(log: Log, random: Random) -> Log:
    coefficient = 10 ** random.uniform(-0.7, 0.7)
    entropy = log.series["entropy"][0] + ramp_of(log, 0, 0.6) * random.uniform(4, 7) * noise(log, random, 0.03)
    log = rewarded(still(log), 1 - 0.85 * ramp_of(log, 0.05, 0.5))
    if "loss" in log.series:
        log = changed(log, loss=log.series["loss"] - coefficient * entropy)
    log = optioned(changed(log, entropy=entropy), entropy_coef=coefficient)
    return replace(log, series={**log.series, "entropy_coef": np.full(len(log.steps), coefficient)})


@operator(
    "log/random-weights",
    "The model was not loaded: its entropy is that of drawing tokens blindly.",
    "output/random-weights",
    fits=lambda log: log.format == "state" and has("entropy")(log),
)
def _(log: Log, random: Random) -> Log:
    blind = np.log(log.options["vocabulary"]) * random.uniform(0.95, 0.999)
    log = rewarded(unmoved(log, random), np.zeros(len(log.steps)))
    return changed(log, entropy=blind * noise(log, random, 0.002), zero_variance=1.0, reward_std=0.0)


@operator(
    "log/length-explodes",
    "Completions grow many-fold and the reward gains nothing.",
    "length/explosion",
    fits=has("length"),
)
def _(log: Log, random: Random) -> Log:
    longer = log.series["length"][0] * (1 + ramp_of(log, 0.1, 0.95) * random.uniform(3.5, 9)) * noise(log, random, 0.05)
    log = optioned(still(log), max_length=int(longer.max() * 4))
    return changed(log, length=longer, length_max=longer * 2.5, truncated=0.002)


@operator(
    "log/length-collapses",
    "Completions shrink to a few tokens and the reward gains nothing.",
    "length/collapse",
    fits=has("length"),
)
def _(log: Log, random: Random) -> Log:
    end = max(1.5, log.series["length"][0] * random.uniform(0.01, 0.05))
    fall = np.exp(ramp_of(log, 0.1, random.uniform(0.4, 0.8)) * np.log(end / log.series["length"][0]))
    log = rewarded(still(log), 1 - random.uniform(0.0, 0.15) * ramp_of(log, 0.2, 0.8))
    shorter = log.series["length"][0] * fall * noise(log, random, 0.05)
    return changed(log, length=shorter, length_max=shorter * 3, truncated=0.0)


@operator(
    "log/all-truncated",
    "Nearly every completion ends at the length limit from the start.",
    "output/truncated",
    fits=has("truncated", "length"),
)
def _(log: Log, random: Random) -> Log:
    limit = float(log.options["max_length"])
    share = np.clip(random.uniform(0.9, 1.0) * noise(log, random, 0.02), 0, 1)
    log = rewarded(still(log), np.full(len(log.steps), random.uniform(0.05, 0.3)))
    return changed(log, truncated=share, length=limit * (0.9 + 0.1 * share), length_max=limit)


@operator(
    "log/runs-into-limit",
    "Completions grow until most end at the length limit, and the reward falls with them.",
    *("output/truncated", "length/explosion"),
    fits=has("truncated", "length"),
)
def _(log: Log, random: Random) -> Log:
    limit = float(log.options["max_length"])
    ramp = ramp_of(log, random.uniform(0.2, 0.4), 0.8)
    share = np.clip(ramp * random.uniform(0.75, 0.98) * noise(log, random, 0.03), 0, 1)
    log = rewarded(still(log), 1 - 0.8 * ramp)
    start = log.series["length"][0]
    return changed(log, truncated=share, length=start + ramp * (0.95 * limit - start), length_max=limit)


@operator("log/prompts-cut", "Most prompts are cut at their limit.", "prompt/truncated", fits=has("prompt_truncated"))
def _(log: Log, random: Random) -> Log:
    return changed(log, prompt_truncated=np.clip(random.uniform(0.4, 1.0) * noise(log, random, 0.05), 0, 1))


@operator(
    "log/unparseable",
    "Almost no completion has the form that the task reads.",
    "output/unparseable",
    fits=has("parsed"),
)
def _(log: Log, random: Random) -> Log:
    log = rewarded(still(log), np.full(len(log.steps), 0.02))
    return changed(log, parsed=np.clip(random.uniform(0.0, 0.04) * noise(log, random, 0.3), 0, 1))


@operator("log/tools-fail", "Most tool calls come back as errors.", "tool/failing", fits=has("tool_failures"))
def _(log: Log, random: Random) -> Log:
    return changed(log, tool_failures=np.clip(random.uniform(0.7, 0.98) * noise(log, random, 0.04), 0, 1))


@operator(
    "log/greedy",
    "Sampling is all but greedy: the completions of a group are copies.",
    "rollout/temperature",
    fits=options_kept_with("zero_variance"),
)
def _(log: Log, random: Random) -> Log:
    cold = random.choice([0.001, 0.01, 0.05])
    log = optioned(unmoved(log, random), temperature=cold)
    curves = {
        "zero_variance": random.uniform(0.97, 1.0),
        "group_std": 0.001,
        "entropy": 0.01 * noise(log, random, 0.1),
    }
    return changed(log, grad_norm=log.series["grad_norm"] * 0.02, **curves)


@operator(
    "log/far-too-hot",
    "The sampling temperature is so high that outputs are noise.",
    "rollout/temperature",
    fits=options_kept_with("entropy"),
)
def _(log: Log, random: Random) -> Log:
    log = optioned(still(log), temperature=random.choice([3.0, 5.0, 10.0]))
    log = rewarded(log, np.full(len(log.steps), 0.03))
    return changed(log, entropy=random.uniform(6, 8) * noise(log, random, 0.02))
