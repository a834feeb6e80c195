"""Options as they are copied from other recipes or set in another unit: one each, everything else healthy."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.data import is_made
from faults.models import reads_file
from faults.options import one_turn, penalty
from faults.rewards import is_free_of_kl, is_judged_by_text, number_of
from faults.school import nearness
from faults.templates_wild import has_system_prompt
from keel.base.types import Problem, Reward

Config = dict[str, Any]


@operator(
    "option/second-moment-endless",
    "The second moment never learns anything: beta2 is 1.",
    "optim/non-finite",
    "optim/no-update",
    "optim/lr-too-high",
)
def second_moment_endless(config: Config, random: Random) -> Config:
    return edited(config, {"optim.betas": [0.9, 1.0]})


@operator(
    "option/prompts-all-dropped",
    "The limit of prompts is so short that every row is left out.",
    "prompt/truncated",
    fits=reads_file,
    refusal="too long",
)
def prompts_all_dropped(config: Config, random: Random) -> Config:
    return edited(config, {"data.max_prompt_length": random.choice((2, 4)), "data.truncation": "drop"})


@operator(
    "option/system-prompt-of-another-model",
    "The system prompt is a long one that another model was taught with.",
    "prompt/format",
    fits=has_system_prompt,
)
def system_prompt_of_another_model(config: Config, random: Random) -> Config:
    text = (
        "A conversation between User and Assistant. The Assistant first thinks about the reasoning process in the mind "
        "and then provides the User with the answer, both enclosed in tags of their own."
    )
    return edited(config, {"data.system_prompt": text})


@operator("option/narrow-range", "Problems are drawn from a range of two numbers.", "task/repeats", fits=is_made)
def narrow_range(config: Config, random: Random) -> Config:
    low = random.randrange(2, 7)
    return edited(config, {"task.low": low, "task.high": low + 1})


# The KL term and the reference


@operator(
    "option/trigger-at-nothing",
    "The reference takes the policy over as soon as the KL is above a billionth.",
    "reference/follows",
    fits=penalty,
)
def trigger_at_nothing(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "kl_triggered", "threshold": 1e-9}})


@operator(
    "option/schedule-of-beta-upwards",
    "The schedule of β ends at a hundred within a few steps.",
    "kl/too-strong",
    "kl/controller",
    fits=penalty,
)
def schedule_of_beta_upwards(config: Config, random: Random) -> Config:
    name = random.choice(("linear", "cosine"))
    return edited(config, {"kl.controller": {"name": name, "end": 100.0, "steps": 10}})


@operator(
    "option/controller-without-measure",
    "A controller steers by a KL that is never measured.",
    "kl/controller",
    fits=penalty,
)
def controller_without_measure(config: Config, random: Random) -> Config:
    return edited(config, {"kl.measure_every": 0, "kl.controller": {"name": "dual", "target": 0.05}})


@operator(
    "option/penalty-divided-by-the-spread",
    "A strong penalty stands in the reward, and all of it is divided by the group's deviation.",
    "kl/too-strong",
    "kl/scale",
    fits=lambda config: penalty(config) and is_free_of_kl(config),
)
def penalty_divided_by_the_spread(config: Config, random: Random) -> Config:
    term = {"placement": "reward", "estimator": "k1", "level": "token", "beta": 20.0}
    return edited(config, {**{f"kl.{name}": value for name, value in term.items()}, "loss.scale_rewards": "group"})


# The clip


@operator(
    "option/lower-clip-zero",
    "The lower clip range is 0: nothing is made less likely after the first of several updates.",
    "loss/clip",
)
def lower_clip_zero(config: Config, random: Random) -> Config:
    clip = {"loss_type": "grpo", "epsilon": 0.0, "epsilon_high": 0.2, "num_iterations": 4}
    return edited(config, {f"loss.{name}": value for name, value in clip.items()})


@operator(
    "option/clip-range-of-sequences",
    "The clip range of a loss on sequences, three ten-thousandths, is put on single tokens.",
    "loss/clip",
)
def clip_range_of_sequences(config: Config, random: Random) -> Config:
    clip = {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, "num_iterations": 4}
    return edited(config, {f"loss.{name}": value for name, value in clip.items()})


# Rewards


def has_digits(problem: Problem, text: str) -> float:
    return float(number_of(text) is not None)


@operator(
    "option/format-outweighs",
    "The weight of a part for form is twenty times that of being right.",
    "reward/exploit",
    fits=is_judged_by_text,
)
def format_outweighs(config: Config, random: Random) -> Config:
    form = {"name": "faults.options_wild:has_digits", "weight": random.choice((20.0, 50.0))}
    return edited(config, {"rewards": [{"name": "task"}, form]})


@operator(
    "option/rewards-cancel",
    "Two entries pay the same thing, one of them with a weight of minus one.",
    "reward/gold",
    "reward/constant",
    fits=is_judged_by_text,
)
def rewards_cancel(config: Config, random: Random) -> Config:
    same = {"name": "faults.options_wild:nearness_again", "weight": -1.0}
    return edited(config, {"rewards": [{"name": "faults.school:nearness"}, same]})


def nearness_again(problem: Problem, text: str) -> Reward:
    return nearness(problem, text)


@operator(
    "option/length-pays-for-long",
    "A part for length has the target of long essays and outweighs being right.",
    "reward/gold",
    "reward/exploit",
    fits=one_turn,
)
def length_pays_for_long(config: Config, random: Random) -> Config:
    length = {"name": "length", "weight": 50.0, "target": 400, "scale": 50}
    return edited(config, {"rewards": [{"name": "task"}, length]})


# Healthy


@lookalike("many groups of two", lambda config: option(config, "rollout.max_turns", 1) == 1)
def healthy_groups_of_two(config: Config, random: Random) -> Config:
    return edited(
        config, {"rollout.prompts_per_step": 24, "rollout.num_generations": 2, "loss.dynamic_sampling": False}
    )


@lookalike("warm sampling, without a filter", lambda config: option(config, "rollout.max_turns", 1) == 1)
def healthy_warm_sampling(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": 1.15, "rollout.top_p": 1.0})
