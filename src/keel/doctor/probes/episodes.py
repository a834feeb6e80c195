"""Episodes of several turns: what the environment answers, whether that is the model's own result, and how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from keel.base.types import Group
from keel.doctor.advice import either, times
from keel.doctor.calls import call_findings
from keel.doctor.evidence import LOOKS, at_most, between, chance_above, level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import answers, first_turn, is_useless, replies
from keel.doctor.thresholds import Thresholds

REPLAYED, SECONDS = 16, 5.0  # single turns that are played again to see whether they end, and for how long
BEYOND = 3  # times rollout.max_turns that an episode is gone on with


def episode_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Nothing is said of tasks of one turn, nor where an environment raises: a failed reward says so."""
    if not setup.run.task.multi_turn or setup.failures:
        return
    yield from [*call_findings(setup, thresholds)] or _failing(setup, thresholds)
    yield from _unfinished(setup, thresholds)


# ------------------------------------------------------------------------ what tools answer


def _useless(group: Group, tokenizer: Any, turn: int) -> float | None:
    """The share of a group's replies from which nothing is learned; None where there was none.

    To a first turn that was cut at its limit no tool has a better answer.
    """
    shares: list[tuple[float, float]] = []  # replies, and how many of them are useless
    for completion in (c for c in group.completions if False in c.action[:turn] or len(c.action) < turn):
        counts, texts = completion.counts, replies(completion, tokenizer)
        wrong = sum(map(is_useless, texts))
        if counts.get("tool/calls"):
            shares.append((counts["tool/calls"], max(counts.get("tool/errors", 0.0), wrong)))
        elif texts:
            shares.append((len(texts), wrong))
    total = sum(count for count, _ in shares)
    return min(1.0, sum(wrong for _, wrong in shares) / total) if total else None


def _failing(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Most replies are errors or nothing, beyond chance over `tool_errors`; a problem is one observation.

    Where some are, the test goes on until it is known on which side of the limit their share is.
    """
    tokenizer, limit = setup.policy.tokenizer, thresholds["tool_errors"]
    turn = setup.config.rollout.max_turn_length or setup.config.rollout.max_completion_length

    def useless(groups: Sequence[Group]) -> list[float]:
        shares = (_useless(group, tokenizer, turn) for group in groups)
        return [share for share in shares if share is not None]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(useless(groups), limit) > level(thresholds, LOOKS + 1)  # single ones are one look more

    def over(groups: Sequence[Group]) -> bool:
        return fmean(useless(groups) or [0.0]) > limit

    def undecided(groups: Sequence[Group]) -> bool:
        shares = useless(groups)
        return any(shares) and by_chance(groups) and at_most(shares) > limit

    groups = more_groups(setup, "tool/failing", undecided, single=True)
    if not over(groups) or by_chance(groups):
        return
    texts = [text for group in groups for c in group.completions for text in replies(c, tokenizer)]
    wrong = list(filter(is_useless, texts))
    shown = wrong[0] if wrong else ""
    asked = len({first_turn(completion, tokenizer) for group in groups for completion in group.completions})
    alike = len(set(wrong)) == 1 and asked > 1
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


# ------------------------------------------------------------------------ how they end


def unfinished(setup: KeelSubject, group: Group) -> list[bool]:
    """Which episodes had more to do after their last turn, of the first ones; [] where that is not known.

    Of a single turn, whether it would have been answered: one of a problem is played again, of REPLAYED problems.
    """
    if setup.config.rollout.max_turns > 1 or not setup.run.task.multi_turn:
        return [completion.stop_reason == "turns" for completion in group.completions]
    known: dict[tuple[str, str], list[bool]] = setup.shared.setdefault("answered turns", {})
    began, seconds = time.monotonic(), setup.shared.get("seconds of answered turns", 0.0)
    key = group.problem.key, group.completions[0].text
    if key not in known and len(known) < REPLAYED and seconds < SECONDS:
        known[key] = []
        with suppress(Exception):  # a user's environment may raise anything
            known[key] = [answers(setup.run.task, group.problem, [key[1]])[0] is not None]
        setup.shared["seconds of answered turns"] = seconds + time.monotonic() - began
    return known.get(key, [])


def _unfinished(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
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


def _is_deaf(setup: KeelSubject) -> bool:
    """Whether the environment goes on far beyond the turns of the run and replies the same, whatever is said."""
    task, turns = setup.run.task, BEYOND * setup.config.rollout.max_turns
    try:
        for group in setup.groups[:2]:
            said = [completion.text.splitlines()[-1:] for completion in group.completions[:2]]
            texts = [task.gold(group.problem), "", *(line for lines in said for line in lines)]
            heard = [answers(task, group.problem, [text] * turns) for text in texts]
            if any(answers[-1] is None or answers != heard[0] for answers in heard):
                return False
    except Exception:  # a user's environment may raise anything
        return False
    return True
