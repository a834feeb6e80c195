"""Faults of losses, controllers, ends of turns, prompts and whole tasks, each through a public extension point."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from doctor.faults import Odd
from doctor.faults_reference import Held, _copy, blend
from doctor.schooled import nearness, schooled_model
from keel.base.types import Problem, Reward
from keel.kl.controllers import KLState
from keel.losses import LossOptions
from keel.losses.policy import LossInputs, PolicyTerm, clipped
from keel.models.options import LoadedModel

# Losses


def right_loss(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(inputs, options)


def clipped_on_the_wrong_side(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    ratio, limits = inputs.ratio(), inputs.limits
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    return PolicyTerm(-torch.maximum(ratio * inputs.advantages, inside * inputs.advantages), ratio)


def clipped_on_both_sides(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    ratio, limits = inputs.ratio(), inputs.limits
    return PolicyTerm(-ratio.clamp(1 - limits.low, 1 + limits.high) * inputs.advantages, ratio)


def not_clipped(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    ratio = inputs.ratio()
    return PolicyTerm(-ratio * inputs.advantages, ratio)


def range_of_sequences(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, limits=replace(inputs.limits, low=3e-4, high=4e-4)), options)


def range_for_sequences(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: the same clip range on the mean ratio of a completion."""
    lengths = inputs.mask.sum(-1, keepdim=True).clamp_min(1)
    mean = ((inputs.logp - inputs.old_logp) * inputs.mask).sum(-1, keepdim=True) / lengths
    ratio = (mean + inputs.logp - inputs.logp.detach()).exp()
    inside = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return PolicyTerm(-torch.minimum(ratio * inputs.advantages, inside * inputs.advantages), ratio)


def weak_ones_left_out(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: small negative advantages are not trained on."""
    return clipped(
        replace(
            inputs, advantages=torch.where(inputs.advantages > -1, inputs.advantages.clamp_min(0), inputs.advantages)
        ),
        options,
    )


def ratio_to_itself(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """The ratio to the current policy: 1, with a gradient."""
    ratio = (inputs.logp - inputs.logp.detach()).exp()
    return PolicyTerm(-ratio * inputs.advantages, ratio)


def own_weights(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: later tokens have a slightly smaller weight."""
    term = clipped(inputs, options)
    return replace(term, loss=term.loss * 0.9 ** torch.arange(inputs.logp.shape[-1]))


# Controllers


@dataclass(frozen=True)
class Own:
    """A user's controller with an initial value and an update rule."""

    start: float
    unit: str = "per_token"
    raises: bool = False

    def init(self) -> KLState:
        return KLState(beta=self.start, base=self.start)

    def update(self, state: KLState, kl: float | None) -> KLState:
        if self.raises:
            return replace(state, beta=state.beta * kl)  # type: ignore[operator]  # a step that measured none has None
        return state


def negative(beta: float) -> Own:
    return Own(-beta)


# Engines


# Scorers


# Estimators, as functions of d = log p − log π


# References


class AtOnce(Held):
    kind = "ema"

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        blend(self.held, policy, 1.0)
        return True


def following(loaded: LoadedModel, every: int = 1) -> Held:
    return AtOnce(_copy(loaded))


class Forgetful(Held):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state) -> None:
        pass


class Deaf(Held):
    """Saves its weights but does not load them."""

    def load_state_dict(self, state) -> None:
        pass


# Rewards, tasks, models


def abyss(problem: Problem, text: str) -> Reward:
    reward = nearness(problem, text)
    return reward if reward.total == 1.0 else replace(reward, total=-1e30)


@dataclass(frozen=True)
class Stuck(Odd):
    """A task that repeats its problems. `kind` selects how."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if self.kind == "one":
            problem = self.inner.sample(1, seed=0, step=0)[0]
            return [replace(problem, key=f"{i}/{step}") for i in range(count)]
        if self.kind in ("step", "steps"):
            return self.inner.sample(count, seed=seed, step=step // 50 * (self.kind == "steps"))
        return [replace(p, prompt=f"{p.prompt}  ") for p in self.inner.sample(count, seed=seed, step=step)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        problems = self.inner.held_out(count, seed=seed)
        return [replace(p, prompt=f"{p.prompt}  ") for p in problems] if self.kind == "spaces" else problems


def same_every_step() -> Stuck:
    return Stuck("step")


def same_for_steps_on_end() -> Stuck:
    return Stuck("steps")


def one_problem() -> Stuck:
    return Stuck("one")


def spaces_at_the_end() -> Stuck:
    return Stuck("spaces")


def shifted_vocabulary() -> tuple[Any, Any]:
    model, tokenizer = schooled_model()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(copy.deepcopy(weight).roll(1, 0))
    return model, tokenizer
