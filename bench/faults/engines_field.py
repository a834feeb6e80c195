"""Engines as users of servers report them: log-probabilities in other orders, ids and texts that do not match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import lookalike
from faults.engines import Groups, Wrapped, cut, fault, is_native, is_one_turn, is_unfiltered, reporting, with_engine
from faults.templates_wild import asks_for_tags
from keel.base.types import Completion
from keel.rollout import Request, SamplingParams

FIELDS = ("tokens", "action", "sample_logp", "filtered_logp")

# What is reported


@fault(
    "engine/logp-sign-flipped",
    "negative log-likelihoods are reported where log-probabilities should be",
    "sampler/mismatch",
)
class LogpSignFlipped(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return reporting(completion, [-logp for logp in completion.sample_logp])


@fault(
    "engine/logp-reversed",
    "log-probabilities are listed from the last token to the first",
    "sampler/mismatch",
)
class LogpReversed(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return reporting(completion, completion.sample_logp[::-1])


@fault(
    "engine/logp-of-a-sibling",
    "log-probabilities of a group come in another order than its completions",
    "sampler/mismatch",
)
class LogpOfASibling(Wrapped):
    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        def swapped(mine: Completion, other: Completion) -> Completion:
            count = len(mine.tokens)
            return reporting(mine, (*other.sample_logp[:count], *mine.sample_logp[len(other.sample_logp) :])[:count])

        return [
            [swapped(mine, other) for mine, other in zip(group, [*group[1:], *group[:1]], strict=True)]
            for group in groups
        ]


@fault(
    "engine/logp-noisy",
    "log-probabilities come with noise of a third of a nat, as from kernels that depend on the batch",
    "sampler/mismatch",
    "sampler/precision",
    strengths=(0.3, 0.5),
)
class LogpNoisy(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        random = Random(f"{request.key} {completion.sample_logp}")
        return reporting(completion, [logp + random.gauss(0.0, self.strength) for logp in completion.sample_logp])


# What is drawn, and from which context


@fault(
    "engine/temperatures-in-turn",
    "the completions of a group are drawn at temperatures from half to twice the one asked for, so that they differ",
    "sampler/temperature",
    "sampler/mismatch",
    fits=is_unfiltered,
)
class TemperaturesInTurn(Wrapped):
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        if sampling.greedy:
            return self.inner.generate(requests, sampling, **noise)
        groups: Groups = []
        for request in requests:
            drawn = list(request.drawn(sampling))
            group: list[Completion] = []
            for sample in drawn:
                heat = 0.5 * 4 ** (sample % 5 / 4)
                warmed = replace(sampling, temperature=sampling.temperature * heat)
                group += self.inner.generate([replace(request, samples=(sample,))], warmed, **noise)[0]
            groups.append(group)
        return groups


@fault(
    "engine/middle-chunk-lost",
    "a chunk in the middle of every prompt is lost on the way to the engine",
    "sampler/other-prompt",
    strengths=(4, 6),
)
class MiddleChunkLost(Wrapped):
    def asked(self, request: Request) -> Request:
        middle, lost = len(request.tokens) // 2, int(self.strength)
        return replace(request, tokens=(*request.tokens[: middle - lost // 2], *request.tokens[middle + lost // 2 :]))


@fault(
    "engine/padded-on-the-right",
    "prompts are padded on the right, and the engine goes on after the padding",
    "sampler/other-prompt",
    "sampler/mismatch",
    strengths=(2, 5),
)
class PaddedOnTheRight(Wrapped):
    def asked(self, request: Request) -> Request:
        padding = (self.tokenizer.pad_token_id,) * int(self.strength)
        return replace(request, tokens=(*request.tokens, *padding))


# What comes back


@fault(
    "engine/first-token-sliced-off",
    "completions come back without their first token, the text with it, as where a prompt is a token shorter",
    "output/text",
    "sampler/mismatch",
    "sampler/other-prompt",
)
class FirstTokenSlicedOff(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        if len(completion.tokens) < 2:
            return completion
        return replace(completion, **{name: getattr(completion, name)[1:] for name in FIELDS})


@fault(
    "engine/prompt-tail-in-tokens",
    "the prompt's last token stands at the front of every completion and counts as sampled",
    "mask/not-actions",
    "sampler/mismatch",
    "output/text",
    fits=is_one_turn,
)
class PromptTailInTokens(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        if len(completion.tokens) >= request.limit(sampling):
            return completion
        front: dict[str, Any] = {"tokens": request.tokens[-1], "action": True, "sample_logp": 0.0, "filtered_logp": 0.0}
        longer: dict[str, Any] = {name: (front[name], *getattr(completion, name)) for name in FIELDS}
        return replace(completion, **longer)


@fault(
    "engine/ids-of-another-vocabulary",
    "the server numbers tokens from another start than the trainer: ids are off by one, texts are right",
    "output/text",
    "sampler/mismatch",
    "model/tokenizer",
)
class IdsOfAnotherVocabulary(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        ends, size = self.inner.eos_ids, len(self.tokenizer)
        tokens = tuple(token if token in ends else max(7, (token + 1) % size) for token in completion.tokens)
        return replace(completion, tokens=tokens)


@fault(
    "engine/second-half-no-action",
    "the second half of every completion is marked as the environment's",
    "mask/not-actions",
    "mask/end",
)
class SecondHalfNoAction(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        kept = (len(completion.tokens) + 1) // 2
        rest = len(completion.tokens) - kept
        front = cut(completion, kept)
        return replace(
            completion,
            action=(*front.action, *(False,) * rest),
            sample_logp=(*front.sample_logp, *(0.0,) * rest),
            filtered_logp=(*front.filtered_logp, *(0.0,) * rest),
        )


@fault(
    "engine/text-twice",
    "every chunk of the stream is put into the text twice",
    "output/text",
)
class TextTwice(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text="".join(2 * character for character in completion.text))


@fault(
    "engine/text-not-returned",
    "the server returns tokens alone, and the text that is judged is empty",
    "output/text",
    "output/unparseable",
)
class TextNotReturned(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text="")


@fault(
    "engine/tags-parsed-away",
    "the server reads tags as its own and takes them out of the text",
    "output/text",
    "output/unparseable",
    also={"rewards": ([{"name": "task"}],)},
    fits=lambda config: is_native(config) and asks_for_tags(config),
)
class TagsParsedAway(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return replace(completion, text=re.sub(r"</?\w+>", "", completion.text))


# Healthy: an engine that looks odd and is right


class OneCompletionAtATime(Wrapped):
    """Asks for every completion by itself."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        def alone(request: Request, sample: int) -> Completion:
            return self.inner.generate([replace(request, samples=(sample,))], sampling, **noise)[0][0]

        return [[alone(request, sample) for sample in request.drawn(sampling)] for request in requests]


@lookalike("engine of one completion at a time", is_native)
def healthy_one_at_a_time(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, OneCompletionAtATime)
