"""What peers call what Keel measures: one table a peer, and the short names of `--map`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keel.base.errors import unknown
from keel.lab.doctor.history import Series

K3 = "kl/policy_ref/k3/mean"

# TRL 1.16: `kl` is the mean k3 of all completion tokens, `reward_std` the deviation over the whole batch.
TRL: dict[str, str] = {
    "kl": K3,
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/zero_variance_fraction",
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "length/truncated_fraction",
    "clip_ratio/region_mean": "ratio/clip_fraction",
    "clip_ratio/low_mean": "ratio/clip_low_fraction",
    "clip_ratio/high_mean": "ratio/clip_high_fraction",
    "grad_norm": "grad/norm",
    "learning_rate": "optim/learning_rate",
    "entropy": "entropy/mean",
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "sampling/sampling_logp_difference/max": "logp/sampler_gap_max",
    "sampling/sampling_logp_difference/mean": "logp/sampler_gap_mean",
    "sampling/importance_sampling_ratio/max": "ratio/sampler_max",
}

# verl: `actor/kl_loss` is the penalty's estimate (low_var_kl is k3), `critic/score` the reward before any penalty.
VERL: dict[str, str] = {
    "actor/kl_loss": K3,
    "actor/reward_kl_penalty": K3,
    "actor/ppo_kl": "kl/old_policy/k1/mean",
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/penalized",
    "response_length/mean": "length/mean",
    "response_length/max": "length/max",
    "response_length/clip_ratio": "length/truncated_fraction",
    "prompt_length/clip_ratio": "prompt/truncated_fraction",
    "actor/pg_clipfrac": "ratio/clip_fraction",
    "actor/grad_norm": "grad/norm",
    "actor/lr": "optim/learning_rate",
    "actor/entropy": "entropy/mean",
    "actor/entropy_loss": "entropy/mean",
    "actor/pg_loss": "loss/policy",
    "rollout_corr/kl": "kl/sampler_policy/k1/mean",
    "rollout_corr/k3_kl": "kl/sampler_policy/k3/mean",
}

# `--map kl=column`: what the checks read, under short names.
SHORT: dict[str, str] = {
    "step": "step",
    "kl": K3,
    "kl_k1": "kl/policy_ref/k1/mean",
    "kl_exact": "kl/policy_ref/exact/mean",
    "sampler_kl": "kl/sampler_policy/k3/mean",
    "sampler_gap": "logp/sampler_gap_max",
    "beta": "kl/beta",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "group_std": "reward/within_group_std",
    "zero_variance": "reward/zero_variance_fraction",
    "loss": "loss/total",
    "grad_norm": "grad/norm",
    "learning_rate": "optim/learning_rate",
    "entropy": "entropy/mean",
    "length": "length/mean",
    "truncated": "length/truncated_fraction",
    "prompt_truncated": "prompt/truncated_fraction",
    "parsed": "parse/ok_fraction",
    "clipped": "ratio/clip_fraction",
    "skipped": "guard/skipped",
}

# GRPOConfig's option: Keel's.
TRL_OPTIONS: dict[str, str] = {
    "beta": "kl.beta",
    "loss_type": "loss.loss_type",
    "scale_rewards": "loss.scale_rewards",
    "num_iterations": "loss.num_iterations",
    "steps_per_generation": "optim.minibatches",
    "learning_rate": "optim.learning_rate",
    "max_grad_norm": "optim.max_grad_norm",
    "num_generations": "rollout.num_generations",
    "max_completion_length": "rollout.max_completion_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "max_steps": "run.max_steps",
    "model_init_kwargs": "model.init",
    "sync_ref_model": "reference.moves",
    "disable_dropout": "model.disable_dropout",
    "use_bias_correction_kl": "kl.bias_correction",
}

_METRIC_PREFIXES = (
    *("kl", "reward", "loss", "logp", "entropy", "ratio", "grad", "optim", "guard", "length", "parse", "prompt"),
    *("turn", "tool", "answer"),
)
_KEEL = re.compile(rf"^({'|'.join(_METRIC_PREFIXES)})/")
_REWARD_PART = re.compile(r"^rewards/(.+)/mean$")


def canonical(name: str) -> str | None:
    """Keel's name of a peer's metric, with or without a `train/` before it; None where Keel has none."""
    bare = name.removeprefix("train/")
    for table in (TRL, VERL):
        if bare in table:
            return table[bare]
    part = _REWARD_PART.match(bare)
    if part is not None:
        return f"reward/part/{part[1]}"
    return bare if _KEEL.match(bare) else None


def option_name(dotted: str, source: str) -> str:
    """What the user of that trainer has to change: TRL's own option where there is one, Keel's otherwise."""
    if source == "TRL":
        return next((theirs for theirs, ours in TRL_OPTIONS.items() if ours == dotted), dotted)
    return dotted


def from_map(name: str) -> str:
    """Keel's name of a name given to `--map`: a short one, or Keel's own."""
    if name in SHORT:
        return SHORT[name]
    if _KEEL.match(name):
        return name
    raise unknown("name in --map", name, SHORT)


def renamed(series: Mapping[str, Series], mapping: Mapping[str, str]) -> tuple[dict[str, Series], list[str]]:
    """(series under Keel's names, names that no check reads); of two for one name the first in the table is kept.

    `mapping` is that of `--map`, {name: column}; its columns are read under these names alone.
    """
    renamed_series: dict[str, Series] = {}
    unused = []
    order = {name: index for index, name in enumerate((*TRL, *VERL))}
    unmapped = [name for name in series if name not in mapping.values()]
    for name in sorted(unmapped, key=lambda name: order.get(name.removeprefix("train/"), len(order))):
        keel_name = canonical(name)
        if keel_name is None:
            unused.append(name)
        else:
            renamed_series.setdefault(keel_name, series[name])
    mapped = {from_map(name): series[column] for name, column in mapping.items() if column in series}
    return renamed_series | mapped, unused
