"""A model of some thousand parameters and a task it can learn from in a few steps, for tests that run many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.config.schema import Config
from keel.envs import Task
from keel.models.tiny import tiny_tokenizer


def small_model(seed: int = 0) -> tuple[Any, Any]:
    """A Llama of one layer and width 16; given to a configuration as `trainer.small:small_model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer


def other_model() -> tuple[Any, Any]:
    """Another such model, as a teacher."""
    return small_model(5)


@dataclass(frozen=True)
class Letters(Task):
    """Pays the share of letters in a completion: every group of a random model has some spread."""

    name: str = "letters"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{seed}/{step}/{i}", f"{step}:{i}=", "abc") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"h{i}=", "abc") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "abc"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        text = turns[-1]
        share = sum(c.isalpha() for c in text) / max(1, len(text))
        return Reward(share, {"letters": share}, parsed=bool(text))


def letters() -> Letters:
    return Letters()


BASE = {
    "run": {"name": "small", "max_steps": 4},
    "model": {"name": "trainer.small:small_model", "device": "cpu"},
    "task": {"name": "trainer.small:letters"},
    "rewards": [{"name": "task"}],
    "rollout": {"prompts_per_step": 3, "num_generations": 4, "max_completion_length": 5},
    "kl": {"beta": 0.01},
    "optim": {"learning_rate": 1.0e-2},
    "eval": {"every": 0, "samples": 2, "k": [1, 2]},
    "log": {"console": "none", "tensorboard": False},
    "checkpoint": {"every": 100},
}


def small_config(*overrides: str) -> Config:
    return load_config(BASE, overrides)
