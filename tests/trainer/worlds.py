"""A small model that knows the words of the built-in worlds; named `trainer.worlds:model` in configurations."""

from __future__ import annotations

from typing import Any

from keel.envs.registry import build_task
from keel.models.tiny import word_model

TASK = {"name": "multihop", "retriever": "golden", "hops": [2], "documents": 4, "think": False, "instruction": None}


def model(seed: int = 0) -> tuple[Any, Any]:
    task: Any = build_task(**TASK)
    return word_model(task.vocabulary, seed)


CONFIG = {
    "run": {"name": "worlds", "max_steps": 2},
    "model": {"name": "trainer.worlds:model", "device": "cpu"},
    "task": TASK,
    "rewards": [{"name": "task"}],
    "warmstart": {"steps": 2, "batch_size": 4, "learning_rate": 1e-2},
    "rollout": {
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 120,
        "max_turns": 3,
        "max_turn_length": 24,
    },
    "kl": {"beta": 0.01},
    "optim": {"learning_rate": 1e-3},
    "eval": {"every": 0, "samples": 2, "k": [1]},
    "log": {"console": "none", "tensorboard": False},
}
