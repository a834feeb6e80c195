"""What each trainer calls its metrics: neutral name → theirs, as of TRL 1.16 and the others' releases of 2026.

A row of neutral values becomes a row of one trainer's metrics; what a trainer does not log is left out, and what it
logs beside (extremes, counters) is added, since readers have to cope with all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, float]  # neutral name: value
Metrics = dict[str, Any]  # the trainer's name: value

PART = "part/"  # a reward part is `part/<name>`

TRL = {
    "reward": "reward",
    "reward_std": "reward_std",
    "zero_variance": "frac_reward_zero_std",
    "kl": "kl",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "length_max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "clip_fraction": "clip_ratio/region_mean",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "loss": "loss",
    "sampler_gap": "sampling/sampling_logp_difference/mean",
    "sampler_gap_max": "sampling/sampling_logp_difference/max",
    "weight_mean": "sampling/importance_sampling_ratio/mean",
    "weight_max": "sampling/importance_sampling_ratio/max",
    "tool_failures": "tools/failure_frequency",
    "entropy_coef": "entropy_coef",
}

UPDATE_METRICS = ("kl", "entropy", "clip_fraction", "grad_norm", "learning_rate", "loss", "policy_loss", "entropy_coef")

VERL = {
    "reward": "critic/score/mean",
    "kl": "actor/kl_loss",
    "beta": "actor/kl_coef",
    "old_kl": "actor/ppo_kl",
    "entropy": "actor/entropy",
    "length": "response_length/mean",
    "length_max": "response_length/max",
    "truncated": "response_length/clip_ratio",
    "prompt_truncated": "prompt_length/clip_ratio",
    "clip_fraction": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "policy_loss": "actor/pg_loss",
    "advantage_mean": "critic/advantages/mean",
    "sampler_probability_gap": "training/rollout_probs_diff_mean",
    "sampler_correlation": "training/rollout_actor_probs_pearson_corr",
    "sampler_k1": "rollout_corr/kl",
    "sampler_kl": "rollout_corr/k3_kl",
    "weight_mean": "rollout_corr/rollout_is_mean",
    "weight_max": "rollout_corr/rollout_is_max",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
}

OPENRLHF = {
    "reward": "reward",
    "group_std": "group_reward_std",
    "kl": "kl",
    "old_kl": "ppo_kl",
    "sampler_k1": "vllm_kl",
    "entropy": "entropy_loss",
    "length": "response_length",
    "truncated": "truncated",
    "clip_fraction": "ppo_clip_ratio",
    "grad_norm": "actor_grad_norm",
    "learning_rate": "actor_lr",
    "policy_loss": "policy_loss",
    "reward_std": "rollout/reward_std",
}

NEMO_RL = {
    "reward": "reward",
    "kl": "kl_penalty",
    "sampler_kl": "gen_kl_error",
    "sampler_factor": "token_mult_prob_error",
    "weight_mean": "sampling_importance_ratio",
    "entropy": "approx_entropy",
    "length": "mean_gen_tokens_per_sample",
    "length_max": "max_gen_tokens_per_sample",
    "truncated": "truncation_rate",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "loss": "loss",
    "advantage_mean": "advantages/mean",
}

PRIME_RL = {
    "sampler_kl": "mismatch_kl/all/mean",
    "entropy": "entropy/all/mean",
    "clip_fraction": "is_masked/mean",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/lr",
    "loss": "loss/mean",
    "reward": "train/agg/all/agent/reward/mean",
    "length": "train/agg/all/agent/num_output_tokens/mean",
    "length_max": "train/agg/all/agent/num_output_tokens/max",
    "truncated": "train/agg/all/agent/is_truncated/mean",
    "staleness": "off_policy/mean",
}

KEEL = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "group_std": "reward/within_group_std",
    "zero_variance": "reward/zero_variance_fraction",
    "kl": "kl/policy_ref/k3/mean",
    "beta": "kl/beta",
    "old_kl": "kl/old_policy/k3/mean",
    "entropy": "entropy/mean",
    "length": "length/mean",
    "length_max": "length/max",
    "truncated": "length/truncated_fraction",
    "prompt_truncated": "prompt/truncated_fraction",
    "grad_norm": "grad/norm",
    "learning_rate": "optim/learning_rate",
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "kl_loss": "loss/kl",
    "sampler_k1": "kl/sampler_policy/k1/mean",
    "sampler_kl": "kl/sampler_policy/k3/mean",
    "sampler_gap_max": "logp/sampler_gap_max",
    "unreported": "mismatch/unreported_fraction",
    "ess": "ratio/ess",
    "parsed": "parse/ok_fraction",
    "skipped": "guard/skipped",
    "nonfinite": "guard/nonfinite",
    "rollbacks": "guard/rollbacks",
    "staleness": "staleness/mean",
}


def _trl(row: Row) -> Metrics:
    out = _renamed(row, TRL)
    for name, value in _parts(row):
        out[f"rewards/{name}_reward/mean"] = value
        out[f"rewards/{name}_reward/std"] = abs(value) ** 0.5 * 0.4
    if "length" in row:
        out["completions/min_length"] = max(1.0, row["length"] // 3)
        ended = row.get("truncated", 0.0) < 1  # the mean over no completion is not a number, which TRL logs as null
        out["completions/mean_terminated_length"] = row["length"] * 0.97 if ended else None
        out["completions/min_terminated_length"] = max(1.0, row["length"] // 3) if ended else None
        out["completions/max_terminated_length"] = row["length"] * 1.9 // 1 if ended else None
    if "clip_fraction" in row:
        out["clip_ratio/low_mean"] = row["clip_fraction"] * 0.4
        out["clip_ratio/low_min"] = row["clip_fraction"] * 0.1
        out["clip_ratio/high_mean"] = row["clip_fraction"] * 0.6
        out["clip_ratio/high_max"] = min(1.0, row["clip_fraction"] * 2.5)
    if "weight_mean" in row:
        out["sampling/importance_sampling_ratio/min"] = max(0.0, 2 * row["weight_mean"] - row.get("weight_max", 1.5))
    if "tool_failures" in row:
        out["tools/call_frequency"] = 1.4
    if "entropy_coef" in row and "policy_loss" in row:
        out["policy_loss"] = row["policy_loss"]
    return out | {"num_tokens": 65536.0 * row["step"], "step_time": 11.3}


def _verl(row: Row) -> Metrics:
    out = _renamed(row, VERL)
    one = row.get("zero_variance", 0.0) >= 1  # one reward for all: extremes and mean are the same
    low, high = (row["reward"], row["reward"]) if one else (row["reward_low"], row["reward_high"])
    out |= {"critic/score/max": high, "critic/score/min": low, "critic/rewards/max": high, "critic/rewards/min": low}
    out["critic/rewards/mean"] = row["reward"]
    if "clip_fraction" in row:
        out["actor/pg_clipfrac_lower"] = row["clip_fraction"] * 0.02
    if "advantage_mean" in row:
        out |= {"critic/advantages/max": 2.47, "critic/advantages/min": -2.47}
        out["critic/returns/mean"] = row["advantage_mean"]
    if "length" in row:
        out["response_length/min"] = max(1.0, row["length"] // 3)
        out |= {"prompt_length/mean": 131.0, "prompt_length/max": 204.0, "prompt_length/min": 67.0}
    if "sampler_probability_gap" in row:
        out["training/rollout_probs_diff_max"] = min(1.0, row["sampler_probability_gap"] * 60)
        out["training/rollout_probs_diff_std"] = row["sampler_probability_gap"] * 2.2
        out["training/rollout_probs_diff_valid"] = 1
    if "sampler_kl" in row and "entropy" in row:
        gap = row.get("sampler_k1", row["sampler_kl"])
        out["rollout_corr/training_ppl"] = math.exp(min(row["entropy"] + gap, 50.0))
        out["rollout_corr/rollout_ppl"] = math.exp(min(row["entropy"], 50.0))
        out["rollout_corr/log_ppl_diff"] = gap
        out["rollout_corr/ppl_ratio"] = math.exp(min(gap, 50.0))
        out["rollout_corr/chi2_token"] = math.expm1(min(2 * row["sampler_kl"], 50.0))
    out |= {
        "training/global_step": int(row["step"]),
        "training/epoch": 0,
        "timing_s/step": 92.1,
        "perf/mfu/actor": 0.31,
    }
    return out


def _openrlhf(row: Row) -> Metrics:
    out = _renamed(row, OPENRLHF)
    out["return"] = out["rollout/reward_mean"] = row["reward"]
    if "kl" in row:
        out["logprobs_diff"] = row["kl"]
    if "length" in row:
        out |= {"total_length": row["length"] + 131, "rollout/response_length_mean": row["length"]}
    if "truncated" in row:
        out["rollout/truncated_rate"] = row["truncated"]
    out |= {"rollout/num_samples": 1024.0, "timing/step_total": 80.5}
    return {f"train/{name}": value for name, value in out.items()}


def _nemo_rl(row: Row) -> Metrics:
    out = _renamed(row, NEMO_RL)
    if "zero_variance" in row:
        none, every = _solved(row)
        out |= {"baseline_reward/pct_0": 100 * none, "baseline_reward/pct_1": 100 * every}
        out["baseline_reward/pct_mixed"] = 100 * (1 - none - every)
    if "sampler_kl" in row:
        out |= {"policy_kl_error": row["sampler_kl"] * 1.02, "js_divergence_error": row["sampler_kl"] / 4}
    if "clip_fraction" in row:
        spread = 4 * abs(row["clip_fraction"]) ** 0.5
        out |= {"probs_ratio": 1.0, "probs_ratio_clamped": 1.0, "probs_ratio_max": 1 + spread}
        out["probs_ratio_min"] = 1 / (1 + spread)
    if "advantage_mean" in row:
        out |= {"advantages/max": 2.47, "advantages/min": -2.47}
    if "truncated" in row:
        out["natural_termination_rate"] = 1 - row["truncated"]
    out |= {"mean_prompt_length": 131.0, "global_valid_seqs": 512.0, "wd": 0.01}
    return {f"train/{name}": value for name, value in out.items()}


def _prime_rl(row: Row) -> Metrics:
    out = _renamed(row, PRIME_RL)
    for name, value in _parts(row):
        out[f"train/agg/all/agent/rewards/{name}/mean"] = value
    if "zero_variance" in row:
        none, every = _solved(row)
        out |= {"train/agg/all/agent/solved_none": none, "train/agg/all/agent/solved_all": every}
        out["train/agg/all/agent/solved_some"] = 1 - none - every
    if "sampler_kl" in row:
        out["mismatch_kl/all/max"] = row["sampler_kl"] * 300
        out["unmasked_mismatch_kl/mean"] = row["sampler_kl"]
        if row.get("entropy", 0) > 0:
            out["kl_ent_ratio/mean"] = row["sampler_kl"] / row["entropy"]
    return out | {"time/step": 41.0, "perf/mfu": 31.2, "progress/total_tokens": 1e5 * row["step"]}


def _keel(row: Row) -> Metrics:
    out = _renamed(row, KEEL)
    for name, value in _parts(row):
        out[f"reward/part/{name}"] = value
    out["reward/penalized"] = row["reward"]
    if "kl" in row:
        kl = row["kl"]
        spread = abs(kl) / 8
        for estimator, value in (("k1", kl), ("k2", kl * 1.05), ("k3", kl)):
            out[f"kl/policy_ref/{estimator}/mean"] = value
            out[f"kl/policy_ref/{estimator}/se"] = spread
        out |= {"kl/policy_ref/k3/max": abs(kl) * 30, "kl/policy_ref/k3/p95": abs(kl) * 4}
        out["kl/policy_ref/sequence/mean"] = kl * row.get("length", 100.0)
        out |= {"kl/clamped_fraction": 0.0, "kl/rejected_fraction": 0.0}
        if "entropy" in row:
            out |= {"logp/policy_mean": -row["entropy"], "logp/ref_mean": -row["entropy"] - kl}
    if "kl_loss" in row and "policy_loss" in row:
        total = abs(row["kl_loss"]) + abs(row["policy_loss"])
        out["loss/kl_share"] = abs(row["kl_loss"]) / total if total > 0 else 0.0
    if "clip_fraction" in row:
        out["ratio/clip_low_fraction"] = row["clip_fraction"] * 0.4
        out["ratio/clip_high_fraction"] = row["clip_fraction"] * 0.6
    if "grad_norm" in row:
        norm = row["grad_norm"]
        out["grad/clip_factor"] = min(1.0, row["max_grad_norm"] / norm) if norm > 0 else 1.0
    return out | {"guard/spike": 0.0, "guard/over_budget": 0.0, "time/total_s": 8.2, "speed/tokens_per_s": 5300.0}


# What a trainer logs beside its table, computed from other neutral names.
_BESIDE = {
    "keel": ("clip_fraction",),
    "trl": ("policy_loss",),
    "verl": ("zero_variance",),  # not logged, but what an operator changes must stay consistent
    "openrlhf": ("zero_variance",),
    "nemo-rl": ("zero_variance", "all_right", "clip_fraction"),
    "prime-rl": ("zero_variance", "all_right"),
}
_TABLES = {"keel": KEEL, "trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "nemo-rl": NEMO_RL, "prime-rl": PRIME_RL}
LOGGED = {trainer: frozenset((*table, *_BESIDE[trainer])) for trainer, table in _TABLES.items()}
PARTS_LOGGED = ("keel", "trl", "prime-rl")
METRICS: dict[str, Callable[[Row], Metrics]] = {
    "keel": _keel,
    "trl": _trl,
    "verl": _verl,
    "openrlhf": _openrlhf,
    "nemo-rl": _nemo_rl,
    "prime-rl": _prime_rl,
}
TRAINERS = tuple(METRICS)
EVALUATION = {  # a held-out evaluation, where the trainer logs it beside its metrics
    "trl": "eval_rewards/accuracy_reward/mean",
    "verl": "val-core/math/acc/mean@1",
    "openrlhf": "eval/eval_math_pass1",
    "nemo-rl": "validation/accuracy",
    "prime-rl": "eval/math/all/agent/avg@1",
}


def _renamed(row: Row, table: Mapping[str, str]) -> Metrics:
    return {theirs: row[ours] for ours, theirs in table.items() if ours in row}


def _parts(row: Row) -> list[tuple[str, float]]:
    return [(name.removeprefix(PART), value) for name, value in row.items() if name.startswith(PART)]


def _solved(row: Row) -> tuple[float, float]:
    """(groups that are all wrong, all right): those without spread."""
    every = min(row.get("all_right", 0.0), row["zero_variance"])
    return row["zero_variance"] - every, every
