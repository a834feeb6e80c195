"""Replay first turns of the batch in new episodes, to compare the environment's replies."""

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
        """Whether the reply is a tool result. Other replies may be equal for all."""
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
