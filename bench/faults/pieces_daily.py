"""Losses, KL terms and weight sync with the bugs of an ordinary day: one row for all, wakings, fused matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, lookalike, operator, path_of
from faults.engines import Copied, Groups, fault, has_full_weights, is_native, is_synced, with_engine
from faults.losses import (
    Steering,
    Strength,
    controller_fault,
    has_penalty,
    is_clipped,
    kl_fault,
    loss_fault,
    term_with,
)
from keel.losses import LossInputs, PolicyTerm
from keel.losses.recipes import LOSSES
from keel.rollout import Request, SamplingParams

Config = Mapping[str, Any]

# Losses


@loss_fault(
    "loss/advantage-of-the-last-row-for-all",
    "a loop over completions leaves its last advantage behind, and all rows are trained with that one",
    "loss/sign",
)
def advantage_of_the_last_row(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, advantages=inputs.advantages[-1:].expand_as(inputs.advantages))


@loss_fault(
    "loss/supervised-term-left-in",
    "the loss of an earlier supervised tuning is still added: all that is sampled is made likelier, right or wrong",
    "loss/sign",
    "loss/scale",
    strength=(2.0, 5.0),
)
def supervised_term_left_in(inputs: LossInputs, options: Strength) -> PolicyTerm:
    term = term_with(inputs)
    return replace(term, loss=term.loss - options.strength * inputs.logp)


def grpo_in_64_bits(inputs: LossInputs, options: Any) -> PolicyTerm:
    wide = {name: getattr(inputs, name).double() for name in ("logp", "old_logp", "advantages")}
    term = term_with(inputs, **wide)
    return replace(term, loss=term.loss.to(inputs.logp.dtype), ratio=term.ratio.to(inputs.logp.dtype))


grpo_in_64_bits_recipe = replace(LOSSES["grpo"], term=grpo_in_64_bits, takes_delta=False)


@lookalike("loss whose ratio and clip are computed in 64 bits", is_clipped)
def healthy_wide_loss(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"loss.loss_type": "faults.pieces_daily:grpo_in_64_bits_recipe"})


# KL terms


def cross_entropy_of_samples(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """−log p of what was sampled, which nothing of the policy is in."""
    return -ref_logp + 0.0 * logp


def exponential_without_gradient(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 whose exponential is taken of detached log-probabilities: what is left of its gradient has a mean of zero."""
    d = ref_logp - logp
    return torch.expm1(d.detach()) - d


def k3_times(d: Tensor, factor: float = 1.0) -> Tensor:
    return factor * (torch.expm1(d) - d)


kl_fault(
    "kl/cross-entropy-of-samples",
    "the penalty is the reference's surprise at what was sampled, which has no gradient in the policy",
    "kl/no-gradient",
    "kl/reversed",
    formulas=["cross_entropy_of_samples"],
    module=__name__,
)
kl_fault(
    "kl/exponential-without-gradient",
    "the exponential of k3 is taken without a gradient, and what is left pulls nowhere on average",
    "kl/no-gradient",
    "kl/reversed",
    formulas=["exponential_without_gradient"],
    module=__name__,
)


@operator(
    "kl/coefficient-applied-twice",
    "the formula multiplies by the coefficient, as the loss does: the penalty weighs next to nothing",
    "kl/scale",
    "kl/no-gradient",
    fits=has_penalty,
)
def coefficient_applied_twice(config: Config, random: Random) -> dict[str, Any]:
    formula = f"faults.pieces_daily:k3_times(factor={config['kl']['beta']})"
    changed = edited(config, {"kl.estimator": formula, "kl.allow_biased": True, "kl.exact": False})
    changed["kl"].pop("gradient", None)
    return changed


@controller_fault(
    "kl/controller-all-or-nothing",
    "β is switched off below the target and to thousands above it",
    target=(1e-5, 1e-4),
    most=(1e3, 1e4),
)
def all_or_nothing(beta: float, target: float = 1e-4, most: float = 1e3) -> Steering:
    return Steering(beta, lambda last, step, kl: most if kl > target else 0.0)


def own_coefficient(beta: float, held: float = 50.0) -> Steering:
    return Steering(held, lambda last, step, kl: held)


@operator(
    "kl/controller-ignores-the-configured-coefficient",
    "the controller does not take the configured β and holds one of its own, a thousand times as large or more",
    "kl/controller",
    "kl/too-strong",
    "kl/scale",
    fits=has_penalty,
)
def ignores_the_configured_coefficient(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"kl.controller": {"name": path_of(own_coefficient), "held": random.choice((50.0, 200.0))}})


# Weight sync


@fault(
    "sync/rolled-back-on-waking",
    "the engine sleeps after each step and wakes every second time with the weights that it was started with",
    "sampler/stale",
    fits=is_synced,
)
class RolledBackOnWaking(Copied):
    first: dict[str, Tensor]
    wakings = 0

    def prepare(self) -> None:
        self.first = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        self.wakings += 1
        if self.wakings % 2 == 0:
            self.inner.release()
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(self.first[name])
        return super().generate(requests, sampling, **noise)


@fault(
    "sync/read-before-all-had-arrived",
    "sampling begins before all tensors have arrived: the second half of them is always that of the sync before",
    "sampler/stale",
    fits=is_synced,
)
class ReadBeforeAllHadArrived(Copied):
    late: dict[str, Tensor]

    def prepare(self) -> None:
        self.late = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        super().load(weights)
        self.late = {name: tensor.clone() for name, tensor in weights.items()}

    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        names = list(weights)
        return self.late[name] if names.index(name) >= len(names) // 2 else weights[name]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head with its two halves taken in turns, as another layout of rotary positions has them."""
    size = rows.shape[0] // heads
    order = torch.arange(size, device=rows.device).view(2, -1).T.flatten()
    return rows.view(heads, size, -1)[:, order].reshape(rows.shape)


@fault(
    "sync/rotary-halves-interleaved",
    "queries and keys are sent in the layout of another library, which takes the halves of a head in turns",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class RotaryHalvesInterleaved(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        config: Any = self.model.config
        if "q_proj" in name:
            return interleaved(weights[name], config.num_attention_heads)
        return interleaved(weights[name], config.num_key_value_heads) if "k_proj" in name else weights[name]


@fault(
    "sync/fused-attention-cut-in-the-wrong-places",
    "queries, keys and values come as one matrix, group by group, and are cut apart as if all queries came first",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class FusedAttentionCutWrongly(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        part = next((part for part in "qkv" if f".{part}_proj." in name), None)
        if part is None:
            return weights[name]
        groups = self.model.config.num_key_value_heads  # type: ignore[union-attr]
        whole = {other: weights[name.replace(f".{part}_proj.", f".{other}_proj.")] for other in "qkv"}
        fused = torch.cat([rows.unflatten(0, (groups, -1)) for rows in whole.values()], 1).flatten(0, 1)
        sizes = [rows.shape[0] for rows in whole.values()]
        return dict(zip(whole, fused.split(sizes), strict=True))[part]


# Healthy: a sync that looks odd and is right


class AsleepBetweenSteps(Copied):
    """Throws its weights away after each step, and has the newest ones again when it is woken."""

    newest: dict[str, Tensor]

    def prepare(self) -> None:
        self.newest = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        self.newest = {name: tensor.clone() for name, tensor in weights.items()}
        super().load(weights)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        super().load(self.newest)
        groups = super().generate(requests, sampling, **noise)
        self.inner.release()
        for tensor in self.model.state_dict().values():
            tensor.zero_()
        return groups


@lookalike("engine that forgets its weights after each step and is told them again when it wakes", is_native)
def healthy_asleep(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, AsleepBetweenSteps)
