"""Engines as their users report them: weights swapped under a completion, resumed outputs, seeds, caches, defaults."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

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
    reporting,
    with_engine,
)
from faults.engines_field import FIELDS
from faults.models import is_chat
from faults.rewards import chance_of
from keel.base.types import Completion
from keel.models.head import evaluating
from keel.rollout import Request, SamplingParams
from keel.rollout.sampling import block_shape, draw, gumbel

# Which weights


@fault(
    "engine/begun-before-the-sync",
    "completions are begun with the weights before a sync and gone on with those after it, in the middle of a text",
    "sampler/stale",
    "sampler/mismatch",
    fits=lambda config: is_unfiltered(config) and is_synced(config),
)
class BegunBeforeTheSync(Decoded, Copied):
    def prepare(self) -> None:
        self.before = copy.deepcopy(self.model)

    def load(self, weights: dict[str, Tensor]) -> None:
        self.before.load_state_dict(self.model.state_dict())
        super().load(weights)

    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        if contexts.shape[1] - prompt >= 2:
            return self.logits(contexts)
        with evaluating(self.before):
            return self.before(input_ids=contexts).logits[:, -1].float()


# What is reported


@fault(
    "engine/first-logp-zero",
    "a completion's first token is reported with 0, as the first of a prompt is",
    "sampler/mismatch",
    "sampler/unreported",
)
class FirstLogpZero(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return reporting(completion, (0.0, *completion.sample_logp[1:]))


# What is drawn


@fault(
    "engine/penalised-and-reported-so",
    "a repetition penalty of the model's generation config is drawn with, and reported with",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(1.1, 1.2, 1.3),
    fits=is_unfiltered,
)
class PenalisedAndReportedSo(Decoded):
    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        logits = self.logits(contexts)
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, contexts, True)
        return torch.where(seen, torch.where(logits > 0, logits / self.strength, logits * self.strength), logits)


@fault(
    "engine/cache-in-few-bits",
    "keys and values are kept in three or four bits",
    "sampler/precision",
    "sampler/mismatch",
    strengths=(3, 4),
    fits=is_unfiltered,
)
class CacheInFewBits(Decoded):
    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        def rounded(module: Any, given: Any, out: Tensor) -> Tensor:
            step = out.abs().amax(-1, keepdim=True).clamp_min(1e-6) / (2 ** (int(self.strength) - 1) - 1)
            return (out / step).round() * step

        parts = [part for name, part in self.model.named_modules() if name.endswith(("k_proj", "v_proj"))]
        hooks = [part.register_forward_hook(rounded) for part in parts]
        try:
            return self.logits(contexts)
        finally:
            for hook in hooks:
                hook.remove()


@fault(
    "engine/chunked-prefill-restarts",
    "the prompt is read in two chunks, and the second one's positions begin at 0 again",
    "sampler/mismatch",
    "sampler/other-prompt",
    fits=is_unfiltered,
)
class ChunkedPrefillRestarts(Decoded):
    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        positions, half = torch.arange(contexts.shape[1], device=contexts.device), prompt // 2
        positions = torch.where(positions < half, positions, positions - half)
        with evaluating(self.model):
            return self.model(input_ids=contexts, position_ids=positions.expand_as(contexts)).logits[:, -1].float()


@fault(
    "engine/forked-after-the-first-token",
    "a group is forked from one row after its first token, which all of its completions share",
    "sampler/noise",
    "reward/constant",
    fits=lambda config: is_unfiltered(config) and is_one_turn(config),
)
class ForkedAfterTheFirstToken(Decoded):
    def group(self, request: Request, sampling: SamplingParams, keys: Tensor) -> list[Completion]:
        self.root = request.start, sampling, keys[:1]
        return super().group(request, sampling, keys)

    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        start, sampling, key = self.root
        if contexts.shape[1] > prompt or sampling.greedy:
            return logits
        noise = gumbel(key, torch.full_like(key, start), sum(block_shape(logits.shape[-1])))
        token = draw(logits[:1], sampling, noise)[0]
        return torch.full_like(logits, -torch.inf).index_fill(1, token.to(logits.device), 0.0)


@fault(
    "engine/replicas-of-one-seed",
    "the completions of a group are shared out over replicas that were started with one seed, and repeat each other",
    "sampler/noise",
    "reward/constant",
    strengths=(2, 4),
    fits=is_one_turn,
)
class ReplicasOfOneSeed(Wrapped):
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        share = max(1, sampling.num_generations // int(self.strength))
        groups = self.inner.generate(requests, sampling, **noise)
        return [[group[place % share] for place in range(len(group))] for group in groups]


# What is asked


@fault(
    "engine/thought-opened-by-the-server",
    "the server's own template opens a block of thought after the assistant's header",
    "sampler/other-prompt",
    fits=lambda config: is_native(config) and is_chat(config),
)
class ThoughtOpenedByTheServer(Wrapped):
    def asked(self, request: Request) -> Request:
        opened = self.tokenizer.encode("<think>\n", add_special_tokens=False)
        return request if request.start else replace(request, tokens=(*request.tokens, *opened))


@fault(
    "engine/limit-counts-the-prompt",
    "the limit of new tokens counts those of the prompt too, and leaves one or two for the answer",
    "output/truncated",
    fits=is_one_turn,
)
class LimitCountsThePrompt(Wrapped):
    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        asked = [replace(r, max_new=max(1, r.limit(sampling) - len(r.tokens))) for r in requests]
        return self.inner.generate(asked, sampling, **noise)


# What comes back


@fault(
    "engine/partial-output-twice",
    "after an interruption the resumed output holds the first tokens already, and they are put before it once more",
    "output/text",
    "sampler/mismatch",
    "mask/not-actions",
    also={"rollout.max_completion_length": (24,)},
    fits=is_one_turn,
)
class PartialOutputTwice(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        done = (len(completion.tokens) + 1) // 2
        if len(completion.tokens) + done > request.limit(sampling):
            return completion
        longer: dict[str, Any] = {
            name: (*getattr(completion, name)[:done], *getattr(completion, name)) for name in FIELDS
        }
        return replace(completion, **longer)


@fault(
    "engine/failed-requests-answered-empty",
    "requests that failed come back as an end token alone, with a log-probability of 0",
    "sampler/mismatch",
    "output/unparseable",
    "mask/not-actions",
    strengths=(0.3, 0.5),
    fits=is_one_turn,
)
class FailedRequestsAnsweredEmpty(Wrapped):
    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        if chance_of(f"{request.key} {completion.sample_logp} {completion.text}") >= self.strength:
            return completion
        return Completion((self.tokenizer.eos_token_id,), (True,), (0.0,), (0.0,), "", "eos")


@fault(
    "engine/batch-of-the-step-before",
    "the queue is one batch behind: each step gets the completions of the step before, which had other problems",
    "sampler/swapped",
    "sampler/stale",
    fits=is_one_turn,
)
class BatchOfTheStepBefore(Wrapped):
    last: Groups | None = None

    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        last, self.last = self.last, groups
        fitting = last is not None and [len(group) for group in last] == [len(group) for group in groups]
        return last if last is not None and fitting else groups


# Healthy: engines that look odd and are right


class AsksTwice(Wrapped):
    """Asks for everything twice, as a client that hedges does, and keeps the first answer: both are the same."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        answers = [self.inner.generate(requests, sampling, **noise) for _ in range(2)]
        return answers[0]


@lookalike("engine that asks twice and keeps the first answer", is_native)
def healthy_hedging_engine(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, AsksTwice)


class WrittenBackwards(Copied):
    """Has a copy of the policy that is written tensor by tensor, the last one first, by way of the processor."""

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in reversed(self.model.state_dict().items()):
            tensor.copy_(weights[name].cpu().clone())


@lookalike("engine with a copy whose last tensor is written first", is_native)
def healthy_backwards_sync(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, WrittenBackwards)
