"""Chat templates as they are put together on an ordinary day: copied from others, printed, tagged, indented."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import operator
from faults.models import CONTENT, HEADER, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_field import TURN, reads_closely
from faults.templates_wild import ROLE, asks_for_tags

Config = dict[str, Any]
VERSION = version_of(__file__)


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


@operator(
    "template/conversation-printed-as-a-list",
    "The template prints the list of messages as the program has it, brackets, quotes and all.",
    "prompt/format",
    fits=asks_for_tags,
)
def conversation_printed_as_a_list(config: Config, random: Random) -> Config:
    return rewritten(rewritten(config, TURN, ""), LOOP, "{{ messages | string }}" + LOOP)


@operator(
    "template/roles-as-xml-tags",
    "Turns stand between tags with the names of their roles, as prompts for another model were written.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def roles_as_xml_tags(config: Config, random: Random) -> Config:
    role = "message['role']"
    tagged = rewritten(config, TURN, "{{ '<' + " + role + " + '>' + " + CONTENT + " + '</' + " + role + " + '>\\n' }}")
    return rewritten(tagged, HEADER, HEADER.replace("<|assistant|>", "<assistant>"))


@operator(
    "template/rounds-of-question-and-answer",
    "The template is an early family's: rounds are counted, and question and answer stand under words of its language.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def rounds_of_question_and_answer(config: Config, random: Random) -> Config:
    asked = rewritten(config, TURN, "{{ '[Round 1]\\n\\n问：' + " + CONTENT + " + '\\n\\n' }}")
    return rewritten(asked, HEADER, HEADER.replace("<|assistant|>", "答："))


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
    fits=asks_for_tags,
)
def indentation_rendered(config: Config, random: Random) -> Config:
    laid_out = rewritten(config, TURN, "{{ '\\n        ' + " + TURN.removeprefix("{{ ").removesuffix(" }}") + " }}")
    return rewritten(laid_out, HEADER, HEADER.replace("'<|assistant|>'", "'\\n        <|assistant|>\\n    '"))
