"""Faults of what travels: templates, prompts, texts, what an engine continues, weights and tokenizers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from keel.base.types import Problem
from keel.models.tiny import CHAT_TEMPLATE
from lab.doctor.faults import Odd, Wrapped
from lab.doctor.schooled import schooled_model

# Templates

_HEADER = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_TURN = "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"


def _loop(body: str) -> str:
    return "{% for message in messages %}" + body + "{% endfor %}"


def _schooled() -> tuple[Any, Any]:
    """The schooled model with a tokenizer of its own."""
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
    """Cuts texts at six tokens, in silence."""
    model, tokenizer = _schooled()
    whole = tokenizer.encode
    tokenizer.encode = lambda text, **options: whole(text, **options)[:6]
    return model, tokenizer


# Healthy templates of several shapes


def with_marks() -> tuple[Any, Any]:
    return _templated(CHAT_TEMPLATE)


def inst() -> tuple[Any, Any]:
    """As Llama 2 and Mistral: brackets around the user, nothing before the assistant."""
    user = "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}"
    return _templated("{{ bos_token }}" + _loop(user + "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"))


def thinking() -> tuple[Any, Any]:
    """As Qwen 3: trims, writes a system prompt of its own, and opens a thought after the header."""
    turn = "{{ '<|' + message['role'] + '|>\\n' + (message['content'] | trim) + eos_token + '\\n' }}"
    header = "{% if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' }}{% endif %}"
    system = "{% if messages[0]['role'] != 'system' %}{{ '<|system|>\\nBe brief.' + eos_token + '\\n' }}{% endif %}"
    return _templated(system + _loop(turn) + header)


def always_opened() -> tuple[Any, Any]:
    """As Alpaca: the response's line is always there, and questions are written as JSON."""
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
    """The text of a neighbour."""

    def change_group(self, request, group, sampling):
        texts = [completion.text for completion in group]
        return [replace(c, text=text) for c, text in zip(group, [*texts[1:], texts[0]], strict=True)]


class SpecialTokens(Wrapped):
    """Text with its special tokens written out."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.tokenizer = tokenizer

    def change(self, request, completion, sampling):
        return replace(completion, text=self.tokenizer.decode(completion.tokens, skip_special_tokens=False))


class Stripped(Wrapped):
    """Text without spaces at its ends: nothing that the reward minds."""

    def change(self, request, completion, sampling):
        return replace(completion, text=f" {completion.text}\n")
