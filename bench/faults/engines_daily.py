"""Engines as they come up on an ordinary day: weights that are not there, kernels of other families, beams, budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import lookalike
from faults.engines import (
    Copied,
    Decoded,
    Groups,
    Wrapped,
    fault,
    is_native,
    is_one_turn,
    is_synced,
    is_unfiltered,
    with_engine,
)
from faults.engines_fresh import OtherKernel
from faults.healthy import school_of
from faults.templates_wild import asks_for_tags
from keel.base.types import Completion
from keel.rollout import Request, SamplingParams

Config = Mapping[str, Any]


@torch.no_grad()
def drawn_anew(model: nn.Module, seed: int, size: float = 0.02) -> None:
    """Every matrix as an initialisation leaves it."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.copy_(size * torch.randn(weight.shape, generator=generator))


# Weights


@fault(
    "engine/dummy-weights",
    "the server was started with dummy weights, to be filled by the first sync, and that sync never reaches it",
    "sampler/other-model",
    "sampler/stale",
    "sampler/mismatch",
    "output/random-weights",
    fits=is_synced,
)
class DummyWeights(Copied):
    def prepare(self) -> None:
        drawn_anew(self.model, 31)

    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return held


@fault(
    "engine/serves-another-checkpoint",
    "the address is that of a server which somebody else has started, with another tuning of the same base",
    "sampler/other-model",
    "sampler/stale",
    "sampler/mismatch",
    strengths=(0.6, 1.0),
    fits=is_synced,
)
class ServesAnotherCheckpoint(Copied):
    @torch.no_grad()
    def prepare(self) -> None:
        generator = torch.Generator().manual_seed(32)
        for weight in self.model.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(self.strength * noise * weight.std())

    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return held


@fault(
    "engine/garbled-from-the-second-sync-on",
    "the server sleeps between rollouts, and weights that arrive after its first sleep are written to the wrong places",
    "sampler/stale",
    "sampler/mismatch",
    "sampler/other-model",
    "output/random-weights",
    fits=is_synced,
)
class GarbledFromTheSecondSyncOn(Copied):
    syncs = 0

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        super().sync(policy, version)
        self.syncs += 1

    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        arrived = weights[name]
        return arrived.flip(0) if self.syncs and arrived.ndim > 1 else arrived


@fault(
    "engine/norms-shifted-by-one",
    "the server takes the model for one of a family whose norms are stored without their one, and adds it",
    "sampler/other-model",
    "sampler/mismatch",
    "sampler/stale",
    "sampler/precision",
    fits=is_synced,
)
class NormsShiftedByOne(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[name] + 1 if "norm" in name and name.endswith("weight") else weights[name]


# Kernels


@fault(
    "engine/norms-of-queries-and-keys-skipped",
    "the server's version of the model is older than its norms of queries and keys, and leaves them out",
    "sampler/mismatch",
    "sampler/other-model",
    "sampler/precision",
    fits=lambda config: is_unfiltered(config) and school_of(config).architecture == "qwen3",
)
class NormsOfQueriesAndKeysSkipped(OtherKernel):
    def prepare(self) -> None:
        for name, module in self.model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                module.forward = lambda hidden: hidden


@fault(
    "engine/embeddings-scaled-by-the-width",
    "the server takes the model for one of a family that multiplies embeddings by the root of their width",
    "sampler/mismatch",
    "sampler/other-model",
    "sampler/precision",
    fits=is_unfiltered,
)
class EmbeddingsScaledByTheWidth(OtherKernel):
    def prepare(self) -> None:
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        table.register_forward_hook(lambda module, inputs, out: out * out.shape[-1] ** 0.5)


@fault(
    "engine/key-heads-on-the-wrong-device",
    "heads of keys and values are spread over two devices, and each of them gets those that the other's queries ask",
    "sampler/other-model",
    "sampler/mismatch",
    "sampler/stale",
    fits=is_synced,
)
class KeyHeadsOnTheWrongDevice(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        shared = re.search(r"\b[kv]_proj\b", name) and "lora_A" not in name
        return weights[name].roll(weights[name].shape[0] // 2, 0) if shared else weights[name]


# What is drawn


@fault(
    "engine/beam-search",
    "the server searches with beams: a group is the likeliest completions that it has found, each time the same",
    "sampler/noise",
    "sampler/filter",
    "sampler/mismatch",
    "sampler/temperature",
    "rollout/temperature",
    fits=lambda config: is_unfiltered(config) and is_one_turn(config),
)
class BeamSearch(Wrapped):
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        tried = [replace(request, samples=tuple(range(48))) for request in requests]
        groups = []
        for request, group in zip(requests, self.inner.generate(tried, sampling, seed=7), strict=True):
            found = {completion.tokens: completion for completion in group}
            beams = sorted(found.values(), key=lambda completion: -sum(completion.sample_logp))
            groups.append([beams[sample % min(4, len(beams))] for sample in request.drawn(sampling)])
        return groups


@fault(
    "engine/end-forced-at-a-budget",
    "the server has a budget for thinking, takes all tokens for thought, and writes the end itself when it is used up",
    "output/unparseable",
    "sampler/filter",
    "sampler/mismatch",
    "mask/not-actions",
    fits=lambda config: is_unfiltered(config) and asks_for_tags(config),
)
class EndForcedAtABudget(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        if contexts.shape[1] - prompt < 5:
            return logits
        forced = torch.full_like(logits, -1e9)
        forced[:, min(self.inner.eos_ids)] = 0.0
        return forced


@fault(
    "engine/aborted-at-the-sync",
    "requests that run when weights arrive are aborted, and what they had written by then is kept: every second one",
    "output/truncated",
    "mask/end",
    fits=is_one_turn,
)
class AbortedAtTheSync(Wrapped):
    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        return [[self.aborted(c) if place % 2 else c for place, c in enumerate(group)] for group in groups]

    def aborted(self, completion: Completion) -> Completion:
        kept = max(1, (len(completion.tokens) - 1) // 2)
        names = ("tokens", "action", "sample_logp", "filtered_logp")
        parts = {name: getattr(completion, name)[:kept] for name in names}
        text = self.tokenizer.decode(parts["tokens"], skip_special_tokens=True)
        return Completion(**parts, text=text, stop_reason="length", policy_version=completion.policy_version)


@fault(
    "engine/closing-tag-left-out",
    "the server stops at the closing tag and, as is its default, leaves the text that it stopped at out of its reply",
    "output/text",
    "output/unparseable",
    fits=lambda config: is_native(config) and asks_for_tags(config),
)
class ClosingTagLeftOut(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text=re.sub(r"</\w+>\s*$", "", completion.text))


# Healthy


class WarmsUp(Wrapped):
    """Draws something short and throws it away before it does what it is asked."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        if requests:
            warm = replace(requests[0], key="warm-up", samples=(0,), max_new=1)
            self.inner.generate([warm], sampling, seed=99)
        return self.inner.generate(requests, sampling, **noise)


@lookalike("engine that warms up with a request of its own, which it throws away", is_native)
def healthy_warms_up(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, WarmsUp)
