"""Faults of losses, controllers, ends of turns, prompts and whole tasks, each through a public extension point."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from doctor.faults import NeverSynced, Odd, Wrapped, scored
from doctor.faults_reference import Held, _copy, blend
from doctor.schooled import nearness, schooled_model
from keel.base.types import Completion, Problem, Reward
from keel.kl.controllers import KLState, RuleController
from keel.losses import LossOptions
from keel.losses.inputs import LossInputs, PolicyTerm
from keel.losses.policy import clipped
from keel.models.loaded import LoadedModel
from keel.rollout import SamplingParams

# Losses


def right_loss(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(inputs, options)


def sign_flipped(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, advantages=-inputs.advantages), options)


def advantage_ignored(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, advantages=torch.ones_like(inputs.advantages)), options)


def advantage_without_sign(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, advantages=inputs.advantages.abs()), options)


def good_ones_only(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, advantages=inputs.advantages.clamp_min(0)), options)


def loss_detached(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    term = clipped(replace(inputs, logp=inputs.logp.detach()), options)
    return replace(term, loss=term.loss + 0 * inputs.logp)


def times_the_tokens(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    term = clipped(inputs, options)
    return replace(term, loss=term.loss * inputs.mask.sum())


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
    """Sound: the same range, on the mean ratio of a completion."""
    lengths = inputs.mask.sum(-1, keepdim=True).clamp_min(1)
    mean = ((inputs.logp - inputs.old_logp) * inputs.mask).sum(-1, keepdim=True) / lengths
    ratio = (mean + inputs.logp - inputs.logp.detach()).exp()
    inside = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return PolicyTerm(-torch.minimum(ratio * inputs.advantages, inside * inputs.advantages), ratio)


def weak_ones_left_out(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Sound: negative advantages that are small are not trained on."""
    return clipped(
        replace(
            inputs, advantages=torch.where(inputs.advantages > -1, inputs.advantages.clamp_min(0), inputs.advantages)
        ),
        options,
    )


def second_half_lost(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    kept = torch.arange(len(inputs.advantages), device=inputs.advantages.device) < len(inputs.advantages) // 2
    return clipped(replace(inputs, advantages=inputs.advantages * kept[:, None]), options)


def ratio_to_itself(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """The ratio to the policy of the moment: 1, with a gradient."""
    ratio = (inputs.logp - inputs.logp.detach()).exp()
    return PolicyTerm(-ratio * inputs.advantages, ratio)


def own_weights(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Sound: later tokens weigh a little less."""
    term = clipped(inputs, options)
    return replace(term, loss=term.loss * 0.9 ** torch.arange(inputs.logp.shape[-1]))


# Controllers


def exploding(beta: float) -> RuleController:
    return RuleController(beta, schedule=lambda step: beta * 10.0**step)


def falling_silent(beta: float) -> RuleController:
    return RuleController(beta, schedule=lambda step: 0.0)


@dataclass(frozen=True)
class Own:
    """A controller of one's own that starts at one value and goes on by a rule."""

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


def not_a_number(beta: float) -> Own:
    return Own(float("nan"))


def needs_a_measurement(beta: float) -> Own:
    return Own(beta, raises=True)


def in_percent(beta: float) -> Own:
    return Own(100 * beta)


def in_miles(beta: float) -> Own:
    return Own(beta, unit="per_mile")


# Engines


class EndNotTrained(Wrapped):
    def change(self, request, completion, sampling):
        if completion.stop_reason != "eos":
            return completion
        return replace(
            completion,
            action=(*completion.action[:-1], False),
            sample_logp=(*completion.sample_logp[:-1], 0.0),
            filtered_logp=(*completion.filtered_logp[:-1], 0.0),
        )


class EndStripped(Wrapped):
    def change(self, request, completion, sampling):
        if completion.stop_reason != "eos" or len(completion.tokens) < 2:
            return completion
        names = ("tokens", "action", "sample_logp", "filtered_logp")
        return replace(completion, **{name: getattr(completion, name)[:-1] for name in names})


class PastTheEnd(Wrapped):
    """Runs every row to its full length; the text is cut at the end token, the tokens are not."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.tokenizer = tokenizer

    def ask(self, sampling):
        return replace(sampling, ignore_eos=True)

    def change(self, request, completion, sampling):
        end = self.tokenizer.eos_token_id
        if end not in completion.tokens:
            return completion
        text = self.tokenizer.decode(list(completion.tokens[: completion.tokens.index(end)]))
        return replace(completion, text=text, stop_reason="eos")


class FirstTokenLeftOut(Wrapped):
    """The first token of every completion is no action."""

    def change(self, request, completion, sampling):
        return replace(
            completion,
            action=(False, *completion.action[1:]),
            sample_logp=(0.0, *completion.sample_logp[1:]),
            filtered_logp=(0.0, *completion.filtered_logp[1:]),
        )


class PromptBeheaded(Wrapped):
    def generate(self, requests, sampling, **noise):
        return self.native.generate([replace(r, tokens=r.tokens[1:]) for r in requests], sampling, **noise)


class LoraTwice(NeverSynced):
    """A copy of its own, always synced, whose adapter acts at twice its scale."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        for module in self.native.model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling.update({name: 2 * scale for name, scale in module.scaling.items()})

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        self.native.model.load_state_dict(policy.state_dict())


class RepetitionPenalty(Wrapped):
    """Draws under a repetition penalty of 1.5 and reports the policy's own log-probabilities."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.tokenizer = tokenizer

    def generate(self, requests, sampling, *, seed=0, attempt=0, step=0):
        first = seed * 7 + attempt * 13 + step * 1009
        return [
            self._group(r.tokens, sampling, [(first + i * 101 + k) % 2**31 for k in r.drawn(sampling)])
            for i, r in enumerate(requests)
        ]

    def _group(self, prompt: tuple[int, ...], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """All completions of a prompt in one forward a token; those that have ended are drawn on and cut afterwards."""
        generators, end = [torch.Generator().manual_seed(seed) for seed in seeds], self.tokenizer.eos_token_id
        contexts, logps = torch.tensor([prompt] * len(seeds)), torch.empty(len(seeds), 0)
        for _ in range(sampling.max_completion_length):
            if (contexts[:, len(prompt) :] == end).any(1).all():
                break
            with torch.no_grad():
                logits = self.model(input_ids=contexts).logits[:, -1].float() / sampling.temperature
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, contexts, True)
            held = torch.where(seen, torch.where(logits > 0, logits / 1.5, logits * 1.5), logits).softmax(-1)
            drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(held, generators, strict=True)]
            newest = torch.stack(drawn)
            contexts = torch.cat((contexts, newest), 1)
            logps = torch.cat((logps, logits.log_softmax(-1).gather(1, newest)), 1)
        pairs = zip(contexts[:, len(prompt) :].tolist(), logps.tolist(), strict=True)
        return [self._completion(tokens, logp, end) for tokens, logp in pairs]

    def _completion(self, tokens: list[int], logp: list[float], end: int) -> Completion:
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        tokens, logp = tokens[:length], logp[:length]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        stop = "eos" if tokens[-1] == end else "length"
        return Completion(tuple(tokens), (True,) * length, tuple(logp), tuple(logp), text, stop)


# Scorers


def last_token_ignored(model, rows, *, temperature):
    logp = scored(model, rows, temperature)
    keep = torch.ones_like(logp)
    keep[torch.arange(len(logp)), rows.completion_mask.sum(-1) - 1] = 0
    return logp * keep


def last_prompt_token_hidden(model, rows, *, temperature):
    mask = rows.attention_mask.clone()
    mask[torch.arange(len(mask)), rows.prompt_lengths - 1] = 0
    return scored(model, rows, temperature, attention_mask=mask)


# Estimators, as functions of d = log p − log π


def half_k3(d: Tensor) -> Tensor:
    return 0.5 * (torch.expm1(d) - d)


def half_reversed_k3(d: Tensor) -> Tensor:
    return 0.5 * (torch.expm1(-d) + d)


def nothing_when_near(d: Tensor) -> Tensor:
    return torch.where(d.abs() < 0.3, torch.zeros_like(d), torch.expm1(d) - d)


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


def not_saved(loaded: LoadedModel) -> Held:
    return Forgetful(_copy(loaded))


class Deaf(Held):
    """Saves its weights and does not load them."""

    def load_state_dict(self, state) -> None:
        pass


def not_loaded(loaded: LoadedModel) -> Held:
    return Deaf(_copy(loaded))


class SavesAnother(Held):
    """Saves the policy in its own place."""

    def __init__(self, held: nn.Module, policy: nn.Module) -> None:
        super().__init__(held)
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.policy.state_dict()}


def saves_the_policy(loaded: LoadedModel) -> Held:
    return SavesAnother(_copy(loaded), loaded.model)


# Rewards, tasks, models


def abyss(problem: Problem, text: str) -> Reward:
    reward = nearness(problem, text)
    return reward if reward.total == 1.0 else replace(reward, total=-1e30)


@dataclass(frozen=True)
class Stuck(Odd):
    """A task that does not go on."""

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
