"""Options with the mistakes of an ordinary day: names mistyped, units mistaken, parts that are not installed."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, is_float32, lookalike, operator, option
from faults.models import folder_of, reads_file
from faults.options import full, lora, one_turn
from faults.options_field import with_rewards
from faults.options_fresh import ABSENT
from faults.rewards import is_judged_by_text
from faults.templates_wild import asks_for_tags

Config = dict[str, Any]


def is_clipped(config: Config) -> bool:
    """Whether the loss is PPO's clip on tokens."""
    return option(config, "loss.loss_type", "grpo") in ("grpo", "bnpo", "dapo")


def is_file_of_chats(config: Config) -> bool:
    return reads_file(config) and folder_of(config).name.startswith("chat")


# Parts and files that are not there


@operator(
    "option/eight-bit-moments-not-installed",
    "The optimizer is to keep its moments in 8 bits by a library that is not installed.",
    *ABSENT,
    refusal="bitsandbytes",
)
def eight_bit_moments_not_installed(config: Config, random: Random) -> Config:
    return edited(config, {"optim.optimizer": "adamw8bit"})


@operator(
    "option/four-bits-without-a-gpu",
    "The base is to be held in four bits on a machine that has neither the library nor a GPU for it.",
    *ABSENT,
    fits=lora,
    refusal="bitsandbytes",
)
def four_bits_without_a_gpu(config: Config, random: Random) -> Config:
    return edited(config, {"model.quantization": "4bit"})


@operator(
    "option/inference-library-not-installed",
    "Sampling is to be by vLLM within the process, which is not installed.",
    *ABSENT,
    "sampler/other-model",
    refusal="vllm",
)
def inference_library_not_installed(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.engine": "vllm"})


@operator(
    "option/data-path-mistyped",
    "The name of the data's file is misspelt, and there is none of that name.",
    "doctor/probe-failed",
    "prompt/no-question",
    fits=reads_file,
    refusal="gsm8k_trian.jsonl",
)
def data_path_mistyped(config: Config, random: Random) -> Config:
    return edited(config, {"data.path": str(folder_of(config).parent / "gsm8k_trian.jsonl")})


@operator(
    "option/prompt-column-of-another-dataset",
    "The column of prompts is called as in another dataset, and the file has none of that name.",
    "prompt/no-question",
    "doctor/probe-failed",
    fits=reads_file,
    refusal="problem",
)
def prompt_column_of_another_dataset(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "problem", "answer": "answer"}})


@operator(
    "option/reward-module-not-found",
    "The reward's module lies in a folder that is not on the path.",
    "reward/failed",
    "doctor/probe-failed",
    fits=is_judged_by_text,
    refusal="my_rewards",
)
def reward_module_not_found(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "my_rewards:correctness_reward"})


# Data


@operator(
    "option/evaluated-on-the-training-file",
    "The file to evaluate on is the one that is trained on.",
    "eval/leak",
    fits=reads_file,
)
def evaluated_on_the_training_file(config: Config, random: Random) -> Config:
    return edited(config, {"task.eval_path": config["data"]["path"], "eval.every": 20, "eval.samples": 40})


@operator(
    "option/answers-as-system-messages",
    "The column of answers is named as that of system messages too: each prompt begins with its answer.",
    "prompt/answer-leak",
    "prompt/format",
    fits=is_file_of_chats,
)
def answers_as_system_messages(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "question", "answer": "answer", "system": "answer"}})


# Rewards


@operator(
    "option/group-of-the-pattern-forgotten",
    "The reward's pattern finds a number, and nothing says that the number is to be compared with the answer.",
    "reward/exploit",
    "reward/constant",
    "reward/gold",
    fits=is_judged_by_text,
)
def group_of_the_pattern_forgotten(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "regex", "pattern": r"(-?[0-9]+)"})


@operator(
    "option/right-only-behind-a-form-nobody-writes",
    "An answer is looked at once a text has its thoughts in tags, which no prompt asks for and no text has.",
    "reward/gold",
    "reward/constant",
    "output/unparseable",
    fits=is_judged_by_text,
)
def right_only_behind_a_form(config: Config, random: Random) -> Config:
    rungs = [{"tag": random.choice(("think", "reasoning")), "value": 0.2}, {"reward": "task", "value": 0.8}]
    return with_rewards(config, {"name": "ladder", "rungs": rungs})


@operator(
    "option/price-on-talk-alone",
    "The only reward is a price on length: to say nothing is best, and being right earns nothing.",
    "reward/exploit",
    "reward/gold",
    "reward/constant",
    fits=is_judged_by_text,
)
def price_on_talk_alone(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "length", "target": 0, "scale": random.choice((20.0, 50.0))})


@operator(
    "option/stop-at-the-closing-tag",
    "Completions are to stop at the tag that closes an answer, which is cut off with that, so that none can be read.",
    "output/unparseable",
    "output/text",
    "output/truncated",
    "reward/constant",
    fits=asks_for_tags,
)
def stop_at_the_closing_tag(config: Config, random: Random) -> Config:
    return edited(with_rewards(config, {"name": "task"}), {"rollout.stop": ["</answer>"]})


# Updates


@operator(
    "option/adapter-at-the-rate-of-full-training",
    "An adapter is trained at the rate that full training has, a thousandth of its own.",
    "optim/no-update",
    fits=lora,
)
def adapter_at_the_rate_of_full_training(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": random.choice((5e-7, 1e-6))})


@operator(
    "option/limit-on-gradients-of-zero",
    "The limit on gradients is 0, which elsewhere means that there is none.",
    "optim/no-update",
)
def limit_on_gradients_of_zero(config: Config, random: Random) -> Config:
    return edited(config, {"optim.max_grad_norm": 0.0})


@operator(
    "option/weights-in-float16",
    "All weights are trained in float16, in which the optimizer's eps and most of its second moments are 0.",
    "optim/non-finite",
    "optim/no-update",
    "optim/lr-too-high",
    "guard/skips-all",
    "scoring/non-finite",
    fits=lambda config: full(config) and is_float32(config),
)
def weights_in_float16(config: Config, random: Random) -> Config:
    return edited(config, {"model.dtype": "float16"})


@operator(
    "option/clip-range-in-percent",
    "The clip range is given in percent, and each batch is used several times: nothing is ever clipped.",
    "loss/clip",
    "optim/lr-too-high",
    fits=is_clipped,
)
def clip_range_in_percent(config: Config, random: Random) -> Config:
    passes = random.choice((4, 6))
    return edited(config, {"loss.epsilon": 20.0, "loss.epsilon_high": 20.0, "loss.num_iterations": passes})


# Healthy


@lookalike("limits four times what answers need, and one on gradients that none reaches", one_turn)
def healthy_wide_limits(config: Config, random: Random) -> Config:
    longest = 4 * option(config, "rollout.max_completion_length", 64)
    return edited(config, {"rollout.max_completion_length": longest, "optim.max_grad_norm": 1000.0})
