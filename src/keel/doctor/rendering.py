"""What a chat template does by itself: where it puts the user's text, and what opens the assistant's turn."""

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
_THOUGHT = "<think>"  # belongs to what is answered, whoever writes it
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class TurnMarks:
    """Texts as a template writes them: what opens the user's and the assistant's turn.

    `assistant` is the generation prompt, `answered` what stands before an answer in a conversation and `end` after it,
    `asked` all that stands before a question, and `opening` what the generation prompt begins of the answer itself.
    """

    user: str
    assistant: str
    answered: str = ""
    end: str = ""
    asked: str = ""
    opening: str = ""

    @property
    def fault(self) -> str | None:
        """What is wrong with the generation prompt by the template's own conversations; None where nothing is."""
        if not self.answered or self.answered.startswith(self.assistant):
            return None
        if self.asked.endswith(self.assistant):
            return "it opens the user's turn"
        rest = self.assistant.removeprefix(self.answered).strip()
        if rest == self.assistant:
            return None  # another header, which may be meant
        if self.end and self.end in rest:
            return "it opens the assistant's turn and ends it at once"
        return "it opens the assistant's turn twice" if self.answered in rest else None

    @property
    def doubled(self) -> bool:
        """Whether the fault is a header too many, and not one that is missing."""
        return self.fault is not None and self.fault.endswith("twice")


def rendered(setup: KeelSubject, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """The tokens of prompts as training renders them, before any limit cuts them."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    return [renderer.prompt(problem) for problem in problems]


def messages_of(problem: Problem) -> list[Mapping[str, str]]:
    """A prompt as messages; a text is the user's."""
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return [dict(message) for message in problem.prompt]


def in_template(renderer: Renderer, problem: Problem) -> bool:
    """Whether this problem is put into the chat template."""
    as_messages = not isinstance(problem.prompt, str) or renderer.system_prompt is not None
    return renderer.template is not None and (renderer.named or as_messages)


def turn_marks(tokenizer: Any, template: str | None) -> TurnMarks | None:
    """Learned by rendering a question with and without a generation prompt; None where the template does not tell."""
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}

    def fill(*messages: dict[str, str], opened: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": opened, "chat_template": template}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **options))
        except Exception:  # templates raise what they like
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
    """What opens an answer where a template has no generation prompt: the text between question and answer.

    A template that always opens the assistant's turn has done so after a lone question, behind the end of that turn;
    what more it writes before an answer, such as an empty thought, is no header.
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
    """What data.chat_template calls the template that `auto` uses; by its name, plain text is put in too."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, Mapping):
        return "default" if template else None
    return "default" if "default" in template else next(iter(template), None)


def _last_mark(tokenizer: Any, before: str) -> str:
    """What stands right before the user's text, from its last special token on; empty where there is none."""
    special = [t for t in getattr(tokenizer, "all_special_tokens", ()) if t and t != tokenizer.bos_token]
    starts = [before.rfind(token) for token in special if token in before]
    opening = before[max(starts) :].strip() if starts else ""
    named = [t for t in special if before.endswith(t) or t in opening]
    return opening if named else ""


def words(text: str) -> list[str]:
    """Its words and numbers in lower case; escaped line breaks, as JSON has them, part words too."""
    return _WORDS.findall(text.replace("\\n", " ").replace("\\t", " ").casefold())


def survives(text: str, decoded: str) -> bool:
    """Whether a text still stands in a decoded prompt, whatever became of spaces, case and punctuation.

    The whole of it in one piece, or all of its words in their order.
    """
    squashed, whole = "".join(words(text)), "".join(words(decoded))
    if squashed in whole:
        return True
    remaining = iter(words(decoded))
    return all(word in remaining for word in words(text))


def word_by_word(tokenizer: Any, text: str) -> str:
    """A text as the tokenizer writes its words back, one at a time: without what it has no token for."""
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
    """The tokenizer is not the model's, by this evidence."""
    return finding("model/tokenizer", evidence, TOKENIZER_CAUSE, TOKENIZER_ADVICE)
