"""Chat templates that write something else than the model has learned: turns, roles, headers, texts of their own."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, operator
from faults.models import CONTENT, HEADER, is_chat, is_plain, with_template
from faults.school import version_of

Config = dict[str, Any]
VERSION = version_of(__file__)
LOOP = "{% for message in messages %}"


def rewritten(config: Config, old: str, new: str) -> Config:
    return with_template(config, old, new, VERSION, old, new)


@operator("template/content-as-json", "Messages are written as JSON strings, in quotes.", "prompt/format", fits=is_chat)
def content_as_json(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "(message | tojson)")


@operator(
    "template/think-prefilled",
    "The template opens a block of thought, or writes an empty one, for a model that knows none.",
    "prompt/format",
    fits=is_chat,
)
def think_prefilled(config: Config, random: Random) -> Config:
    opening = random.choice(("<think>\\n", "<think>\\n\\n</think>\\n\\n"))
    return rewritten(config, HEADER, HEADER.replace("|>'", f"|>{opening}'"))


@operator("template/header-twice", "The assistant's header is written twice.", "prompt/format", fits=is_chat)
def header_twice(config: Config, random: Random) -> Config:
    return rewritten(config, HEADER, HEADER + HEADER)


@operator(
    "template/header-first",
    "The assistant's header stands before the question.",
    "prompt/no-header",
    "prompt/format",
    fits=is_chat,
)
def header_first(config: Config, random: Random) -> Config:
    return rewritten(rewritten(config, HEADER, ""), LOOP, HEADER + LOOP)


@operator(
    "template/default-system-prompt",
    "The template writes a long system prompt of its own where none is given.",
    "prompt/format",
    fits=lambda config: is_chat(config) and not config["data"].get("system_prompt"),
)
def default_system_prompt(config: Config, random: Random) -> Config:
    text = "Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\nYou are a helpful assistant."
    return rewritten(config, LOOP, "{{ '<|system|>" + text + "' + eos_token }}" + LOOP)


@operator(
    "template/header-misspelt",
    "The assistant's header is misspelt, so that it is no special token.",
    "prompt/format",
    "prompt/no-header",
    fits=is_chat,
)
def header_misspelt(config: Config, random: Random) -> Config:
    return rewritten(config, HEADER, HEADER.replace("<|assistant|>", "<|assistant |>"))


@operator("template/last-message-lost", "The last message is not written.", "prompt/no-question", fits=is_chat)
def last_message_lost(config: Config, random: Random) -> Config:
    return rewritten(config, LOOP, "{% for message in messages[:-1] %}")


@operator(
    "template/first-content-for-all",
    "Every turn is written with the first message's text.",
    "prompt/no-question",
    fits=lambda config: is_chat(config) and bool(config["data"].get("system_prompt")),
)
def first_content_for_all(config: Config, random: Random) -> Config:
    return rewritten(config, CONTENT, "messages[0]['content']")


@operator("template/base-model-in-chat", "A base model is prompted as a chat model.", "prompt/format", fits=is_plain)
def base_model_in_chat(config: Config, random: Random) -> Config:
    return edited(config, {"data.chat_template": "chatml"})
