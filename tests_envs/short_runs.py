"""Short runs on an environment, and their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def small(folder: Path, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "run", "dir": str(folder), "max_steps": 4},
        "model": {"name": "keel.models.tiny:half_model", "device": "cpu"},
        "task": spec,
        "rollout": {
            "prompts_per_step": 3,
            "num_generations": 2,
            "max_turns": 3,
            "max_turn_length": 8,
            "max_completion_length": 48,
        },
        "optim": {"learning_rate": 1.0e-3},
        "eval": {"every": 0, "samples": 4, "k": [1]},
        "log": {"console": "none", "tensorboard": False},
        "checkpoint": {"every": 2},
        **more,
    }


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    timed = ("time/", "speed/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records]
