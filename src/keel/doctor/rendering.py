"""Analyse a chat template: where it puts the user's text, and its header of the assistant's turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.rollout.render import Renderer
from keel.run.build import build_renderer

_QUESTION, _ANSWER = "keelquestionprobe", "keelanswerprobe"
_THOUGHT = "<think>"  # belongs to the answer, whether the template or the model writes it
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class TurnMarks:
    """Texts that a template writes to open the user's and the assistant's turn.

    `assistant` is the generation prompt. `answered` and `end` stand before and after an answer in a conversation.
    `asked` is all text before a question. `opening` is the part of the generation prompt that starts the answer itself.
    """

    user: str
    assistant: str
    answered: str = ""
    end: str = ""
    asked: str = ""
    opening: str = ""

    @property
    def fault(self) -> str | None:
        """What is wrong with the generation prompt, compared with the template's conversations; None if nothing is."""
        if not self.answered or self.answered.startswith(self.assistant):
            return None
        if self.asked.endswith(self.assistant):
            return "it opens the user's turn"
        rest = self.assistant.removeprefix(self.answered).strip()
        if rest == self.assistant:
            return None  # a different header, which may be intended
        if self.end and self.end in rest:
            return "it opens the assistant's turn and ends it at once"
        return "it opens the assistant's turn twice" if self.answered in rest else None

    @property
    def doubled(self) -> bool:
        """Whether the generation prompt contains one header too many, rather than too few."""
        return self.fault is not None and self.fault.endswith("twice")


def rendered(setup: KeelSubject, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """The prompts' tokens as training renders them, before truncation."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    return [renderer.prompt(problem) for problem in problems]


def messages_of(problem: Problem) -> list[Mapping[str, str]]:
    """A prompt as messages. A plain text becomes a user message."""
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return [dict(message) for message in problem.prompt]


def in_template(renderer: Renderer, problem: Problem) -> bool:
    """Whether this problem is rendered with the chat template."""
    as_messages = not isinstance(problem.prompt, str) or renderer.system_prompt is not None
    return renderer.template is not None and (renderer.named or as_messages)


def turn_marks(tokenizer: Any, template: str | None) -> TurnMarks | None:
    """The marks, from renderings with and without a generation prompt; None if they cannot be determined."""
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}

    def fill(*messages: dict[str, str], opened: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": opened, "chat_template": template}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **options))
        except Exception:  # a template may raise any exception
            return ""

    if template is None:
        return None
    before, asked, after = fill(question).partition(_QUESTION)
    conversation = fill(question, answer)
    generation = fill(question, opened=True).removeprefix(before + asked + after)
    header = generation or _between_turns(conversation, after)
    between, _, end = conversation.partition(_QUESTION)[2].partition(_ANSWER)
    answered = between.removeprefix(after) if end else ""
    assistant, answered = (text.partition(_THOUGHT)[0].strip() for text in (header, answered))
    mark = next((mark for mark in (answered, assistant) if mark and mark in generation), None)
    opening = (generation if mark is None else generation.partition(mark)[2]).lstrip()
    user = _last_mark(tokenizer, before)
    return TurnMarks(user, assistant, answered, end.strip(), before.strip(), opening) if asked else None


def _between_turns(conversation: str, after: str) -> str:
    """The header of an answer for templates without a generation prompt: the text between question and answer.

    A template that always writes the header has already done so after the question. Further text before an answer, such
    as an empty thought, is not part of the header.
    """
    between, answered, end = conversation.partition(_QUESTION)[2].partition(_ANSWER)
    opened = after.strip().removeprefix(end.strip()).strip()
    if end.strip() and opened != after.strip() and opened:
        return opened
    return between.removeprefix(after) if answered else ""


def own_template(tokenizer: Any) -> str | None:
    """The tokenizer's default template, whatever the configuration uses."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, Mapping) else template


def template_name(tokenizer: Any) -> str | None:
    """The value of data.chat_template for the template that `auto` uses. With it, plain texts are rendered as well."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, Mapping):
        return "default" if template else None
    return "default" if "default" in template else next(iter(template), None)


def _last_mark(tokenizer: Any, before: str) -> str:
    """The text right before the user's text, from the last special token on; empty if there is none."""
    special = [t for t in getattr(tokenizer, "all_special_tokens", ()) if t and t != tokenizer.bos_token]
    starts = [before.rfind(token) for token in special if token in before]
    opening = before[max(starts) :].strip() if starts else ""
    named = [t for t in special if before.endswith(t) or t in opening]
    return opening if named else ""


def words(text: str) -> list[str]:
    """The words and numbers of a text in lower case. Escaped line breaks, as in JSON, separate words."""
    return _WORDS.findall(text.replace("\\n", " ").replace("\\t", " ").casefold())


def survives(text: str, decoded: str) -> bool:
    """Whether a decoded prompt still contains a text, apart from spaces, case and punctuation.

    It must contain the text as one piece, or all of its words in order.
    """
    squashed, whole = "".join(words(text)), "".join(words(decoded))
    if squashed in whole:
        return True
    remaining = iter(words(decoded))
    return all(word in remaining for word in words(text))


def word_by_word(tokenizer: Any, text: str) -> str:
    """Encode and decode a text word by word, which drops what the tokenizer cannot represent."""
    return " ".join(
        str(tokenizer.decode(tokenizer.encode(word, add_special_tokens=False), skip_special_tokens=False))
        for word in text.split()
    )


def messages_in(renderer: Renderer, problem: Problem) -> list[Mapping[str, str]]:
    """A problem's messages, after the configured system prompt."""
    messages = messages_of(problem)
    if renderer.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": renderer.system_prompt}, *messages]


TOKENIZER_CAUSE = "the tokenizer is not the one that the model was trained with, or was changed since"
TOKENIZER_ADVICE = "load model and tokenizer of one checkpoint (model.name), and change no ids or texts of tokens"


def tokenizer_finding(evidence: str) -> Finding:
    """The finding that the tokenizer does not belong to the model."""
    return finding("model/tokenizer", evidence, TOKENIZER_CAUSE, TOKENIZER_ADVICE)
