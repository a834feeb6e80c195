"""Options of groups, schedules, controllers and evaluation as users get them wrong: one each, the rest healthy."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, operator
from faults.options import lora, penalty
from faults.rewards import is_free_of_kl

Config = dict[str, Any]


@operator("option/group-of-one", "A group is one completion, which has nothing to be compared with.", "reward/constant")
def group_of_one(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.num_generations": 1, "loss.dynamic_sampling": False})


@operator(
    "option/decay-of-another-run",
    "The schedule was made for a run of a twentieth of the steps, and ends at 0.",
    "optim/no-update",
)
def decay_of_another_run(config: Config, random: Random) -> Config:
    schedule = {"schedule": random.choice(("linear", "cosine")), "warmup_steps": 0, "final_ratio": 0.0}
    schedule["decay_steps"] = max(2, config["run"]["max_steps"] // 20)
    return edited(config, {f"optim.{name}": value for name, value in schedule.items()})


@operator(
    "option/adapter-decays",
    "Weight decay takes most of the adapter away at every update.",
    "optim/weight-decay",
    "optim/no-update",
    fits=lora,
)
def adapter_decays(config: Config, random: Random) -> Config:
    return edited(config, {"optim.weight_decay": 0.9 / config["optim"]["learning_rate"]})


@operator(
    "option/target-of-nothing",
    "The controller's target is one that every policy passes with its first update.",
    "kl/controller",
    "kl/too-strong",
    fits=penalty,
)
def target_of_nothing(config: Config, random: Random) -> Config:
    return edited(config, {"kl.controller": {"name": random.choice(("dual", "pid", "step")), "target": 1e-9}})


@operator(
    "option/upper-clip-zero",
    "The upper clip range is 0: nothing is made likelier after the first of several updates.",
    "loss/clip",
)
def upper_clip_zero(config: Config, random: Random) -> Config:
    clip = {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.0, "num_iterations": 4}
    return edited(config, {f"loss.{name}": value for name, value in clip.items()})


@operator(
    "option/noise-normalised",
    "Parts are normalised before they are added, and one of them is noise of a ten-thousandth.",
    "advantage/amplified",
    "reward/exploit",
    fits=is_free_of_kl,
)
def noise_normalised(config: Config, random: Random) -> Config:
    parts = [{"name": "faults.rewards:closeness"}, {"name": "faults.rewards:tiny_differences", "weight": 5.0}]
    return edited(config, {"rewards": parts, "reward.aggregate": "normalised_sum"})


@operator(
    "option/evaluation-hot",
    "Evaluation samples at a temperature at which outputs are noise.",
    "eval/train-gap",
)
def evaluation_hot(config: Config, random: Random) -> Config:
    return edited(config, {"eval.every": 20, "eval.samples": 32, "eval.temperature": random.choice((5.0, 10.0))})
