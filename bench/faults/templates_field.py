"""Chat templates as forks and tools rewrite them: markers, blanks, systems and BOS tokens that the model misses."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import lookalike, operator
from faults.healthy import school_of
from faults.models import CONTENT, HEADER, is_chat, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_wild import END, ROLE, asks_for_tags, has_system_prompt

Config = dict[str, Any]
VERSION = version_of(__file__)
TURN = "{{ " + ROLE + " + " + CONTENT + " + eos_token }}"


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


def reads_closely(config: Config) -> bool:
    """Whether the model has learned its questions letter by letter, so that others than those are lost on it."""
    school = school_of(config)
    return (school.world, school.architecture) in (("chat", "llama"), ("words", "qwen2"), ("tagged", "qwen3"))


# Markers


@operator(
    "template/words-for-markers",
    "Roles are written as words with a colon, in place of the model's markers.",
    "prompt/format",
    "prompt/no-header",
    fits=is_chat,
)
def words_for_markers(config: Config, random: Random) -> Config:
    spoken = rewritten(config, TURN, "{{ (message['role'] | capitalize) + ': ' + " + CONTENT + " + '\\n' }}")
    return rewritten(spoken, HEADER, HEADER.replace("<|assistant|>", "Assistant: "))


# Messages


@operator(
    "template/blanks-removed",
    "Blanks are taken out of every message.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def blanks_removed(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | replace(' ', ''))")


@operator(
    "template/characters-spaced",
    "A filter meant for lists puts a blank between the characters of every message.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def characters_spaced(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | join(' '))")


@operator(
    "template/content-in-capitals",
    "Messages are written in capitals.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def content_in_capitals(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | upper)")


@operator(
    "template/content-in-a-code-fence",
    "Every message is put between the marks of a block of code.",
    "prompt/format",
    fits=asks_for_tags,
)
def content_in_a_code_fence(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"'```text\\n' + {CONTENT} + '\\n```\\n'")


@operator(
    "template/content-as-parts",
    "The template reads messages as lists of parts, and writes nothing for one that is a text.",
    "prompt/no-question",
    "task/repeats",
    fits=is_chat,
)
def content_as_parts(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "(message['content'][0]['text'] | default('', true))")


@operator(
    "template/content-backwards",
    "A filter for scripts from right to left turns every message round.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def content_backwards(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | reverse)")


@operator(
    "template/url-encoded",
    "Messages are written as addresses are, with signs of percent.",
    "prompt/no-question",
    "prompt/format",
    fits=reads_closely,
)
def url_encoded(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | urlencode)")


@operator(
    "template/end-after-every-word",
    "The end token stands between the words of a message, as a separator.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def end_after_every_word(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | replace(' ', eos_token))")


# System messages


@operator(
    "template/refuses-the-system-role",
    "The template raises at a system message, and the configuration has one.",
    "prompt/format",
    "prompt/no-question",
    fits=has_system_prompt,
    refusal="the chat template refuses the messages",
)
def refuses_the_system_role(config: Config, random: Random) -> Config:
    refused = "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    return rewritten(config, LOOP, LOOP + refused)


# Healthy


@lookalike("template that refuses roles which nobody uses", is_chat)
def healthy_strict_template(config: Config, random: Random) -> Config:
    known = "['system', 'user', 'assistant', 'tool']"
    refused = "{% if message['role'] not in " + known + " %}{{ raise_exception('unknown role') }}{% endif %}"
    return rewritten(rewritten(config, LOOP, LOOP + refused), END, END.replace("}}{%", "}}{#- a turn -#}{%"))
