"""Options of sampling and optimisation as users get them wrong: one option each, everything else healthy."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, operator

Config = dict[str, Any]


def full(config: Config) -> bool:
    return "lora" not in config["model"]


def lora(config: Config) -> bool:
    return not full(config)


def one_turn(config: Config) -> bool:
    return "max_turns" not in config["rollout"]


def penalty(config: Config) -> bool:
    """A KL term that acts from the first step on."""
    return config["kl"]["beta"] > 0 and config["kl"].get("controller", {}).get("name", "fixed") == "fixed"


def one_reward(config: Config) -> bool:
    return len(config["rewards"]) == 1


# ------------------------------------------------------------------------ the update is nothing


@operator("option/rate-tiny", "The learning rate is 1e-12.", "optim/no-update")
def rate_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": 1e-12})


@operator("option/rate-of-large-model", "The learning rate of a 70B model's recipe.", "optim/no-update")
def rate_of_large_model(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": config["optim"]["learning_rate"] * 1e-5})


@operator("option/rate-zero", "The learning rate is 0, as where a sweep's value was lost.", "optim/no-update")
def rate_zero(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": 0.0})


@operator("option/warmup-longer-than-run", "The warm-up is far longer than the run.", "optim/no-update")
def warmup_longer_than_run(config: Config, random: Random) -> Config:
    return edited(
        config,
        {
            "optim.schedule": "constant",
            "optim.warmup_steps": random.choice((100, 1000)) * config["run"]["max_steps"],
            "optim.decay_steps": None,
        },
    )


@operator("option/decay-at-once", "The schedule ends after its first step at a rate of 0.", "optim/no-update")
def decay_at_once(config: Config, random: Random) -> Config:
    schedule = random.choice(("linear", "cosine"))
    return edited(
        config, {"optim.schedule": schedule, "optim.warmup_steps": 0, "optim.decay_steps": 1, "optim.final_ratio": 0.0}
    )


@operator("option/clip-norm-with-eps", "Gradients are clipped to next to nothing, below Adam's eps.", "optim/no-update")
def clip_norm_with_eps(config: Config, random: Random) -> Config:
    return edited(config, {"optim.max_grad_norm": 1e-9})


@operator("option/adam-eps", "Adam's eps is larger than any gradient.", "optim/no-update")
def adam_eps(config: Config, random: Random) -> Config:
    return edited(config, {"optim.eps": random.choice((1e3, 1e5))})


@operator("option/lora-alpha-tiny", "The adapter's scale is next to nothing.", "optim/no-update", fits=lora)
def lora_alpha_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora.alpha": 1e-6})


@operator(
    "option/weights-swallow-update",
    "All weights are bfloat16, which rounds updates of this rate away.",
    "optim/no-update",
    fits=full,
)
def weights_swallow_update(config: Config, random: Random) -> Config:
    # In float32 a run still learns at this rate, by steps of 1e-8 nats; at the subject's own, bfloat16 learns as well.
    rate = config["optim"]["learning_rate"] * 1e-2
    return edited(config, {"model.dtype": "bfloat16", "optim.learning_rate": rate, "optim.precision": "auto"})


def advantages_alone(config: Config) -> bool:
    """Whether nothing but advantages moves the policy."""
    others = config["kl"]["beta"], config["loss"].get("entropy_coef", 0.0), config["optim"].get("weight_decay", 0.0)
    return not any(others)


@operator(
    "option/reward-warmup-endless",
    "The advantages' weight rises over ten million steps.",
    "optim/no-update",
    fits=advantages_alone,
)
def reward_warmup_endless(config: Config, random: Random) -> Config:
    return edited(config, {"reward.warmup_steps": 10_000_000})


# ------------------------------------------------------------------------ the update is too much


@operator("option/rate-huge", "The learning rate is a thousand times too large.", "optim/lr-too-high")
def rate_huge(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": config["optim"]["learning_rate"] * 1000})


@operator("option/rate-of-pretraining", "The learning rate of a pretraining run.", "optim/lr-too-high", fits=full)
def rate_of_pretraining(config: Config, random: Random) -> Config:
    return edited(config, {"optim.learning_rate": 0.02, "optim.warmup_steps": 0})


@operator("option/lora-scale-huge", "alpha / r of the adapter is in the thousands.", "optim/lr-too-high", fits=lora)
def lora_scale_huge(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora.alpha": 4096.0 * config["model"]["lora"]["r"]})


def clips_second_pass(config: Config) -> bool:
    loss = config["loss"]
    return loss.get("num_iterations", 1) > 1 and loss["loss_type"] in ("grpo", "dapo", "bnpo")


@operator(
    "option/many-passes",
    "Each batch is used several times, and the clip range cuts nothing.",
    "loss/clip",
    fits=clips_second_pass,
)
def many_passes(config: Config, random: Random) -> Config:
    return edited(config, {"loss.epsilon": 50.0, "loss.epsilon_high": 50.0})


@operator("option/weight-decay", "Weight decay pulls harder than the gradient.", "optim/weight-decay", fits=full)
def weight_decay(config: Config, random: Random) -> Config:
    return edited(config, {"optim.weight_decay": random.choice((100.0, 300.0, 1000.0))})


@operator(
    "option/momentum-endless", "The first moment never forgets what it began with: beta1 is 1.", "optim/no-update"
)
def momentum_endless(config: Config, random: Random) -> Config:
    return edited(config, {"optim.betas": [1.0, 0.999]})


# ------------------------------------------------------------------------ another term rules


@operator("option/beta-huge", "The KL coefficient of another unit: 50 and more.", "kl/too-strong", fits=penalty)
def beta_huge(config: Config, random: Random) -> Config:
    return edited(config, {"kl.beta": random.choice((50.0, 1000.0))})


@operator("option/beta-per-token-in-reward", "A huge penalty in the reward.", "kl/too-strong", fits=penalty)
def beta_in_reward(config: Config, random: Random) -> Config:
    return edited(
        config,
        {
            "kl.placement": "reward",
            "kl.estimator": "k1",
            "kl.level": "token",
            "kl.beta": 300.0,
            "loss.scale_rewards": "none",
        },
    )


@operator("option/controller-floor", "The controller's floor is far above any useful β.", "kl/too-strong", fits=penalty)
def controller_floor(config: Config, random: Random) -> Config:
    return edited(config, {"kl.controller": {"name": "fixed", "low": 500.0}})


@operator(
    "option/controller-zero", "The controller's ceiling is 0: the penalty never acts.", "kl/controller", fits=penalty
)
def controller_zero(config: Config, random: Random) -> Config:
    return edited(config, {"kl.controller": {"name": "fixed", "high": 0.0}})


@operator("option/kl-warmup-endless", "β rises over ten million steps.", "kl/controller", fits=penalty)
def kl_warmup_endless(config: Config, random: Random) -> Config:
    return edited(config, {"kl.controller": {"name": "warmup", "steps": 10_000_000}})


@operator(
    "option/target-unit",
    "A target per sequence is read per token: nothing ever reaches it.",
    "kl/controller",
    fits=penalty,
)
def target_unit(config: Config, random: Random) -> Config:
    return edited(config, {"kl.controller": {"name": "step", "target": 600.0, "preset": "ppo", "low": 0.0}})


@operator(
    "option/log-ratio-clamp",
    "Log-ratios are clamped to next to nothing: the KL term is flat.",
    "kl/no-gradient",
    "kl/scale",
)
def log_ratio_clamp(config: Config, random: Random) -> Config:
    return edited(config, {"kl": {"beta": 0.1, "estimator": "k3", "log_ratio_clamp": 1e-7}})


@operator("option/entropy-huge", "The entropy bonus is a hundred times the policy term.", "entropy/too-strong")
def entropy_huge(config: Config, random: Random) -> Config:
    return edited(config, {"loss.entropy_coef": random.choice((20.0, 100.0))})


@operator("option/entropy-negative", "The entropy bonus has the wrong sign.", "entropy/too-strong")
def entropy_negative(config: Config, random: Random) -> Config:
    return edited(config, {"loss.entropy_coef": -1.0})


@operator("option/epsilon-zero", "The clip range is 0: every second update sees nothing.", "loss/clip")
def epsilon_zero(config: Config, random: Random) -> Config:
    return edited(
        config, {"loss.loss_type": "grpo", "loss.epsilon": 0.0, "loss.epsilon_high": 0.0, "loss.num_iterations": 4}
    )


@operator(
    "option/delta-tiny",
    "The cap of the ratio is far below 1: no token is trained.",
    "loss/clip",
    "loss/no-gradient",
    "loss/scale",
)
def delta_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"loss.loss_type": "grpo", "loss.delta": 1e-4})


@operator(
    "option/cispo-cap",
    "The cap of cispo's weight is next to 0.",
    *("loss/clip", "loss/scale", "loss/no-gradient"),
    refusal="epsilon_high caps the ratio itself",
)
def cispo_cap(config: Config, random: Random) -> Config:
    changed = edited(config, {"loss.loss_type": "cispo", "loss.epsilon_high": 1e-5})
    changed["loss"].pop("epsilon", None)
    return changed


@operator(
    "option/mismatch-masks-all",
    "The weights that repair the sampler's mismatch must be exactly 1, and all others are masked.",
    "loss/no-gradient",
    "loss/clip",
)
def mismatch_masks_all(config: Config, random: Random) -> Config:
    return edited(config, {"loss.mismatch": {"kind": "icepop", "cap": 1.0, "floor": 1.0}})


@operator("option/controller-multiplies-zero", "A controller that multiplies β begins at 0.", "kl/controller")
def controller_multiplies_zero(config: Config, random: Random) -> Config:
    return edited(config, {"kl": {"beta": 0.0, "controller": {"name": "step", "target": 0.05, "low": 0.0}}})


# ------------------------------------------------------------------------ sampling


@operator("option/temperature-cold", "The temperature is next to 0.", "rollout/temperature")
def temperature_cold(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": random.choice((0.01, 0.02))})


@operator("option/greedy", "The temperature is 0: all completions of a group are the same.", "rollout/temperature")
def greedy(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": 0.0, "eval.k": [1]})


@operator("option/temperature-hot", "The temperature is far too high: completions are noise.", "rollout/temperature")
def temperature_hot(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.temperature": random.choice((5.0, 10.0))})


@operator("option/top-k-one", "Only the most probable token is drawn.", "rollout/temperature", "sampler/filter")
def top_k_one(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.top_k": 1})


@operator(
    "option/top-p-tiny", "The nucleus holds a twentieth of the probability.", "rollout/temperature", "sampler/filter"
)
def top_p_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.top_p": 0.05})


@operator(
    "option/min-p-high",
    "Only tokens nearly as probable as the best are drawn.",
    "rollout/temperature",
    "sampler/filter",
)
def min_p_high(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.min_p": 0.95})


@operator("option/length-short", "Completions are cut before they can end.", "output/truncated")
def length_short(config: Config, random: Random) -> Config:
    short = {"rollout.max_completion_length": 1} if one_turn(config) else {"rollout.max_turn_length": 4}
    return edited(config, short)


@operator("option/mask-truncated-all", "Every completion is cut, and cut ones are masked.", "output/truncated")
def mask_truncated_all(config: Config, random: Random) -> Config:
    return edited(length_short(config, random), {"loss.mask_truncated_completions": True})


@operator(
    "option/turns-too-few",
    "Tools are offered and the episode ends with the first call.",
    "output/truncated",
    "answer/unusable",
    fits=lambda config: not one_turn(config),
)
def turns_too_few(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.max_turns": 1})


@operator(
    "option/stop-in-answer",
    "A stop text cuts every answer before it is said.",
    "output/unparseable",
    "output/truncated",
    fits=one_turn,
)
def stop_in_answer(config: Config, random: Random) -> Config:
    return edited(
        config, {"rollout.stop": ["<"] if config["task"].get("format") == "answer_tag" else [str(d) for d in range(10)]}
    )


def quick(config: Config) -> bool:
    """A rate of the upper half of what is healthy: many of its updates together go far."""
    return config["optim"]["learning_rate"] >= (2.5e-4 if full(config) else 1.3e-3)


@operator("option/staleness-deep", "Sampling runs many steps ahead of the updates.", "sampler/too-old", fits=quick)
def staleness_deep(config: Config, random: Random) -> Config:
    return edited(config, {"rollout.max_staleness": 64})


# ------------------------------------------------------------------------ what is left out


@operator("option/collect-max-tiny", "Every completion's KL is above the limit for the policy term.", "kl/rejects-all")
def collect_max_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"kl.collect_max": 1e-12, "kl.measure_every": 1, "reference": {"kind": "frozen"}})


@operator("option/budget-tiny", "The budget is spent by the first update.", "guard/skips-all", "kl/over-budget")
def budget_tiny(config: Config, random: Random) -> Config:
    return edited(config, {"kl.budget": {"max": 1e-9, "action": "stop"}})


@operator("option/guard-tight", "Every gradient norm above a hair over the median is skipped.", "guard/skips-all")
def guard_tight(config: Config, random: Random) -> Config:
    return edited(config, {"guards.grad_spike": 1.0000001, "guards.on_spike": "skip"})


# ------------------------------------------------------------------------ rewards' options


def _with_rewards(config: Config, **options: Any) -> Config:
    return edited(config, {"rewards": [{**part, **options} for part in config["rewards"]]})


@operator("option/reward-weight-zero", "The weight of every reward is 0.", "reward/gold")
def reward_weight_zero(config: Config, random: Random) -> Config:
    return _with_rewards(config, weight=0.0)


@operator("option/reward-weight-negative", "The reward has the wrong sign.", "reward/gold")
def reward_weight_negative(config: Config, random: Random) -> Config:
    return _with_rewards(config, weight=-1.0)


@operator(
    "option/reward-weight-huge",
    "The reward is counted in millions, without dividing by its deviation.",
    "reward/scale",
    fits=penalty,
)
def reward_weight_huge(config: Config, random: Random) -> Config:
    return edited(_with_rewards(config, weight=1e6), {"loss.scale_rewards": "none"})


@operator(
    "option/length-rules", "A part for brevity outweighs being right.", "reward/gold", "reward/exploit", fits=one_turn
)
def length_rules(config: Config, random: Random) -> Config:
    length = {"name": "length", "weight": 50.0, "target": 0, "scale": 4}
    return edited(config, {"rewards": [{"name": "task"}, length]})


@operator(
    "option/rewards-shuffled",
    "Rewards are dealt out at random, as in a control that was left on.",
    "reward/gold",
    "reward/nondeterministic",
)
def rewards_shuffled(config: Config, random: Random) -> Config:
    return edited(config, {"reward.shuffle": random.randrange(100)})


@operator("option/reward-timeout", "Rewards have no time to answer.", "reward/failed")
def reward_timeout(config: Config, random: Random) -> Config:
    changed = edited(config, {"reward.timeout_s": 0.005, "reward.on_error": "zero"})
    changed["rewards"] = [{"name": "faults.options:slow_reward"}]
    return changed


def slow_reward(problem: Any, text: str) -> float:
    import time

    time.sleep(0.05)
    return float(text.strip() == str(problem.answer))


# ------------------------------------------------------------------------ groups, references, precision


@operator(
    "option/reference-follows", "The reference takes the policy over at every step.", "reference/follows", fits=penalty
)
def reference_follows(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "ema", "alpha": 1.0, "every": 1}})


@operator(
    "option/snapshot-each-step",
    "A snapshot of the policy is the reference after each step.",
    "reference/follows",
    fits=penalty,
)
def snapshot_each_step(config: Config, random: Random) -> Config:
    return edited(config, {"reference": {"kind": "snapshot", "every": 1}})


@operator("option/adapter-dropout", "The adapter's dropout is on.", "scoring/dropout", fits=lora)
def adapter_dropout(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora.dropout": 0.3})


@operator(
    "option/adapter-misses-model",
    "The adapter's targets name no layer of the model.",
    "optim/no-update",
    fits=lora,
)
def adapter_misses_model(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora.targets": ["not_a_layer"]})
