"""Healthy histories of training, simulated: what `keel doctor LOG` has to be silent about, and what operators break.

Rewards come from drawn completions (problems of differing difficulty, groups of samples), so that mean, deviation,
spread within groups and the share of groups without spread belong together; whatever the policy does follows the sum
of the learning rates, so that a warm-up holds reward, KL, entropy and length back alike.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import faults.log_operators
import faults.log_operators_daily
import faults.log_operators_field
import faults.log_operators_fresh
import faults.log_operators_late
import faults.log_operators_policy
import faults.log_operators_reports
import faults.log_operators_run
import faults.log_operators_wild  # noqa: F401  (they register their operators)
from faults.log_names import LOGGED, PART, PARTS_LOGGED, TRAINERS
from faults.log_writers import FORMATS, Log, write_log
from keel.doctor.examine import examine
from keel.doctor.findings import Diagnosis

__all__ = ["TRAINERS", "Log", "examine_log", "healthy_log", "write_log"]

Curves = dict[str, np.ndarray]
SPREADLESS = 0.85  # share of groups without spread beyond which a run has little left to learn
_NEEDED = ("reward", "kl", "grad_norm", "learning_rate", "zero_variance", "all_right", "beta")  # never lost


def examine_log(log: Log) -> Diagnosis:
    """What the doctor says of the log's files."""
    with tempfile.TemporaryDirectory(prefix="keel-log-") as folder:
        return examine(write_log(log, Path(folder)))


def healthy_log(seed: int, trainer: str | None = None, format: str | None = None) -> Log:
    """A run that learns and has nothing wrong with it; the same for the same arguments."""
    random = Random(f"healthy log {seed} {trainer} {format}")
    trainer = trainer or random.choice(TRAINERS)
    generator = np.random.default_rng(random.getrandbits(64))
    course, rewards = _rewarded_course(random, generator)
    curves = rewards | _policy(course, random, generator, trainer)
    curves |= _sampler(course, random, generator, trainer)
    sparse = trainer in ("trl", "openrlhf") and course.steps >= 300
    every = random.choice([1, 1, 2, 5, 10]) if sparse else 1
    mean = trainer == "trl"  # over the steps since the last line; OpenRLHF logs the one step
    curves = {name: _logged(curve, every, mean) for name, curve in curves.items() if _is_logged(name, trainer)}
    steps = np.arange(every, course.steps + 1, every)
    optional = [name for name in curves if name not in _NEEDED and not name.startswith(PART)]
    lost = {name for name in optional if random.random() < 0.08}
    rows = np.ones(len(steps), dtype=bool)
    if random.random() < 0.2:  # lines that were lost on the way; the first shows where the run began
        rows[1:] = generator.random(len(steps) - 1) > random.uniform(0.01, 0.05)
    resumed = None
    if random.random() < 0.15:
        stopped = int(random.choice(list(steps[len(steps) // 3 : -5])))
        resumed = (stopped, max(int(steps[0]), stopped - random.randint(1, 12)))
    return Log(
        trainer,
        format or random.choice(FORMATS[trainer]),
        course.options | {"every": every},
        steps[rows],
        {name: curve[rows] for name, curve in curves.items() if name not in lost},
        evaluations=_evaluations(course, random, generator),
        evaluated=_EVALUATED,
        retention=_retention(course, random, generator) if trainer == "keel" else {},
        resumed=resumed,
    )


_EVALUATED = 400


@dataclass(frozen=True)
class _Course:
    """How a run goes: options, the learning rate of each step, how far the policy has moved before it (0 to 1)."""

    kind: str  # "usual", "good", "slow", "solved"
    options: Mapping[str, Any]
    rate: np.ndarray
    moved: np.ndarray
    skill: np.ndarray  # mean chance of a right answer at each step
    gain: float
    prompts: int
    length: float  # of completions, at the start and as a factor at the end
    growth: float

    @property
    def steps(self) -> int:
        return len(self.rate)


def _rewarded_course(random: Random, generator: np.random.Generator) -> tuple[_Course, Curves]:
    """A course with its rewards, drawn until there is something left to learn at its end."""
    while True:
        course = _course(random)
        rewards = _rewards(course, random, generator)
        if rewards["zero_variance"][-course.steps // 4 :].mean() <= SPREADLESS:
            return course, rewards


def _course(random: Random) -> _Course:
    steps = random.randint(60, 400)
    kind = random.choices(["usual", "good", "slow", "solved"], [6, 2, 2, 1])[0]
    low, high = random.choice([(0.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (0.0, 10.0), (0.0, 2.0)])
    warmup = round(steps * random.choice([0.0, 0.0, 0.03, 0.1, random.uniform(0.2, 0.35)]))
    options = {
        "max_steps": steps,
        "learning_rate": 10 ** random.uniform(-6.3, -4.5),
        "warmup_steps": warmup,
        "beta": random.choice([0.0, 0.001, 0.005, 0.01, 0.04, 0.1]),
        "updates": random.choice([1, 1, 2, 4]),
        "group_size": random.choice([4, 8, 8, 16]),
        "max_grad_norm": random.choice([1.0, 1.0, 0.5, 0.2]),
        "temperature": random.choice([1.0, 1.0, 0.9, 0.7]),
        "scale_rewards": random.choice(["group", "batch", "none"]),
        "entropy_coef": random.choice([0.0, 0.0, 0.0, 0.0, 1e-4]),
        "dropout": False,
        "vocabulary": random.choice([49152, 128256, 151936]),
        "reward_low": low,
        "reward_high": high,
    }
    rate = options["learning_rate"] * _schedule(
        steps, warmup, random.choice(["constant", "constant", "linear", "cosine"])
    )
    moved = np.concatenate([[0.0], np.cumsum(rate)[:-1]]) / rate.sum()
    prompts = random.choice([32, 64, 128])
    start = {"usual": (0.1, 0.5), "good": (0.72, 0.85), "slow": (0.2, 0.5), "solved": (0.4, 0.7)}[kind]
    begin = random.uniform(*start)
    # what one step's mean deviates by, and the gain that a line through all steps shows beyond doubt
    noise = 0.33 / math.sqrt(prompts) * math.sqrt(12 / steps)
    gain = {
        "usual": random.uniform(0.15, 0.4),
        "good": max(random.uniform(0.05, 0.1), 7.5 * noise),
        "slow": random.uniform(7.5, 11) * noise,
        "solved": random.uniform(0.97, 0.985) - begin,
    }[kind]
    gain = min(gain, 0.985 - begin)
    bend = random.uniform(1.0, 4.0)
    skill = begin + gain * (1 - np.exp(-bend * moved)) / (1 - math.exp(-bend))
    length = 10 ** random.uniform(1.8, 3.2)
    growth = random.uniform(1.5, 2.4) if random.random() < 0.2 and gain > 0.15 else random.uniform(0.7, 1.3)
    options["max_length"] = 2 ** math.ceil(math.log2(length * max(growth, 1) * random.uniform(2.2, 4)))
    units = [name for name, chance in _PARTS.items() if random.random() < chance]
    shares = {1: (1.0,), 2: (0.8, 0.2), 3: (0.7, 0.15, 0.15)}[len(units)]
    options["shares"] = dict(zip(units, shares, strict=True))  # of the total reward
    return _Course(kind, options, rate, moved, skill, gain, prompts, length, growth)


_PARTS = {"accuracy": 1.0, "format": 0.6, "similarity": 0.25}


def _schedule(steps: int, warmup: int, shape: str) -> np.ndarray:
    at = np.arange(steps)
    after = np.clip((at - warmup) / max(1, steps - warmup), 0, 1)
    decay = {"constant": np.ones(steps), "linear": 1 - after, "cosine": 0.5 * (1 + np.cos(np.pi * after))}[shape]
    return np.where(at < warmup, at / max(1, warmup), decay)


def _rewards(course: _Course, random: Random, generator: np.random.Generator) -> Curves:
    """Means over drawn completions: right answers, the format that they are in, and sometimes a graded part."""
    low, high = course.options["reward_low"], course.options["reward_high"]
    size = (course.steps, course.prompts, course.options["group_size"])
    concentration = random.uniform(1.5, 3.5)
    mean = course.skill[:, None]
    chance = generator.beta(concentration * mean, concentration * (1 - mean), size[:2])
    right = generator.random(size) < chance[:, :, None]
    formatted_at = random.uniform(0.3, 0.9)
    formatted = 1 - (1 - formatted_at) * np.exp(-8 * course.moved)
    graded = 0.35 + 0.25 * right + 0.15 * course.skill[:, None, None] + generator.normal(0, 0.1, size)
    units = {
        "accuracy": right.astype(float),
        "format": (right | (generator.random(size) < formatted[:, None, None])).astype(float),
        "similarity": np.clip(graded, 0, 1),
    }
    shares = course.options["shares"]
    parts = {name: share * (low + (high - low) * units[name]) for name, share in shares.items()}
    total = sum(parts.values())
    spread = total.std(axis=2, ddof=1)
    level = spread <= 1e-9
    curves = {
        "reward": total.mean(axis=(1, 2)),
        "reward_std": total.reshape(course.steps, -1).std(axis=1, ddof=1),
        "group_std": spread.mean(axis=1),
        "zero_variance": level.mean(axis=1),
        "all_right": (level & right.all(axis=2)).mean(axis=1),
        "parsed": np.clip(np.maximum(formatted, course.skill), 0, 1),
        "advantage_mean": generator.normal(-0.008, 0.012, course.steps),
    }
    return curves | {PART + name: part.mean(axis=(1, 2)) for name, part in parts.items()}


def _policy(course: _Course, random: Random, generator: np.random.Generator, trainer: str) -> Curves:
    """What the policy does while it moves: KL, entropy, length, gradients, clipping, losses."""
    steps, options, moved = course.steps, course.options, course.moved
    wobble = lambda size: np.exp(generator.normal(0, size, steps))  # noqa: E731
    beta = options["beta"]
    curves: Curves = {"learning_rate": course.rate}
    far = 10 ** (random.uniform(-2.7, -2.0) if course.kind == "slow" else random.uniform(-2.3, -0.95))
    kl = far * moved ** random.uniform(0.9, 1.4) * wobble(0.08)
    kl += 10 ** random.uniform(-7, -4.3) * wobble(0.3) if random.random() < 0.5 else 0.0  # rounding in 16 bits
    if options["updates"] > 1:
        kl += 0.02 * far * course.rate / course.rate.max() * wobble(0.2)
    if beta > 0 or trainer == "keel":
        curves["kl"] = kl
    elif trainer in ("openrlhf", "nemo-rl"):  # without a reference they log zeros
        curves["kl"] = np.zeros(steps)
    curves["beta"] = np.full(steps, beta)
    entropy = random.uniform(0.25, 1.6)
    curves["entropy"] = entropy * (1 + (random.uniform(0.45, 1.1) - 1) * moved) * wobble(0.03)
    curves["length"] = course.length * (1 + (course.growth - 1) * moved) * wobble(0.04)
    limit = options["max_length"]
    draws = course.prompts * options["group_size"]
    tail = [0.5 * math.erfc(math.log(limit / mean) / 0.45 / math.sqrt(2)) for mean in curves["length"]]
    curves["truncated"] = generator.binomial(draws, tail) / draws
    longest = np.minimum(limit, np.round(curves["length"] * random.uniform(2.2, 3) * wobble(0.1)))
    curves["length_max"] = np.where(curves["truncated"] > 0, limit, longest)
    curves["prompt_truncated"] = np.zeros(steps)
    curves["grad_norm"] = 10 ** random.uniform(-1.5, 0.2) * wobble(random.uniform(0.15, 0.35))
    pace = course.rate / course.rate.max()
    several = options["updates"] > 1
    curves["clip_fraction"] = 10 ** random.uniform(-3.3, -1.8) * pace * wobble(0.2) if several else np.zeros(steps)
    curves["old_kl"] = 10 ** random.uniform(-4.5, -3.3) * pace * wobble(0.3) if several else np.zeros(steps)
    curves["policy_loss"] = generator.normal(0, 10 ** random.uniform(-2.6, -1.5), steps)
    curves["kl_loss"] = beta * curves.get("kl", np.zeros(steps))
    curves["loss"] = curves["policy_loss"] + curves["kl_loss"]
    curves |= {name: np.zeros(steps) for name in ("skipped", "nonfinite", "rollbacks")}
    if random.random() < 0.2:
        curves["tool_failures"] = np.clip(generator.normal(0.08, 0.02, steps), 0, 1)
    if options["entropy_coef"] > 0:
        curves["entropy_coef"] = np.full(steps, options["entropy_coef"])
    return curves


def _sampler(course: _Course, random: Random, generator: np.random.Generator, trainer: str) -> Curves:
    """How far the engine's log-probabilities are from the trainer's: rounding, in 16 bits or in 32."""
    steps = course.steps
    if trainer not in ("nemo-rl", "prime-rl") and random.random() < 0.35:
        return {}
    native = trainer == "keel" and random.random() < 0.7
    gap = 10 ** (random.uniform(-7, -6) if native else random.uniform(-2.6, -1.8)) * np.exp(
        generator.normal(0, 0.08, steps)
    )
    k3 = 1.6 * gap**2
    curves = {
        "sampler_gap": gap,
        "sampler_gap_max": gap * random.uniform(15, 40) * np.exp(generator.normal(0, 0.2, steps)),
        "sampler_kl": k3,
        "sampler_k1": k3 + generator.normal(0, 0.02, steps) * gap,
        "sampler_probability_gap": 0.4 * gap,
        "sampler_correlation": 1 - 0.6 * gap * np.exp(generator.normal(0, 0.2, steps)) * 0.2,
        "sampler_factor": np.exp(gap),
        "weight_mean": 1 + generator.normal(0, 0.01, steps) * gap,
        "weight_max": 1 + np.minimum(1.0, gap * 25),
        "ess": 1 - np.minimum(0.5, 2 * k3),
    }
    if trainer == "keel":
        curves["unreported"] = np.zeros(steps)
    if trainer == "verl" and random.random() < 0.4:  # one of the two is switched on
        for name in [name for name in curves if not name.startswith(("sampler_probability", "sampler_corr"))]:
            del curves[name]
    return curves


def _evaluations(course: _Course, random: Random, generator: np.random.Generator) -> dict[int, float]:
    if random.random() < 0.4:
        return {}
    every = max(5, course.steps // random.randint(4, 8))
    at = range(every, course.steps + 1, every)
    level = random.uniform(0.85, 1.0)  # held-out problems are a little harder
    return {step: generator.binomial(_EVALUATED, level * course.skill[step - 1]) / _EVALUATED for step in at}


def _retention(course: _Course, random: Random, generator: np.random.Generator) -> dict[int, float]:
    level = random.uniform(0.4, 0.8)
    return {step: generator.binomial(_EVALUATED, level) / _EVALUATED for step in (0, course.steps // 2, course.steps)}


def _is_logged(name: str, trainer: str) -> bool:
    return trainer in PARTS_LOGGED if name.startswith(PART) else name in LOGGED[trainer]


def _logged(curve: np.ndarray, every: int, mean: bool) -> np.ndarray:
    """One value a line of the log."""
    count = len(curve) // every
    by_line = curve[: count * every].reshape(count, every)
    return by_line.mean(axis=1) if mean else by_line[:, -1]
