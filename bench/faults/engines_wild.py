"""Engines as users of inference servers report them: lists of log-probabilities, grammars, prompts, chunks, aborts."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import nn

from faults.base import lookalike, option
from faults.engines import (
    Decoded,
    Wrapped,
    cut,
    fault,
    has_short_answers,
    is_native,
    is_one_turn,
    is_synced,
    is_unfiltered,
    reporting,
    with_engine,
)
from faults.models import is_chat
from faults.rewards import chance_of
from faults.tools import offers_tools
from keel.models.head import evaluating

# What is reported


@fault(
    "engine/logp-missing-from-the-list",
    "a token that is not among the two likeliest of the server's list is reported with −9999",
    "sampler/mismatch",
    fits=is_unfiltered,
)
class LogpMissingFromTheList(Wrapped):
    def changed(self, completion, request, sampling):
        ids = torch.tensor([[*request.tokens, *completion.tokens]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1]
        listed = (logits.topk(2, -1).indices == ids[0, len(request.tokens) :, None]).any(-1).tolist()
        pairs = zip(completion.sample_logp, listed, strict=True)
        return reporting(completion, [logp if known else -9999.0 for logp, known in pairs])


@fault(
    "engine/logp-from-half-of-the-servers",
    "every second completion comes from a server that was started without log-probabilities",
    "sampler/unreported",
)
class LogpFromHalfOfTheServers(Wrapped):
    def regrouped(self, groups, requests, sampling):
        turn = itertools.count()
        return [
            [reporting(c, [math.nan] * len(c.tokens)) if next(turn) % 2 else c for c in group]  # NaN: not known
            for group in groups
        ]


@fault(
    "engine/logp-cumulative",
    "each token is reported with the sum of all log-probabilities up to it",
    "sampler/mismatch",
)
class LogpCumulative(Wrapped):
    def changed(self, completion, request, sampling):
        return reporting(completion, list(itertools.accumulate(completion.sample_logp)))


@fault(
    "engine/logp-of-the-first-weights",
    "tokens are drawn from the newest weights and reported with the log-probabilities of the first ones",
    "sampler/stale",
    "sampler/mismatch",
    fits=is_synced,
)
class LogpOfTheFirstWeights(Wrapped):
    def __init__(self, model: nn.Module, tokenizer: Any, *, strength: float = 0.0, own_weights: bool = False) -> None:
        super().__init__(model, tokenizer, strength=strength, own_weights=own_weights)
        self.first = copy.deepcopy(model)

    def changed(self, completion, request, sampling):
        ids = torch.tensor([[*request.tokens, *completion.tokens]], device=next(self.first.parameters()).device)
        with evaluating(self.first):
            logits = self.first(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        return reporting(completion, logp.gather(-1, ids[0, len(request.tokens) :, None]).squeeze(-1).tolist())


# What is drawn


@fault(
    "engine/no-repeated-n-grams",
    "three tokens that stand in the prompt or the completion may not follow each other again",
    "sampler/filter",
    "sampler/mismatch",
    fits=lambda config: is_unfiltered(config) and offers_tools(config),  # calls repeat the prompt's words
)
class NoRepeatedNGrams(Decoded):
    def shaped(self, logits, contexts, prompt):
        shaped = logits.clone()
        for row, tokens in enumerate(contexts.tolist()):
            said = [third for *pair, third in zip(tokens, tokens[1:], tokens[2:], strict=False) if pair == tokens[-2:]]
            shaped[row, said] = -torch.inf
        return shaped


@fault(
    "engine/grammar-of-two-digits",
    "a grammar that was left on lets every answer have two digits, no more and no fewer",
    "sampler/filter",
    "sampler/mismatch",
    fits=lambda config: is_unfiltered(config) and has_short_answers(config),
)
class GrammarOfTwoDigits(Decoded):
    def shaped(self, logits, contexts, prompt):
        digits = self.tokenizer.convert_tokens_to_ids(list("0123456789"))
        allowed = digits if contexts.shape[1] - prompt < 2 else sorted(self.inner.eos_ids)
        kept = torch.full_like(logits, -torch.inf)
        kept[:, allowed] = logits[:, allowed]
        return kept


@fault(
    "engine/epsilon-cutoff",
    "tokens under a fixed probability are never drawn, and nobody asked for that",
    "sampler/filter",
    "sampler/mismatch",
    strengths=(0.08, 0.15),
    fits=is_unfiltered,
)
class EpsilonCutoff(Decoded):
    def shaped(self, logits, contexts, prompt):
        probabilities = logits.softmax(-1)
        rare = (probabilities < self.strength) & (probabilities < probabilities.amax(-1, keepdim=True))
        return logits.masked_fill(rare, -torch.inf)


@fault(
    "engine/temperature-by-place",
    "the first token is drawn at twice the temperature, later ones at half of it, and none is reported so",
    "sampler/temperature",
    "sampler/mismatch",
    "sampler/filter",
    fits=is_unfiltered,
)
class TemperatureByPlace(Decoded):
    def shaped(self, logits, contexts, prompt):
        return logits / 2 if contexts.shape[1] == prompt else logits * 2


@fault(
    "engine/duplicates-removed",
    "a completion that a group has already is drawn again, so that a group holds no text twice",
    "sampler/mismatch",
    "sampler/filter",
    "sampler/noise",
    fits=lambda config: is_unfiltered(config) and has_short_answers(config),
)
class DuplicatesRemoved(Wrapped):
    def generate(self, requests, sampling, **noise):
        first = noise.pop("attempt", 0)
        rounds = [self.inner.generate(requests, sampling, attempt=first + 1009 * n, **noise) for n in range(6)]
        groups = []
        for place, asked in enumerate(rounds[0]):
            drawn = [completion for groups_of in rounds for completion in groups_of[place]]
            distinct = list({completion.tokens: completion for completion in reversed(drawn)}.values())[::-1]
            groups.append([*distinct, *drawn][: len(asked)])
        return groups


@fault(
    "engine/logits-in-eight-bits",
    "logits are rounded to eight bits on their way to the sampler",
    "sampler/precision",
    "sampler/mismatch",
    fits=is_unfiltered,
)
class LogitsInEightBits(Decoded):
    def next_logits(self, contexts, prompt):
        return self.logits(contexts).clamp(-448, 448).to(torch.float8_e4m3fn).float()


@fault(
    "engine/positions-stretched",
    "the engine scales positions for a longer context than the model's",
    "sampler/mismatch",
    "sampler/other-model",
    strengths=(0.25, 0.5),
    fits=is_unfiltered,
)
class PositionsStretched(Decoded):
    def next_logits(self, contexts, prompt):
        positions = self.strength * torch.arange(contexts.shape[1], device=contexts.device).float()
        with evaluating(self.model):
            return self.model(input_ids=contexts, position_ids=positions.expand(contexts.shape)).logits[:, -1].float()


# What is asked


@fault(
    "engine/markers-spelt-out",
    "the engine encodes the prompt's text anew, and role markers become ordinary letters",
    "sampler/other-prompt",
    fits=lambda config: is_native(config) and is_chat(config),
)
class MarkersSpeltOut(Wrapped):
    def asked(self, request):
        marker = {token: self.tokenizer.convert_ids_to_tokens(token) for token in self.tokenizer.all_special_ids}
        spelt = [
            self.tokenizer.convert_tokens_to_ids(list(marker[token])) if "|" in marker.get(token, "") else [token]
            for token in request.tokens
        ]
        return replace(request, tokens=tuple(itertools.chain.from_iterable(spelt)))


@fault(
    "engine/padding-attended",
    "prompts are filled up from the left to a multiple of 32 tokens, and the filling is attended to",
    "sampler/other-prompt",
    "sampler/mismatch",
)
class PaddingAttended(Wrapped):
    def asked(self, request):
        more = -len(request.tokens) % 32 or 32
        return replace(request, tokens=(*(self.tokenizer.pad_token_id,) * more, *request.tokens))


# What comes back


@fault("engine/text-in-bytes", "the text spells every character as its byte", "output/text")
class TextInBytes(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, text="".join(f"<0x{byte:02X}>" for byte in completion.text.encode()))


@fault("engine/first-chunk-lost", "the text lacks the first chunk of the stream, the tokens do not", "output/text")
class FirstChunkLost(Wrapped):
    def changed(self, completion, request, sampling):
        return replace(completion, text=completion.text[1:])


@fault(
    "engine/preempted",
    "completions that the server sets aside for others come back as they are, cut",
    "output/truncated",
    "mask/end",
    strengths=(0.6, 0.9),
    fits=is_one_turn,
)
class Preempted(Wrapped):
    def changed(self, completion, request, sampling):
        if len(completion.tokens) < 2 or chance_of(f"{request.key} {completion.sample_logp}") >= self.strength:
            return completion
        shorter = cut(completion, len(completion.tokens) // 2)
        text = self.tokenizer.decode(shorter.tokens, skip_special_tokens=True)
        return replace(shorter, text=text, stop_reason="length")


@fault(
    "engine/own-stop-text",
    "the server ends completions at a text of its own, which stands in every answer, and leaves it out",
    "output/unparseable",
    "mask/end",
    also={"rewards": ([{"name": "task"}],)},
    fits=lambda config: is_one_turn(config) and option(config, "task.format") == "answer_tag",
)
class OwnStopText(Wrapped):
    def changed(self, completion, request, sampling):
        texts = [self.tokenizer.decode(completion.tokens[: n + 1]) for n in range(len(completion.tokens))]
        end = next((n for n, text in enumerate(texts) if "</" in text), None)
        if end is None or end < 2:
            return completion
        shorter = cut(completion, end - 1)
        return replace(shorter, text=self.tokenizer.decode(shorter.tokens), stop_reason="stop")


# Healthy: engines that look odd and are right


class RoundingALittle(Wrapped):
    """Sends log-probabilities with five digits after the point."""

    def changed(self, completion, request, sampling):
        return reporting(completion, [round(logp, 5) for logp in completion.sample_logp])


@lookalike("engine that writes five digits", is_unfiltered)
def healthy_rounding_engine(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, RoundingALittle)


class TwoAtATime(Wrapped):
    """Asks for two problems at a time, as a server of small batches does."""

    def generate(self, requests, sampling, **noise):
        parts = [requests[at : at + 2] for at in range(0, len(requests), 2)]
        return [group for part in parts for group in self.inner.generate(part, sampling, **noise)]


@lookalike("engine of small batches", is_native)
def healthy_small_batches(config: Any, random: Random) -> dict[str, Any]:
    return with_engine(config, TwoAtATime)
