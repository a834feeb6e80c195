"""Random models, rollouts and configurations: what the metamorphic tests draw from.

Nothing here is a list of known cases: hypothesis composes the shapes. Pytest alone runs a fixed draw of them;
`make test-all DRAWS=60 SEED=7` runs random ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st

from keel.base.types import Completion, Group, Problem, Reward
from keel.config import load_config
from keel.config.schema import Config
from keel.envs import Task
from keel.models.tiny import tiny_tokenizer
from keel.run.build import build_policy, build_run
from keel.trainer.state import State, TrainingRun

EXAMPLES = int(os.environ.get("KEEL_METAMORPHIC_EXAMPLES", "0"))  # 0: a fixed draw, small enough for every test run


def budget(examples: int) -> settings:
    """The fixed draw of so many examples, or a random one as long as was asked for."""
    if EXAMPLES:
        return settings(max_examples=EXAMPLES, derandomize=False, deadline=None, print_blob=True)
    return settings(max_examples=examples, derandomize=True, deadline=None)


FAMILIES = ("llama", "gpt2", "qwen3", "window", "gemma2", "experts", "yarn")


def random_model(seed: int = 0) -> tuple[Any, Any]:
    """A model of a family, depth and size that the seed chooses: given to a configuration by its name."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    tokenizer, family = tiny_tokenizer(), FAMILIES[seed % len(FAMILIES)]
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    shape = {
        "hidden_size": 16,
        "intermediate_size": pick(16, 24),
        "num_hidden_layers": pick(1, 2),
        "num_attention_heads": 2,
        "num_key_value_heads": pick(1, 2),
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": pick(True, False),
        "initializer_range": 0.3,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    configs: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**shape, **ids),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=16, n_layer=pick(1, 2), n_head=2, n_positions=128, initializer_range=0.3, **ids
        ),
        "qwen3": lambda: transformers.Qwen3Config(**shape, **ids),
        "window": lambda: transformers.MistralConfig(**shape, sliding_window=pick(4, 7), **ids),
        "gemma2": lambda: transformers.Gemma2Config(
            **shape, sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=5.0, **ids
        ),
        "experts": lambda: transformers.MixtralConfig(**shape, num_local_experts=3, num_experts_per_tok=2, **ids),
        "yarn": lambda: transformers.LlamaConfig(**shape, rope_parameters=yarn, **ids),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(configs[family]())
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Sums(Task):
    """Prompts of different lengths; rewards come with the rollouts that the tests make."""

    name: str = "sums"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{seed}/{step}/{i}", "1+" * (i % 4 + 1) + f"{step}=", "2") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"{i}=", "2") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "2"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(sum(map(ord, turns[-1])) % 5), {}, parsed=True)


def sums() -> Sums:
    return Sums()


# -- rollouts ------------------------------------------------------------------------------------------------------


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Tokens of one completion, some of them not the policy's, as behind a tool."""
    length = draw(st.integers(1, 12))
    tokens = tuple(draw(st.lists(st.integers(3, 60), min_size=length, max_size=length)))
    heard = draw(st.integers(0, length - 1)), draw(st.integers(0, 4))
    action = tuple(not heard[0] <= i < heard[0] + heard[1] for i in range(length))
    action = action if any(action) else (True,) * length
    logp = tuple(-0.5 if acted else 0.0 for acted in action)
    return Completion(tokens, action, logp, logp, "x", draw(st.sampled_from(["eos", "length"])))


@st.composite
def groups(draw: st.DrawFn, sizes: tuple[int, int] = (2, 4)) -> tuple[Group, ...]:
    """Groups of one size, of ragged prompts and completions; a group's rewards may all be equal."""
    size = draw(st.integers(*sizes))
    made = []
    for number in range(draw(st.integers(2, 4))):
        prompt = tuple(draw(st.lists(st.integers(3, 60), min_size=1, max_size=14)))
        texts = tuple(draw(completions()) for _ in range(size))
        rewards = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=size, max_size=size))
        if draw(st.booleans()) and number:
            rewards = [rewards[0]] * size
        made.append(Group(Problem(f"p{number}", "?"), prompt, texts, tuple(Reward(r) for r in rewards)))
    return tuple(made)


# -- configurations ------------------------------------------------------------------------------------------------

LOSSES = ("policy_gradient", "grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo")
SOUND = (
    ("loss", "token", "k1"), ("loss", "token", "k2"), ("loss", "token", "k3"), ("loss", "token", "abs"),
    ("loss", "token", "exact"), ("loss", "token", "exact_reverse"), ("loss", "sequence", "k1"),
    ("loss", "sequence", "k2"), ("loss", "sequence", "k3"), ("loss", "sequence", "exact"),
    ("advantage", "token", "k1"), ("advantage", "sequence", "k1"), ("reward", "token", "k1"),
)  # fmt: skip


@st.composite
def options(draw: st.DrawFn, *, updates: bool = False) -> dict[str, Any]:
    """A configuration that loads: a loss, a sound penalty, and what surrounds them."""
    placement, level, estimator = draw(st.sampled_from(SOUND))
    loss = draw(st.sampled_from(LOSSES))
    chosen: dict[str, Any] = {
        "run.seed": draw(st.integers(0, 200)),
        "kl.placement": placement,
        "kl.level": level,
        "kl.estimator": estimator,
        "kl.exact": draw(st.booleans()),
        "loss.loss_type": loss,
        "loss.baseline": draw(st.sampled_from(["group_mean", "leave_one_out", "none"])),
        "loss.scale_rewards": draw(st.sampled_from(["group", "batch", "none"])),
        "loss.mismatch.kind": draw(st.sampled_from(["none", "truncate", "mask"])),
        "rollout.temperature": draw(st.sampled_from([0.7, 1.0, 1.3])),
        "optim.microbatch_tokens": draw(st.sampled_from([8, 40, 8192])),
    }
    if placement == "loss" and level == "token":
        chosen["kl.reduction"] = draw(st.sampled_from(["token_mean", "loss"]))
    if updates and loss != "policy_gradient":
        chosen["loss.num_iterations"] = draw(st.integers(1, 2))
        chosen["optim.minibatches"] = draw(st.integers(1, 2))
    return chosen


BASE = {
    "run": {"name": "random", "max_steps": 2},
    "model": {"name": "metamorphic.worlds:random_model", "device": "cpu"},
    "task": {"name": "metamorphic.worlds:sums"},
    "rewards": [{"name": "task"}],
    "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 16},
    "kl": {"beta": 0.5},
    "optim": {"learning_rate": 1.0e-2, "max_grad_norm": 1.0e9},
    "eval": {"every": 0, "samples": 2, "k": [1]},
    "log": {"console": "none", "tensorboard": False},
    "checkpoint": {"every": 1},
}


def configure(chosen: dict[str, Any], **more: Any) -> Config:
    overrides = [f"{name}={value}" for name, value in {**chosen, **more}.items()]
    return load_config(BASE, ["guards.on_step0_kl=warn", *overrides])  # runs begin away from their reference


def make_run(config: Config, rollouts: Sequence[Group] | None = None) -> tuple[TrainingRun, State]:
    """A run away from its reference by a displacement that the seed fixes, with these rollouts if they are given."""
    run = build_run(config, build_policy(config)).run
    with torch.no_grad():
        for number, parameter in enumerate(run.optimizer.parameters):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.05 * noise)
    if rollouts is not None:
        run.rollout = run.rollout.model_copy(update={"prompts_per_step": len(rollouts)})
        run.collect = lambda problems, *, attempt, step: list(rollouts)  # type: ignore[assignment]
    return run, State(kl=run.controller.init())
