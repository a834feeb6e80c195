"""First turns of the batch, said again in new episodes of their problem: what was asked and what was answered."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from keel.base.types import Problem
from keel.doctor.findings import Severity
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import contents, played_again, replies
from keel.envs import Episode
from keel.envs.tool_calls import parse_calls
from keel.envs.toolbox import ToolEpisode

EPISODES = 12  # of the batch whose first turn is said again
FEWEST, MOST = 4, 0.75  # calls that must agree, and the share of them

_ROLES = frozenset(("tool", "function", "ipython", "observation"))
_RESULT = re.compile(r"\b(?:results?|outputs?|observations?|responses?|returned|found)\b", re.IGNORECASE)
_VALUE = re.compile(r"\W*[-+]?\d[\d.,]*\W*")


class Wrong(NamedTuple):
    """What is wrong and its cause, how sure that is, and where it would be right."""

    evidence: str
    cause: str
    severity: Severity = "error"
    unless: str = ""
    in_failures: Severity | None = None  # where hardly an episode can be read, which speaks for it


@dataclass(frozen=True)
class Replayed:
    """The replies to a first turn of the batch: as the model was shown them, and twice in episodes of their own."""

    problem: Problem
    text: str
    shown: str | None  # None where it had no room
    first: str
    again: str
    roles: tuple[str, ...]  # of its messages; none of a text
    asked: Hashable  # see `asked_of`
    of_tool: bool

    @property
    def is_result(self) -> bool:
        """Whether it is said to be what a call returned; other replies may be the same to all."""
        called = _RESULT.search(self.again) or _VALUE.fullmatch(self.again)
        return self.of_tool or bool(_ROLES & set(self.roles)) or called is not None

    @property
    def is_steady(self) -> bool:
        """Whether the call returns the same both times, and something."""
        return self.first == self.again and bool(self.again.strip())


def asked_of(episode: Episode, text: str) -> Hashable:
    """What a turn asks for: the names and arguments of its calls, whatever was thought; elsewhere all of it."""
    if not isinstance(episode, ToolEpisode):
        return text
    calls = parse_calls(text, episode.toolbox.format, tuple(episode.offered.values()))
    return tuple((call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in calls)


def replayed(setup: KeelSubject) -> tuple[list[Replayed], list[tuple[bool, bool]]]:
    """The first calls of the batch's episodes, each made twice in a row: those answered, and which ended theirs.

    A turn that was cut at its limit is no call.
    """
    whole = {(t.request.key, t.sample): t.completion for t in reversed(setup.turns)}
    texts = {key: completion.text for key, completion in whole.items() if completion.stop_reason != "length"}
    rows, ends = list[Replayed](), list[tuple[bool, bool]]()
    for sample in range(max(len(group.completions) for group in setup.groups)):
        # One problem after the other, so that the call before a call is another one.
        for group in (group for group in setup.groups if sample < len(group.completions)):
            text = texts.get((group.problem.key, sample))
            if text is None or len(ends) >= EPISODES:
                continue
            shown = replies(group.completions[sample], setup.policy.tokenizer)
            with suppress(Exception):  # a user's environment may raise anything
                with played_again(setup, group.problem, [text]) as (episode, (first, *_)):
                    asked, of_tool = asked_of(episode, text), isinstance(episode, ToolEpisode)
                with played_again(setup, group.problem, [text]) as (_, (again, *_)):
                    pass
                ends.append((first is None, again is None))
                if first is not None and again is not None:
                    roles = () if isinstance(again, str) else tuple(message["role"] for message in again)
                    told, heard = shown[0] if shown else None, (contents(first), contents(again))
                    rows.append(Replayed(group.problem, text, told, *heard, roles, asked, of_tool))
    return rows, ends
