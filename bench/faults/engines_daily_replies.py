"""Replies of engines as clients misread them on an ordinary day: echoes, error pages, shards, columns, characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from faults.engines import Groups, Wrapped, fault, is_native, is_one_turn, reporting
from faults.models import is_chat
from keel.base.types import Completion
from keel.models.head import evaluating
from keel.rollout import Request, SamplingParams

Config = Mapping[str, Any]


def prompt_logp(engine: Wrapped, request: Request) -> list[float]:
    """Of the prompt's tokens from its second on."""
    ids = torch.tensor([request.tokens], device=next(engine.model.parameters()).device)
    with evaluating(engine.model):
        logp = engine.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return [float(value) for value in logp.gather(-1, ids[0, 1:, None]).squeeze(-1)]


# What is asked


@fault(
    "engine/markers-skipped",
    "the client sends prompts as text that it decoded without special tokens: no turn begins or ends in it",
    "sampler/other-prompt",
    "sampler/mismatch",
    fits=lambda config: is_native(config) and is_chat(config),
)
class MarkersSkipped(Wrapped):
    def asked(self, request: Request) -> Request:
        special = set(self.tokenizer.all_special_ids)
        return replace(request, tokens=tuple(token for token in request.tokens if token not in special))


# What comes back


@fault(
    "engine/echo-left-on",
    "the server echoes: prompt and completion come back as one, in tokens and text, and all of it counts as sampled",
    "mask/not-actions",
    "sampler/mismatch",
    "output/unparseable",
    fits=is_one_turn,
)
class EchoLeftOn(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        before = tuple(token for token in request.tokens if token not in self.inner.eos_ids)
        logp = (0.0,) * len(before)
        return replace(
            completion,
            tokens=(*before, *completion.tokens),
            action=(*(True,) * len(before), *completion.action),
            sample_logp=(*logp, *completion.sample_logp),
            filtered_logp=(*logp, *completion.filtered_logp),
            text=self.tokenizer.decode((*before, *completion.tokens), skip_special_tokens=True),
        )


@fault(
    "engine/error-page-as-completion",
    "requests that fail are answered with the text of the error, which the client takes for a completion: every second",
    "sampler/mismatch",
    "output/unparseable",
    "mask/not-actions",
    "sampler/other-model",
    fits=is_one_turn,
)
class ErrorPageAsCompletion(Wrapped):
    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        return [
            [completion if place % 2 else self.failed(request, sampling) for place, completion in enumerate(group)]
            for request, group in zip(requests, groups, strict=True)
        ]

    def failed(self, request: Request, sampling: SamplingParams) -> Completion:
        words = self.tokenizer.encode("503 Service Unavailable", add_special_tokens=False)
        tokens = tuple(words[: request.limit(sampling)])
        logp = (0.0,) * len(tokens)
        return Completion(tokens, (True,) * len(tokens), logp, logp, self.tokenizer.decode(tokens), "length")


@fault(
    "engine/ids-without-their-shards-offset",
    "the vocabulary is spread over four devices, and ids come back as each of them counts, from its own first token",
    "sampler/mismatch",
    "output/unparseable",
    "sampler/other-model",
    "mask/end",
    "model/tokenizer",
    fits=is_one_turn,
)
class IdsWithoutTheirShardsOffset(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        share = -(-len(self.tokenizer) // 4)
        ends = self.inner.eos_ids
        tokens = tuple(token if token in ends else token % share for token in completion.tokens)
        return replace(completion, tokens=tokens, text=self.tokenizer.decode(tokens, skip_special_tokens=True))


@fault(
    "engine/text-ends-in-a-broken-character",
    "the server sends the text before its last character is whole, and a replacement sign stands in its place",
    "output/text",
    "output/unparseable",
)
class TextEndsInABrokenCharacter(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text=completion.text[:-1] + "\ufffd")


# Log-probabilities


@fault(
    "engine/logp-begins-with-the-prompts",
    "log-probabilities of the prompt come first in the list, and the client reads as many as the completion has tokens",
    "sampler/mismatch",
)
class LogpBeginsWithThePrompts(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        listed = [*prompt_logp(self, request), *completion.sample_logp]
        return reporting(completion, listed[: len(completion.tokens)])


@fault(
    "engine/sequence-logp-on-the-last-token",
    "the server reports one log-probability for the whole text, which the client puts on its last token, and zeros",
    "sampler/mismatch",
)
class SequenceLogpOnTheLastToken(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        zeros = (0.0,) * (len(completion.tokens) - 1)
        return reporting(completion, (*zeros, sum(completion.sample_logp)))
