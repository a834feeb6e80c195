"""Faults in templates, prompts, texts, weights and tokenizers, and engines that continue other prompts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from doctor.faults import NoLogp, Odd, Talking, Wrapped
from doctor.schooled import fresh_model, schooled_model
from keel.base.types import Problem
from keel.models.tiny import CHARACTERS, CHAT_TEMPLATE, character_tokenizer
from keel.rollout import Request

# Templates

_HEADER = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_TURN = "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"


def _loop(body: str) -> str:
    return "{% for message in messages %}" + body + "{% endfor %}"


def _schooled() -> tuple[Any, Any]:
    """The schooled model with its own copy of the tokenizer."""
    model, tokenizer = schooled_model()
    return model, copy.deepcopy(tokenizer)


def _templated(template: str) -> tuple[Any, Any]:
    model, tokenizer = _schooled()
    tokenizer.chat_template = template
    return model, tokenizer


def loses_the_question() -> tuple[Any, Any]:
    return _templated(_loop("{{ '<|' + message['role'] + '|>' + eos_token }}") + _HEADER)


def cuts_the_question() -> tuple[Any, Any]:
    return _templated(_loop("{{ '<|' + message['role'] + '|>' + message['content'][:5] + eos_token }}") + _HEADER)


def loses_the_header() -> tuple[Any, Any]:
    return _templated(_loop(_TURN))


def loses_the_system_prompt() -> tuple[Any, Any]:
    return _templated(_loop("{% if message['role'] != 'system' %}" + _TURN + "{% endif %}") + _HEADER)


def cutting_tokenizer() -> tuple[Any, Any]:
    """A tokenizer that silently truncates texts to six tokens."""
    model, tokenizer = _schooled()
    whole = tokenizer.encode
    tokenizer.encode = lambda text, **options: whole(text, **options)[:6]
    return model, tokenizer


# Models


def forgotten_layer() -> tuple[Any, Any]:
    """The second layer has its initial weights instead of the loaded ones."""
    model, tokenizer = _schooled()
    model.model.layers[1].load_state_dict(fresh_model(seed=5)[0].model.layers[1].state_dict())
    return model, tokenizer


def other_ids() -> tuple[Any, Any]:
    """Another model's tokenizer: the same characters with other ids."""
    model, _ = _schooled()
    tokenizer = character_tokenizer(CHARACTERS[::-1])
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer


def filled_up() -> tuple[Any, Any]:
    """A vocabulary doubled by repeating its rows. Half of the sampled ids are not in the tokenizer."""
    model, tokenizer = _schooled()
    rows = model.get_input_embeddings().weight.data
    model.resize_token_embeddings(2 * len(rows), mean_resizing=False)
    model.get_input_embeddings().weight.data = torch.cat([rows, rows])
    model.tie_weights()
    return model, tokenizer


def grown() -> tuple[Any, Any]:
    """Added tokens that stand for parts of the questions and were never trained."""
    model, tokenizer = _schooled()
    tokenizer.add_tokens([f"{digit}=" for digit in range(10)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, tokenizer


def without_digits() -> tuple[Any, Any]:
    """A tokenizer without digits, so that much of the questions is lost."""
    model, _ = _schooled()
    return model, character_tokenizer([c for c in CHARACTERS if c not in "0123456789"])


def another_end() -> tuple[Any, Any]:
    """A model that ends with <eos>, with a tokenizer whose end token is a role mark."""
    model, tokenizer = _schooled()
    tokenizer.eos_token = "<|user|>"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def ends_at_digits() -> tuple[Any, Any]:
    """A generation config with end token ids of another vocabulary, which are spaces and digits here."""
    model, tokenizer = _schooled()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.encode("6789")]
    return model, tokenizer


def on_bos() -> tuple[Any, Any]:
    """A model that gives its answers only after BOS."""
    model, tokenizer = _schooled()
    lost = Lost(model.get_input_embeddings(), tokenizer.bos_token_id)
    model.set_input_embeddings(lost)
    return model, tokenizer


class Lost(nn.Module):
    """Embeddings with noise in texts that do not start with BOS, like attention without its learned sink."""

    def __init__(self, inner: nn.Module, bos: int) -> None:
        super().__init__()
        self.inner, self.bos, self.weight = inner, bos, inner.weight

    def forward(self, tokens: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self.weight.shape[1], generator=generator) * self.weight.std()
        return self.inner(tokens) + noise * (tokens[:, :1] != self.bos)[..., None]


# Healthy templates of several shapes


def with_marks() -> tuple[Any, Any]:
    return _templated(CHAT_TEMPLATE)


def inst() -> tuple[Any, Any]:
    """As in Llama 2 and Mistral: brackets around the user, no header of the assistant."""
    user = "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}"
    return _templated("{{ bos_token }}" + _loop(user + "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"))


def thinking() -> tuple[Any, Any]:
    """As in Qwen 3: trims texts, adds its own system prompt, and opens a thought after the header."""
    turn = "{{ '<|' + message['role'] + '|>\\n' + (message['content'] | trim) + eos_token + '\\n' }}"
    header = "{% if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' }}{% endif %}"
    system = "{% if messages[0]['role'] != 'system' %}{{ '<|system|>\\nBe brief.' + eos_token + '\\n' }}{% endif %}"
    return _templated(system + _loop(turn) + header)


_THOUGHT = "{% if message['role'] == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
_THOUGHTFUL = "{{ '<|' + message['role'] + '|>\\n' }}" + _THOUGHT + "{{ message['content'] + eos_token + '\\n' }}"


def empty_thought() -> tuple[Any, Any]:
    """As in Qwen 3: earlier answers follow an empty thought, but the header opens none."""
    return _templated(_loop(_THOUGHTFUL) + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")


def empty_thought_always_opened() -> tuple[Any, Any]:
    """As `empty_thought`, with the header also without `add_generation_prompt`."""
    return _templated(_loop(_THOUGHTFUL) + "{% if messages[-1]['role'] == 'user' %}{{ '<|assistant|>\\n' }}{% endif %}")


def empty_thought_headless() -> tuple[Any, Any]:
    return _templated(_loop(_THOUGHTFUL))


def channels() -> tuple[Any, Any]:
    """As in gpt-oss: answers are rendered in a channel that the model itself opens."""
    channel = "{% if message['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
    turn = "{{ '<|start|>' + message['role'] }}" + channel + "{{ '<|message|>' + message['content'] + eos_token }}"
    return _templated(_loop(turn) + "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}")


def always_opened() -> tuple[Any, Any]:
    """As in Alpaca: the response line is always present, and questions are JSON strings."""
    body = "{% if message['role'] == 'assistant' %}{{ message['content'] }}{% else %}"
    return _templated(
        _loop(body + "{{ '### Instruction: ' + (message['content'] | tojson) + '\\n### Response: ' }}{% endif %}")
    )


def without_bos() -> tuple[Any, Any]:
    model, tokenizer = _schooled()
    tokenizer.bos_token = None
    return model, tokenizer


# Tasks


@dataclass(frozen=True)
class Asked(Odd):
    """The schooled task with its prompts changed, in training and in evaluation."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return self._changed(self.inner.sample(count, seed=seed, step=step))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self._changed(self.inner.held_out(count, seed=seed))

    def _changed(self, problems: list[Problem]) -> list[Problem]:
        if self.kind == "copies":
            half = problems[: (len(problems) + 1) // 2]
            doubled = [*half, *(replace(p, key=f"{p.key}/again") for p in half)]
            return doubled[: len(problems)]
        return [replace(p, prompt=self._prompt(p)) for p in problems]

    def _prompt(self, problem: Problem) -> Any:
        text = str(problem.prompt)
        match self.kind:
            case "leak":
                return f"(answer: {problem.answer}) {text}"
            case "bos":
                return f"<bos>\n<bos>{text}"
            case "marks":
                return f"<|user|>{text}<eos>"
            case "whole marks":
                return f"<|user|>{text}<eos><|assistant|>"
            case "shots":
                shot = [{"role": "user", "content": "max 1 2="}, {"role": "assistant", "content": "2"}]
                return [*shot, {"role": "user", "content": text}]
            case "choices":
                return f"The answer is one of these, the result: {text}"
        return text


@dataclass(frozen=True)
class Alike(Talking):
    """Episodes with equal prompts, as in a guessing game. The problems differ only in `info`."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return self._hidden(self.inner.sample(count, seed=seed, step=step))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self._hidden(self.inner.held_out(count, seed=seed))

    def _hidden(self, problems: list[Problem]) -> list[Problem]:
        return [replace(p, prompt="max 1 2=", info={"hidden": p.prompt}) for p in problems]


def alike() -> Alike:
    return Alike("alike", "talking")


def leaking_answers() -> Asked:
    return Asked("leak")


def blank_between_bos() -> Asked:
    return Asked("bos")


def marks_without_header() -> Asked:
    return Asked("marks")


def marks_with_header() -> Asked:
    return Asked("whole marks")


def few_shots() -> Asked:
    return Asked("shots")


def choices() -> Asked:
    return Asked("choices")


def copies() -> Asked:
    return Asked("copies")


# Engines


class OthersText(Wrapped):
    """Each completion has the text of its neighbour."""

    def change_group(self, request, group, sampling):
        texts = [completion.text for completion in group]
        return [replace(c, text=text) for c, text in zip(group, [*texts[1:], texts[0]], strict=True)]


class SpecialTokens(Wrapped):
    """Texts that include special tokens."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.tokenizer = tokenizer

    def change(self, request, completion, sampling):
        return replace(completion, text=self.tokenizer.decode(completion.tokens, skip_special_tokens=False))


class Stripped(Wrapped):
    """Texts with extra outer whitespace, which the reward ignores."""

    def change(self, request, completion, sampling):
        return replace(completion, text=f" {completion.text}\n")


class Reported(Wrapped):
    """Continues other prompts and reports the log-probabilities after them."""

    def prompts(self, requests: Sequence[Request]) -> list[Request]:
        return list(requests)

    def generate(self, requests, sampling, **noise):
        return self.native.generate(self.prompts(requests), sampling, **noise)


class Silent(Wrapped):
    """Continues other prompts and reports no log-probabilities."""

    def change(self, request, completion, sampling):
        return replace(completion, sample_logp=(float("nan"),) * len(completion.tokens))

    def generate(self, requests, sampling, **noise):
        return super().generate(self.prompts(requests), sampling, **noise)


class _Cut:
    def prompts(self, requests):
        return [replace(r, tokens=r.tokens[-3:]) for r in requests]


class _SecondBos:
    def prompts(self, requests):
        return [replace(r, tokens=(1, *r.tokens)) for r in requests]


class _WithoutEnd:
    def prompts(self, requests):
        return [replace(r, tokens=r.tokens[:-2]) for r in requests]


class _Spaced:
    def prompts(self, requests):
        space = schooled_model()[1].encode(" ")
        return [replace(r, tokens=(*r.tokens, *space)) for r in requests]


class _Prefixed:
    def prompts(self, requests):
        opening = schooled_model()[1].encode("be brief and max 9 0=9")  # a text that no hypothesis has
        return [replace(r, tokens=(*opening, *r.tokens)) for r in requests]


class _Spaceless:
    def prompts(self, requests):
        space = schooled_model()[1].encode(" ")[0]
        return [replace(r, tokens=tuple(t for t in r.tokens if t != space) or r.tokens) for r in requests]


class _RepliesCut:
    def prompts(self, requests):
        return [replace(r, tokens=r.tokens[:-3]) if r.start else r for r in requests]


class _FirstTurnLeftOut:
    """Later turns are continued without the first token of the model's first turn."""

    def prompts(self, requests):
        return [
            replace(r, tokens=(*r.tokens[: -r.start], *r.tokens[1 - r.start :])) if r.start else r for r in requests
        ]


class FirstTurnLeftOutReported(_FirstTurnLeftOut, Reported): ...


class CutReported(_Cut, Reported): ...


class RepliesCutReported(_RepliesCut, Reported): ...


class PrefixedReported(_Prefixed, Reported): ...


class SpacelessReported(_Spaceless, Reported): ...


class CutSilent(_Cut, Silent): ...


class SecondBosReported(_SecondBos, Reported): ...


class WithoutEndReported(_WithoutEnd, Reported): ...


class WithoutEndSilent(_WithoutEnd, Silent): ...


class SpacedReported(_Spaced, Reported): ...


class Rotated(Wrapped):
    """Completions are returned in another order than the requests."""

    def generate(self, requests, sampling, **noise):
        generated = super().generate(requests, sampling, **noise)
        return [*generated[1:], generated[0]]


class RotatedSilent(NoLogp):
    def generate(self, requests, sampling, **noise):
        generated = super().generate(requests, sampling, **noise)
        return [*generated[1:], generated[0]]


class Transposed(Wrapped):
    """Samples of all requests interleaved, but split as if they were grouped by request."""

    def generate(self, requests, sampling, **noise):
        generated = super().generate(requests, sampling, **noise)
        flat = [completion for column in zip(*generated, strict=True) for completion in column]
        count = len(generated[0])
        return [flat[i : i + count] for i in range(0, len(flat), count)]


class FirstPromptForAll(Reported):
    def prompts(self, requests):
        return [replace(r, tokens=requests[0].tokens) for r in requests]


class RescoredCut(_Cut, Wrapped):
    """Continues truncated prompts and reports log-probabilities after the full ones."""

    def generate(self, requests, sampling, **noise):
        generated = self.native.generate(self.prompts(requests), sampling, **noise)
        pairs = zip(requests, generated, strict=True)
        return [self.rescored(self.model, request, group, sampling.temperature) for request, group in pairs]
