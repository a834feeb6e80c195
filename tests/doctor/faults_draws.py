"""Engines that draw or report otherwise than the policy does, each in one way."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from doctor.faults import Wrapped
from keel.models.tiny import tiny_tokenizer
from keel.rollout.native.engine import NativeEngine


class Copied(Wrapped):
    """Draws with a copy of the policy in which `alter` has changed something, and follows every sync."""

    reports = "policy"  # log-probabilities of the policy, or of its own copy

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model, self.copy = model, copy.deepcopy(model)
        self.alter(self.copy)
        self.native = NativeEngine(self.copy, tokenizer)

    def alter(self, model: Any) -> None:
        pass

    def rounded(self, tensor: Tensor) -> Tensor:
        return tensor

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        self.copy.load_state_dict({name: self.rounded(tensor) for name, tensor in policy.state_dict().items()})

    def change_group(self, request, group, sampling):
        return self.rescored(self.model, request, group, sampling.temperature) if self.reports == "policy" else group


class BansAToken(Copied):
    """Never writes a 7."""

    token = tiny_tokenizer().encode("7")[-1]
    bias = -1e4

    def alter(self, model: Any) -> None:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[..., self.token] += self.bias
            return changed

        model.lm_head.register_forward_hook(hook)


class LikesAToken(BansAToken):
    bias = 2.0


class ForgetsPositions(Copied):
    """Every token after the eighth of the text is at position 7."""

    reports = "own"

    def alter(self, model: Any) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": kwargs["position_ids"].clamp_max(7)}
            return (args[0], args[1].clamp_max(7), *args[2:]), kwargs

        model.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)


class OtherWeights(Copied):
    """Draws with weights that are a little off, and says nothing of it."""

    def rounded(self, tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(tensor))
        return tensor + 0.25 * tensor.std() * torch.randn(tensor.shape, generator=generator)


class OtherAttention(Copied):
    """Half of what its attention would give out, at every sync."""

    reports = "own"

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        weights = policy.state_dict()
        self.copy.load_state_dict({name: 0.5 * w if "o_proj" in name else w for name, w in weights.items()})


class SmallChangesLost(Copied):
    """Takes only those changes of a weight that are large beside it."""

    reports = "own"

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        new, held = policy.state_dict(), self.copy.state_dict()
        far = {name: (new[name] - w).abs() > 0.02 * w.abs().amax() for name, w in held.items()}
        self.copy.load_state_dict({name: torch.where(far[name], new[name], w) for name, w in held.items()})


class EveryOtherColder(Wrapped):
    """Every other request at another temperature, in draws and reports."""

    def generate(self, requests, sampling, **noise):
        both = [
            self.native.generate(requests, replace(sampling, temperature=t * sampling.temperature), **noise)
            for t in (1.0, 0.6)
        ]
        return [both[number % 2][number] for number in range(len(requests))]


class HotterInGroups(Wrapped):
    """At twice the temperature wherever a prompt has several completions, and says nothing of it."""

    def ask(self, sampling):
        return replace(sampling, temperature=2 * sampling.temperature) if sampling.num_generations > 1 else sampling

    def change_group(self, request, group, sampling):
        return self.rescored(self.model, request, group, sampling.temperature)
