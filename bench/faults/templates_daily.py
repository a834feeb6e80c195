"""Chat templates as they are put together on an ordinary day: copied from others, indented, merged, without BOS."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import operator
from faults.models import CONTENT, HEADER, is_chat, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_field import TURN, reads_closely
from faults.templates_wild import ROLE, has_system_prompt

Config = dict[str, Any]
VERSION = version_of(__file__)


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


@operator(
    "template/system-merged-into-the-users-turn",
    "The template is of a family without a system role: what the system says stands before the question, in one turn.",
    "prompt/format",
    fits=has_system_prompt,
)
def system_merged_into_the_users_turn(config: Config, random: Random) -> Config:
    merged = (
        "{% if message['role'] == 'system' %}{{ '<|user|>' + " + CONTENT + " + '\\n\\n' }}"
        "{% else %}{{ " + CONTENT + " + eos_token }}{% endif %}"
    )
    return rewritten(config, TURN, merged)


@operator(
    "template/question-twice",
    "The template writes every message twice, once under its role and once more before the answer.",
    "prompt/format",
    fits=reads_closely,
)
def question_twice(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "(" + CONTENT + " + '\\n\\n' + " + CONTENT + ")")


@operator(
    "template/human-and-gpt",
    "Roles have the names that another collection of conversations gives them, human and gpt.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def human_and_gpt(config: Config, random: Random) -> Config:
    names = "{'user': 'human', 'assistant': 'gpt', 'system': 'system'}[message['role']]"
    named = rewritten(config, ROLE, "'<|' + " + names + " + '|>'")
    return rewritten(named, HEADER, HEADER.replace("<|assistant|>", "<|gpt|>"))


@operator(
    "template/indentation-rendered",
    "The template was laid out for people to read, and its line breaks and indents come out between the turns.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def indentation_rendered(config: Config, random: Random) -> Config:
    laid_out = rewritten(config, TURN, "{{ '\\n        ' + " + TURN.removeprefix("{{ ").removesuffix(" }}") + " }}")
    return rewritten(laid_out, HEADER, HEADER.replace("'<|assistant|>'", "'\\n        <|assistant|>\\n    '"))


@operator(
    "template/bos-left-out",
    "The template leaves BOS to the tokenizer, which does not write it either.",
    "prompt/no-bos",
    "prompt/format",
    fits=is_chat,
)
def bos_left_out(config: Config, random: Random) -> Config:
    return rewritten(config, "{{ bos_token }}" + LOOP, LOOP)
