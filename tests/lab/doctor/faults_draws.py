"""Engines that draw or report otherwise than the policy does, each in one way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from keel.models.tiny import tiny_tokenizer
from keel.rollout import NativeEngine
from lab.doctor.faults import Wrapped


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


class InEightBits(Copied):
    """Holds its matrices as 8-bit integers."""

    reports = "own"

    def rounded(self, tensor: Tensor) -> Tensor:
        unit = tensor.abs().amax() / 127 if tensor.dim() == 2 else None
        return tensor if unit is None else (tensor / unit).round() * unit


class ForgetsPositions(Copied):
    """Every token after the tenth of the text is at position 9."""

    reports = "own"

    def alter(self, model: Any) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": kwargs["position_ids"].clamp_max(9)}
            return (args[0], args[1].clamp_max(9), *args[2:]), kwargs

        model.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)


class OtherWeights(Copied):
    """Draws with weights that are a little off, and says nothing of it."""

    def rounded(self, tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(tensor))
        return tensor + 0.25 * tensor.std() * torch.randn(tensor.shape, generator=generator)


class GoesOn(Wrapped):
    """Lets no completion end at its first token."""


class Replaces(Copied):
    """Now and then writes another token than the one it drew."""

    def change_group(self, request, group, sampling):
        out = []
        for number, completion in enumerate(group):
            tokens = list(completion.tokens)
            if number % 3 == 0:
                tokens[0] = self.token
            out.append(completion if number % 3 else _with(completion, tokens))
        return self.rescored(self.model, request, out, sampling.temperature)

    token = tiny_tokenizer().encode("x")[-1]


def _with(completion: Any, tokens: list[int]) -> Any:
    from dataclasses import replace

    return replace(completion, tokens=tuple(tokens))
