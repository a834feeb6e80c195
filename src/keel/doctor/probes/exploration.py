"""Exploration: the entropy of the sampled distribution against that of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from keel.doctor.advice import unfiltered
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.states import mean_kl, state_logits
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.rollout.sampling import SamplingParams, filter_threshold

LEAST_CHOICE = math.log(2)  # least entropy, in nats, of a group's completions after the first


def probe_exploration(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """The entropy of the sampling distribution against that of the policy at temperature 1, at the visited states."""
    sampling = setup.built.sampling
    own = state_logits(setup, setup.policy.model, temperature=1.0)
    setup.of_batch["own_states"] = own  # the update probe starts from these states
    drawn = drawn_logits(own, sampling)
    figures = {
        "entropy_own": entropy(own),
        "entropy_drawn": entropy(drawn),
        "kl_drawn": mean_kl(drawn, own),
        "entropy_uniform": math.log(setup.vocabulary),
    }
    line = (
        f"exploration: entropy {figures['entropy_drawn']:.3g} nats per token as drawn, {figures['entropy_own']:.3g} at "
        f"temperature 1 without filters; what is drawn is {figures['kl_drawn']:.2g} nats per token from the policy"
    )
    return Outcome("exploration", tuple(_findings(setup, figures, thresholds)), figures, (line,))


def drawn_logits(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits `[N, V]` of the sampling distribution: temperature, then filters; greedy keeps one token.

    Tokens that cannot be drawn are −∞.
    """
    if sampling.greedy:
        return torch.full_like(logits, -math.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    warm = logits / sampling.temperature
    return warm.masked_fill(warm < filter_threshold(warm, sampling), -math.inf) if sampling.filtered else warm


def entropy(logits: Tensor) -> float:
    """Mean entropy in nats of distributions with logits `[N, V]`."""
    logp = logits.double().log_softmax(-1)
    return max(0.0, float(-(logp.exp() * logp).nan_to_num(0.0).sum(-1).mean()))


def _findings(setup: KeelSubject, figures: dict[str, float], thresholds: Thresholds) -> Iterator[Finding]:
    rollout = setup.config.rollout
    own, drawn = figures["entropy_own"], figures["entropy_drawn"]
    names = ("temperature", "top_p", "top_k", "min_p")
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    chosen = {name: getattr(rollout, name) for name in names if getattr(rollout, name) != usual[name]}
    options = ", ".join(f"rollout.{name}={value:g}" for name, value in chosen.items())
    warm = {"rollout.temperature": 1.0} if "temperature" in chosen else {}
    tree = setup.config.to_dict()
    if not chosen:
        return
    spread = own * setup.completion_length * (rollout.num_generations - 1)
    differs = own > thresholds["entropy_collapse"] and spread > LEAST_CHOICE
    if differs and drawn < thresholds["exploration_least"] * own:
        yield finding(
            "rollout/temperature",
            f"the entropy of what is drawn is {drawn:.2g} nats per token, that of the policy {own:.2g} at temperature "
            f"1: {drawn / own:.1%} of it is left (under {thresholds['exploration_least']:.0%})",
            f"{options}: the completions of a group become copies of one another, and nothing is compared",
            propose("set {}", {**warm, **unfiltered(tree)}),
            # below it, completions of a group are near copies in any case
            severity=None if own * setup.completion_length > LEAST_CHOICE else "warning",
        )
    elif drawn > own and figures["kl_drawn"] > thresholds["exploration_noise"]:
        yield finding(
            "rollout/temperature",
            f"what is drawn is {figures['kl_drawn']:.2g} nats per token from the policy at temperature 1 (over "
            f"{thresholds['exploration_noise']:g}): entropy {drawn:.2g} nats per token where the policy's own is "
            f"{own:.2g} and drawing blindly has {figures['entropy_uniform']:.2g}",
            f"{options}: noise is drawn, not what the policy knows, so that rewards say little about it",
            propose("set {}", {"rollout.temperature": 1.0}),
        )
