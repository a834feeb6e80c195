"""A small supervised model: it answers, ends its answers, and is right about half of the time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from keel.base.types import Problem, Reward
from keel.config import load_config
from keel.config.schema import Config
from keel.envs.registry import build_task
from keel.models.tiny import tiny_tokenizer

TASK = {"name": "arithmetic", "skill": "max", "low": 0, "high": 9}


def fresh_model(seed: int = 0, width: int = 24) -> tuple[Any, Any]:
    """A loader `doctor.schooled:fresh_model`: a Llama of two layers and width 24 with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer


@cache
def taught(steps: int, batch: int = 32, make: Callable[[], tuple[Any, Any]] = fresh_model) -> tuple[Any, Any]:
    """Trained on gold answers until it writes a digit and stops, but not until it is always right."""
    model, tokenizer = make()
    parameters = {key: value for key, value in TASK.items() if key != "name"}
    task = build_task(str(TASK["name"]), **parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    for step in range(steps):
        problems = task.sample(batch, seed=7, step=step)
        texts = [(tokenizer.encode(str(p.prompt)), tokenizer.encode(task.gold(p))) for p in problems]
        width = max(len(a) + len(b) + 1 for a, b in texts)
        tokens = torch.full((batch, width), tokenizer.pad_token_id)
        labels = torch.full((batch, width), -100)
        for row, (prompt, answer) in enumerate(texts):
            line = [*prompt, *answer, tokenizer.eos_token_id]
            tokens[row, : len(line)] = torch.tensor(line)
            labels[row, len(prompt) : len(line)] = torch.tensor(line[len(prompt) :])
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return model.eval(), tokenizer


def schooled_model() -> tuple[Any, Any]:
    """A loader `doctor.schooled:schooled_model`. Every call returns the same weights in a new copy."""
    model, tokenizer = taught(90)
    return copy.deepcopy(model), tokenizer


def nearness(problem: Problem, text: str) -> Reward:
    """1 for the answer, up to 0.5 for a number near it, 0 otherwise. Rewards differ in most groups."""
    answer = text.strip()
    if not answer.isdecimal():
        return Reward(0.0, parsed=False)
    return Reward(1.0 if answer == problem.answer else 0.5 * max(0.0, 1 - abs(int(answer) - int(problem.answer)) / 9))


def counted(asked: list[str]) -> Callable[[Problem, str], Reward]:
    """A reward that records its calls."""

    def reward(problem: Problem, text: str) -> Reward:
        asked.append(text)
        return nearness(problem, text)

    return reward


BASE: dict[str, Any] = {
    "run": {"name": "schooled", "max_steps": 20},
    "model": {"name": "doctor.schooled:schooled_model", "device": "cpu"},
    "task": TASK,
    "rewards": [{"name": "doctor.schooled:nearness"}],
    "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6},
    "kl": {"beta": 0.01},
    "optim": {"learning_rate": 1.0e-4},
    "eval": {"every": 0, "samples": 2, "k": [1, 2]},
    "log": {"console": "none", "tensorboard": False},
}


def schooled_config(*overrides: str) -> Config:
    return load_config(BASE, overrides)
