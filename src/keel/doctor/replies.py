"""What an environment replies, as text: read from tokens, and whether anything is learned from it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import groupby
from typing import Any

from keel.base.types import Completion, Problem
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import survives
from keel.envs import Episode, Task
from keel.envs.base import play_turns
from keel.envs.episode import Reply
from keel.rollout.stops import StopStrings

# What probes may play a user's environment again, 80 times and 10 s in all: how episodes end has its own part of it
# (8 plays, and of single turns 16 more and 5 s).
PLAYS, SECONDS = 72, 10.0
PLAYS_OF_SINGLE_TURNS, SECONDS_OF_SINGLE_TURNS = 40, 5.0

TAG = re.compile(r"</?\w+>")
_FRAME = re.compile(r"\b(results?|tool|response|output|observation|function|ipython|user|system|assistant)\b|[\s<>/|]+")
_OPENING = re.compile(rf"(?:<[^<>]*>|[\W_]|(?:status|null)\b|{_FRAME.pattern})*")
# A server's refusal: a status with its phrase, or the phrase alone where it is of the server's own failing.
_PHRASES = {s.value: re.escape(s.phrase.casefold()).replace("timeout", "time-?out") for s in HTTPStatus if s >= 400}
_FAILED = "|".join(phrase for status, phrase in _PHRASES.items() if status >= 500 or status == 429)
_STATUSES = re.compile(
    rf"(?:(?:http\S*\W+)?(?:{'|'.join(map(str, _PHRASES))})\W+(?:\w+\W+)?(?:{'|'.join(_PHRASES.values())})|{_FAILED})"
    r"(?! ?[\w'’-])"  # not the first words of a sentence
)
_ARGUMENT = "(?:argument|parameter|operand|option|field|property)s?"
# At the start of a reply. A count is a result, as of a linter; so is a field for errors that holds none.
_ERRORS = re.compile(
    r"(?:(?:an?|the|internal|server|unknown|unexpected|fatal)\s+)*\w*(?:error|exception|failure)s?\b"
    r"(?!\W*(?:null|none|nil|false|0)\b|\W*(?:\"\"|''|\[\]|\{\}))"
    r"|(?:(?!(?:no|not|never|without|\d\d?)\b)\w+\W+){0,3}(?:traceback|timed out|timeout(?!\W*\d)|unavailable|"
    r"forbidden|denied|refused|invalid|unauthori[sz]ed|not (?:found|available|implemented)|"
    r"no (?:search |matching |relevant )?results?|rate limit|bad request|undefined|failed to|"
    r"requests? too (?:quickly|fast|often)|too many requests)\b"
    r"|(?:0|zero)\s+(?:results?|hits|matches|documents|records|entries)\b(?!\s*(?!found|returned|for\b)\w)"
    # a command's own name may stand before what it could not do, and a number of its error
    r"|(?:[\w./-]+:\s+)*(?:\(\d+\)\s+)?(?:(?:could not|cannot|unable to)\s+(?:resolve|connect|reach|open|find|"
    r"execute|import|load|access|read|fetch|allocate)|no such (?:file|host|module|table|command|tool|key|function))\b"
    # how a process ends that did not do what it was started for, and says no more
    r"|(?:(?!(?:no|not|never|without|if)\b)\w+\W+){0,4}?(?:(?:(?:exit(?:ed)?|terminated|ended|failed|died|stopped)\W+"
    r"(?:(?:with|by|on|an?|non-?zero|exit|return|error)\W+)*(?:code|status|signal)\W+-?[1-9]\d*|"
    r"(?:was|been|process|got) killed|killed|(?:cuda )?out of memory|oom\W?killed|"
    r"(?:memory|time|cpu|quota|rate|output|usage)\W+(?:limit\W+|quota\W+)?exceeded|deadline exceeded|"
    r"segmentation fault|stack overflow|broken pipe|no space left on device|read-only file system|"
    r"operation not permitted|command not found|kernel (?:has )?(?:died|restarted|crashed)|"
    r"connection (?:was )?(?:reset|closed|lost|aborted))"
    r"(?:\W+(?:by (?:peer|signal|the \w+)|core dumped|memory limit exceeded))?\W*(?:</\S*\s*)?$)"
    # how programs and services tell that they were called in a wrong way
    r"|usage:\s*[\w./-]{0,40}[a-z][\w./-]{0,40}(?:\s+[\w./-]{1,80})?(?:\s*[\[<{]\S|\s+--?[a-z])[^\n]*\s*"
    r"(?:</\S*\s*)?(?:$|[^\n]*(?:error:|required|missing|--help)[^\n]*\s*$)"  # a synopsis alone, or with what was wrong
    rf"|(?:[\w./-]+:\s+)*(?:the following\s+)?(?:\w+\W+){{0,2}}{_ARGUMENT}\s+(?:\W?\w+\W?\s+)?(?:is|are)\s+"
    r"(?:required|missing)\s*(?:[:;,]|[.!]?\s*$)"
    rf"|(?:[\w./-]+:\s+)*missing\s+(?:\d+\s+)?(?:(?:required|positional|mandatory|query)\s+)*{_ARGUMENT}\s*"
    r"(?:[:;,.!'\"`(<]|$)"
)
# Next to nothing, dots, and a mark that the rest was cut off: a number may be truncated on purpose.
_CUT = re.compile(r"[^\W\d]{0,8}\s*(?:\.{3}|…)\s*[\[(<]?\s*(?:\w+\s+)?truncated\b[^\n]{0,40}\s*(?:</\S*\s*)?$")
# How languages write what has no text of its own: an object, a call that nobody awaited, a function.
_OBJECT = re.compile(
    r"<(?:[\w.]+ object\b|coroutine object|async_generator object|generator object|bound method|built-in|function|"
    r"class|module)[^>]* ?(?:at 0x[0-9a-f]+|of <[^>]*>|'[^']*')?>+|<response \[\d+\]>|\[object \w+\]"
)


def replies(completion: Completion, tokenizer: Any) -> list[str]:
    """What the environment said between the model's turns, as text: with its own blanks, where it is in the transcript.

    Some tokenizers lose them, and a status without blanks is no words.
    """
    tokens = zip(completion.action, completion.tokens, strict=True)
    parts = [(action, [token for _, token in part]) for action, part in groupby(tokens, key=lambda pair: pair[0])]
    shown = [str(tokenizer.decode(part, skip_special_tokens=True)) for action, part in parts if not action]
    places = [place for place, sign in enumerate(completion.text) if not sign.isspace()]
    whole, start, said = squeezed(completion.text), 0, list[str]()
    for text in shown:
        at, length = whole.find(squeezed(text), start), len(squeezed(text))
        found = at >= 0 and length > 0
        said.append(completion.text[places[at] : places[at + length - 1] + 1] if found else text)
        start = at + length if found else start
    return said


def first_turn(completion: Completion, tokenizer: Any, stop: Sequence[str] = ()) -> str:
    """What the model said before the environment did, as the engine hands it on: up to a stop string."""
    action, strings = completion.action, StopStrings(tokenizer)
    tokens = list(completion.tokens[: action.index(False) if False in action else len(action)])
    text = strings.cut(tokens, tuple(stop)) if stop else None
    return strings.decode(tokens) if text is None else text


def is_useless(reply: str) -> bool:
    """Whether a reply says nothing, or that something went wrong."""
    text = reply.casefold()
    opened = _OPENING.sub("", text, count=1)
    wrong = any(pattern.match(opened) for pattern in (_ERRORS, _STATUSES, _CUT))
    return wrong or not _FRAME.sub("", _OBJECT.sub("", text))


def contents(reply: Reply | None) -> str:
    """A reply as text."""
    return "" if reply is None else reply if isinstance(reply, str) else "\n".join(m["content"] for m in reply)


def answers(task: Task, problem: Problem, texts: Iterable[str]) -> list[Reply | None]:
    """The replies of a new episode to these turns, up to its end; it is closed afterwards."""
    with play_turns(task, problem, texts) as (_, answered):
        return answered


class OutOfPlays(Exception):
    """The environment was played again as often, or as long, as a preflight may."""


@contextmanager
def played_again(
    setup: KeelSubject, problem: Problem, texts: Iterable[str] = ()
) -> Iterator[tuple[Episode, list[Reply | None]]]:
    """A new episode after these turns, with its replies to them, closed afterwards; OutOfPlays where none is left."""
    count, seconds = setup.shared.get("plays", (0, 0.0))
    single = setup.config.rollout.max_turns == 1
    most, most_s = (PLAYS_OF_SINGLE_TURNS, SECONDS_OF_SINGLE_TURNS) if single else (PLAYS, SECONDS)
    if count >= most or seconds >= most_s:
        raise OutOfPlays
    began = time.monotonic()
    try:
        with play_turns(setup.run.task, problem, texts) as play:
            yield play
    finally:
        setup.shared["plays"] = count + 1, seconds + time.monotonic() - began


def answers_again(setup: KeelSubject, problem: Problem, text: str) -> Reply | None:
    """The reply of a new episode to a first turn; OutOfPlays as above."""
    with played_again(setup, problem, [text]) as (_, answered):
        return answered[0]


def squeezed(text: str) -> str:
    return "".join(text.split())


def stands_in(result: str, shown: str, tokenizer: Any) -> bool:
    """Whether a result is in what the model reads: as it is, as a template writes JSON, or as tokens give it back."""
    tokens = tokenizer.encode(result, add_special_tokens=False)
    forms = (result, json.dumps(result)[1:-1], str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return any(survives(form, shown) for form in forms)
