"""Options as users report them: values of other losses and units, limits that cut what is asked, narrow bands."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.data import is_made
from faults.models import is_plain, reads_file, with_rows
from faults.options import one_turn, penalty
from faults.options_field import with_rewards
from faults.rewards import is_free_of_kl, is_judged_by_text
from faults.templates_wild import asks_for_tags

Config = dict[str, Any]


def unclipped(config: Config) -> Config:
    """The configuration without clip ranges and passes of its own."""
    loss = {name: value for name, value in (config.get("loss") or {}).items() if not name.startswith("epsilon")}
    return edited(config, {"loss": loss | {"num_iterations": 1}})


# Data and prompts


@operator(
    "option/prompt-limit-cuts-the-question",
    "The limit of prompts is a few tokens, and what is longer loses its beginning, with the question.",
    "prompt/truncated",
    "prompt/no-question",
    "prompt/format",
    fits=one_turn,
)
def prompt_limit_cuts_the_question(config: Config, random: Random) -> Config:
    return edited(config, {"data.max_prompt_length": random.choice((2, 3)), "data.truncation": "left"})


@operator(
    "option/broken-rows-skipped",
    "Most rows lack their answer and are left out without a word: a handful is left to train on.",
    "task/repeats",
    fits=reads_file,
)
def broken_rows_skipped(config: Config, random: Random) -> Config:
    whole = set(Random(13).sample(range(100), 8))

    def broken(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row if at in whole else {"question": row["question"]} for at, row in enumerate(rows)]

    return edited(with_rows(config, broken), {"data.on_broken": "skip", "task.held_out": 2})


@operator(
    "option/asked-in-words",
    "Questions are asked in words, of a model that was taught signs.",
    "prompt/format",
    fits=lambda config: is_made(config) and is_plain(config),
)
def asked_in_words(config: Config, random: Random) -> Config:
    return edited(config, {"task.style": "words"})


# Sampling


@operator(
    "option/limit-cuts-the-closing-tag",
    "Completions have room for the answer and not for the tag that closes it.",
    "output/truncated",
    "output/unparseable",
    fits=asks_for_tags,
)
def limit_cuts_the_closing_tag(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.max_completion_length": random.choice((10, 14))})


@operator(
    "option/creative-writing-sampling",
    "Sampling is what writers of stories like: hot, and cut off by a share of the likeliest token.",
    "sampler/filter",
    "rollout/temperature",
)
def creative_writing_sampling(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": 2.5, "rollout.min_p": 0.3, "rollout.top_p": 1.0})


# Rewards


@operator(
    "option/overlong-limit-below-every-answer",
    "The length from which a text counts as too long is below that of any answer: right and wrong earn the same.",
    "reward/gold",
    "reward/constant",
    "reward/exploit",
    fits=is_judged_by_text,
)
def overlong_limit_below_every_answer(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "cosine", "of": "task", "max_length": 1, "exceeded": -1.0})


@operator(
    "option/another-tag-is-read",
    "The reward reads another tag than the one that the prompt asks for.",
    "reward/gold",
    "reward/constant",
    "output/unparseable",
    fits=asks_for_tags,
)
def another_tag_is_read(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "numeric", "tag": random.choice(("response", "solution", "final"))})


@operator(
    "option/small-rewards-beside-the-penalty",
    "Rewards are ten-thousandths, nothing divides by their deviation, and the KL term has its usual size.",
    "kl/too-strong",
    "reward/weak",
    fits=lambda config: penalty(config) and is_free_of_kl(config),
)
def small_rewards_beside_the_penalty(config: Config, random: Random) -> Config:
    entries = [{**entry, "weight": 1e-4 * entry.get("weight", 1.0)} for entry in config["rewards"]]
    return edited(config, {"rewards": entries, "loss.scale_rewards": "none", "kl.beta": 0.04})


# Losses


@operator(
    "option/cispo-cap-of-another-loss",
    "The upper clip range of another loss is given to cispo, for which it is the largest weight itself.",
    "loss/clip",
    "loss/scale",
    refusal="epsilon_high caps the ratio itself",
)
def cispo_cap_of_another_loss(config: Config, random: Random) -> Config:
    return edited(unclipped(config), {"loss.loss_type": "cispo", "loss.epsilon_high": random.choice((0.2, 0.28))})


@operator(
    "option/sapo-gate-shut",
    "The gate of sapo is so steep that it is shut for whatever a first update has moved.",
    "loss/clip",
    "loss/no-gradient",
)
def sapo_gate_shut(config: Config, random: Random) -> Config:
    gate = {"sapo_temperature_pos": 1e5, "sapo_temperature_neg": 1e5, "loss_type": "sapo", "num_iterations": 4}
    return edited(unclipped(config), {f"loss.{name}": value for name, value in gate.items()})


@operator(
    "option/mismatch-band-narrower-than-rounding",
    "Tokens count only where sampler and trainer agree to four digits, and the trainer computes in 16 bits.",
    "loss/no-gradient",
    "loss/clip",
    "sampler/precision",
    fits=lambda config: option(config, "optim.precision") == "bfloat16",
)
def mismatch_band_narrower_than_rounding(config: Config, random: Random) -> Config:
    return edited(config, {"loss.mismatch": {"kind": "icepop", "cap": 1.0002, "floor": 0.9998}})


@operator(
    "option/entropy-of-games",
    "The entropy bonus is that of small games: it weighs several times what an answer does.",
    "entropy/too-strong",
)
def entropy_of_games(config: Config, random: Random) -> Config:
    return edited(config, {"loss.entropy_coef": random.choice((3.0, 5.0))})


# The KL term and the reference


@operator(
    "option/average-weights-swapped",
    "The share that the reference keeps is given as the share that it takes from the policy at every step.",
    "reference/follows",
    fits=penalty,
)
def average_weights_swapped(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "ema", "alpha": random.choice((0.99, 0.995)), "every": 1}})


@operator(
    "option/horizon-of-one",
    "The horizon of the controller is one episode: β grows or shrinks many-fold at every step.",
    "kl/controller",
    "kl/too-strong",
    fits=penalty,
)
def horizon_of_one(config: Config, random: Random) -> Config:
    ziegler = {"name": "ziegler", "target": 0.5, "horizon": 1}
    return edited(config, {"kl.controller": ziegler, "kl.measure_every": 1})


# Healthy


@lookalike("a tenth of the rate over ten times the steps")
def healthy_slow_and_long(config: Config, random: Random) -> Config:
    rate, steps = config["optim"]["learning_rate"], config["run"]["max_steps"]
    return edited(config, {"optim.learning_rate": rate / 10, "run.max_steps": 10 * steps})


@lookalike("cispo with a cap of five")
def healthy_cispo_cap(config: Config, random: Random) -> Config:
    return edited(unclipped(config), {"loss.loss_type": "cispo", "loss.epsilon_high": 5.0})


@lookalike("weight decay of a tenth")
def healthy_weight_decay(config: Config, random: Random) -> Config:
    return edited(config, {"optim.weight_decay": 0.1})


@lookalike("evaluation of many problems, four tries each")
def healthy_many_tries(config: Config, random: Random) -> Config:
    return edited(config, {"eval.every": 50, "eval.samples": 128, "eval.k": [1, 4]})
