"""Options as users set them by mistake: shares the wrong way round, parts of other recipes, devices, gains."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.healthy import school_of
from faults.losses import has_penalty
from faults.models import is_plain, reads_file
from faults.options import advantages_alone, one_turn, penalty, quick
from faults.rewards import is_free_of_kl, is_judged_by_text
from faults.school import rows, rows_file
from faults.templates_wild import asks_for_tags, has_system_prompt
from keel.base.types import Problem

Config = dict[str, Any]


def with_rewards(config: Config, *rewards: dict[str, Any]) -> Config:
    return edited(config, {"rewards": list(rewards)})


# Data and prompts


@operator(
    "option/held-out-share-mistaken",
    "The share to train on is given as the share to hold out: a handful of problems is left.",
    "task/repeats",
    fits=reads_file,
)
def held_out_share_mistaken(config: Config, random: Random) -> Config:
    return edited(config, {"task.held_out": 0.95})


@operator(
    "option/system-prompt-for-a-base-model",
    "A system prompt is given to a base model, whose prompts go through a chat template for it.",
    "prompt/format",
    fits=is_plain,
)
def system_prompt_for_a_base_model(config: Config, random: Random) -> Config:
    text = random.choice(("You are a helpful assistant.", "Think first, then answer."))
    return edited(config, {"data.system_prompt": text})


@operator(
    "option/form-never-taught",
    "Answers are asked for in tags, which the model has never learned to write.",
    "output/unparseable",
    "reward/constant",
    "prompt/format",
    fits=has_system_prompt,
)
def form_never_taught(config: Config, random: Random) -> Config:
    return edited(config, {"task.format": "answer_tag", "rewards": [{"name": "task"}]})


@operator(
    "option/evaluation-of-another-task",
    "The file to evaluate on is another task's, which asks for the other number.",
    "eval/train-gap",
    fits=reads_file,
)
def evaluation_of_another_task(config: Config, random: Random) -> Config:
    school = school_of(config)
    other = rows_file(rows(replace(school, skill="min" if school.skill == "max" else "max")))
    return edited(config, {"task.eval_path": other, "eval.every": 20, "eval.samples": 40})


# Rewards


@operator(
    "option/form-alone-is-paid",
    "The only reward is the one for tags: whatever stands in them earns the same.",
    "reward/exploit",
    "reward/constant",
    "reward/gold",
    fits=asks_for_tags,
)
def form_alone_is_paid(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "format", "tags": ["answer"]})


@operator(
    "option/tags-of-another-recipe",
    "The rewards are another recipe's, which pay for tags of thought that no prompt asks for.",
    "reward/gold",
    "reward/constant",
    fits=is_judged_by_text,
)
def tags_of_another_recipe(config: Config, random: Random) -> Config:
    form = random.choice(({"name": "tag_count"}, {"name": "format", "tags": ["think", "answer"]}))
    return with_rewards(config, form)


@operator(
    "option/pattern-matches-everything",
    "The pattern of the only reward matches every text.",
    "reward/exploit",
    "reward/constant",
    fits=is_judged_by_text,
)
def pattern_matches_everything(config: Config, random: Random) -> Config:
    return with_rewards(config, {"name": "regex", "pattern": random.choice((".*", "(answer)?", "\\s*"))})


@operator(
    "option/rungs-of-one-height",
    "A ladder pays all of its height for the first rung, any digit, and nothing for the answer.",
    "reward/exploit",
    fits=is_judged_by_text,
)
def rungs_of_one_height(config: Config, random: Random) -> Config:
    rungs = [{"pattern": "[0-9]", "value": 1.0}, {"reward": "task", "value": 0.0}]
    return with_rewards(config, {"name": "ladder", "rungs": rungs})


@operator(
    "option/cosine-values-swapped",
    "What right and wrong texts earn is given the wrong way round.",
    "reward/gold",
    fits=is_judged_by_text,
)
def cosine_values_swapped(config: Config, random: Random) -> Config:
    values = {"correct_short": -1.0, "correct_long": -0.5, "wrong_short": 1.0, "wrong_long": 0.5}
    return with_rewards(config, {"name": "cosine", "of": "task", **values})


@operator(
    "option/reward-weight-of-a-billionth",
    "The reward's weight is a billionth, and nothing divides by the rewards' deviation.",
    "optim/no-update",
    "reward/weak",
    "reward/constant",
    fits=lambda config: advantages_alone(config) and is_free_of_kl(config),
)
def reward_weight_of_a_billionth(config: Config, random: Random) -> Config:
    entries = [{**entry, "weight": 1e-12} for entry in config["rewards"]]
    return edited(config, {"rewards": entries, "loss.scale_rewards": "none"})


@operator(
    "option/judge-is-down",
    "The judge is behind an address at which nobody listens.",
    "reward/failed",
    fits=is_judged_by_text,
    refusal="127.0.0.1:9",
)
def judge_is_down(config: Config, random: Random) -> Config:
    judge = {"name": "http", "url": "http://127.0.0.1:9/score", "timeout_s": 0.5, "retries": 0}
    return with_rewards(config, judge)


def reads_a_missing_field(problem: Problem, text: str) -> float:
    return float(text.strip() == problem.info["ground_truth"])


@operator(
    "option/failed-groups-left-out",
    "The reward reads a field that no problem has, and groups in which a reward fails are left out without a word.",
    "reward/failed",
    fits=is_judged_by_text,
)
def failed_groups_left_out(config: Config, random: Random) -> Config:
    return edited(
        with_rewards(config, {"name": "faults.options_field:reads_a_missing_field"}),
        {"reward.on_error": "skip_group"},
    )


# Sampling


@operator(
    "option/sampling-of-a-model-card",
    "Sampling is what a model's card recommends for serving: cold, of few tokens, and nearly the same each time.",
    "rollout/temperature",
    "sampler/filter",
)
def sampling_of_a_model_card(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": 0.2, "rollout.top_p": 0.5, "rollout.top_k": 2})


@operator(
    "option/longer-than-the-context",
    "Completions may be longer than the model's whole context.",
    "output/truncated",
    "prompt/truncated",
    fits=one_turn,
    refusal="context",
)
def longer_than_the_context(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.max_completion_length": random.choice((1024, 4096))})


# Updates


@operator(
    "option/passes-by-the-dozen",
    "Each batch is used fifty times, so that the policy has left it long before the last.",
    "optim/lr-too-high",
    "loss/clip",
    "ratio/all-clipped",
    fits=quick,
)
def passes_by_the_dozen(config: Config, random: Random) -> Config:
    return edited(config, {"loss.loss_type": "grpo", "loss.num_iterations": 50, "loss.epsilon": None})


@operator(
    "option/device-that-is-not-there",
    "The model is to run on a device that this machine does not have.",
    "device/placement",
    refusal="cuda",
)
def device_that_is_not_there(config: Config, random: Random) -> Config:
    return edited(config, {"model.device": "cuda:63"})


# The KL term and the reference


@operator(
    "option/beta-fades-at-once",
    "The schedule of β ends at 0 after two steps.",
    "kl/controller",
    fits=penalty,
)
def beta_fades_at_once(config: Config, random: Random) -> Config:
    name = random.choice(("linear", "cosine"))
    return edited(config, {"kl.controller": {"name": name, "end": 0.0, "steps": 2}})


@operator(
    "option/controller-gain-huge",
    "The controller's rate is hundreds of times too large: β jumps between its bounds.",
    "kl/controller",
    "kl/too-strong",
    fits=penalty,
)
def controller_gain_huge(config: Config, random: Random) -> Config:
    dual = {"name": "dual", "target": 0.05, "learning_rate": 50.0, "smoothing": 0.0, "low": 1e-12, "high": 1e6}
    return edited(config, {"kl.controller": dual, "kl.measure_every": 1})


@operator(
    "option/biased-pairing-allowed",
    "k1 stands in the loss with its plain gradient, which is zero on average, and the refusal is switched off.",
    "kl/no-gradient",
    fits=has_penalty,
)
def biased_pairing_allowed(config: Config, random: Random) -> Config:
    term = {"estimator": "k1", "gradient": "plain", "placement": "loss", "level": "token", "allow_biased": True}
    once = {"loss.loss_type": "grpo", "loss.num_iterations": 1, "loss.epsilon": None, "optim.minibatches": 1}
    changed = edited(config, {**{f"kl.{name}": value for name, value in term.items()}, **once})
    changed["loss"].pop("epsilon_high", None)
    return edited(changed, {"rollout.max_staleness": 0})


@operator(
    "option/average-that-stands-still",
    "The reference's share of the policy is so small that the average never moves.",
    "reference/moving",
    fits=penalty,
)
def average_that_stands_still(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "ema", "alpha": 1e-12, "every": 1}})


# Healthy


@lookalike("microbatches of few tokens")
def healthy_small_microbatches(config: Config, random: Random) -> Config:
    return edited(config, {"optim.microbatch_tokens": 96})


@lookalike("sampling a few completions at a time, with a stop text that nobody writes", one_turn)
def healthy_few_at_a_time(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.max_batch": 5, "rollout.stop": ["\n\nQuestion:"]})


@lookalike("greedy evaluation beside warm sampling")
def healthy_greedy_evaluation(config: Config, random: Random) -> Config:
    return edited(config, {"eval.every": 20, "eval.samples": 16, "eval.k": [1], "eval.temperature": 0.0})


@lookalike("guard that skips rare spikes", lambda config: option(config, "guards") is None)
def healthy_guard(config: Config, random: Random) -> Config:
    return edited(config, {"guards.grad_spike": 8.0, "guards.on_spike": "skip"})
