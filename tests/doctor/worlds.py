"""A stand-in for the multi-hop model. It has seen some demonstrations, so that it calls, answers and is often wrong."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from keel.config import load_config
from keel.config.schema import Config
from keel.run.build import build_policy, build_warmstart
from keel.trainer.sft import sft

CONFIGS = Path(__file__).parents[2] / "configs"
LITTLE = (
    "task={name: multihop, retriever: golden, top_n: 1, hops: [2], documents: 4, think: false, instruction: null}",
    "data={path: null, truncation: error}",
    "rollout.max_turns=4",
    "rollout.max_turn_length=12",
    "rollout.max_completion_length=120",
    "rollout.temperature=1.0",
    "eval={every: 0, samples: 2, k: [1]}",
    "log={console: none, tensorboard: false}",
    "model.dtype=float32",
    "model.gradient_checkpointing=false",
    "model.device=cpu",
)


@cache
def _taught(steps: int) -> tuple[Any, Any]:
    warm = {"steps": steps, "batch_size": 8, "learning_rate": 5e-3, "warmup_steps": 5}
    base = {"model": {"name": "keel.recipes.multihop.models:multihop_tiny", "device": "cpu"}, "warmstart": warm}
    config = load_config(base, [*LITTLE[:2], "data.max_prompt_length=64"])
    loaded = build_policy(config)
    sft(loaded, *build_warmstart(config, loaded))
    return loaded.model.eval(), loaded.tokenizer


def taught_model() -> tuple[Any, Any]:
    """A loader `doctor.worlds:taught_model`. Every call returns the same weights in a new copy."""
    model, tokenizer = _taught(70)
    return copy.deepcopy(model), tokenizer


def musique_config(*overrides: str) -> Config:
    """`configs/musique.yaml` with its own LoRA, loss, KL and optimizer settings, on the stand-in and its worlds."""
    return load_config(CONFIGS / "musique.yaml", ["model.name=doctor.worlds:taught_model", *LITTLE, *overrides])
