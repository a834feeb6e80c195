"""Engines with what fills the trackers of inference servers: defaults nobody asked for, parsers, kernels, order."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.engines import (
    Copied,
    Decoded,
    Groups,
    Wrapped,
    dealt,
    fault,
    has_lora,
    is_native,
    is_one_turn,
    is_unfiltered,
    reporting,
)
from faults.engines_serving import TurnsRewritten, has_several_prompts
from faults.models import is_chat
from faults.tools import offers_tools
from keel.base.types import Completion
from keel.rollout import Request, SamplingParams

# What is drawn


@fault(
    "engine/greedy-whatever-is-asked",
    "the server does not sample: it always takes the likeliest token, whatever temperature is asked for",
    "sampler/noise",
    "sampler/temperature",
    "sampler/filter",
    "sampler/mismatch",
    "rollout/temperature",
    fits=is_unfiltered,
)
class GreedyWhateverIsAsked(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        return logits * 1e4


@fault(
    "engine/exclamation-marks",
    "logits overflow to no numbers in 16 bits, and the server writes the vocabulary's first sign up to the limit",
    "sampler/mismatch",
    "output/random-weights",
    "output/truncated",
    "output/unparseable",
    fits=is_one_turn,
)
class ExclamationMarks(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        special = set(self.tokenizer.all_special_ids)
        first = next(token for token in range(len(self.tokenizer)) if token not in special)
        tokens = (first,) * request.limit(sampling)
        logp = (-math.log(len(self.tokenizer)),) * len(tokens)
        return Completion(tokens, (True,) * len(tokens), logp, logp, self.tokenizer.decode(tokens), "length")


@fault(
    "engine/dropout-while-sampling",
    "the model that samples was left in training mode: its dropout is on",
    "sampler/mismatch",
    "sampler/precision",
    "scoring/dropout",
    strengths=(0.2, 0.3),
    fits=is_unfiltered,
)
class DropoutWhileSampling(Decoded):
    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        def dropped(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
            return functional.dropout(out, self.strength, training=True)

        layers = [module for name, module in self.model.named_modules() if name.endswith((".mlp", "embed_tokens"))]
        hooks = [layer.register_forward_hook(dropped) for layer in layers]
        try:
            return self.logits(contexts)
        finally:
            for hook in hooks:
                hook.remove()


class OtherKernel(Decoded):
    """Samples with a copy of the policy that computes something else, of the newest weights."""

    shares_weights = False

    def __init__(self, model: nn.Module, tokenizer: Any, *, strength: float = 0.0, own_weights: bool = False) -> None:
        super().__init__(copy.deepcopy(model), tokenizer, strength=strength)
        self.prepare()

    def prepare(self) -> None:
        """Called once, on the copy."""

    @torch.no_grad()
    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        weights = policy.state_dict()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        self.version = version


@fault(
    "engine/attention-scale-wrong",
    "the attention kernel divides scores by the width of a head where its root is meant",
    "sampler/mismatch",
    "sampler/other-model",
    "sampler/precision",
    fits=lambda config: is_unfiltered(config) and is_chat(config),  # where prompts have more than a few tokens
)
class AttentionScaleWrong(OtherKernel):
    def prepare(self) -> None:
        for module in self.model.modules():
            if isinstance(getattr(module, "scaling", None), float):
                module.scaling = float(module.scaling) ** 2  # type: ignore[assignment]


@fault(
    "engine/another-base-under-the-adapter",
    "the server was started from another checkpoint than the trainer, and only the adapter is ever sent to it",
    "sampler/other-model",
    "sampler/stale",
    "sampler/mismatch",
    strengths=(0.2, 0.4),
    fits=has_lora,
)
class AnotherBaseUnderTheAdapter(Copied):
    @torch.no_grad()
    def prepare(self) -> None:
        generator = torch.Generator().manual_seed(21)
        for name, weight in self.model.named_parameters():
            if "lora_" not in name and weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(self.strength * noise * weight.std())

    def arriving(self, name: str, held: Tensor, weights: Any) -> Tensor:
        return weights[name] if "lora_" in name else held


# What is asked


@fault(
    "engine/slot-not-cleared",
    "the cache of a slot is not emptied: each prompt is continued behind the one that was there before",
    "sampler/other-prompt",
    "sampler/mismatch",
    fits=has_several_prompts,
)
class SlotNotCleared(Wrapped):
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        before = [requests[-1], *requests[:-1]]
        asked = [
            request if request.start else replace(request, tokens=(*other.tokens, *request.tokens))
            for request, other in zip(requests, before, strict=True)
        ]
        return self.inner.generate(asked, sampling, **noise)


@fault(
    "engine/template-of-another-family",
    "the server has no template for the model and renders conversations as another family of models is used to",
    "sampler/other-prompt",
    fits=lambda config: is_native(config) and is_chat(config),
)
class TemplateOfAnotherFamily(Wrapped):
    def asked(self, request: Request) -> Request:
        if request.start:
            return request
        special = set(self.tokenizer.all_special_ids)
        begin, end = (self.tokenizer.encode(text, add_special_tokens=False) for text in ("user: ", " assistant: "))
        return replace(request, tokens=(*begin, *(token for token in request.tokens if token not in special), *end))


@fault(
    "engine/prompts-in-ids-of-another-tokenizer",
    "the server has another revision of the tokenizer, in which every ordinary token of a prompt is the next one",
    "sampler/other-prompt",
    "sampler/other-model",
    "sampler/mismatch",
    "model/tokenizer",
)
class PromptsInIdsOfAnotherTokenizer(Wrapped):
    def asked(self, request: Request) -> Request:
        special, size = set(self.tokenizer.all_special_ids), len(self.tokenizer)
        ordinary = [token for token in range(size) if token not in special]
        following = dict(zip(ordinary, [*ordinary[1:], ordinary[0]], strict=True))
        return replace(request, tokens=tuple(following.get(token, token) for token in request.tokens))


@fault(
    "engine/later-turns-without-the-question",
    "the window of the conversation holds its last messages alone, and later turns are sampled without the question",
    "sampler/other-prompt",
    "sampler/mismatch",
    fits=lambda config: is_native(config) and offers_tools(config),
)
class LaterTurnsWithoutTheQuestion(TurnsRewritten):
    def context_of(self, tokens: tuple[int, ...], prompt: int) -> tuple[int, ...]:
        return tokens[prompt:] or tokens[-1:]


# What comes back


@fault(
    "engine/logp-in-order-of-ids",
    "log-probabilities come as a table by token, sorted, and are read as if in the order of the text",
    "sampler/mismatch",
)
class LogpInOrderOfIds(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        order = sorted(range(len(completion.tokens)), key=lambda place: completion.tokens[place])
        return reporting(completion, [completion.sample_logp[place] for place in order])


@fault(
    "engine/sorted-by-prefix",
    "prompts are sorted so that neighbours share their beginnings, and completions come back in that order",
    "sampler/swapped",
    fits=has_several_prompts,
)
class SortedByPrefix(Wrapped):
    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        order = sorted(range(len(groups)), key=lambda place: requests[place].tokens)
        return dealt([groups[place] for place in order], groups)


@fault(
    "engine/streams-of-a-group-mixed",
    "the chunks of a group's streams all go into one text, since nobody asks which of them a chunk is of",
    "output/text",
)
class StreamsOfAGroupMixed(Wrapped):
    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        return [[replace(c, text="".join(other.text for other in group)) for c in group] for group in groups]


@fault(
    "engine/calls-taken-out-of-the-text",
    "the server parses calls of tools by itself and takes them out of the text, where the environment looks for them",
    "output/text",
    "output/unparseable",
    "answer/unusable",
    fits=lambda config: is_native(config) and offers_tools(config),
)
class CallsTakenOutOfTheText(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text=re.sub(r"<(\w+)>.*?</\1>", "", completion.text, flags=re.DOTALL))


@fault(
    "engine/mask-upside-down",
    "the mask says which tokens to leave out, and all that was sampled is left out",
    "mask/not-actions",
    "mask/end",
    "loss/no-gradient",
)
class MaskUpsideDown(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        zeros = (0.0,) * len(completion.tokens)
        nothing = (False,) * len(completion.tokens)
        return replace(completion, action=nothing, sample_logp=zeros, filtered_logp=zeros)
