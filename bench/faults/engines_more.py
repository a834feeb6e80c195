"""Samplers with what servers offer for writing and serving: watermarks, guidance, drafts, penalties on length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import lookalike
from faults.engines import (
    Decoded,
    Groups,
    Wrapped,
    fault,
    is_native,
    is_one_turn,
    is_unfiltered,
    reporting,
    with_engine,
)
from keel.base.types import Completion
from keel.models.head import evaluating
from keel.rollout import Request, SamplingParams

Config = Mapping[str, Any]


def is_plain(config: Config) -> bool:
    """Whether a completion is one short turn, drawn from the policy's own distribution."""
    return is_unfiltered(config) and is_one_turn(config)


@fault(
    "engine/likeliest-left-out",
    "at most places the likeliest tokens are left out in favour of the last that is likely enough, for variety",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(0.02, 0.03),
    fits=is_plain,
)
class LikeliestLeftOut(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        probability = logits.softmax(-1)
        likely = probability >= self.strength
        last = probability.masked_fill(~likely, 2.0).amin(-1, keepdim=True)
        excluded = likely & (probability > last)
        return logits.masked_fill(excluded & (contexts.sum(-1, keepdim=True) % 3 > 0), -torch.inf)


@fault(
    "engine/watermarked",
    "half of the vocabulary, another half after each token, is made likelier, so that texts can be told from others",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(2.0, 3.0),
    fits=is_plain,
)
class Watermarked(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        token = torch.arange(logits.shape[-1], device=logits.device)
        green = (token * 7919 + contexts[:, -1:] * 104729) // 3 % 2 == 0
        return logits + self.strength * green


@fault(
    "engine/guided-away-from-no-prompt",
    "logits are pushed away from those without the prompt, as by a guidance scale that was left on",
    "sampler/mismatch",
    "sampler/filter",
    strengths=(2.0, 4.0),
    fits=is_plain,
)
class Guided(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        return logits + self.strength * (logits - self.logits(contexts[:, prompt - 1 :]))


@fault(
    "engine/end-made-likelier",
    "the end token's logit grows with every token, so that answers are kept short",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(6.0, 8.0),
    fits=is_plain,
)
class EndMadeLikelier(Decoded):
    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        written = contexts.shape[-1] - prompt
        shaped = logits.clone()
        shaped[:, sorted(self.inner.eos_ids)] += self.strength * (1 + written)
        return shaped


class Rescored(Wrapped):
    """Log-probabilities are reported of logits that are not those that tokens were drawn from."""

    def reported(self, logits: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        raise NotImplementedError

    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        ids = torch.tensor([*request.tokens, *completion.tokens], device=next(self.model.parameters()).device)
        begin = len(request.tokens)
        with evaluating(self.model):
            logits = self.model(input_ids=ids[None]).logits[0, begin - 1 : -1].float()
        logits = self.reported(logits / (sampling.temperature or 1.0), ids[begin:], ids[begin - 1 : -1])
        return reporting(completion, logits.log_softmax(-1).gather(-1, ids[begin:, None]).squeeze(-1).tolist())


@fault(
    "engine/logp-of-the-list-alone",
    "log-probabilities are normalised over the few tokens that the server lists, as if there were no others",
    "sampler/mismatch",
    "sampler/filter",
    strengths=(1, 2),
    fits=is_plain,
)
class ListAlone(Rescored):
    def reported(self, logits: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        listed = torch.zeros_like(logits, dtype=torch.bool)
        listed.scatter_(-1, logits.topk(int(self.strength)).indices, True)
        return logits.masked_fill(~listed.scatter_(-1, tokens[:, None], True), -torch.inf)


@fault(
    "engine/logp-of-the-draft",
    "tokens are the policy's, and the log-probabilities beside them those of the draft model that proposed them",
    "sampler/mismatch",
    "sampler/other-model",
    strengths=(1.0, 1.5),
    fits=is_plain,
)
class LogpOfTheDraft(Rescored):
    def reported(self, logits: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        drawn = torch.Generator().manual_seed(17)
        size = logits.shape[-1]
        habits = torch.randn(size, size, generator=drawn).to(logits.device)
        return logits + self.strength * habits[before]


# Healthy


class OneByOne(Wrapped):
    """Prompts are sent one after the other, the last one first, and what comes back is put in order."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        answered = [self.inner.generate([request], sampling, **noise)[0] for request in reversed(requests)]
        return answered[::-1]


@lookalike("engine that is asked one prompt after the other, the last one first", is_native)
def healthy_one_by_one(config: Config, random: Random) -> dict[str, Any]:
    return with_engine(config, OneByOne)
