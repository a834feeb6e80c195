"""What a chat template does to messages of any text: each is written once, as it is, in the order of the talk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keel.doctor.asking import MARK
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import in_template, messages_in, survives
from keel.doctor.replies import squeezed
from keel.rollout.render import Renderer
from keel.run.build import build_renderer

_GIVEN_ROLES = ("user", "system")
LEAST_TEXT = 8  # characters of a message that is counted: a date in a template holds shorter ones
Talk = tuple[tuple[str, str], ...]  # roles and texts

# Capitals, spaces in a row, quotes, a line break and signs of markup: what a filter in a template would change.
SYSTEM = ("system", 'Be Brief:  say "A" or\n B, if 1 < 2 & 2 > 1.')
QUESTION = ("user", 'Which Is It:  "C" or\n D, if 3 < 4 & 4 > 3?')
TALKS: tuple[Talk, ...] = (
    (QUESTION,),
    (SYSTEM, QUESTION),
    (QUESTION, ("assistant", "It Is Seven."), ("user", "And Is It Eight?")),
    (SYSTEM, QUESTION, ("assistant", "It Is Seven."), ("user", "And Is It Eight?")),
)


def verbatim_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Only where prompts of the run are put into a template; what one refuses to write it is not asked for."""
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    if not any(in_template(renderer, group.problem) for group in setup.groups):
        return
    own = [messages_in(renderer, group.problem) for group in setup.groups[:2] if in_template(renderer, group.problem)]
    talks = [*TALKS, *(tuple((message["role"], message["content"]) for message in messages) for messages in own)]
    wrong = next((fault for talk in talks if (fault := written_wrongly(renderer, talk)) is not None), None)
    if wrong is not None:
        setup.shared["another template"] = "messages that are changed"
        yield finding(
            "prompt/format",
            wrong,
            "the chat template does more than to put marks around messages, so that the model reads another text than "
            "the problem's",
            "let the template write message['content'] once for each message, in their order, without a filter other "
            "than trim (tokenizer.chat_template, or data.chat_template for another one)",
        )
    elif (odd := odd_marks(renderer, setup.policy.eos_ids)) is not None:
        yield finding(
            "prompt/format",
            odd,
            "the chat template does not end turns in the way of any model: a mark is missing, or there twice",
            "end every turn with one mark, the one that the model was trained on (tokenizer.chat_template)",
            severity="warning",
        )


def written_wrongly(renderer: Renderer, talk: Talk) -> str | None:
    """What a template does to the messages of a talk that it should not; None where nothing, or it refuses them.

    A message that is left out is another finding, and templates may shorten what the assistant said.
    """
    text = _filled(renderer, talk)
    given = [content for role, content in talk if role in _GIVEN_ROLES]
    if text is None or not all(survives(content, text) for content in given):
        return None
    for role, content in (
        (role, content.strip()) for role, content in talk if role in _GIVEN_ROLES and content.strip()
    ):
        if len(talk) < 3 and content not in text:
            return f"the chat template writes the {role}'s message {content!r} otherwise: {text[-120:]!r}"
        others = "".join(other for _, other in talk).count(content)
        if len(content) >= LEAST_TEXT and text.count(content) > others:
            return f"the chat template writes the {role}'s message {content!r} {text.count(content)} times"
    # a system message may stand before any turn: some templates write it into the last one
    contents = [content.strip() for role, content in talk if role != "system"]
    places, place = [], 0
    for content in contents:
        place = text.find(content, place)
        places.append(place)
        place += len(content)
    if all(content in text for content in contents) and min(places, default=0) < 0:
        return f"the chat template writes messages in another order: {_roles(talk)} becomes {text[-120:]!r}"
    return None


def odd_marks(renderer: Renderer, ends: Iterable[int]) -> str | None:
    """A special token twice in a row, or none at the end of an assistant's turn where one opens the next.

    Templates of plain words have no marks that could be missing; BOS and padding have findings of their own.
    """
    tokenizer: Any = renderer.tokenizer
    special = {
        *tokenizer.all_special_tokens,
        *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special),
    }
    marks = special - {tokenizer.bos_token, tokenizer.pad_token} | {tokenizer.eos_token} - {None}
    text = _filled(renderer, TALKS[2])
    if text is None:
        return None
    if twice := sorted(mark for mark in marks if mark + mark in squeezed(text)):
        return f"the chat template writes {twice[0]!r} twice in a row: {text[-120:]!r}"
    answered, asked = (TALKS[2][i][1] for i in (1, 2))
    between = text.partition(answered)[2].partition(asked)[0]
    opened = re.compile("|".join([MARK.pattern, *map(re.escape, sorted(special - {None}))]))
    count = len(opened.findall(between))
    ended = any(str(tokenizer.decode([end], skip_special_tokens=False)) in between for end in ends)
    if asked in text and count == 1 and not ended:
        return f"the chat template writes {between!r} between the assistant's message and the next: no end"
    return None


def _filled(renderer: Renderer, talk: Talk) -> str | None:
    tokenizer: Any = renderer.tokenizer
    messages = [{"role": role, "content": content} for role, content in talk]
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=renderer.template, tokenize=False, add_generation_prompt=True
            )
        )
    except Exception:  # templates raise what they like
        return None


def _roles(talk: Sequence[tuple[str, str]]) -> str:
    return ", ".join(role for role, _ in talk)
