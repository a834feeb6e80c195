"""Engines as servers get them wrong: caches that are not emptied, limits and ends of their own, mixed-up batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from faults.base import option
from faults.engines import Decoded, Wrapped, fault, is_native, is_one_turn, is_synced, is_unfiltered, reporting
from keel.models.head import evaluating


def has_several_prompts(config: Any) -> bool:
    return is_native(config) and option(config, "rollout.prompts_per_step", 16) > 1


# What is reported


@fault(
    "engine/logp-rounded",
    "log-probabilities are rounded to whole numbers on the way",
    "sampler/mismatch",
    "sampler/precision",
)
class LogpRounded(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [float(round(logp)) for logp in completion.sample_logp])


@fault("engine/logp-floored", "log-probabilities under −1 are reported as −1", "sampler/mismatch")
class LogpFloored(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [max(-1.0, logp) for logp in completion.sample_logp])


@fault(
    "engine/logp-all-zero",
    "zeros are reported where log-probabilities should be",
    "sampler/mismatch",
    "sampler/unreported",
)
class LogpAllZero(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [0.0] * len(completion.tokens))


# What is drawn


@fault(
    "engine/prefix-cache-stale",
    "the cache of prompts outlives the sync: a completion's first token is of the weights before it",
    "sampler/stale",
    "sampler/mismatch",
    fits=lambda config: is_unfiltered(config) and is_synced(config),
)
class PrefixCacheStale(Decoded):
    def __init__(self, model: nn.Module, tokenizer: Any, *, strength: float = 0.0, own_weights: bool = False) -> None:
        super().__init__(model, tokenizer, strength=strength, own_weights=own_weights)
        self.first = copy.deepcopy(model)

    def next_logits(self, contexts, prompt):
        if contexts.shape[1] > prompt:
            return self.logits(contexts)
        with evaluating(self.first):
            return self.first(input_ids=contexts).logits[:, -1].float()


@fault(
    "engine/first-token-greedy",
    "the first token of a completion is always the likeliest, and the others are drawn",
    "sampler/mismatch",
    "sampler/filter",
    fits=is_unfiltered,
)
class FirstTokenGreedy(Decoded):
    def shaped(self, logits, contexts, prompt):
        return logits * 1e4 if contexts.shape[1] == prompt else logits


@fault(
    "engine/best-of-two",
    "two completions are drawn for each, and the likelier one is returned",
    "sampler/mismatch",
    "sampler/filter",
)
class BestOfTwo(Wrapped):
    def generate(self, requests, sampling, **noise):
        groups = self.inner.generate(requests, sampling, **noise)
        others = self.inner.generate(requests, sampling, **{**noise, "attempt": noise.get("attempt", 0) + 1009})
        return [
            [max(pair, key=lambda completion: sum(completion.sample_logp)) for pair in zip(group, other, strict=True)]
            for group, other in zip(groups, others, strict=True)
        ]


# What is asked, and whose completions come back


@fault(
    "engine/prefix-collision",
    "prompts of one length share a key of the cache: every second one is continued as the one before",
    "sampler/other-prompt",
    "sampler/swapped",
    fits=has_several_prompts,
)
class PrefixCollision(Wrapped):
    def generate(self, requests, sampling, **noise):
        asked = [
            replace(request, tokens=requests[place - place % 2].tokens) if not request.start else request
            for place, request in enumerate(requests)
        ]
        return self.inner.generate(asked, sampling, **noise)


@fault(
    "engine/last-one-copied",
    "the batch's last problems get the completions of others, as where ranks have shares of different size",
    "sampler/swapped",
    fits=has_several_prompts,
)
class LastOneCopied(Wrapped):
    def regrouped(self, groups, requests, sampling):
        half = (len(groups) + 1) // 2
        sized = [len(group) == len(groups[0]) for group in groups]
        return [*groups[:half], *groups[: len(groups) - half]] if all(sized) else groups


# Where it ends


@fault(
    "engine/own-limit",
    "the server has a limit of tokens of its own, and one that is far shorter",
    "output/truncated",
    fits=is_one_turn,
)
class OwnLimit(Wrapped):
    def sampling(self, sampling):
        return replace(sampling, max_completion_length=1)


@fault(
    "engine/never-stops",
    "the end token is ignored, as a benchmark's option has it: every completion runs to the limit",
    "output/truncated",
    "mask/end",
    "model/end-token",
    fits=is_one_turn,
)
class NeverStops(Wrapped):
    def sampling(self, sampling):
        return replace(sampling, ignore_eos=True)


@fault(
    "engine/ends-called-cut",
    "completions that end by themselves are reported as cut at the limit",
    "mask/end",
    "output/truncated",
)
class EndsCalledCut(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, stop_reason="length")


@fault(
    "engine/padding-trained",
    "completions come padded to the limit, and the padding counts as sampled",
    "mask/end",
    "mask/not-actions",
    fits=is_one_turn,
)
class PaddingTrained(Wrapped):
    def changed(self, completion, request, sampling):
        more = request.limit(sampling) - len(completion.tokens)
        zeros = (0.0,) * more
        return replace(
            completion,
            tokens=(*completion.tokens, *(self.tokenizer.pad_token_id,) * more),
            action=(*completion.action, *(True,) * more),
            sample_logp=(*completion.sample_logp, *zeros),
            filtered_logp=(*completion.filtered_logp, *zeros),
        )


# Several turns


class TurnsRewritten(Wrapped):
    """Continues later turns from another context than the one that was sampled."""

    def asked(self, request):
        prompt = len(request.tokens) - request.start
        return replace(request, tokens=self.context_of(request.tokens, prompt)) if request.start else request

    def context_of(self, tokens: tuple[int, ...], prompt: int) -> tuple[int, ...]:
        return tokens


class EarlierTurnStripped(TurnsRewritten):
    """Leaves out what the model wrote first, as templates do that drop earlier thoughts."""

    def context_of(self, tokens, prompt):
        ends = [place for place in range(prompt, len(tokens)) if tokens[place] in self.inner.eos_ids]
        return (*tokens[:prompt], *tokens[ends[0] :]) if ends else tokens


class ReplyLost(TurnsRewritten):
    """Leaves out the last characters of what the tool said."""

    def context_of(self, tokens, prompt):
        return tokens[:-6]
