"""Episodes of several turns: what the environment answers, whether that is the model's own result, and how they end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from keel.base.thresholds import Thresholds
from keel.base.types import Completion, Group, Problem
from keel.envs import Task
from keel.envs.episode import Reply, close_now, step_now
from keel.lab.doctor.advice import either, times
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import between, chance_above, level, more_groups
from keel.lab.doctor.probes.rendering import survives
from keel.lab.doctor.setup import ProbeSetup

SECONDS = 5.0  # after which no further episode is played again
REPLAYED, FEWEST = 16, 4  # episodes of the batch that are, and as many as must agree
BEYOND = 3  # times rollout.max_turns that an episode is gone on with
_FRAME = re.compile(r"\b(results?|tool|response|output|observation|function|ipython|user|system|assistant)\b|[\s<>/|]+")
_OPENING = re.compile(rf"(?:<[^<>]*>|[\W_]|(?:status|null)\b|{_FRAME.pattern})*")
# At the start of a reply. A count is a result, as of a linter; so is a field for errors that holds none.
_ERRORS = re.compile(
    r"(?:(?:an?|the|internal|server|unknown|unexpected|fatal)\s+)*\w*(?:error|exception|failure)s?\b"
    r"(?!\W*(?:null|none|nil|false|0)\b|\W*(?:\"\"|''|\[\]|\{\}))"
    r"|(?:(?!(?:no|not|never|without|\d\d?)\b)\w+\W+){0,3}(?:traceback|timed out|timeout(?!\W*\d)|unavailable|"
    r"forbidden|denied|refused|invalid|unauthori[sz]ed|not (?:found|available|implemented)|no results?|rate limit|"
    r"bad request|undefined|failed to)\b"
)


def episode_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Nothing is said of tasks of one turn, nor where an environment raises: a failed reward says so."""
    if not setup.run.task.several_turns or setup.failures:
        return
    yield from [*_of_other_calls(setup)] or _failing(setup, thresholds)
    yield from _unfinished(setup, thresholds)


# ------------------------------------------------------------------------ what tools answer


def replies(completion: Completion, tokenizer: Any) -> list[str]:
    """What the environment said between the model's turns, as text."""
    tokens = zip(completion.action, completion.tokens, strict=True)
    parts = [(action, [token for _, token in part]) for action, part in groupby(tokens, key=lambda pair: pair[0])]
    return [str(tokenizer.decode(part, skip_special_tokens=True)) for action, part in parts if not action]


def is_useless(reply: str) -> bool:
    """Whether a reply says nothing, or that something went wrong."""
    text = reply.casefold()
    return not _FRAME.sub("", text) or _ERRORS.match(_OPENING.sub("", text, count=1)) is not None


def _useless(group: Group, tokenizer: Any) -> float | None:
    """The share of a group's replies from which nothing is learned; None where there was none."""
    shares: list[tuple[float, float]] = []  # replies, and how many of them are useless
    for completion in group.completions:
        counts, texts = completion.counts, replies(completion, tokenizer)
        wrong = sum(map(is_useless, texts))
        if counts.get("tool/calls"):
            shares.append((counts["tool/calls"], max(counts.get("tool/errors", 0.0), wrong)))
        elif texts:
            shares.append((len(texts), wrong))
    total = sum(count for count, _ in shares)
    return min(1.0, sum(wrong for _, wrong in shares) / total) if total else None


def _failing(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Most replies are errors or nothing, beyond chance over `tool_errors`; a problem is one observation."""
    tokenizer, limit = setup.policy.tokenizer, thresholds["tool_errors"]

    def useless(groups: Sequence[Group]) -> list[float]:
        return [share for group in groups if (share := _useless(group, tokenizer)) is not None]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(useless(groups), limit) > level(thresholds)

    def over(groups: Sequence[Group]) -> bool:
        return fmean(useless(groups) or [0.0]) > limit

    groups = more_groups(setup, "tool/failing", lambda groups: over(groups) and by_chance(groups))
    if not over(groups) or by_chance(groups):
        return
    texts = [text for group in groups for c in group.completions for text in replies(c, tokenizer)]
    shown = next(filter(is_useless, texts), "")
    asked = len({_first_turn(completion, tokenizer) for group in groups for completion in group.completions})
    alike = len(set(filter(is_useless, texts))) == 1 and asked > 1
    yield finding(
        "tool/failing",
        f"{between(useless(groups))} of what the environment answers on {len(groups)} problems is an error or nothing, "
        + (f"{shown.strip()!r} to {asked} different calls" if alike else f"such as {shown.strip()[:80]!r}"),
        "the tool fails, or returns nothing, whatever it is asked"
        if alike
        else "the tool fails, or the model's calls are not what it takes",
        "mend the tool: it should return a text for every argument that its types allow; where it is the calls, a "
        "warmstart section on gold episodes",
        severity="error" if fmean(useless(groups)) > thresholds["tool_errors_error"] else "warning",
    )


def _first_turn(completion: Completion, tokenizer: Any) -> str:
    first = [token for token, action in zip(completion.tokens, completion.action, strict=True) if action]
    return str(tokenizer.decode(first[: completion.action.index(False)] if False in completion.action else first))


# ------------------------------------------------------------------------ whose results they are


@dataclass(frozen=True)
class Replayed:
    """The replies to the model's first turn: in the batch as it was shown, and twice in episodes of its own."""

    shown: str
    first: str
    again: str


def contents(reply: Reply | None) -> str:
    """A reply as text."""
    return "" if reply is None else reply if isinstance(reply, str) else "\n".join(m["content"] for m in reply)


def _of_other_calls(setup: ProbeSetup) -> Iterator[Finding]:
    """Calls of the batch made again, alone: each should return what it returned, and the same every time."""
    rows = _replayed(setup)
    late = [(row, after) for row, after in pairwise(rows) if row.again != after.again]
    stale = sum(after.first == row.again and after.first != after.again for row, after in late)
    steady = [row for row in rows if row.first == row.again and row.again.strip()]
    others = {row.again for row in steady}
    lost = [row for row in steady if _squeezed(row.again) not in _squeezed(row.shown)]
    swapped = sum(any(_squeezed(o) in _squeezed(row.shown) for o in others - {row.again}) for row in lost)
    dropped = [row for row in lost if not stands_in(row.again, row.shown, setup.policy.tokenizer)]
    if len(late) >= FEWEST and stale > 0.75 * len(late):
        what = f"{stale} of {len(late)} calls return what the call before them should have returned"
        cause = "the tool, or a cache of it, hands out the result of the call before"
    elif len(lost) >= FEWEST and 2 * len(lost) > len(steady) and 2 * swapped > len(lost):
        what = f"{swapped} of {len(steady)} calls return another episode's result, and their own where they are alone"
        cause = "episodes share what each should have for itself: a result of one is handed to another"
    elif len(dropped) >= FEWEST and len(dropped) == len(steady) and not any(map(is_useless, others)):
        what = (
            f"none of {len(steady)} results stands in what the model reads next: {dropped[0].again.strip()[:60]!r} "
            f"became {dropped[0].shown[-60:]!r}"
        )
        cause = "the chat template or the task drops or cuts what a tool returns"
    else:
        return
    yield finding(
        "tool/failing",
        what,
        cause,
        "let every call return its own result to the episode that made it (Episode.step, the tool's function), and let "
        "the template write messages of the role tool",
    )


def _replayed(setup: ProbeSetup) -> list[Replayed]:
    """The first calls of the batch's episodes, each made twice in a row; [] where none of them was answered."""
    tokenizer, task, began = setup.policy.tokenizer, setup.run.task, time.monotonic()
    texts = {(t.request.key, t.sample): t.completion.text for t in reversed(setup.turns)}
    rows: list[Replayed] = []
    for sample in range(max(len(group.completions) for group in setup.groups)):
        # One problem after the other, so that the call before a call is another one.
        for group in (group for group in setup.groups if sample < len(group.completions)):
            shown, text = replies(group.completions[sample], tokenizer), texts.get((group.problem.key, sample))
            if not shown or text is None or len(rows) >= REPLAYED or time.monotonic() - began > SECONDS:
                continue
            with suppress(Exception):  # a user's environment may raise anything
                first, again = (contents(_answers(task, group.problem, [text])[0]) for _ in range(2))
                rows.append(Replayed(shown[0], first, again))
    return rows


def _answers(task: Task, problem: Problem, texts: Iterable[str]) -> list[Reply | None]:
    """The replies of a new episode to these turns, up to its end; it is closed afterwards."""
    episode, answered = task.start(problem), list[Reply | None]()
    try:
        for text in texts:
            answered.append(step_now(episode, text))
            if answered[-1] is None:
                break
    finally:
        close_now(episode)
    return answered


def _squeezed(text: str) -> str:
    return "".join(text.split())


def stands_in(result: str, shown: str, tokenizer: Any) -> bool:
    """Whether a result is in what the model reads: as it is, as a template writes JSON, or as tokens give it back."""
    tokens = tokenizer.encode(result, add_special_tokens=False)
    forms = (result, json.dumps(result)[1:-1], str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return any(survives(form, shown) for form in forms)


# ------------------------------------------------------------------------ how they end


def unfinished(setup: ProbeSetup, group: Group) -> list[bool]:
    """Which episodes had more to do after their last turn, of the first ones; [] where that is not known.

    Of a single turn, whether it would have been answered: one of a problem is played again, of REPLAYED problems.
    """
    if setup.config.rollout.max_turns > 1 or not setup.run.task.several_turns:
        return [completion.stop_reason == "turns" for completion in group.completions]
    known: dict[tuple[str, str], list[bool]] = setup.shared.setdefault("answered turns", {})
    began, seconds = time.monotonic(), setup.shared.get("seconds of answered turns", 0.0)
    key = group.problem.key, group.completions[0].text
    if key not in known and len(known) < REPLAYED and seconds < SECONDS:
        known[key] = []
        with suppress(Exception):  # a user's environment may raise anything
            known[key] = [_answers(setup.run.task, group.problem, [key[1]])[0] is not None]
        setup.shared["seconds of answered turns"] = seconds + time.monotonic() - began
    return known.get(key, [])


def _unfinished(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Episodes that the last turn ends, not they themselves: nearly all, and beyond chance over `healthy_truncated`.

    A game of so many turns is judged as it stands then, and is none of them: it listens to what is said.
    """
    alarm, healthy = thresholds["truncated_completions_error"], thresholds["healthy_truncated"]

    def shares(groups: Sequence[Group]) -> list[float]:
        return [fmean(ended) for group in groups if (ended := unfinished(setup, group))] or [0.0]

    def doubtful(groups: Sequence[Group]) -> bool:
        return fmean(shares(groups)) > alarm and chance_above(shares(groups), healthy) > level(thresholds)

    groups = more_groups(setup, "output/truncated", doubtful)
    if fmean(shares(groups)) <= alarm or doubtful(groups):
        return
    rows = [pair for group in groups for pair in zip(unfinished(setup, group), group.rewards, strict=False)]
    judged = fmean(reward.parsed for open_ended, reward in rows if open_ended)
    deaf = _is_deaf(setup)
    if judged > thresholds["parse_rate_warning"] and not deaf:
        return
    turns = setup.config.rollout.max_turns
    yield finding(
        "output/truncated",
        f"{between(shares(groups))} of the episodes of {len(shares(groups))} problems had more to do after their last "
        f"turn (rollout.max_turns={turns}), and {100 * judged:.0f} % of those have an answer that can be read"
        + (
            f"; the environment says the same to whatever it is told, and does not end in {BEYOND * turns} turns" * deaf
        ),
        "the environment never ends an episode: it goes on asking until the turns are used up"
        if deaf
        else "the turns are used up before an answer is given",
        "let Episode.step return None where the episode is over"
        if deaf
        else either(times(setup.config.to_dict(), "rollout.max_turns", 3, "three times"), "answer within them"),
        share=fmean(shares(groups)),
    )


def _is_deaf(setup: ProbeSetup) -> bool:
    """Whether the environment goes on far beyond the turns of the run and replies the same, whatever is said."""
    task, turns = setup.run.task, BEYOND * setup.config.rollout.max_turns
    try:
        for group in setup.groups[:2]:
            said = [completion.text.splitlines()[-1:] for completion in group.completions[:2]]
            texts = [task.gold(group.problem), "", *(line for lines in said for line in lines)]
            heard = [_answers(task, group.problem, [text] * turns) for text in texts]
            if any(answers[-1] is None or answers != heard[0] for answers in heard):
                return False
    except Exception:  # a user's environment may raise anything
        return False
    return True
