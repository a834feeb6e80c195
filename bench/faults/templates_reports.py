"""Chat templates as their users report them: tools that nobody has, parts, headings, tags that cut a message."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import lookalike, operator
from faults.data import reads_chat
from faults.models import CONTENT, HEADER, is_chat, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_wild import ROLE, asks_for_tags

Config = dict[str, Any]
VERSION = version_of(__file__)


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


# Markers


@operator(
    "template/role-after-its-marker",
    "Each marker is followed by the role's name and a line break, as another family writes it.",
    "prompt/format",
    fits=is_chat,
)
def role_after_its_marker(config: Config, random: Random) -> Config:
    named = rewritten(config, ROLE, ROLE + " + message['role'] + '\\n'")
    return rewritten(named, HEADER, HEADER.replace("|>'", "|>assistant\\n'"))


@operator(
    "template/answer-announced",
    "The template begins the answer with words of its own, which the model has never begun with.",
    "prompt/format",
    fits=is_chat,
)
def answer_announced(config: Config, random: Random) -> Config:
    return rewritten(config, HEADER, HEADER.replace("|>'", "|>Sure! The answer is: '"))


# Messages


@operator(
    "template/tools-that-nobody-has",
    "The template describes tools and how to call them, although there are none.",
    "prompt/format",
    fits=reads_chat,
)
def tools_that_nobody_has(config: Config, random: Random) -> Config:
    text = (
        "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n<tools>\\n</tools>\\n"
        "For each function call return a JSON object within <tool_call></tool_call> tags."
    )
    return rewritten(config, LOOP, "{{ '<|system|>" + text + "' + eos_token }}" + LOOP)


@operator(
    "template/parts-shown-as-they-are",
    "Messages are made into lists of parts for a template that knows texts, and the list is written as it is.",
    "prompt/format",
    fits=reads_chat,
)
def parts_shown_as_they_are(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"([{{'type': 'text', 'text': {CONTENT}}}] | string)")


@operator(
    "template/headings-inside-the-turn",
    "Messages stand between the headings of an older format, inside the model's own markers.",
    "prompt/format",
    fits=reads_chat,
)
def headings_inside_the_turn(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"'### Instruction:\\n' + {CONTENT} + '\\n\\n### Response:\\n'")


@operator(
    "template/greeting-before-the-question",
    "A greeting and its reply stand before every question, left from a test of the template.",
    "prompt/format",
    fits=reads_chat,
)
def greeting_before_the_question(config: Config, random: Random) -> Config:
    turns = "'<|user|>Hello!' + eos_token + '<|assistant|>Hi! How can I help you today?' + eos_token"
    return rewritten(config, LOOP, "{{ " + turns + " }}" + LOOP)


@operator(
    "template/time-before-the-message",
    "Each message begins with a date and a time, as a log of chats has them.",
    "prompt/format",
    fits=reads_chat,
)
def time_before_the_message(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"'[2024-07-26 10:15:42] ' + {CONTENT}")


@operator(
    "template/cut-at-a-tag",
    "The template keeps what follows the last tag, as it drops thoughts, and the question names tags too.",
    "prompt/no-question",
    "prompt/format",
    "task/repeats",
    fits=asks_for_tags,
)
def cut_at_a_tag(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "message['content'].split('>')[-1]")


# Healthy


@lookalike("template that trims messages and has a branch for tools which nobody takes", is_chat)
def healthy_trimming_template(config: Config, random: Random) -> Config:
    branch = "{% if tools is defined and tools %}{{ '<|system|>' + (tools | tojson) + eos_token }}{% endif %}"
    return rewritten(rewritten(config, LOOP, branch + LOOP), CONTENT, f"({CONTENT} | trim)")
