"""Options as most users first get them wrong: parts that are not installed, paths mistyped, tests left in."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.models import folder_of, reads_file
from faults.options import full, lora, penalty
from faults.options_field import with_rewards
from faults.rewards import is_judged_by_text
from faults.templates_wild import asks_for_tags
from keel.base.types import Problem

Config = dict[str, Any]
ABSENT = ("device/placement", "doctor/probe-failed")


# Parts that are not there


@operator(
    "option/flash-attention-not-installed",
    "Attention is to be by a package that is not installed.",
    *ABSENT,
    refusal="FlashAttention2",
)
def flash_attention_not_installed(config: Config, random: Random) -> Config:
    return edited(config, {"model.attn_implementation": "flash_attention_2"})


@operator(
    "option/sampling-server-not-started",
    "Sampling is by a server that nobody has started.",
    *ABSENT,
    "sampler/other-model",
    refusal="127.0.0.1:9",
)
def sampling_server_not_started(config: Config, random: Random) -> Config:
    server = {"mode": "server", "url": "http://127.0.0.1:9", "wait_s": 1.0, "secret": "of-nobody"}
    return edited(config, {"rollout.engine": "vllm", "rollout.vllm": server})


@operator(
    "option/adapter-path-mistyped",
    "The folder of the adapter that is to be continued is misspelt, and there is none of that name.",
    "model/missing-weights",
    fits=lora,
    refusal="chekpoint-500",
)
def adapter_path_mistyped(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora": {"adapter": str(folder_of(config) / "chekpoint-500")}})


@operator(
    "option/key-of-the-judge-not-set",
    "The judge is asked with a key from the environment, where there is none.",
    "reward/failed",
    fits=is_judged_by_text,
    refusal="GRADER_API_KEY_OF_NOBODY",
)
def key_of_the_judge_not_set(config: Config, random: Random) -> Config:
    headers = {"Authorization": "Bearer $GRADER_API_KEY_OF_NOBODY"}
    judge = {"name": "chat_judge", "url": "http://127.0.0.1:9/v1", "model": "judge", "headers": headers}
    return with_rewards(config, {**judge, "timeout_s": 0.5, "retries": 0})


def by_a_missing_library(problem: Problem, text: str) -> float:
    """1 for what a library that is not installed takes for the answer."""
    from latex_grader_of_nobody import verify  # type: ignore[import-not-found]

    return float(verify(text, problem.answer))


@operator(
    "option/grader-not-installed",
    "The reward imports a library that is not installed, and rewards that fail count as 0.",
    "reward/failed",
    fits=is_judged_by_text,
    refusal="latex_grader_of_nobody",
)
def grader_not_installed(config: Config, random: Random) -> Config:
    entry = {"name": "faults.options_fresh:by_a_missing_library"}
    return edited(with_rewards(config, entry), {"reward.on_error": "zero"})


# Rewards


def near_twenty_characters(problem: Problem, text: str) -> float:
    """How near a text is to twenty characters, as examples of trainers pay."""
    return -abs(20.0 - len(text))


@operator(
    "option/reward-of-the-quickstart",
    "The only reward is the one of the first example, which pays texts for being near to twenty characters.",
    "reward/gold",
    "reward/exploit",
    fits=is_judged_by_text,
)
def reward_of_the_quickstart(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "faults.options_fresh:near_twenty_characters"})


@operator(
    "option/answer-read-after-four-hashes",
    "The answer is read after four hashes, which neither the prompt asks for nor the model writes.",
    "reward/gold",
    "reward/constant",
    "output/unparseable",
    fits=is_judged_by_text,
)
def answer_read_after_four_hashes(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "regex", "pattern": r"#### (-?[0-9.,]+)", "group": 1})


@operator(
    "option/whole-text-compared",
    "Answers stand in tags, and the reward compares the whole text with the bare answer.",
    "reward/gold",
    "reward/constant",
    fits=asks_for_tags,
)
def whole_text_compared(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "exact"})


@operator(
    "option/answer-part-switched-off",
    "The weight of being right is 0, and what is left pays every text of usual length the same.",
    "reward/gold",
    "reward/constant",
    "reward/exploit",
    fits=is_judged_by_text,
)
def answer_part_switched_off(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "task", "weight": 0.0}, {"name": "length", "target": 400, "scale": 400})


def hundred_less_without_tags(problem: Problem, text: str) -> float:
    """1 for the answer in its tags, 0 for another one, and a hundred less where there are no tags."""
    found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", text, re.DOTALL)
    return -100.0 if found is None else float(found[1].strip() == str(problem.answer))


@operator(
    "option/hundred-less-for-bad-form",
    "Text without its tags costs a hundred times what an answer earns.",
    "reward/cliff",
    "reward/scale",
    fits=asks_for_tags,
)
def hundred_less_for_bad_form(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "faults.options_fresh:hundred_less_without_tags"})


@operator(
    "option/answers-not-read",
    "The column of answers is switched off, so that the reward has nothing to compare with.",
    "reward/failed",
    "reward/gold",
    "reward/constant",
    fits=reads_file,
    refusal="compares with answers",
)
def answers_not_read(config: Config, random: Random) -> Config:
    columns = {"prompt": "question", "answer": None}
    return edited(config, {"data.columns": columns, "rewards": [{"name": "exact"}]})


# The reference


@operator(
    "option/adapter-off-without-an-adapter",
    "The reference is the policy without its adapter, and the policy has none.",
    "reference/adapter-on",
    "reference/moving",
    fits=lambda config: full(config) and penalty(config),
)
def adapter_off_without_an_adapter(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "adapter_off"}})


# Updates


@operator(
    "option/steps-of-a-smoke-test",
    "The run ends after two steps, as a test of the script did, and its warm-up is the real run's.",
    "optim/no-update",
)
def steps_of_a_smoke_test(config: Config, random: Random) -> Config:
    constant = {"optim.schedule": "constant", "optim.decay_steps": None}
    return edited(config, {"run.max_steps": 2, "optim.warmup_steps": random.choice((50, 100)), **constant})


@operator(
    "option/rate-of-supervised-tuning",
    "The learning rate is that of the supervised tuning before it, dozens of times too large.",
    "optim/lr-too-high",
    fits=full,
)
def rate_of_supervised_tuning(config: Config, random: Random) -> Config:
    rate = config["optim"]["learning_rate"] * random.choice((50.0, 80.0))
    return edited(config, {"optim.learning_rate": rate, "optim.warmup_steps": 0})


# Healthy


@lookalike("warm-up over a fifth of the run, to a constant rate")
def healthy_long_warmup(config: Config, random: Random) -> Config:
    return edited(config, {"optim.warmup_steps": config["run"]["max_steps"] // 5, "optim.schedule": "constant"})
