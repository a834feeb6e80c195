"""Analyse a chat template: the place of the user's text, the header of the assistant's turn, removable parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        """The fault of the generation prompt, by comparison with a rendered conversation; None if there is none."""
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
        """Whether the fault is a repeated header of the assistant's turn."""
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
    """The data.chat_template value of the template that `auto` uses. If set, it also renders plain-text prompts."""
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
    """Encode and decode a text word by word, which drops characters that the tokenizer cannot represent."""
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


# ------------------------------------------------------------------------ parts of a rendered prompt

WORDS = "words"
Span = tuple[int, int]  # token indices in a prompt
Part = tuple[Span, ...]  # spans that are removed together, in order
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """A prompt's tokens, and the spans that the template wrote before, after and between the messages.

    Each side is cut into segments: a special token followed by ordinary ones. Marks and the text after them can thus be
    removed separately.
    """

    tokens: Tokens
    before: tuple[Span, ...]
    after: tuple[Span, ...]
    special: frozenset[int] = frozenset()
    between: tuple[Span, ...] = ()

    @property
    def messages(self) -> Span:
        """Start and end of the messages, including the text between them."""
        start, stop = self.before[-1:], self.after[:1]
        return (start[0][1] if start else 0), (stop[0][0] if stop else len(self.tokens))

    def parts(self) -> dict[str, Part]:
        """The parts that can be removed, by name. Equal names mean equal parts in all prompts."""
        # the last segment before the messages opens the user's turn; another test covers BOS
        head, tail = [span for span in self.before[:-1] if span != (0, 1)], self.after
        named = [(f"before {i}", span) for i, span in enumerate(head)]
        if len(head) > 1:
            named += [(f"before {i} to its end", (span[0], head[-1][1])) for i, span in enumerate(head[:-1])]
        named += [(f"after {i}", span) for i, span in enumerate(tail)]
        named += [(f"under {i}", (start + 1, end)) for i, (start, end) in enumerate(tail) if end - start > 1]
        return {name: (span,) for name, span in named} | ({WORDS: around} if (around := self.words()) else {})

    def words(self) -> Part:
        """All ordinary tokens that the template wrote around the messages."""
        spans = (*self.before, *self.between, *self.after)
        marked = ((start + (self.tokens[start] in self.special), end) for start, end in spans)
        return tuple((start, end) for start, end in marked if start < end)

    def without(self, part: Part) -> Tokens:
        left_out = {i for start, end in part for i in range(start, end)}
        return tuple(token for i, token in enumerate(self.tokens) if i not in left_out)


def frame_of(renderer: Renderer, problem: Problem, tokens: Tokens) -> Frame | None:
    """The frame of a rendered prompt; None if its messages cannot be found in it."""
    tokenizer: Any = renderer.tokenizer
    contents = ["".join(message["content"].split()) for message in messages_in(renderer, problem)]
    texts = ["".join(str(tokenizer.decode([token], skip_special_tokens=False)).split()) for token in tokens]
    # compared without spaces, which tokenizers add or drop
    ends, whole = list(accumulate(map(len, texts))), "".join(texts)
    stop = whole.rfind(contents[-1])
    starts = [*_places(contents[:-1], whole[: max(stop, 0)]), stop]
    if min(starts) < 0 or not all(contents):
        return None
    begins = [sum(end <= start for end in ends) for start in starts]
    stops = [sum(end < start + len(text) for end in ends) + 1 for start, text in zip(starts, contents, strict=True)]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    head, *between, tail = (
        _segments(tokens, first, last, special) for first, last in zip([0, *stops], [*begins, len(tokens)], strict=True)
    )
    return Frame(tokens, head, tail, frozenset(special), tuple(span for spans in between for span in spans))


def _places(contents: Sequence[str], whole: str) -> Iterator[int]:
    """The position of each text after the previous one, or −1 if it is missing."""
    place = 0
    for content in contents:
        yield (start := whole.find(content, place))
        place = max(start, 0) + len(content)


def _segments(tokens: Tokens, first: int, last: int, special: set[int]) -> tuple[Span, ...]:
    starts = [i for i in range(first, last) if i == first or tokens[i] in special]
    return tuple(zip(starts, [*starts[1:], last], strict=True))
