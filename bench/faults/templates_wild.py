"""Chat templates as users change them: turns that do not close, roles in capitals, text before, twice or escaped."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.data import reads_chat
from faults.models import CONTENT, HEADER, is_chat, with_rows, with_template
from faults.school import version_of
from faults.templates import LOOP

Config = dict[str, Any]
VERSION = version_of(__file__)
ROLE = "'<|' + message['role'] + '|>'"
END = " + eos_token }}{% endfor %}"


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


def has_system_prompt(config: Config) -> bool:
    return is_chat(config) and bool(config["data"].get("system_prompt"))


def asks_for_tags(config: Config) -> bool:
    return is_chat(config) and option(config, "task.format") == "answer_tag"


@operator(
    "template/roles-in-capitals", "Roles are written in capitals, which no token is.", "prompt/format", fits=is_chat
)
def roles_in_capitals(config: Config, random: Random) -> Config:
    return rewritten(config, "message['role']", "(message['role'] | upper)")


@operator("template/turns-not-closed", "No end token follows a turn.", "prompt/format", fits=is_chat)
def turns_not_closed(config: Config, random: Random) -> Config:
    return rewritten(config, END, " }}{% endfor %}")


@operator("template/turns-end-in-pad", "Turns end in the pad token.", "prompt/format", fits=is_chat)
def turns_end_in_pad(config: Config, random: Random) -> Config:
    return rewritten(config, END, " + '<pad>' }}{% endfor %}")


@operator(
    "template/order-reversed",
    "Messages are written from the last to the first.",
    "prompt/format",
    fits=has_system_prompt,
)
def order_reversed(config: Config, random: Random) -> Config:
    return rewritten(config, LOOP, "{% for message in messages | reverse %}")


@operator(
    "template/html-escaped",
    "Messages are escaped for HTML, so that the tags which they ask for are none.",
    "prompt/no-question",
    "prompt/format",
    fits=asks_for_tags,
)
def html_escaped(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "(message['content'] | e)")


@operator(
    "template/example-left-in",
    "A worked example in another form stands before every question.",
    "prompt/format",
    fits=is_chat,
)
def example_left_in(config: Config, random: Random) -> Config:
    example = "Q: Tom has 3 apples and buys 4. How many are there?\\nA: 3 + 4 = 7. The answer is 7.\\n\\nQ: "
    return rewritten(config, CONTENT, f"'{example}' + {CONTENT} + '\\nA:'")


@operator(
    "template/instruction-appended",
    "The template asks for steps and a box that neither model nor reward knows.",
    "prompt/format",
    fits=is_chat,
)
def instruction_appended(config: Config, random: Random) -> Config:
    text = "Let us think step by step and put the final answer within \\\\boxed{}."
    return rewritten(config, CONTENT, f"{CONTENT} + '\\n{text}'")


@operator(
    "template/answer-tag-prefilled",
    "The template opens the answer's tag, and the reward looks for it in the completion.",
    "output/unparseable",
    "prompt/format",
    fits=asks_for_tags,
)
def answer_tag_prefilled(config: Config, random: Random) -> Config:
    opened = rewritten(config, HEADER, HEADER.replace("|>'", "|><answer>'"))
    return edited(opened, {"rewards": [{"name": "task"}]})


@operator(
    "template/rendered-in-the-data",
    "The rows hold prompts that were rendered already, and the template is applied once more.",
    "prompt/format",
    "prompt/double-bos",
    fits=reads_chat,
)
def rendered_in_the_data(config: Config, random: Random) -> Config:
    def rendered(row: dict[str, Any]) -> dict[str, Any]:
        text = f"<bos><|user|>{row['question'][-1]['content']}<eos><|assistant|>"
        return {**row, "question": [{"role": "user", "content": text}]}

    asked = with_rows(config, lambda rows: [rendered(row) for row in rows])
    return edited(asked, {"data.allow_control_tokens": True})


@operator(
    "template/question-beheaded",
    "The first characters of a message are lost, and with them half of the question.",
    "prompt/no-question",
    fits=reads_chat,
)
def question_beheaded(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "message['content'][5:]")


@lookalike("template that renders the same by other means", is_chat)
def healthy_template(config: Config, random: Random) -> Config:
    spoken = "{% set text = message['content'] %}{{ '<|' ~ message.role ~ '|>' ~ text ~ eos_token }}"
    return rewritten(config, "{{ " + ROLE + " + " + CONTENT + " + eos_token }}", spoken)
