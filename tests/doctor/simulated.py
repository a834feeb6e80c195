"""Random simulated logs of runs that learn, including unusual healthy ones, and the same with a fault.

`simulate` draws the course of one run: learning speed, noise and its autocorrelation, learning-rate schedule, KL term,
logging format and metric names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keel.doctor.history import History, Series

KINDS = ("usual", "slow", "good from the start", "noisy", "resumed", "no KL term", "long warm-up", "saturated")
Courses = dict[str, np.ndarray]


@dataclass
class Drawn:
    """A simulated run: its metrics by step, under Keel's names, and its known options."""

    kind: str
    source: str
    steps: np.ndarray
    courses: Courses
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> History:
        """The history that a reader would return."""
        series = {
            name: Series.of(zip(self.steps.tolist(), values.tolist(), strict=True))
            for name, values in self.courses.items()
        }
        return History(self.source, Path("log"), series, config=self.config)


def noise(rng: np.random.Generator, count: int, memory: float, *, heavy: bool = False) -> np.ndarray:
    """AR(1) noise with standard deviation 1. Heavy tails are Student's t with four degrees of freedom."""
    shocks = rng.standard_t(4, count) / math.sqrt(2) if heavy else rng.standard_normal(count)
    values = np.empty(count)
    values[0] = shocks[0]
    for i in range(1, count):
        values[i] = memory * values[i - 1] + math.sqrt(1 - memory**2) * shocks[i]
    return values


def simulate(rng: np.random.Generator, kind: str | None = None, source: str | None = None) -> Drawn:
    """One healthy run."""
    kind = str(rng.choice(KINDS)) if kind is None else kind
    source = str(rng.choice(["TRL", "verl", "keel", "table", "OpenRLHF"])) if source is None else source
    every = int(rng.choice([1, 1, 1, 5, 10]))
    total = int(rng.integers(30, 400))
    steps = np.arange(every, every * total + 1, every, dtype=float)
    done = steps / steps[-1]
    start = {"good from the start": 0.8, "saturated": 0.95}.get(kind, rng.uniform(0.1, 0.5))
    end = {"good from the start": 0.85, "saturated": 0.98, "slow": start + rng.uniform(0.01, 0.05)}.get(
        kind, start + rng.uniform(0.1, 0.4)
    )
    warm = 0.6 if kind == "long warm-up" else rng.choice([0.0, 0.05])
    rate = np.minimum(1.0, done / warm) if warm else np.ones(total)
    if rng.random() < 0.5:  # a cosine, or a line, down to 0 at the end
        rate = rate * (0.5 * (1 + np.cos(np.pi * done)) if rng.random() < 0.5 else 1 - done)
    moved = np.cumsum(rate) / np.sum(rate)
    learned = 1 - np.exp(-rng.uniform(1, 5) * moved)
    learned = learned / learned[-1]
    memory = rng.uniform(0, 0.7)
    loud = 3.0 if kind == "noisy" else 1.0

    def wobble(size: float, *, heavy: bool = False) -> np.ndarray:
        return loud * size * noise(rng, total, memory, heavy=heavy)

    mean = np.clip(start + (end - start) * learned + wobble(rng.uniform(0.01, 0.05)), 0, 1)
    spread = np.sqrt(np.maximum(mean * (1 - mean), 1e-4))
    entropy = rng.uniform(0.2, 2.0)
    length = rng.uniform(30, 800)
    fall, growth = rng.uniform(-0.2, 0.6), rng.uniform(-0.2, 1.0)
    courses: Courses = {
        "reward/mean": mean,
        "reward/std": spread,
        "reward/zero_variance_fraction": np.clip(1 - 4 * spread**2 + wobble(0.05), 0, 0.94),
        "reward/part/accuracy": np.clip(mean - 0.05 + wobble(0.02), 0, 1),
        "reward/part/format": np.clip(0.8 + 0.15 * learned + wobble(0.03), 0, 1),
        "entropy/mean": np.maximum(0.02, entropy * (1 - fall * learned) * np.exp(wobble(0.05))),
        "length/mean": np.maximum(3, length * (1 + growth * learned) * np.exp(wobble(0.06))),
        "length/truncated_fraction": np.clip(0.05 + wobble(0.02), 0, 0.4),
        "grad/norm": rng.uniform(0.05, 2) * np.exp(np.clip(wobble(0.25, heavy=True), -1.5, 1.5)),
        "optim/learning_rate": 10 ** rng.uniform(-6.5, -4.5) * np.roll(rate, -1),
        "loss/policy": wobble(0.02, heavy=True),
        "ratio/clip_fraction": np.zeros(total) if rng.random() < 0.5 else np.clip(0.01 + wobble(0.005), 0, 0.1),
        "logp/sampler_gap_mean": np.abs(0.015 + wobble(0.002)),
    }
    if source == "verl":
        courses["sampler/probability_gap_mean"] = np.abs(0.004 + wobble(0.0005))
        courses["kl/old_policy/k1/mean"] = wobble(3e-4)
    config: dict[str, Any] = {}
    if kind != "no KL term":
        far = 10 ** rng.uniform(-2.5, -0.9)
        kl = far * moved ** rng.uniform(0.8, 2) * np.exp(wobble(0.15))
        if every == 1:
            kl[0] = 0.0
        if source == "OpenRLHF":
            courses["kl/policy_ref/k1/mean"] = kl + np.sqrt(2 * kl) * wobble(0.01)  # of some 10,000 tokens a batch
        else:
            courses["kl/policy_ref/k3/mean"] = kl
        config = {"kl": {"beta": float(rng.choice([0.001, 0.01, 0.04]))}}
    elif source in ("verl", "OpenRLHF"):
        courses["kl/policy_ref/k3/mean"] = np.zeros(total)
    if kind == "slow":
        courses["entropy/mean"] = np.maximum(0.02, entropy * np.exp(wobble(0.05)))
    if source in ("table", "verl", "OpenRLHF") or rng.random() < 0.3:
        config = {}
    drawn = Drawn(kind, source, steps, courses, config)
    if kind == "resumed":  # some steps were not logged
        gap = slice(total // 2, total // 2 + rng.integers(1, max(2, total // 10)))
        drawn.steps = np.delete(steps, gap)
        drawn.courses = {name: np.delete(values, gap) for name, values in courses.items()}
    return drawn


def changed(drawn: Drawn, name: str, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Drawn:
    """The run with one metric replaced by `change(values, share of the run)`."""
    share = drawn.steps / drawn.steps[-1]
    return Drawn(
        drawn.kind,
        drawn.source,
        drawn.steps,
        {**drawn.courses, name: np.asarray(change(drawn.courses[name], share), dtype=float)},
        drawn.config,
    )
