"""Chat templates as they are first written: blanks of their own source, markers of others, roles mixed up."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import lookalike, operator
from faults.models import CONTENT, HEADER, is_chat, with_template
from faults.school import version_of
from faults.templates import LOOP
from faults.templates_field import TURN, reads_closely
from faults.templates_wild import END, ROLE, asks_for_tags

Config = dict[str, Any]
VERSION = version_of(__file__)


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


@operator(
    "template/line-breaks-as-letters",
    "Line breaks of the template were quoted once too often: a backslash and an n stand between the turns.",
    "prompt/format",
    fits=reads_closely,
)
def line_breaks_as_letters(config: Config, random: Random) -> Config:
    broken = rewritten(config, END, END.replace("}}", "+ '\\\\n' }}"))
    return rewritten(broken, HEADER, HEADER.replace("|>'", "|>\\\\n'"))


@operator(
    "template/instructions-in-brackets",
    "The template is of a family that puts instructions between brackets and has no roles.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def instructions_in_brackets(config: Config, random: Random) -> Config:
    return rewritten(rewritten(config, TURN, "{{ '[INST] ' + " + CONTENT + " + ' [/INST]' }}"), HEADER, "")


@operator(
    "template/headings-in-place-of-markers",
    "Turns stand under the headings of an older format for instructions, without the model's markers.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
)
def headings_in_place_of_markers(config: Config, random: Random) -> Config:
    headed = rewritten(config, TURN, "{{ '### Instruction:\\n' + " + CONTENT + " + '\\n\\n' }}")
    return rewritten(headed, HEADER, HEADER.replace("<|assistant|>", "### Response:\\n"))


@operator(
    "template/roles-swapped",
    "The user speaks under the assistant's marker and the model is to go on under the user's.",
    "prompt/format",
    "prompt/no-header",
    fits=lambda config: reads_closely(config) and not asks_for_tags(config),
)
def roles_swapped(config: Config, random: Random) -> Config:
    swapped = rewritten(config, ROLE, "('<|user|>' if message['role'] == 'assistant' else '<|assistant|>')")
    return rewritten(swapped, HEADER, HEADER.replace("<|assistant|>", "<|user|>"))


@operator(
    "template/question-in-the-systems-turn",
    "The question is put into the system's turn, and the user's turn has a fixed text.",
    "prompt/format",
    fits=asks_for_tags,
)
def question_in_the_systems_turn(config: Config, random: Random) -> Config:
    fixed = "{{ '<|system|>' + " + CONTENT + " + eos_token + '<|user|>Please respond.' + eos_token }}"
    return rewritten(config, TURN, fixed)


@operator(
    "template/end-token-of-another-family",
    "Turns end in another family's end token, which this tokenizer reads letter by letter.",
    "prompt/format",
    fits=asks_for_tags,
)
def end_token_of_another_family(config: Config, random: Random) -> Config:
    return rewritten(config, END, END.replace("eos_token", "'<|im_end|>\\n'"))


@operator(
    "template/tags-stripped",
    "Messages go through a filter that takes tags away, and with them the ones that the question asks for.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def tags_stripped(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, f"({CONTENT} | striptags)")


# Healthy


@lookalike("template that marks what the assistant writes", is_chat)
def healthy_marked_template(config: Config, random: Random) -> Config:
    marked = (
        "{% if message['role'] == 'assistant' %}{{ " + ROLE + " }}{% generation %}{{ " + CONTENT + " + eos_token }}"
        "{% endgeneration %}{% else %}" + TURN + "{% endif %}"
    )
    return rewritten(rewritten(config, TURN, marked), LOOP, "{#- one turn after the other -#}" + LOOP)
