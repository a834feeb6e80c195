"""Faults as they appear in a log. Each changes one aspect of a simulated healthy log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from doctor.simulated import Drawn, changed, noise

REWARD, ENTROPY, LENGTH, NORM, RATE = (
    "reward/mean",
    "entropy/mean",
    "length/mean",
    "grad/norm",
    "optim/learning_rate",
)
Break = Callable[[Drawn, np.random.Generator], Drawn]


def kl_name(drawn: Drawn) -> str:
    return next(name for name in drawn.courses if name.startswith("kl/policy_ref/"))


def _wobble(drawn: Drawn, rng: np.random.Generator, size: float) -> np.ndarray:
    return size * noise(rng, len(drawn.steps), 0.4)


def _flat_reward(drawn: Drawn, rng: np.random.Generator, level: float = 0.3) -> Drawn:
    return changed(drawn, REWARD, lambda v, s: np.clip(level + _wobble(drawn, rng, 0.01), 0, 1))


def collapse(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    at = rng.uniform(0.4, 0.7)
    return changed(drawn, REWARD, lambda v, s: np.where(s < at, v, v * np.maximum(0.1, 1 - 8 * (s - at))))


def shift(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    at = rng.uniform(0.3, 0.7)
    drawn = changed(drawn, REWARD, lambda v, s: np.where(s < at, v, 0.25 * v))
    drawn = changed(drawn, LENGTH, lambda v, s: np.where(s < at, v, 2.5 * v))
    return changed(drawn, ENTROPY, lambda v, s: np.where(s < at, v, 2 * v))


def negative_kl(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, kl_name(drawn), lambda v, s: -np.abs(v))


def kl_of_nothing(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The entropy falls by half, so the policy changes, but the KL stays 0."""
    drawn = changed(drawn, ENTROPY, lambda v, s: v * (1 - 0.5 * s))
    drawn = changed(drawn, kl_name(drawn), lambda v, s: np.abs(_wobble(drawn, rng, 1e-8)))
    return replace(drawn, config={"kl": {"beta": 0.04}})


def reference_replaced(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    at = rng.uniform(0.4, 0.7)
    return changed(drawn, kl_name(drawn), lambda v, s: np.where(s < at, v + 0.02, np.maximum(0, 0.05 * (s - at))))


def part_falls(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    drawn = changed(drawn, REWARD, lambda v, s: 0.3 + 0.4 * s + _wobble(drawn, rng, 0.02))
    return changed(drawn, "reward/part/format", lambda v, s: 0.9 - 0.6 * s + _wobble(drawn, rng, 0.02))


def part_gone_early(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """A reward part is lost within a tenth of the run and stays flat afterwards."""
    drawn = changed(drawn, REWARD, lambda v, s: 0.5 + 2 * np.minimum(1, 8 * s) + _wobble(drawn, rng, 0.02))
    return changed(drawn, "reward/part/format", lambda v, s: np.maximum(0, 0.5 - 4 * s + _wobble(drawn, rng, 0.02)))


def drifts(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """A random reward: the KL rises without any gain."""
    drawn = replace(drawn, steps=np.arange(1, len(drawn.steps) + 1))
    factor = np.exp(_wobble(drawn, rng, 0.2))
    return changed(_flat_reward(drawn, rng), kl_name(drawn), lambda v, s: 0.1 * np.minimum(1, 2 * (s - s[0])) * factor)


def norms_of_a_sum(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """Gradient norms of a loss that is summed over some hundred tokens."""
    drawn = changed(drawn, NORM, lambda v, s: 300 * np.exp(_wobble(drawn, rng, 0.2)))
    return replace(drawn, config={**drawn.config, "optim": {"max_grad_norm": 1.0}})


def guards_skip(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The policy does not change because two of three updates are skipped."""
    drawn = stands_still(drawn, rng)
    skipped = (rng.random(len(drawn.steps)) < 0.67).astype(float)
    return replace(drawn, courses={**drawn.courses, "guard/skipped": skipped, "guard/nonfinite": 0 * skipped})


def no_gradient(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, NORM, lambda v, s: 0 * v)


def rate_zero(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, RATE, lambda v, s: 0 * v)


def schedule_ends(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, RATE, lambda v, s: np.where(s < 0.5, v, 0))


def stands_still(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """A very small learning rate: no metric has a trend."""
    drawn = _flat_reward(drawn, rng)
    for name, level in ((ENTROPY, 0.8), (LENGTH, 100.0), ("ratio/clip_fraction", 0.0)):
        course = level * np.exp(_wobble(drawn, rng, 0.03))
        drawn = replace(drawn, courses={**drawn.courses, name: course})
    drawn = changed(drawn, RATE, lambda v, s: 0 * v + 1e-12)
    drawn = changed(drawn, kl_name(drawn), lambda v, s: np.abs(_wobble(drawn, rng, 1e-9)))
    return replace(drawn, config={"kl": {"beta": 0.04}})


def entropy_rises(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(_flat_reward(drawn, rng), ENTROPY, lambda v, s: (0.4 + v) * (1 + 3 * s))


def bonus_rules(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return replace(entropy_rises(drawn, rng), config={"loss": {"entropy_coef": 0.1}})


def shrinks(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(_flat_reward(drawn, rng), LENGTH, lambda v, s: np.maximum(1.5, v * np.exp(-5 * s)))


def grows(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(_flat_reward(drawn, rng), LENGTH, lambda v, s: v * (1 + 6 * s))


def entropy_gone(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(_flat_reward(drawn, rng), ENTROPY, lambda v, s: v * np.exp(-8 * s) + 1e-3)


def gap(level: float) -> Break:
    def break_gap(drawn: Drawn, rng: np.random.Generator) -> Drawn:
        return changed(drawn, "logp/sampler_gap_mean", lambda v, s: level + np.abs(_wobble(drawn, rng, 0.1 * level)))

    return break_gap


def gap_grows(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, "logp/sampler_gap_mean", lambda v, s: v + 0.6 * s)


def kl_holds(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """β is 10: the KL stays at 0.002, and the reward does not rise."""
    factor = np.exp(_wobble(drawn, rng, 0.1))
    drawn = changed(_flat_reward(drawn, rng), kl_name(drawn), lambda v, s: 0.002 * np.minimum(1, 10 * s) * factor)
    return replace(drawn, config={"kl": {"beta": 10.0}})


def first_updates(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    every = drawn.steps[0]
    return changed(drawn, kl_name(drawn), lambda v, s: np.where(np.arange(len(v)) == 0, 0.3 * (every > 1) * every, 0.9))


def greedy(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    drawn = changed(drawn, "reward/zero_variance_fraction", lambda v, s: 0 * v + 1)
    return changed(drawn, ENTROPY, lambda v, s: 0 * v + 1e-4)


def large_advantages(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    largest = 500 + np.abs(_wobble(drawn, rng, 50))
    return replace(drawn, courses={**drawn.courses, "advantage/max": largest}, config={})


def declines(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The reward falls from the first step on, as with the wrong sign of the advantage."""
    return changed(drawn, REWARD, lambda v, s: 0.6 - 0.25 * s + _wobble(drawn, rng, 0.02))


def gradients_grow(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    return changed(drawn, NORM, lambda v, s: 0.1 * np.exp(4 * s + _wobble(drawn, rng, 0.1)))


def weights_off(name: str, level: float) -> Break:
    def break_weights(drawn: Drawn, rng: np.random.Generator) -> Drawn:
        course = level * np.exp(_wobble(drawn, rng, 0.05))
        return replace(drawn, courses={**drawn.courses, name: course})

    return break_weights


LOG_FAULTS: dict[str, tuple[str, Break]] = {
    "reward collapses": ("reward/collapse", collapse),
    "metrics jump": ("run/shift", shift),
    "KL below 0": ("kl/negative", negative_kl),
    "KL of nothing": ("reference/follows", kl_of_nothing),
    "reference replaced": ("reference/moving", reference_replaced),
    "a part falls": ("reward/part-falling", part_falls),
    "a part is gone early": ("reward/part-falling", part_gone_early),
    "drift without gain": ("kl/not-learning", drifts),
    "norms of a sum": ("loss/scale", norms_of_a_sum),
    "guards skip": ("guard/skips-all", guards_skip),
    "no gradient": ("loss/no-gradient", no_gradient),
    "rate 0": ("optim/no-update", rate_zero),
    "schedule ends early": ("optim/no-update", schedule_ends),
    "rate next to nothing": ("optim/no-update", stands_still),
    "entropy rises": ("entropy/rising", entropy_rises),
    "bonus on entropy": ("entropy/too-strong", bonus_rules),
    "completions shrink": ("length/collapse", shrinks),
    "completions grow": ("length/explosion", grows),
    "entropy gone": ("entropy/collapse", entropy_gone),
    "sampler in 16 bits": ("sampler/precision", gap(0.15)),
    "another sampler": ("sampler/mismatch", gap(0.6)),
    "sampler left behind": ("sampler/stale", gap_grows),
    "β of 10": ("kl/too-strong", kl_holds),
    "first updates too large": ("optim/lr-too-high", first_updates),
    "greedy": ("rollout/temperature", greedy),
    "reward declines": ("reward/collapse", declines),
    "gradients grow": ("optim/spike", gradients_grow),
    "weights of mean 0.2": ("sampler/mismatch", weights_off("ratio/sampler_mean", 0.2)),
    "weights few of which count": ("sampler/mismatch", weights_off("mismatch/ess", 0.1)),
    "samples left out": ("sampler/mismatch", weights_off("mismatch/rejected_fraction", 0.8)),
    "probabilities apart": ("sampler/mismatch", weights_off("sampler/correlation", 0.6)),
    "advantages of 500": ("reward/scale", large_advantages),
}
