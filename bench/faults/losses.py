"""Losses (`loss.loss_type`), KL formulas (`kl.estimator`) and controllers (`kl.controller`) that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from faults.base import edited, lookalike, operator, option, path_of
from keel.base.options import Options
from keel.kl.controllers import KLState
from keel.losses import LossInputs, PolicyTerm
from keel.losses.policy import clipped
from keel.losses.recipes import LOSSES, Recipe

Config = Mapping[str, Any]


def is_clipped(config: Config) -> bool:
    """Whether the loss is PPO's clip, with one of Keel's reductions, so that one of one's own may stand in for it."""
    name = option(config, "loss.loss_type", "grpo")
    return name in ("grpo", "bnpo", "dapo") and option(config, "loss.delta") is None


def has_penalty(config: Config) -> bool:
    """Whether a KL penalty of a token's own stands in the loss, so that a formula of one's own may stand in for it."""
    usual = {"placement": "loss", "level": "token", "controller.name": "fixed"}
    return option(config, "kl.beta", 0) > 0 and all(option(config, f"kl.{name}", v) == v for name, v in usual.items())


def loss_fault(
    name: str, breaks: str, *codes: str, also: Mapping[str, Sequence[Any]] = {}, **parameters: Sequence[Any]
) -> Callable[[Callable[..., PolicyTerm]], Recipe]:
    """Registers a policy term, reduced as grpo's, as an operator; its parameters are drawn from those given here."""

    def register(term: Callable[..., PolicyTerm]) -> Recipe:
        def apply(config: Config, random: Random) -> dict[str, Any]:
            drawn = {f"loss.{parameter}": random.choice(values) for parameter, values in parameters.items()}
            changes = {path: random.choice(values) for path, values in also.items()}
            return edited(config, {"loss.loss_type": path_of(term), **drawn, **changes})

        operator(name, breaks, *codes, fits=is_clipped)(apply)
        return replace(LOSSES["grpo"], term=term, takes_delta=False)

    return register


class Strength(Options):
    strength: float = Field(default=1.0, description="How wrong it is.")


def term_with(inputs: LossInputs, **changes: Tensor) -> PolicyTerm:
    """grpo's own term on other inputs."""
    return clipped(replace(inputs, **changes), _NO_DELTA)


class _NoDelta(Options):
    delta: None = None


_NO_DELTA: Any = _NoDelta()


@loss_fault("loss/sign-flipped", "the loss is its own negative", "loss/sign")
def sign_flipped(inputs, options):
    return term_with(inputs, advantages=-inputs.advantages)


@loss_fault("loss/ratio-upside-down", "the ratio is old over new, whose gradient points the other way", "loss/sign")
def ratio_upside_down(inputs, options):
    return term_with(inputs, logp=inputs.old_logp.detach(), old_logp=inputs.logp)


@loss_fault("loss/advantage-without-sign", "the advantage's size counts, not its sign", "loss/sign")
def advantage_without_sign(inputs, options):
    return term_with(inputs, advantages=inputs.advantages.abs())


@loss_fault("loss/advantage-of-another-row", "every completion is trained with its neighbour's advantage", "loss/sign")
def advantage_of_another_row(inputs, options):
    return term_with(inputs, advantages=inputs.advantages.roll(1, 0))


@loss_fault(
    "loss/advantage-by-place",
    "advantages are spread over the batch by place: token t gets the advantage of row t",
    "loss/sign",
)
def advantage_by_place(inputs, options):
    rows, width = inputs.advantages.shape
    first = inputs.advantages[:, 0]
    return term_with(inputs, advantages=first[torch.arange(width, device=first.device) % rows].expand(rows, width))


@loss_fault("loss/advantage-ignored", "every token is made more likely, whatever it earned", "loss/sign")
def advantage_ignored(inputs, options):
    return term_with(inputs, advantages=torch.ones_like(inputs.advantages))


@loss_fault("loss/good-ones-only", "completions below the group's mean are not trained", "loss/no-gradient")
def good_ones_only(inputs, options):
    return term_with(inputs, advantages=inputs.advantages.clamp_min(0))


@loss_fault("loss/detached", "the ratio is detached, so that nothing is trained", "loss/no-gradient")
def detached(inputs, options):
    return term_with(inputs, logp=inputs.logp.detach() + 0.0 * inputs.logp)


@loss_fault("loss/first-token-only", "only the first token is trained", "loss/no-gradient", "mask/not-actions")
def first_token_only(inputs, options):
    first = torch.zeros_like(inputs.advantages)
    first[:, 0] = 1
    return term_with(inputs, advantages=inputs.advantages * first)


@loss_fault(
    "loss/last-token-left-out",
    "the last token of every completion, its end, is not trained",
    "mask/end",
    "mask/not-actions",
    "loss/no-gradient",
)
def last_token_left_out(inputs, options):
    mask = inputs.mask.bool()
    later = mask.flip(-1).cumsum(-1).flip(-1) > 1
    return term_with(inputs, advantages=inputs.advantages * later)


@loss_fault("loss/times-the-tokens", "the loss is a sum over the tokens where a mean is meant", "loss/scale")
def times_the_tokens(inputs, options):
    term = term_with(inputs)
    return replace(term, loss=term.loss * inputs.mask.sum())


@loss_fault("loss/mean-twice", "the loss is divided by the batch's tokens, and then averaged once more", "loss/scale")
def mean_twice(inputs, options):
    term = term_with(inputs)
    return replace(term, loss=term.loss / inputs.mask.sum().clamp_min(1))


@loss_fault(
    "loss/scaled",
    "a loss scale is never taken out",
    "loss/scale",
    strength=(0.01, 64.0, 1024.0),
)
def scaled(inputs, options: Strength):
    term = term_with(inputs)
    return replace(term, loss=term.loss * options.strength)


@loss_fault(
    "loss/clip-on-the-wrong-side",
    "the larger of clipped and unclipped is taken, so that what should be cut goes on and what should not is cut",
    "loss/clip",
    also={"loss.num_iterations": (2, 3)},
)
def clip_on_the_wrong_side(inputs, options):
    ratio, limits, advantages = inputs.ratio(), inputs.limits, inputs.advantages
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    return PolicyTerm(-torch.maximum(ratio * advantages, inside * advantages), ratio)


@loss_fault(
    "loss/ratio-to-itself",
    "the ratio is taken to the policy of now, so that it is always 1 and nothing is ever clipped",
    "loss/clip",
    also={"loss.num_iterations": (2, 3)},
)
def ratio_to_itself(inputs, options):
    return term_with(inputs, old_logp=inputs.logp.detach())


@loss_fault(
    "loss/clip-around-zero",
    "the clip is made for log-ratios and put on the ratio: everything is at its edge",
    "loss/clip",
    "loss/no-gradient",
)
def clip_around_zero(inputs, options):
    ratio, limits = inputs.ratio(), inputs.limits
    return PolicyTerm(-ratio.clamp(-limits.low, limits.high) * inputs.advantages, ratio)


# KL formulas: functions of d = log p − log π, or of the log-probabilities


def kl_fault(name: str, breaks: str, *codes: str, formulas: Sequence[str], module: str = __name__) -> None:
    """Registers formulas of a module, of which one is drawn, as an operator that lets them pass the audit."""

    def apply(config: Config, random: Random) -> dict[str, Any]:
        changes = {"kl.estimator": f"{module}:{random.choice(formulas)}", "kl.allow_biased": True}
        changed = edited(config, {**changes, "kl.exact": False})
        changed["kl"].pop("gradient", None)
        return changed

    operator(name, breaks, *codes, fits=has_penalty)(apply)


def negative_k2(d: Tensor) -> Tensor:
    return -0.5 * d.square()


def negative_k3(d: Tensor) -> Tensor:
    return d - torch.expm1(d)


def wrong_way_k3(d: Tensor, factor: float = 1.0) -> Tensor:
    """k3 of −d: right for samples of the reference only."""
    return factor * (torch.expm1(-d) + d)


def detached_k2(d: Tensor) -> Tensor:
    return 0.5 * d.square().detach() + 0.0 * d


def detached_k3(d: Tensor) -> Tensor:
    return (torch.expm1(d) - d).detach() + 0.0 * d


def plain_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """log π − log p: its mean is the KL, its expected gradient is zero."""
    return logp - ref_logp


def scaled_k2(d: Tensor, factor: float = 1.0) -> Tensor:
    return factor * d.square()


def scaled_k3(d: Tensor, factor: float = 1.0) -> Tensor:
    return factor * (torch.expm1(d) - d)


def absolute(d: Tensor) -> Tensor:
    return d.abs()


def of_the_reference(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """p·(log p − log π), as KLDivLoss sums it, on sampled tokens."""
    return ref_logp.exp() * (ref_logp - logp)


def of_old_logp(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3 between the rollout's policy and the reference: nothing of it depends on the policy of now."""
    d = ref_logp - old_logp
    return torch.expm1(d) - d + 0.0 * logp


def of_old_policy(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k2 between the policy of now and that of the rollout: the reference is not in it."""
    return 0.5 * (logp - old_logp).square()


kl_fault(
    "kl/sign-flipped",
    "the penalty rewards distance from the reference",
    "kl/reversed",
    formulas=["negative_k2", "negative_k3"],
)
kl_fault(
    "kl/wrong-way-round",
    "k3 with policy and reference swapped",
    "kl/reversed",
    formulas=["wrong_way_k3", "wrong_way_k3(factor=0.5)", "wrong_way_k3(factor=2.0)"],
)
kl_fault("kl/detached", "the penalty has no gradient", "kl/no-gradient", formulas=["detached_k2", "detached_k3"])
kl_fault("kl/k1-in-the-loss", "k1 as a loss: its expected gradient is zero", "kl/no-gradient", formulas=["plain_k1"])
kl_fault(
    "kl/scaled",
    "the penalty is some times as strong as β says, as by a missing half or another logarithm",
    "kl/scale",
    formulas=["scaled_k2(factor=2.5)", "scaled_k2(factor=0.1)", "scaled_k3(factor=5.0)", "scaled_k3(factor=0.2)"],
)
kl_fault(
    "kl/absolute",
    "the absolute log-ratio, whose gradient is that of no KL",
    "kl/reversed",
    "kl/scale",
    formulas=["absolute"],
)
kl_fault(
    "kl/weighted-by-the-reference",
    "log-ratios of sampled tokens are weighted by the reference's probability once more",
    "kl/reversed",
    "kl/scale",
    formulas=["of_the_reference"],
)
kl_fault(
    "kl/of-the-wrong-pair",
    "the penalty is between the rollout's policy and one of the two others",
    "kl/no-gradient",
    "kl/reversed",
    formulas=["of_old_logp", "of_old_policy"],
)


# Controllers of β


class Steering:
    """β from a rule of the last β, the step and the measured KL."""

    unit = "per_token"

    def __init__(self, beta: float, rule: Callable[[float, int, float], float]) -> None:
        self.beta, self.rule = beta, rule

    def init(self) -> KLState:
        return KLState(beta=self.beta, base=self.beta)

    def update(self, state: KLState, kl: float | None) -> KLState:
        beta = state.beta if kl is None or not math.isfinite(kl) else self.rule(state.beta, state.step, kl)
        return replace(state, beta=beta, base=beta, step=state.step + 1)


def controller_fault(name: str, breaks: str, **parameters: Sequence[Any]) -> Callable[[Callable[..., Any]], Any]:
    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        def apply(config: Config, random: Random) -> dict[str, Any]:
            drawn = {parameter: random.choice(values) for parameter, values in parameters.items()}
            return edited(config, {"kl.controller": {"name": path_of(make), **drawn}})

        operator(name, breaks, "kl/controller", fits=has_penalty)(apply)
        return make

    return register


@controller_fault("kl/controller-upside-down", "β falls where the KL is above its target", target=(0.02, 0.1))
def upside_down(beta: float, target: float = 0.05) -> Steering:
    return Steering(beta, lambda last, step, kl: last * (0.5 if kl > target else 2.0))


@controller_fault("kl/controller-negative", "β goes below zero where the KL is under its target", target=(0.05, 0.2))
def below_zero(beta: float, target: float = 0.1) -> Steering:
    return Steering(beta, lambda last, step, kl: last + 0.1 * (kl - target))


@controller_fault("kl/controller-without-bound", "β grows at every step, without bound", factor=(1.2, 1.5, 2.0))
def without_bound(beta: float, factor: float = 1.5) -> Steering:
    return Steering(beta, lambda last, step, kl: min(last * factor, 1e300))


@controller_fault("kl/controller-silent", "β is zero after the first steps", steps=(1, 3))
def falling_silent(beta: float, steps: int = 1) -> Steering:
    return Steering(beta, lambda last, step, kl: last if step < steps else 0.0)


@controller_fault("kl/controller-nan", "β is no number where the measured KL is zero or below", scale=(1.0, 10.0))
def not_a_number(beta: float, scale: float = 1.0) -> Steering:
    return Steering(beta, lambda last, step, kl: math.nan if kl <= 1e-3 else last * math.log(1 + scale * kl) / scale)


# Healthy


def own_grpo(inputs, options):
    return term_with(inputs)


own_grpo_recipe = replace(LOSSES["grpo"], term=own_grpo, takes_delta=False)


@lookalike("loss of one's own, equal to grpo", is_clipped)
def healthy_loss(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"loss.loss_type": "faults.losses:own_grpo_recipe"})


def own_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return 0.5 * (logp - ref_logp).square()


@lookalike("estimator of one's own, equal to k2", has_penalty)
def healthy_estimator(config: Config, random: Random) -> dict[str, Any]:
    changed = edited(config, {"kl.estimator": "faults.losses:own_k2", "kl.exact": False})
    changed["kl"].pop("gradient", None)
    return changed


def bounded(beta: float, target: float = 0.05) -> Steering:
    """Doubles or halves β within a factor of 10 of where it began."""
    return Steering(beta, lambda last, step, kl: min(max(last * (2.0 if kl > target else 0.5), beta / 10), 10 * beta))


@lookalike("controller of one's own within bounds", has_penalty)
def healthy_controller(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"kl.controller": {"name": "faults.losses:bounded", "target": random.choice((0.02, 0.1))}})
