"""Chat templates as their users report them: tools that nobody has, merged roles, lost BOS, tags that cut a message."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import lookalike, operator
from faults.models import CONTENT, HEADER, is_chat, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_field import TURN
from faults.templates_wild import END, ROLE, asks_for_tags, has_system_prompt

Config = dict[str, Any]
VERSION = version_of(__file__)
BOS = "{{ bos_token }}"


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


# BOS


@operator(
    "template/bos-lost",
    "The template leaves the BOS to the tokenizer, which does not add it.",
    "prompt/no-bos",
    "prompt/format",
    fits=is_chat,
)
def bos_lost(config: Config, random: Random) -> Config:
    return rewritten(config, BOS, "")


@operator(
    "template/bos-before-every-turn",
    "A BOS stands before every turn and before the assistant's header.",
    "prompt/format",
    "prompt/double-bos",
    fits=is_chat,
)
def bos_before_every_turn(config: Config, random: Random) -> Config:
    turns = rewritten(rewritten(config, BOS, ""), ROLE, "bos_token + " + ROLE)
    return rewritten(turns, HEADER, HEADER.replace("'<|", "bos_token + '<|"))


# Markers and ends


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
    "template/ends-of-another-family",
    "Turns end in another family's mark, which this tokenizer spells letter by letter.",
    "prompt/format",
    fits=is_chat,
)
def ends_of_another_family(config: Config, random: Random) -> Config:
    return rewritten(config, END, " + '<|im_end|>\\n' }}{% endfor %}")


@operator(
    "template/empty-turn-before-the-answer",
    "An empty turn of the assistant stands before its header, as where the data end in one.",
    "prompt/format",
    "prompt/no-header",
    fits=is_chat,
)
def empty_turn_before_the_answer(config: Config, random: Random) -> Config:
    return rewritten(config, HEADER, HEADER.replace("'<|", "'<|assistant|>' + eos_token + '<|"))


# Messages


@operator(
    "template/tools-that-nobody-has",
    "The template describes tools and how to call them, although there are none.",
    "prompt/format",
    fits=is_chat,
)
def tools_that_nobody_has(config: Config, random: Random) -> Config:
    text = (
        "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n<tools>\\n</tools>\\n"
        "For each function call return a JSON object within <tool_call></tool_call> tags."
    )
    return rewritten(config, LOOP, "{{ '<|system|>" + text + "' + eos_token }}" + LOOP)


@operator(
    "template/system-in-the-users-turn",
    "The system message is written at the head of the user's turn.",
    "prompt/format",
    fits=has_system_prompt,
)
def system_in_the_users_turn(config: Config, random: Random) -> Config:
    opened = "{% if message['role'] == 'system' %}{{ '<|user|>' + " + CONTENT + " + '\\n\\n' }}"
    rest = "{% elif loop.index0 == 1 %}{{ " + CONTENT + " + eos_token }}{% else %}" + TURN + "{% endif %}"
    return rewritten(config, TURN, opened + rest)


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
