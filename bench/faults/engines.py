"""Engines that report, draw, cut, mix up or sync something else than they should: Keel's own around one fault each."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, is_float32, lookalike, operator, option, path_of
from keel.base.types import Completion
from keel.models.head import evaluating
from keel.rollout import EngineWrapper, Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.sampling import block_shape, draw, gumbel, row_key

Config = Mapping[str, Any]
Groups = list[list[Completion]]


def is_native(config: Config) -> bool:
    """Whether sampling is Keel's own, in the policy's precision."""
    return option(config, "rollout.engine", "native") == "native" and option(config, "rollout.dtype", "auto") == "auto"


def is_unfiltered(config: Config) -> bool:
    """Whether tokens are drawn from the policy's own distribution until its end token."""
    filters = ("top_p", 1), ("top_k", 0), ("min_p", 0), ("stop", ())
    return is_native(config) and all(option(config, f"rollout.{name}", off) in (off, []) for name, off in filters)


def is_one_turn(config: Config) -> bool:
    """Whether a completion is one turn of a few tokens."""
    short = option(config, "rollout.max_completion_length", 64) <= 24
    return is_native(config) and option(config, "rollout.max_turns", 1) == 1 and short


def has_short_answers(config: Config) -> bool:
    """Whether an answer is a token or two: one turn, without tags around it."""
    return is_one_turn(config) and option(config, "task.format") != "answer_tag"


def is_synced(config: Config) -> bool:
    """Whether every rollout is meant to be of the newest weights."""
    return is_native(config) and option(config, "rollout.max_staleness", 0) == 0


def has_lora(config: Config) -> bool:
    return is_synced(config) and option(config, "model.lora") is not None


def has_full_weights(config: Config) -> bool:
    return is_synced(config) and option(config, "model.lora") is None


def with_engine(config: Config, cls: type, changes: Mapping[str, Any] = {}, **parameters: Any) -> dict[str, Any]:
    """The configuration with an engine of this package, without the options that only Keel's own reads."""
    changed = edited(config, {"rollout.engine": {"name": path_of(cls), **parameters}, **changes})
    for native_only in ("kv_cache_gib", "cuda_graphs", "dtype"):
        changed["rollout"].pop(native_only, None)
    return changed


def fault(
    name: str,
    breaks: str,
    *codes: str,
    strengths: Sequence[float] = (),
    also: Mapping[str, Sequence[Any]] = {},
    fits: Callable[[Any], bool] = is_native,
) -> Callable[[type[Wrapped]], type[Wrapped]]:
    """Registers an engine as an operator: one of `strengths` is passed to it, other options are drawn from `also`."""

    def register(cls: type[Wrapped]) -> type[Wrapped]:
        def apply(config: Config, random: Random) -> dict[str, Any]:
            parameters = {"strength": random.choice(strengths)} if strengths else {}
            changes = {path: random.choice(values) for path, values in also.items()}
            return with_engine(config, cls, changes, **parameters)

        operator(name, breaks, *codes, fits=fits)(apply)
        return cls

    return register


class Wrapped(EngineWrapper):
    """Keel's engine with hooks before and after it; by itself it changes nothing."""

    inner: NativeEngine

    def __init__(self, model: nn.Module, tokenizer: Any, *, strength: float = 0.0, own_weights: bool = False) -> None:
        super().__init__(NativeEngine(model, tokenizer, copy=own_weights))
        self.tokenizer, self.strength = tokenizer, strength

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def asked(self, request: Request) -> Request:
        """What the inner engine is asked in place of a request."""
        return request

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def noise(self, noise: dict[str, int]) -> dict[str, int]:
        return noise

    def changed(self, completion: Completion, request: Request, sampling: SamplingParams) -> Completion:
        return completion

    def regrouped(self, groups: Groups, requests: Sequence[Request], sampling: SamplingParams) -> Groups:
        return [
            [self.changed(completion, request, sampling) for completion in group]
            for request, group in zip(requests, groups, strict=True)
        ]

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        asked = [self.asked(request) for request in requests]
        groups = self.inner.generate(asked, self.sampling(sampling), **self.noise(noise))
        return self.regrouped(groups, requests, sampling)

    def logits(self, contexts: Tensor) -> Tensor:
        """Of the token after each context, `[B, V]`."""
        with evaluating(self.model):
            return self.model(input_ids=contexts).logits[:, -1].float()

    def rescored(self, completion: Completion, request: Request, temperature: float) -> Completion:
        """The completion with the engine's model's log-probabilities at another temperature."""
        ids = torch.tensor([[*request.tokens, *completion.tokens]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        logp = (logits / temperature).log_softmax(-1)
        picked = logp.gather(-1, ids[0, len(request.tokens) :, None]).squeeze(-1)
        return reporting(completion, picked.tolist())


def reporting(completion: Completion, logp: Sequence[float]) -> Completion:
    """The completion with other log-probabilities, before and after filters."""
    return replace(completion, sample_logp=tuple(logp), filtered_logp=tuple(logp))


def cut(completion: Completion, length: int) -> Completion:
    """The completion's first tokens, with the text as it was."""
    names = ("tokens", "action", "sample_logp", "filtered_logp")
    return replace(completion, **{name: getattr(completion, name)[:length] for name in names})


# What is reported


@fault(
    "engine/logp-of-a-neighbour",
    "each token is reported with the log-probability of the token before or after it",
    "sampler/mismatch",
    strengths=(-1, 1),
)
class LogpOfNeighbour(Wrapped):
    def changed(self, completion, request, sampling):
        logp = completion.sample_logp
        return reporting(completion, (*logp[1:], 0.0) if self.strength > 0 else (0.0, *logp[:-1]))


@fault(
    "engine/logp-without-temperature",
    "log-probabilities are reported at temperature 1 while sampling has another",
    "sampler/temperature",
    also={"rollout.temperature": (0.6, 0.7, 0.8, 1.2)},
)
class LogpWithoutTemperature(Wrapped):
    def changed(self, completion, request, sampling):
        return self.rescored(completion, request, 1.0)


@fault(
    "engine/logp-in-another-base",
    "logarithms are reported to base 2 or 10",
    "sampler/mismatch",
    strengths=(2, 10),
)
class LogpInAnotherBase(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [logp / math.log(self.strength) for logp in completion.sample_logp])


@fault(
    "engine/logp-plus-constant",
    "a constant is added to every reported log-probability, as where a normaliser is forgotten",
    "sampler/mismatch",
    strengths=(-1.0, -0.4, -0.15),
)
class LogpPlusConstant(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [logp + self.strength for logp in completion.sample_logp])


@fault(
    "engine/logp-mean-of-the-sequence",
    "every token is reported with the mean log-probability of its completion",
    "sampler/mismatch",
)
class LogpMean(Wrapped):
    def changed(self, completion, request, sampling):
        logp = completion.sample_logp
        return reporting(completion, [sum(logp) / len(logp)] * len(logp))


@fault("engine/logp-is-probability", "probabilities are reported in place of their logarithms", "sampler/mismatch")
class LogpIsProbability(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, [math.exp(logp) for logp in completion.sample_logp])


@fault(
    "engine/logp-of-the-likeliest",
    "the likeliest token's log-probability is reported in place of the drawn one's, as top-1 of a server's list",
    "sampler/mismatch",
)
class LogpOfTheLikeliest(Wrapped):
    def changed(self, completion, request, sampling):
        ids = torch.tensor([[*request.tokens, *completion.tokens]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        return reporting(completion, logp.amax(-1).tolist())


@fault(
    "engine/logp-of-the-whole-prompt",
    "the first token is reported with the prompt's log-probability added to its own",
    "sampler/mismatch",
)
class LogpWithPrompt(Wrapped):
    def changed(self, completion, request, sampling):
        ids = torch.tensor([request.tokens], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logp = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        prompt = float(logp.gather(-1, ids[0, 1:, None]).sum())
        return reporting(completion, (completion.sample_logp[0] + prompt, *completion.sample_logp[1:]))


# What is drawn


class HiddenOption(Wrapped):
    """Samples with an option of its own and reports log-probabilities as if it had not."""

    option = ""

    def sampling(self, sampling):
        value = int(self.strength) if self.option == "top_k" else self.strength
        return sampling if sampling.greedy else replace(sampling, **{self.option: value})

    def changed(self, completion, request, sampling):
        return reporting(completion, completion.sample_logp)


@fault(
    "engine/hidden-top-p",
    "tokens are drawn from a nucleus that nobody asked for",
    "sampler/filter",
    strengths=(0.5, 0.6, 0.7, 0.8),
    fits=is_unfiltered,
)
class HiddenTopP(HiddenOption):
    option = "top_p"


@fault(
    "engine/hidden-top-k",
    "tokens are drawn from the k likeliest, and nobody asked for that",
    "sampler/filter",
    strengths=(2, 3),
    fits=is_unfiltered,
)
class HiddenTopK(HiddenOption):
    option = "top_k"


@fault(
    "engine/hidden-min-p",
    "tokens are drawn under a min-p that nobody asked for",
    "sampler/filter",
    strengths=(0.3, 0.5),
    fits=is_unfiltered,
)
class HiddenMinP(HiddenOption):
    option = "min_p"


@fault(
    "engine/filtered-logp",
    "a hidden nucleus, and log-probabilities of what it leaves reported as those before it",
    "sampler/filter",
    strengths=(0.5, 0.6, 0.7, 0.8),
    fits=is_unfiltered,
)
class FilteredLogp(HiddenOption):
    option = "top_p"

    def changed(self, completion, request, sampling):
        return reporting(completion, completion.filtered_logp)


@fault(
    "engine/own-temperature",
    "the engine samples and reports at a temperature of its own, as a server's generation config has it",
    "sampler/temperature",
    strengths=(0.5, 0.6, 1.5, 1.8),
)
class OwnTemperature(Wrapped):
    def sampling(self, sampling):
        return sampling if sampling.greedy else replace(sampling, temperature=sampling.temperature * self.strength)


@fault(
    "engine/secret-temperature",
    "the engine samples at a temperature of its own and reports at the one that was asked for",
    "sampler/temperature",
    strengths=(0.5, 0.6, 1.6, 2.0),
)
class SecretTemperature(OwnTemperature):
    def changed(self, completion, request, sampling):
        return completion if sampling.greedy else self.rescored(completion, request, sampling.temperature)


class Decoded(Wrapped):
    """A whole forward pass for every token, with Keel's noise: what the native engine draws, where nothing is shaped.

    `shaped` changes the logits that tokens are drawn from; those before it are reported.
    """

    def shaped(self, logits: Tensor, contexts: Tensor, prompt: int) -> Tensor:
        return logits

    def next_logits(self, contexts: Tensor, prompt: int) -> Tensor:
        return self.logits(contexts)

    def generate(self, requests, sampling, *, seed=0, attempt=0, step=0):
        groups = []
        for request in map(self.asked, requests):
            request.check(sampling, self.context)
            keys = [row_key(seed, attempt, step, request.key, sample) for sample in request.drawn(sampling)]
            groups.append(self.group(request, sampling, torch.tensor(keys)))
        return self.regrouped(groups, requests, sampling)

    def group(self, request: Request, sampling: SamplingParams, keys: Tensor) -> list[Completion]:
        """All completions of a request; those that have ended are drawn on and cut afterwards."""
        prompt, rows = len(request.tokens), len(keys)
        contexts = torch.tensor([request.tokens] * rows, device=next(self.model.parameters()).device)
        keys, columns, ends = keys.to(contexts.device), [], torch.tensor(sorted(self.inner.eos_ids))
        for position in range(request.limit(sampling)):
            logits = self.next_logits(contexts, prompt)
            positions = torch.full_like(keys, request.start + position)
            noise = None if sampling.greedy else gumbel(keys, positions, sum(block_shape(logits.shape[-1])))
            tokens = draw(self.shaped(logits, contexts, prompt), sampling, noise)[0]
            logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            columns.append(logp.gather(-1, tokens[:, None]))
            contexts = torch.cat((contexts, tokens[:, None]), 1)
            if torch.isin(contexts[:, prompt:].cpu(), ends).any(1).all():
                break
        rows_of = zip(contexts[:, prompt:].tolist(), torch.cat(columns, 1).tolist(), strict=True)
        return [self.completion(tokens, logp) for tokens, logp in rows_of]

    def completion(self, tokens: list[int], logp: list[float]) -> Completion:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.inner.eos_ids), None)
        tokens, logp = tokens[:end], logp[:end]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = "length" if end is None else "eos"
        return Completion(tuple(tokens), (True,) * len(tokens), tuple(logp), tuple(logp), text, reason)


@fault(
    "engine/repetition-penalty",
    "tokens that stand in prompt or completion are made less likely, as a server's default does",
    "sampler/filter",
    strengths=(1.3, 1.5, 2.0),
    fits=is_unfiltered,
)
class RepetitionPenalty(Decoded):
    def shaped(self, logits, contexts, prompt):
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, contexts, True)
        penalised = torch.where(logits > 0, logits / self.strength, logits * self.strength)
        return torch.where(seen, penalised, logits)


@fault(
    "engine/presence-penalty",
    "a constant is taken off the logits of tokens that have occurred",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(1.0, 1.5, 2.0),
    fits=is_unfiltered,
)
class PresencePenalty(Decoded):
    def shaped(self, logits, contexts, prompt):
        seen = torch.zeros_like(logits).scatter_(1, contexts, 1.0)
        return logits - self.strength * seen


@fault(
    "engine/logit-bias",
    "the logits of every third token of the vocabulary are raised or lowered before tokens are drawn",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(-3.0, 2.0, 3.0),
    fits=is_unfiltered,
)
class LogitBias(Decoded):
    def shaped(self, logits, contexts, prompt):
        biased = torch.arange(logits.shape[-1], device=logits.device) % 3 == 1
        return logits + self.strength * biased


@fault(
    "engine/banned-tokens",
    "every n-th token of the vocabulary is never drawn, as under a list of bad words",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(3, 5),
    fits=is_unfiltered,
)
class BannedTokens(Decoded):
    def shaped(self, logits, contexts, prompt):
        banned = torch.arange(logits.shape[-1], device=logits.device) % int(self.strength) == 1
        banned[sorted(self.inner.eos_ids)] = False
        return logits.masked_fill(banned, -torch.inf)


@fault(
    "engine/min-tokens",
    "the end token may not be drawn before the completion has some tokens",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(3, 4),
    fits=lambda config: is_unfiltered(config) and has_short_answers(config),
)
class MinTokens(Decoded):
    def shaped(self, logits, contexts, prompt):
        held = logits.clone()
        if contexts.shape[1] - prompt < self.strength:
            held[:, sorted(self.inner.eos_ids)] = -torch.inf
        return held


@fault(
    "engine/softcapped-logits",
    "the engine's kernel squashes logits by a tanh that the model does not have",
    "sampler/mismatch",
    strengths=(3.0, 5.0),
    fits=is_unfiltered,
)
class SoftcappedLogits(Decoded):
    def next_logits(self, contexts, prompt):
        return self.strength * torch.tanh(self.logits(contexts) / self.strength)


@fault(
    "engine/draft-accepted",
    "tokens of a draft model are taken without the rejection that would make them the policy's",
    "sampler/mismatch",
    strengths=(1.2, 2.0),
    fits=is_unfiltered,
)
class DraftAccepted(Decoded):
    def shaped(self, logits, contexts, prompt):
        generator = torch.Generator().manual_seed(int(contexts.sum()))
        return logits + self.strength * torch.randn(logits.shape[-1], generator=generator).to(logits.device)


@fault(
    "engine/lost-cache",
    "the KV cache loses its oldest entries: only the last tokens are attended to",
    "sampler/mismatch",
    "sampler/other-prompt",
    strengths=(2, 3, 4),
    fits=is_unfiltered,
)
class LostCache(Decoded):
    def next_logits(self, contexts, prompt):
        return self.logits(contexts[:, -int(self.strength) :])


@fault(
    "engine/positions-jump",
    "the positions of the completion are off by some against those of the prompt",
    "sampler/mismatch",
    strengths=(16, 32),
    fits=is_unfiltered,
)
class PositionsJump(Decoded):
    def next_logits(self, contexts, prompt):
        positions = torch.arange(contexts.shape[1], device=contexts.device)
        positions = positions + (positions >= prompt - 1) * int(self.strength)
        with evaluating(self.model):
            return self.model(input_ids=contexts, position_ids=positions.expand_as(contexts)).logits[:, -1].float()


# What is asked


@fault(
    "engine/prompt-cut-left",
    "the engine drops the first tokens of a prompt",
    "sampler/other-prompt",
    strengths=(1, 2, 3),
)
class PromptCutLeft(Wrapped):
    def asked(self, request):
        return replace(request, tokens=request.tokens[int(self.strength) :] or request.tokens[-1:])


@fault(
    "engine/prompt-cut-right",
    "the engine drops the last tokens of a prompt",
    "sampler/other-prompt",
    strengths=(1, 2, 3),
)
class PromptCutRight(Wrapped):
    def asked(self, request):
        return replace(request, tokens=request.tokens[: -int(self.strength)] or request.tokens[:1])


@fault(
    "engine/one-more-bos",
    "the engine puts a BOS token before prompts that are complete",
    "sampler/other-prompt",
)
class OneMoreBos(Wrapped):
    def asked(self, request):
        return replace(request, tokens=(self.tokenizer.bos_token_id, *request.tokens))


@fault(
    "engine/template-twice",
    "the engine's server renders a rendered prompt as a user's message once more",
    "sampler/other-prompt",
)
class TemplateTwice(Wrapped):
    def asked(self, request):
        if request.start:
            return request
        text = self.tokenizer.decode(request.tokens)
        message = [{"role": "user", "content": text}]
        if self.tokenizer.chat_template is None:
            text = f"user: {text} assistant: "
        else:
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return replace(request, tokens=tuple(self.tokenizer.encode(text, add_special_tokens=False)))


@fault(
    "engine/system-prompt",
    "the engine's server puts a system prompt of its own before every prompt",
    "sampler/other-prompt",
)
class SystemPrompt(Wrapped):
    def asked(self, request):
        return replace(
            request, tokens=(*self.tokenizer.encode("Be brief. ", add_special_tokens=False), *request.tokens)
        )


@fault(
    "engine/prompt-retokenised",
    "the engine decodes and encodes prompts, which loses the spaces in them",
    "sampler/other-prompt",
)
class PromptRetokenised(Wrapped):
    def asked(self, request):
        text = self.tokenizer.decode(request.tokens).replace(" ", "")
        return replace(request, tokens=tuple(self.tokenizer.encode(text, add_special_tokens=False)) or request.tokens)


# Whose completions come back


@fault(
    "engine/shifted-by-one",
    "every problem gets the completions of the one before or after it",
    "sampler/swapped",
    strengths=(-1, 1),
)
class ShiftedByOne(Wrapped):
    def regrouped(self, groups, requests, sampling):
        shift = int(self.strength) % max(1, len(groups))
        return dealt([*groups[shift:], *groups[:shift]], groups)


@fault(
    "engine/as-completed",
    "completions come back in the order in which they ended, the shortest first",
    "sampler/swapped",
)
class AsCompleted(Wrapped):
    def regrouped(self, groups, requests, sampling):
        return dealt([sorted((c for group in groups for c in group), key=lambda c: (len(c.tokens), c.tokens))], groups)


@fault(
    "engine/interleaved",
    "completions come back sample by sample and are read problem by problem",
    "sampler/swapped",
)
class Interleaved(Wrapped):
    def regrouped(self, groups, requests, sampling):
        samples = max(map(len, groups), default=0)
        return dealt([[group[i] for group in groups if i < len(group)] for i in range(samples)], groups)


@fault(
    "engine/neighbours-swapped",
    "the completions of each pair of neighbouring problems change places",
    "sampler/swapped",
)
class NeighboursSwapped(Wrapped):
    def regrouped(self, groups, requests, sampling):
        pairs = [groups[i : i + 2][::-1] for i in range(0, len(groups), 2)]
        return dealt([group for pair in pairs for group in pair], groups)


def dealt(completions: Sequence[Sequence[Completion]], groups: Groups) -> Groups:
    """All completions in this order, in groups of the sizes that were asked for."""
    line = iter([completion for group in completions for completion in group])
    return [[next(line) for _ in group] for group in groups]


# What the text is


@fault(
    "engine/special-tokens-in-text",
    "the text that is judged shows the end token, or whatever else is special",
    "output/text",
)
class SpecialTokensInText(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, text=self.tokenizer.decode(completion.tokens, skip_special_tokens=False))


@fault("engine/prompt-in-text", "the text that is judged begins with the prompt", "output/text")
class PromptInText(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, text=self.tokenizer.decode(request.tokens) + completion.text)


@fault(
    "engine/text-of-other-ids",
    "tokens are turned into text by a vocabulary that is off by some places",
    "output/text",
    strengths=(1, 2),
)
class TextOfOtherIds(Wrapped):
    def changed(self, completion, request, sampling):
        size = len(self.tokenizer)
        ids = [(token + int(self.strength)) % size for token in completion.tokens if token not in self.inner.eos_ids]
        return replace(completion, text=self.tokenizer.decode(ids, skip_special_tokens=True))


@fault(
    "engine/text-cut",
    "the last characters of the text are lost, as where a stop string is cut off that was not there",
    "output/text",
    strengths=(1, 2),
)
class TextCut(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, text=completion.text[: -int(self.strength)])


@fault("engine/text-spaced", "tokens are joined into text with spaces around them", "output/text")
class TextSpaced(Wrapped):
    def changed(self, completion, request, sampling):
        pieces = [self.tokenizer.decode([token], skip_special_tokens=True) for token in completion.tokens]
        return replace(completion, text=" " + " ".join(filter(None, pieces)) + " .")


@fault(
    "engine/text-of-a-sibling",
    "tokens and texts of a group come from two lists of different order",
    "output/text",
)
class TextOfSibling(Wrapped):
    def regrouped(self, groups, requests, sampling):
        return [
            [replace(c, text=other.text) for c, other in zip(group, [*group[1:], *group[:1]], strict=True)]
            for group in groups
        ]


# Which noise


@fault("engine/copies", "all completions of a group are the first one", "sampler/noise")
class Copies(Wrapped):
    def regrouped(self, groups, requests, sampling):
        return [[group[0]] * len(group) for group in groups]


@fault("engine/pairs-of-copies", "every second completion of a group is a copy of the one before it", "sampler/noise")
class PairsOfCopies(Wrapped):
    def regrouped(self, groups, requests, sampling):
        return [[group[i - i % 2] for i in range(len(group))] for group in groups]


@fault("engine/seed-of-the-run", "the noise is the same at every step", "sampler/noise")
class SeedOfTheRun(Wrapped):
    def noise(self, noise):
        return {**noise, "step": 0, "attempt": 0}


@fault("engine/cached", "a prompt that was asked before gets the completions of that time", "sampler/noise")
class Cached(Wrapped):
    def regrouped(self, groups, requests, sampling):
        cache: dict[Any, list[Completion]] = vars(self).setdefault("cache", {})
        return [
            cache.setdefault((request.tokens, request.samples, sampling.temperature, request.limit(sampling)), group)
            if len(group) == len(request.drawn(sampling))
            else group
            for request, group in zip(requests, groups, strict=True)
        ]


# Where it ends, and what counts as sampled


@fault("engine/end-stripped", "the end token is cut off from tokens, with stop_reason eos", "mask/end")
class EndStripped(Wrapped):
    def changed(self, completion, request, sampling):
        ends = completion.stop_reason == "eos" and len(completion.tokens) > 1
        return cut(completion, -1) if ends else completion


@fault("engine/end-doubled", "the end token stands twice at the end", "mask/end")
class EndDoubled(Wrapped):
    def sampling(self, sampling):
        return replace(sampling, max_completion_length=max(1, sampling.max_completion_length - 1))

    def changed(self, completion, request, sampling):
        if completion.stop_reason != "eos" or len(completion.tokens) >= request.limit(sampling):
            return completion
        names = ("tokens", "action", "sample_logp", "filtered_logp")
        doubled = {name: (*getattr(completion, name), getattr(completion, name)[-1]) for name in names}
        return replace(completion, **doubled)


@fault("engine/end-not-trained", "the end token is no action", "mask/end", "mask/not-actions")
class EndNotTrained(Wrapped):
    def changed(self, completion, request, sampling):
        if completion.stop_reason != "eos":
            return completion
        unsampled = {name: (*getattr(completion, name)[:-1], 0.0) for name in ("sample_logp", "filtered_logp")}
        return replace(completion, action=(*completion.action[:-1], False), **unsampled)


@fault(
    "engine/past-the-end",
    "rows run on after their end token; the text is cut there, the tokens are not",
    "mask/end",
    also={"rollout.max_completion_length": (16, 24)},
    fits=is_one_turn,
)
class PastTheEnd(Wrapped):
    def sampling(self, sampling):
        return replace(sampling, ignore_eos=True)

    def changed(self, completion, request, sampling):
        end = next((i for i, token in enumerate(completion.tokens) if token in self.inner.eos_ids), None)
        if end is None:
            return completion
        text = self.tokenizer.decode(completion.tokens[:end], skip_special_tokens=True)
        return replace(completion, text=text, stop_reason="eos")


@fault(
    "engine/cut-and-called-eos",
    "completions are cut after a token or two and reported as ended by themselves",
    "mask/end",
)
class CutAndCalledEos(Wrapped):
    def changed(self, completion, request, sampling):
        if len(completion.tokens) < 2:
            return completion
        shorter = cut(completion, len(completion.tokens) // 2)
        text = self.tokenizer.decode(shorter.tokens, skip_special_tokens=True)
        return replace(shorter, text=text, stop_reason="eos")


@fault("engine/first-token-no-action", "the first token of every completion is no action", "mask/not-actions")
class FirstTokenNoAction(Wrapped):
    def changed(self, completion, request, sampling):
        unsampled = {name: (0.0, *getattr(completion, name)[1:]) for name in ("sample_logp", "filtered_logp")}
        return replace(completion, action=(False, *completion.action[1:]), **unsampled)


@fault(
    "engine/forced-prefix-trained",
    "an opening that the engine writes before every completion counts as sampled",
    "mask/not-actions",
    also={"rollout.max_completion_length": (24,)},
    fits=is_one_turn,
)
class ForcedPrefixTrained(Wrapped):
    opening = "(think) "

    def prefix(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self.opening, add_special_tokens=False))

    def asked(self, request):
        limit = request.max_new and max(1, request.max_new - len(self.prefix()))
        return replace(request, tokens=(*request.tokens, *self.prefix()), max_new=limit)

    def sampling(self, sampling):
        return replace(sampling, max_completion_length=max(1, sampling.max_completion_length - len(self.prefix())))

    def changed(self, completion, request, sampling):
        prefix, zeros = self.prefix(), (0.0,) * len(self.prefix())
        return replace(
            completion,
            tokens=(*prefix, *completion.tokens),
            action=(True,) * (len(prefix) + len(completion.tokens)),
            sample_logp=(*zeros, *completion.sample_logp),
            filtered_logp=(*zeros, *completion.filtered_logp),
            text=self.opening + completion.text,
        )


@fault(
    "engine/tokens-replaced",
    "a share of the tokens is another one than was drawn, as where text is encoded anew",
    "sampler/mismatch",
    strengths=(0.15, 0.3),
)
class TokensReplaced(Wrapped):
    def changed(self, completion, request, sampling):
        random, ends = Random(str((request.key, completion.tokens))), self.inner.eos_ids
        others = [token for token in range(len(self.tokenizer)) if token not in self.tokenizer.all_special_ids]
        tokens = tuple(
            random.choice(others) if token not in ends and random.random() < self.strength else token
            for token in completion.tokens
        )
        return replace(completion, tokens=tokens, text=self.tokenizer.decode(tokens, skip_special_tokens=True))


# Weights of its own


class Copied(Wrapped):
    """Samples with a copy of the policy, which `sync` brings up to date tensor by tensor."""

    shares_weights = False

    def __init__(self, model: nn.Module, tokenizer: Any, *, strength: float = 0.0, own_weights: bool = False) -> None:
        super().__init__(copy.deepcopy(model), tokenizer, strength=strength)
        self.version = 0
        self.prepare()

    def prepare(self) -> None:
        """Called once, on the fresh copy."""

    @torch.no_grad()
    def sync(self, policy, version=None):
        self.inner.release()
        self.load({name: tensor.detach() for name, tensor in policy.state_dict().items()})
        self.version = version

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(self.arriving(name, tensor, weights))

    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """What is written over a tensor."""
        return weights[name]


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    match = re.search(r"\.(?:layers|h)\.(\d+)\.", f".{name}")
    return int(match[1]) if match else None


def is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.is_floating_point() and layer_of(name) is not None


@fault(
    "engine/quantised",
    "the engine rounds its weights to a few bits at every sync",
    "sampler/precision",
    "sampler/mismatch",
    strengths=(3, 4),
    fits=has_full_weights,
)
class Quantised(Copied):
    def prepare(self):
        self.load({name: tensor.clone() for name, tensor in self.model.state_dict().items()})

    def arriving(self, name, held, weights):
        tensor = weights[name]
        step = tensor.abs().amax() / (2 ** (int(self.strength) - 1) - 1)
        return (tensor / step).round() * step if is_matrix(name, tensor) else tensor


@fault("sync/never", "the engine holds the weights that it was built with", "sampler/stale", fits=is_synced)
class NeverSynced(Copied):
    def load(self, weights):
        pass


@fault("sync/first-only", "only the first sync writes anything", "sampler/stale", fits=is_synced)
class SyncedOnce(Copied):
    written = False

    def load(self, weights):
        if not self.written:
            super().load(weights)
        self.written = True


@fault("sync/one-late", "each sync writes the weights of the sync before", "sampler/stale", fits=is_synced)
class OneLate(Copied):
    pending: dict[str, Tensor] | None = None

    def load(self, weights):
        if self.pending is not None:
            super().load(self.pending)
        self.pending = {name: tensor.clone() for name, tensor in weights.items()}


@fault(
    "sync/averaged",
    "a sync goes part of the way to the policy's weights",
    "sampler/stale",
    strengths=(0.2, 0.5),
    fits=is_synced,
)
class Averaged(Copied):
    def arriving(self, name, held, weights):
        return torch.lerp(held, weights[name], self.strength) if held.is_floating_point() else weights[name]


@fault(
    "sync/embeddings-missing",
    "embeddings and head are never written",
    "sampler/stale",
    fits=has_full_weights,
)
class EmbeddingsMissing(Copied):
    def arriving(self, name, held, weights):
        return weights[name] if layer_of(name) is not None else held


@fault(
    "sync/layers-missing",
    "the last layer and every second before it are never written",
    "sampler/stale",
    fits=is_synced,
)
class LayersMissing(Copied):
    def arriving(self, name, held, weights):
        layer, last = layer_of(name), max(layer_of(other) or 0 for other in weights)
        return held if layer is not None and (last - layer) % 2 == 0 else weights[name]


@fault("sync/attention-missing", "the attention's weights are never written", "sampler/stale", fits=is_synced)
class AttentionMissing(Copied):
    def arriving(self, name, held, weights):
        return held if "attn" in name else weights[name]


@fault(
    "sync/gate-and-up-swapped",
    "two matrices of the MLP change places, as where they are sent as one in the other order",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class GateAndUpSwapped(Copied):
    def arriving(self, name, held, weights):
        other = {"gate": "up", "up": "gate"}
        return weights[re.sub(r"\b(gate|up)(?=_proj)", lambda match: other[match[1]], name)]


@fault(
    "sync/transposed",
    "square matrices arrive transposed",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class Transposed(Copied):
    def arriving(self, name, held, weights):
        tensor = weights[name]
        return tensor.T if is_matrix(name, tensor) and tensor.shape[0] == tensor.shape[1] else tensor


@fault("sync/delta-twice", "each sync adds the difference since the last one twice", "sampler/stale", fits=is_synced)
class DeltaTwice(Copied):
    def arriving(self, name, held, weights):
        return 2 * weights[name] - held if held.is_floating_point() else weights[name]


@fault(
    "sync/lora-missing",
    "the engine samples without the adapter",
    "sampler/stale",
    fits=has_lora,
)
class LoraMissing(Copied):
    def arriving(self, name, held, weights):
        return torch.zeros_like(held) if "lora_B" in name else weights[name]


@fault(
    "sync/lora-scale",
    "the adapter acts at another scale in the engine",
    "sampler/stale",
    strengths=(0.5, 2.0, 4.0),
    fits=has_lora,
)
class LoraScale(Copied):
    def prepare(self):
        for module in self.model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling.update({name: self.strength * scale for name, scale in module.scaling.items()})


@fault(
    "sync/lora-half",
    "only one of the adapter's two factors is written",
    "sampler/stale",
    fits=has_lora,
)
class LoraHalf(Copied):
    def arriving(self, name, held, weights):
        return held if "lora_B" in name else weights[name]


# Healthy: engines that look odd and are right


@lookalike("engine that only counts", is_native)
def healthy_counting_engine(config: Config, random: Random) -> dict[str, Any]:
    return with_engine(config, Counting)


class Counting(Wrapped):
    """Counts what passes through it."""

    completions = 0

    def regrouped(self, groups, requests, sampling):
        self.completions += sum(map(len, groups))
        return groups


@lookalike("engine of one's own, token by token", lambda config: is_unfiltered(config) and is_float32(config))
def healthy_plain_engine(config: Config, random: Random) -> dict[str, Any]:
    return with_engine(config, Decoded)


@lookalike("engine with a copy that is synced", is_native)
def healthy_copied_engine(config: Config, random: Random) -> dict[str, Any]:
    return with_engine(config, Copied)


@lookalike("engine that samples in another order", is_native)
def healthy_reordering_engine(config: Config, random: Random) -> dict[str, Any]:
    return with_engine(config, Reordering)


class Reordering(Wrapped):
    """Asks longest prompts first and puts the answers back where they belong."""

    def generate(self, requests, sampling, **noise):
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
        groups = self.inner.generate([requests[i] for i in order], sampling, **noise)
        by_request = dict(zip(order, groups, strict=True))
        return [by_request[i] for i in range(len(requests))]
