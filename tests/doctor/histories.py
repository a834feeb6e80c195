"""Synthetic histories: a healthy run, and the same with one fault."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keel.doctor.history import History, Series

KEEL_CONFIG: dict[str, Any] = {
    "kl": {"beta": 0.01, "estimator": "k3", "gradient": "auto", "placement": "loss", "level": "token", "budget": None},
    "loss": {"loss_type": "grpo", "scale_rewards": "group", "num_iterations": 1},
    "optim": {"learning_rate": 1e-5, "max_grad_norm": 1.0, "minibatches": 1},
    "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_completion_length": 64},
    "data": {"truncation": "error"},
}


def healthy(seed: int = 0, steps: int = 60, **changes: Any) -> History:
    """A run that learns: the reward rises from 0.3 to 0.7, the KL from 0 to about 0.06 nats per token."""
    noise = random.Random(seed)
    lines: dict[str, list[tuple[float, float]]] = {}
    for step in range(1, steps + 1):
        done = (step - 1) / max(steps - 1, 1)
        values = {
            "reward/mean": 0.3 + 0.4 * done + noise.gauss(0, 0.03),
            "reward/std": 0.45,
            "reward/within_group_std": 0.4 + noise.gauss(0, 0.02),
            "reward/zero_variance_fraction": 0.1 + abs(noise.gauss(0, 0.02)),
            "kl/policy_ref/k3/mean": 0.06 * done * (1 + 0.2 * noise.random()),
            "kl/sampler_policy/k3/mean": 1e-6 * noise.random(),
            "logp/sampler_gap_max": 1e-3 * noise.random(),
            "kl/beta": 0.01,
            "entropy/mean": 1.2 - 0.5 * done + noise.gauss(0, 0.02),
            "grad/norm": 0.8 * math.exp(noise.gauss(0, 0.3)),
            "loss/total": noise.gauss(0, 0.02),
            "guard/skipped": 0.0,
            "guard/nonfinite": 0.0,
            "guard/spike": 0.0,
            "optim/learning_rate": 1e-5,
            "length/mean": 30 + noise.gauss(0, 2),
            "length/truncated_fraction": 0.02,
            "parse/ok_fraction": 0.9,
            "ratio/clip_low_fraction": 0.01,
            "ratio/clip_high_fraction": 0.02,
        }
        for name, value in values.items():
            lines.setdefault(name, []).append((step, value))
    fields: dict[str, Any] = {
        "source": "keel",
        "path": Path("run"),
        "series": {name: Series.of(pairs) for name, pairs in lines.items()},
        "config": KEEL_CONFIG,
        "evaluations": (
            evaluation("sort", "trained", 0, 0.3),
            evaluation("copy", "retention", 0, 0.9),
            evaluation("sort", "trained", steps, 0.6),
            evaluation("copy", "retention", steps, 0.88),
        ),
        "rollouts": tuple(
            {"step": step, "reward": float(noise.random() < 0.5), "tracked": False} for step in range(1, 30)
        ),
        "vocabulary": 1000,
    }
    return History(**{**fields, **changes})


def evaluation(task: str, split: str, step: int, share: float, n: int = 128) -> dict[str, Any]:
    margin = 1.96 * math.sqrt(share * (1 - share) / n)
    return {
        "task": task,
        "split": split,
        "step": step,
        "pass@1": share,
        "ci95": [share - margin, share + margin],
        "n": n,
    }


def altered(name: str, value: Callable[[int, float], float], base: History | None = None, **changes: Any) -> History:
    """The healthy run with one metric replaced by `value(step, old)`."""
    base = healthy() if base is None else base
    was = base.series[name]
    pairs = [(step, value(int(step), old)) for step, old in zip(was.steps, was.values, strict=True)]
    fields = {field: getattr(base, field) for field in base.__dataclass_fields__}
    return History(**{**fields, "series": {**base.series, name: Series.of(pairs)}, **changes})


def configured(base: History | None = None, **options: Any) -> History:
    """The healthy run with other options, such as `kl__estimator="k1"` for kl.estimator."""
    base = healthy() if base is None else base
    config = {section: dict(values) for section, values in base.config.items()}
    for dotted, value in options.items():
        section, name = dotted.split("__")
        config.setdefault(section, {})[name] = value
    fields = {field: getattr(base, field) for field in base.__dataclass_fields__}
    return History(**{**fields, "config": config})
