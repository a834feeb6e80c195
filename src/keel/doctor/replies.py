"""Replies of an environment: their text, whether it contains information, and replays in new episodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby
from typing import Any, NamedTuple

from keel.base.types import Completion, Problem
from keel.doctor.findings import Severity
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import survives
from keel.envs import Episode, Task
from keel.envs.base import play_turns
from keel.envs.episode import Reply
from keel.envs.tool_calls import parse_calls
from keel.envs.toolbox import ToolEpisode
from keel.rollout.request import StopStrings

# Limits on replays of a user's environment, in plays and seconds; lower for single turns. Tests of episode endings have
# separate limits (probes/episodes.py).
PLAYS, SECONDS = 72, 10.0
PLAYS_OF_SINGLE_TURNS, SECONDS_OF_SINGLE_TURNS = 40, 5.0

TAG = re.compile(r"</?\w+>")
_FRAME = re.compile(r"\b(results?|tool|response|output|observation|function|ipython|user|system|assistant)\b|[\s<>/|]+")
_OPENING = re.compile(rf"(?:<[^<>]*>|[\W_]|(?:status|null)\b|{_FRAME.pattern})*")
# An HTTP error: a status code with its phrase, or the phrase of a server error alone.
_PHRASES = {s.value: re.escape(s.phrase.casefold()).replace("timeout", "time-?out") for s in HTTPStatus if s >= 400}
_FAILED = "|".join(phrase for status, phrase in _PHRASES.items() if status >= 500 or status == 429)
_STATUSES = re.compile(
    rf"(?:(?:http\S*\W+)?(?:{'|'.join(map(str, _PHRASES))})\W+(?:\w+\W+)?(?:{'|'.join(_PHRASES.values())})|{_FAILED})"
    r"(?! ?[\w'’-])"  # the phrase must not start a longer sentence
)
# Errors at the start of a reply. A linter's count of errors and an empty error field are results.
_ERRORS = re.compile(
    r"(?:(?:an?|the|internal|server|unknown|unexpected|fatal)\s+)*\w*(?:error|exception|failure)s?\b"
    r"(?!\W*(?:null|none|nil|false|0)\b|\W*(?:\"\"|''|\[\]|\{\}))"
    r"|(?:(?!(?:no|not|never|without|\d\d?)\b)\w+\W+){0,3}(?:traceback|timed out|timeout(?!\W*\d)|unavailable|"
    r"forbidden|denied|refused|invalid|unauthori[sz]ed|not (?:found|available|implemented)|"
    r"no (?:search |matching |relevant )?results?|rate limit|bad request|undefined|failed to|"
    r"requests? too (?:quickly|fast|often)|too many requests)\b"
    r"|(?:0|zero)\s+(?:results?|hits|matches|documents|records|entries)\b(?!\s*(?!found|returned|for\b)\w)"
    # a command's name and an error number may come first
    r"|(?:[\w./-]+:\s+)*(?:\(\d+\)\s+)?(?:(?:could not|cannot|unable to)\s+(?:resolve|connect|reach|open|find|"
    r"execute|import|load|access|read|fetch|allocate)|no such (?:file|host|module|table|command|tool|key|function))\b"
    # the call had wrong arguments
    r"|(?:[^\n]*\n)?[^\n]*\b(?:arguments?|parameters?|operands?)\W+(?:is|are)\W+(?:required|missing)\b"
    # almost no text, dots, and a truncation mark; numbers may be truncated on purpose
    r"|[^\W\d]{0,8}\s*(?:\.{3}|…)\s*[\[(<]?\s*(?:\w+\s+)?truncated\b[^\n]{0,40}\s*(?:</\S*\s*)?$"
    # the exit status of a failed process, without further output
    r"|(?:(?!(?:no|not|never|without|if)\b)\w+\W+){0,6}?(?:(?:code|status|signal)\W+-?[1-9]\d*|killed|out of memory|"
    r"(?:limit|quota|deadline) exceeded|segmentation fault|command not found|no space left on device|"
    r"connection (?:reset|closed|lost))(?:\W+(?:by (?:peer|signal|the \w+)|core dumped|memory limit exceeded))?"
    r"\W*(?:</\S*\s*)?$"
)
# Default string forms of an object, a coroutine or a function.
_OBJECT = re.compile(
    r"<[^<>]*\b(?:object|method|function|class|module)\b[^>]*(?:at 0x[0-9a-f]+|of <[^>]*>|'[^']*')>+|"
    r"<response \[\d+\]>|\[object \w+\]"
)


def replies(completion: Completion, tokenizer: Any) -> list[str]:
    """The environment's replies between the model's turns, with their original whitespace if the transcript has it.

    Some tokenizers lose whitespace, and without it an error message cannot be recognised.
    """
    tokens = zip(completion.action, completion.tokens, strict=True)
    parts = [(action, [token for _, token in part]) for action, part in groupby(tokens, key=lambda pair: pair[0])]
    shown = [str(tokenizer.decode(part, skip_special_tokens=True)) for action, part in parts if not action]
    places = [place for place, sign in enumerate(completion.text) if not sign.isspace()]
    whole, start, parts_shown = squeezed(completion.text), 0, list[str]()
    for text in shown:
        at, length = whole.find(squeezed(text), start), len(squeezed(text))
        found = at >= 0 and length > 0
        parts_shown.append(completion.text[places[at] : places[at + length - 1] + 1] if found else text)
        start = at + length if found else start
    return parts_shown


def first_turn(completion: Completion, tokenizer: Any, stop: Sequence[str] = ()) -> str:
    """The model's first turn up to a stop string, as the engine returns it."""
    action, strings = completion.action, StopStrings(tokenizer)
    tokens = list(completion.tokens[: action.index(False) if False in action else len(action)])
    text = strings.cut(tokens, tuple(stop)) if stop else None
    return strings.decode(tokens) if text is None else text


def is_useless(reply: str) -> bool:
    """Whether a reply is empty or reports an error."""
    text = reply.casefold()
    opened = _OPENING.sub("", text, count=1)
    return bool(_ERRORS.match(opened) or _STATUSES.match(opened)) or not _FRAME.sub("", _OBJECT.sub("", text))


def contents(reply: Reply | None) -> str:
    return "" if reply is None else reply if isinstance(reply, str) else "\n".join(m["content"] for m in reply)


def answers(task: Task, problem: Problem, texts: Iterable[str]) -> list[Reply | None]:
    """The replies of a new episode to these turns, until it ends. The episode is closed."""
    with play_turns(task, problem, texts) as (_, answered):
        return answered


class OutOfPlays(Exception):
    """Raised when the budget for replays of the environment is used up."""


@contextmanager
def played_again(
    setup: KeelSubject, problem: Problem, texts: Iterable[str] = ()
) -> Iterator[tuple[Episode, list[Reply | None]]]:
    """A new episode after these turns, with its replies, closed on exit. Raises OutOfPlays without budget."""
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
    """The reply of a new episode to a first turn. Raises OutOfPlays without budget."""
    with played_again(setup, problem, [text]) as (_, answered):
        return answered[0]


def squeezed(text: str) -> str:
    return "".join(text.split())


def stands_in(result: str, shown: str, tokenizer: Any) -> bool:
    """Whether the model's context contains a result: unchanged, as JSON by the template, or as decoded tokens."""
    tokens = tokenizer.encode(result, add_special_tokens=False)
    forms = (result, json.dumps(result)[1:-1], str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return any(survives(form, shown) for form in forms)


# ------------------------------------------------------------------------ first turns in new episodes

EPISODES = 12  # episodes of the batch whose first turn is replayed
FEWEST, MOST = 4, 0.75  # least number and share of calls that must agree

_ROLES = frozenset(("tool", "function", "ipython", "observation"))
_RESULT = re.compile(r"\b(?:results?|outputs?|observations?|responses?|returned|found)\b", re.IGNORECASE)
_VALUE = re.compile(r"\W*[-+]?\d[\d.,]*\W*")


class Wrong(NamedTuple):
    """A violated property: evidence and cause, the severity, and when it would be intended."""

    evidence: str
    cause: str
    severity: Severity = "error"
    unless: str = ""
    # the severity if hardly any episode can be parsed, which makes the finding more likely
    in_failures: Severity | None = None


@dataclass(frozen=True)
class Replayed:
    """The replies to a first turn of the batch: the one shown to the model, and those of two new episodes."""

    problem: Problem
    text: str
    shown: str | None  # None if it did not fit into the context
    first: str
    again: str
    roles: tuple[str, ...]  # roles of the reply's messages; empty for a plain text
    asked: Hashable  # see `asked_of`
    of_tool: bool

    @property
    def is_result(self) -> bool:
        """Whether the reply is a tool result. Other replies may be the same for all calls."""
        called = _RESULT.search(self.again) or _VALUE.fullmatch(self.again)
        return self.of_tool or bool(_ROLES & set(self.roles)) or called is not None

    @property
    def is_steady(self) -> bool:
        """Whether the call returns the same nonempty result both times."""
        return self.first == self.again and bool(self.again.strip())


def asked_of(episode: Episode, text: str) -> Hashable:
    """The names and arguments of a turn's calls, without its reasoning; for other environments, the whole turn."""
    if not isinstance(episode, ToolEpisode):
        return text
    calls = parse_calls(text, episode.toolbox.format, tuple(episode.offered.values()))
    return tuple((call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in calls)


def replayed(setup: KeelSubject) -> list[Replayed]:
    """The batch's answered first calls, each repeated twice in a row.

    Turns that were cut at their limit are skipped.
    """
    whole = {(t.request.key, t.sample): t.completion for t in reversed(setup.turns)}
    texts = {key: completion.text for key, completion in whole.items() if completion.stop_reason != "length"}
    rows, calls = list[Replayed](), 0
    for sample in range(max(len(group.completions) for group in setup.groups)):
        # Problems alternate, so that consecutive calls differ.
        for group in (group for group in setup.groups if sample < len(group.completions)):
            text = texts.get((group.problem.key, sample))
            if text is None or calls >= EPISODES:
                continue
            shown = replies(group.completions[sample], setup.policy.tokenizer)
            with suppress(Exception):  # a user's environment may raise anything
                with played_again(setup, group.problem, [text]) as (episode, (first, *_)):
                    asked, of_tool = asked_of(episode, text), isinstance(episode, ToolEpisode)
                with played_again(setup, group.problem, [text]) as (_, (again, *_)):
                    pass
                calls += 1
                if first is not None and again is not None:
                    roles = () if isinstance(again, str) else tuple(message["role"] for message in again)
                    reply, both = shown[0] if shown else None, (contents(first), contents(again))
                    rows.append(Replayed(group.problem, text, reply, *both, roles, asked, of_tool))
    return rows
