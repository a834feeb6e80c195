"""Scorers, references and weight sync with the usual bugs of trainers that were put together by hand."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, lookalike, option, path_of
from faults.engines import (
    Copied,
    Groups,
    fault,
    has_full_weights,
    has_lora,
    is_native,
    is_synced,
    layer_of,
    with_engine,
)
from faults.references import Held, copied, has_adapter_reference, has_full_reference, reference_fault
from faults.scorers import is_scored_natively, logits_of, picked, right, scorer_fault
from keel.models.head import evaluating
from keel.models.options import LoadedModel
from keel.models.scorer import ScoreRows
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

Config = Mapping[str, Any]

# Scorers


def has_several_problems(config: Config) -> bool:
    return is_scored_natively(config) and option(config, "rollout.prompts_per_step", 16) > 1


def one_prompt_for_all(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The first row's prompt stands before all completions, its end where theirs is."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    source = places - rows.prompt_lengths[:, None] + rows.prompt_lengths[0]
    first = rows.tokens[:1].expand_as(rows.tokens).gather(1, source.clamp(0, rows.tokens.shape[1] - 1))
    in_prompt = (places < rows.prompt_lengths[:, None]) & (source >= 0)
    return right(model, replace(rows, tokens=torch.where(in_prompt, first, rows.tokens)), temperature=temperature)


def noise_on_embeddings(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Uniform noise on what is embedded, as supervised fine-tuning has it against overfitting."""
    table = model.get_input_embeddings()  # type: ignore[operator]

    def noisy(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        size = 5 / (out.shape[1] * out.shape[2]) ** 0.5
        return out + size * (2 * torch.rand_like(out) - 1)

    hook = table.register_forward_hook(noisy)
    try:
        return right(model, rows, temperature=temperature)
    finally:
        hook.remove()


def summed_twice(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Two processes hold all of the logits, and those of both are added."""
    return picked((2 * logits_of(model, rows) / temperature).log_softmax(-1), rows)


def gradient_lost(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """What is recomputed on the way back has inputs without a gradient, so that no weight gets one."""
    logp = right(model, rows, temperature=temperature)
    return logp.detach() + 0.0 * logp


scorer_fault(
    "scorer/prompt-of-the-first-row",
    "the prompt is computed once for a whole batch, as if all of its rows were of one group",
    "scoring/mismatch",
    "scoring/shifted",
    "mask/attention",
    scorers=[one_prompt_for_all],
    fits=has_several_problems,
)
scorer_fault(
    "scorer/embedding-noise-left-on",
    "the noise on embeddings of an earlier fine-tuning is still on when tokens are scored",
    "scoring/nondeterministic",
    "scoring/dropout",
    "scoring/mismatch",
    scorers=[noise_on_embeddings],
)
scorer_fault(
    "scorer/logits-added-over-processes",
    "the logits of two processes, which are the same ones, are added before they are scored",
    "scoring/temperature",
    "scoring/mismatch",
    scorers=[summed_twice],
)
scorer_fault(
    "scorer/checkpointing-without-gradient",
    "gradient checkpointing gets inputs that need no gradient: the values are right and no weight has a gradient",
    "scoring/gradient",
    "loss/no-gradient",
    "optim/no-update",
    scorers=[gradient_lost],
)


def longest_first(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Scores rows from the longest to the shortest and puts them back in their order."""
    order = rows.attention_mask.sum(1).argsort(descending=True, stable=True)
    inputs = {"attention_mask": rows.attention_mask[order], "position_ids": rows.position_ids[order]}
    logits = model(input_ids=rows.tokens[order], **inputs).logits[:, :-1].float()
    logp = (logits / temperature).log_softmax(-1)[order.argsort()]
    return picked(logp, rows)


@lookalike("scorer that sorts rows by length and puts them back", is_scored_natively)
def healthy_longest_first(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(longest_first)})


# References


@reference_fault(
    "reference/head-drawn-anew",
    "the checkpoint has no head of its own, and the reference's is drawn at random where it should be tied",
    "reference/wrong",
    "kl/at-start",
    fits=has_full_reference,
)
@torch.no_grad()
def head_drawn_anew(loaded: LoadedModel) -> Held:
    model: Any = copied(loaded)
    head = model.get_output_embeddings()
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(11)) * 0.02
    head.weight = nn.Parameter(drawn.to(head.weight), requires_grad=False)
    return Held(model)


@reference_fault(
    "reference/another-adapter-active",
    "the reference is scored with the adapter of another run, which was loaded beside the policy's",
    "reference/wrong",
    "kl/at-start",
    fits=has_adapter_reference,
)
@torch.no_grad()
def another_adapter_active(loaded: LoadedModel) -> Held:
    model, generator = copied(loaded), torch.Generator().manual_seed(12)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return Held(model)


class SwapNotUndone(Held):
    """Reference and policy change places for each pass, and every second time they are not changed back."""

    def __init__(self, model: nn.Module, policy: nn.Module) -> None:
        super().__init__(model)
        self.policy, self.uses = policy, 0

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self.uses += 1
        scored = self.held if self.uses % 2 else self.policy
        with evaluating(scored):
            yield scored


@reference_fault(
    "reference/swap-not-undone",
    "the reference's weights are swapped in for its pass and not always back out: every second pass has the policy's",
    "reference/moving",
    "reference/follows",
    "reference/wrong",
    fits=has_full_reference,
)
def swap_not_undone(loaded: LoadedModel) -> Held:
    return SwapNotUndone(copied(loaded), loaded.model)


@reference_fault(
    "reference/rope-scaled",
    "the reference is loaded with a scaling of its rotary positions that the policy does not have",
    "reference/wrong",
    "kl/at-start",
    fits=has_full_reference,
    factor=(4.0, 8.0),
)
@torch.no_grad()
def rope_scaled(loaded: LoadedModel, factor: float = 4.0) -> Held:
    model = copied(loaded)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.div_(factor)
    return Held(model)


# Weight sync


@fault(
    "sync/last-bucket-lost",
    "tensors are sent in buckets, and the last one is never flushed",
    "sampler/stale",
    fits=is_synced,
)
class LastBucketLost(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        names = list(weights)
        return held if names.index(name) >= 2 * len(names) // 3 else weights[name]


@fault(
    "sync/layers-under-another-name",
    "the names of wrapped layers have a prefix that the engine does not know and skips: only what is outside arrives",
    "sampler/stale",
    fits=has_full_weights,
)
class LayersUnderAnotherName(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[name] if layer_of(name) is None else held


@fault(
    "sync/keys-and-values-swapped",
    "keys and values are cut out of one matrix in the wrong order and change places",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class KeysAndValuesSwapped(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        other = {"k": "v", "v": "k"}
        return weights[re.sub(r"\b([kv])(?=_proj)", lambda match: other[match[1]], name)]


@fault(
    "sync/output-projections-unmatched",
    "the engine has other names for output projections, and the adapter's parts for them are dropped in silence",
    "sampler/stale",
    "sampler/mismatch",
    fits=has_lora,
)
class OutputProjectionsUnmatched(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        unknown = "lora_" in name and re.search(r"\b(o|down)_proj\b", name)
        return torch.zeros_like(held) if unknown else weights[name]


# Healthy: a sync that looks odd and is right


class TwoReplicas(Copied):
    """Two copies of the policy, both of them synced: even completions of a group are one's, odd ones the other's."""

    second: NativeEngine

    def prepare(self) -> None:
        self.second = NativeEngine(copy.deepcopy(self.model), self.tokenizer)

    @torch.no_grad()
    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        super().sync(policy, version)
        self.second.release()
        for name, tensor in self.second.model.state_dict().items():
            tensor.copy_(policy.state_dict()[name])

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        def share(replica: NativeEngine, rest: int) -> Groups:
            asked = [
                replace(request, samples=tuple(sample for sample in request.drawn(sampling) if sample % 2 == rest))
                for request in requests
            ]
            drawn = iter(replica.generate([request for request in asked if request.samples], sampling, **noise))
            return [next(drawn) if request.samples else [] for request in asked]

        groups = []
        for request, even, odd in zip(requests, share(self.inner, 0), share(self.second, 1), strict=True):
            lines = iter(even), iter(odd)
            groups.append([next(lines[sample % 2]) for sample in request.drawn(sampling)])
        return groups


@lookalike("engine of two replicas, both of them synced", is_native)
def healthy_two_replicas(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, TwoReplicas)
