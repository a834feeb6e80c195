"""Random healthy configurations: what a careful engineer would start, over losses, KL terms, sizes and worlds."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from faults.school import CACHE, School, asked, cached, digest, schooled, version_of
from keel.config import load_config
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import train_step

Config = dict[str, Any]

# One a world and architecture: a model is taught once, in some seconds, and serves many draws.
SCHOOLS = (
    School("signs", "max", "llama", 32, 2),
    School("signs", "min", "qwen2", 48, 2),
    School("signs", "max", "mistral", 24, 3),
    School("signs", "min", "qwen3", 32, 1),
    School("file", "max", "qwen3", 32, 2),
    School("file", "min", "llama", 48, 2),
    School("chat", "max", "qwen2", 32, 2),
    School("chat", "min", "llama", 32, 3),
    School("words", "max", "llama", 32, 2),
    School("words", "min", "qwen2", 32, 2),
    School("tagged", "max", "qwen3", 32, 2),
    School("tools", "max", "llama", 32, 2),
)
RATES = {"full": (1.5e-4, 4e-4), "lora": (8e-4, 2e-3)}
MOVED = (1e-5, 0.02)  # nats per token that one update at the full rate moves the policy by
SPREAD = 0.25  # share of groups whose rewards differ
DRAWS = 20
VERSION = version_of(__file__)
# Prompts a step and completions a group: small groups of many prompts, and many completions of one or two prompts.
SIZES = ((8, 2), (16, 2), (6, 3), (8, 3), (1, 12), (1, 16), (2, 8), (2, 16))

KL_TERMS: tuple[dict[str, Any], ...] = (
    {"estimator": "k3"},
    {"estimator": "k3"},
    {"estimator": "k2"},
    {"estimator": "exact"},
    {"estimator": "exact", "level": "sequence"},
    {"estimator": "k1", "placement": "advantage"},
    {"estimator": "k1", "placement": "reward"},
)
CONTROLLERS: tuple[dict[str, Any], ...] = (
    {"name": "fixed"},
    {"name": "fixed"},
    {"name": "warmup", "steps": 10},
    {"name": "linear", "end": 0.001, "steps": 80},
    {"name": "cosine", "end": 0.002, "steps": 100},
    {"name": "dual", "target": 0.05},
    {"name": "step", "target": 0.05, "preset": "gentle"},
    {"name": "ziegler", "target": 0.5},
    {"name": "pid", "target": 0.05},
)
REFERENCES: tuple[dict[str, Any], ...] = (
    {"kind": "auto"},
    {"kind": "auto"},
    {"kind": "frozen"},
    {"kind": "ema", "alpha": 0.5, "every": 20},
    {"kind": "snapshot", "every": 50},
    {"kind": "kl_triggered", "threshold": 0.1},
)
REWARDS: tuple[list[dict[str, Any]], ...] = (
    [{"name": "task"}],
    [{"name": "faults.school:nearness"}],
    [{"name": "task"}, {"name": "faults.school:nearness", "weight": 0.5}],
    [{"name": "task"}, {"name": "length", "weight": 0.1, "target": 20, "scale": 20}],
)


def draw(random: Random) -> Config:
    """One configuration; nothing is computed, so that it may turn out without spread in its rewards."""
    school = random.choice(SCHOOLS)
    config: Config = deepcopy(asked(school))
    loss_type = random.choice(("grpo", "grpo", "dapo", "dapo", "dr_grpo", "gspo", "cispo", "bnpo", "gmpo", "sapo"))
    lora = random.random() < 0.4
    config["run"] = {
        "name": "healthy",
        "dir": str(CACHE / "runs"),
        "seed": random.randrange(1000),
        "max_steps": random.choice((100, 200, 500)),
    }
    config["model"] = {"name": str(CACHE / school.key), "device": "cpu"}
    if lora:
        rank = random.choice((4, 8, 16))
        config["model"]["lora"] = {"r": rank, "alpha": float(random.choice((rank, 2 * rank)))}
    config["rewards"] = deepcopy(random.choice(REWARDS))
    usual = random.choice((4, 6, 8)), random.choice((4, 6, 8, 12, 16))
    prompts, completions = random.choice(SIZES) if random.random() < 0.25 else usual
    config["rollout"] |= {
        "prompts_per_step": prompts,
        "num_generations": completions,
        "temperature": random.choice((1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 1.2)),
        "top_p": random.choice((1.0,) * 9 + (0.95,)),
        "max_staleness": random.choice((0, 0, 0, 1)),
    }
    config["loss"] = _loss(random, loss_type)
    config["kl"] = _kl(random, loss_type)
    if config["kl"].get("placement") == "reward":
        config["loss"]["scale_rewards"] = "none"  # dividing by σ would divide β by it too
    config["reference"] = dict(random.choice(REFERENCES if config["kl"]["beta"] else REFERENCES[:3]))
    config["optim"] = _optim(random, lora, config["run"]["max_steps"])
    precision = random.choice(("float32", "float32", "mixed", "base"))
    if precision == "mixed":
        config["optim"]["precision"] = "bfloat16"
    elif precision == "base" and lora:
        config["model"]["dtype"] = "bfloat16"  # the adapter that is trained stays in float32
    config["reward"] = {"warmup_steps": random.choice((0, 0, 5))}
    config["eval"] = {"every": random.choice((0, 20, 50)), "samples": 8, "k": [1]}
    config["log"] = {"console": "none", "tensorboard": False}
    return config


def _loss(random: Random, loss_type: str) -> dict[str, Any]:
    loss: dict[str, Any] = {"loss_type": loss_type}
    if loss_type in ("grpo", "dapo", "bnpo", "cispo", "gmpo") and random.random() < 0.3:
        loss["num_iterations"] = 2
    if loss_type == "dapo":
        loss |= {"epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": random.random() < 0.5}
        loss["dynamic_sampling"] = random.random() < 0.3
    if random.random() < 0.2:
        loss["baseline"] = "leave_one_out"
    if random.random() < 0.2:
        loss["entropy_coef"] = 0.001
    return loss


def _kl(random: Random, loss_type: str) -> dict[str, Any]:
    """No penalty for a recipe that means to have none; else a term that is proven, of usual strength."""
    if loss_type == "dr_grpo" or random.random() < 0.15:
        return {"beta": 0.0}
    kl: dict[str, Any] = {"beta": random.choice((0.001, 0.005, 0.01, 0.04)), **random.choice(KL_TERMS)}
    controller = dict(random.choice(CONTROLLERS))
    if controller["name"] == "ziegler" or kl["beta"] > controller.get("end", 0.0):
        kl["controller"] = controller
    if random.random() < 0.2:
        kl["budget"] = {"max": 0.5, "action": "warn"}
    return kl


def _optim(random: Random, lora: bool, max_steps: int) -> dict[str, Any]:
    low, high = RATES["lora" if lora else "full"]
    schedule = random.choice(("constant", "constant", "linear", "cosine"))
    return {
        "learning_rate": low * (high / low) ** random.random(),
        "schedule": schedule,
        "warmup_steps": random.choice((0, 0, 5, max_steps // 20)),
        "weight_decay": random.choice((0.0, 0.0, 0.01)),
        "betas": random.choice(([0.9, 0.999], [0.9, 0.95])),
        "max_grad_norm": random.choice((1.0, 1.0, 0.5)),
        "minibatches": random.choice((1, 1, 1, 2)),
    }


# ------------------------------------------------------------------------ whether it is healthy


@dataclass(frozen=True)
class Soundness:
    """What a draw does, measured without the doctor: groups of the run's own size, and one update at the full rate."""

    spread: float  # share of groups whose rewards differ
    reward: float  # mean
    ended: float  # share of completions that end by themselves
    moved: float  # nats per token between the policies before and after the update

    @property
    def sound(self) -> bool:
        return self.spread >= SPREAD and self.ended >= 0.9 and MOVED[0] <= self.moved <= MOVED[1]


def soundness(config: Config) -> Soundness:
    """Measured once and kept in the cache."""

    def write(path: Path) -> None:
        path.write_text(json.dumps(vars(_measure(config))))

    return Soundness(**json.loads(cached(f"sound-{digest(VERSION, config)}.json", write).read_text()))


def has_spread(config: Config) -> bool:
    """Whether enough groups of the run's own size differ in reward."""
    return soundness(config).spread >= SPREAD


def _measure(config: Config) -> Soundness:
    at_full_rate = deepcopy(config)
    at_full_rate["optim"] |= {"warmup_steps": 0, "schedule": "constant"}
    at_full_rate["reward"] = {"warmup_steps": 0}
    at_full_rate["loss"]["dynamic_sampling"] = False
    groups = max(8, 64 // config["rollout"]["num_generations"])  # smaller ones tell less each
    at_full_rate["rollout"] |= {"max_staleness": 0, "prompts_per_step": groups}
    checked = load_config(at_full_rate)
    loaded = build_policy(checked)
    run = build_run(checked, loaded).run
    with closing(run):
        run.engine.sync(loaded.model, 0)
        _, _, batch = train_step(run, State(kl=run.controller.init()))
        completions = [(group.prompt_tokens, c) for group in batch.groups for c in group.completions]
        rewards = [[reward.total for reward in group.rewards] for group in batch.groups]
        rows = [(prompt, c.tokens) for prompt, c in completions[:: max(1, len(completions) // 12)]]
        after = [_log_probs(loaded.model, *row) for row in rows]
    before_model = build_policy(checked).model
    before = [_log_probs(before_model, *row) for row in rows]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)])
    return Soundness(
        spread=sum(max(group) - min(group) > 1e-6 for group in rewards) / len(rewards),
        reward=sum(map(sum, rewards)) / len(completions),
        ended=sum(c.stop_reason == "eos" for _, c in completions) / len(completions),
        moved=float(kl.mean()),
    )


@torch.no_grad()
def _log_probs(model: torch.nn.Module, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1)


def healthy(seed: int, fits: Callable[[Config], bool] = lambda config: True) -> Config:
    """The first sound draw of this seed that `fits`; its model is taught and its rewards have spread."""
    random = Random(f"healthy {seed}")
    for _ in range(100 * DRAWS):
        config = draw(random)
        if fits(config):
            schooled(school_of(config))
            if soundness(config).sound:
                return config
    raise ValueError(f"no sound draw of seed {seed} fits")


def school_of(config: Config) -> School:
    """What the model of a draw was taught."""
    name = Path(config["model"]["name"]).name
    return next(school for school in SCHOOLS if school.key == name)
