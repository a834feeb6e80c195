"""Check tool results and endings of multi-turn episodes, and that judging again gives the same rewards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from keel.base.types import Group
from keel.doctor.advice import either, times
from keel.doctor.calls import call_findings
from keel.doctor.evidence import LOOKS, SAME, at_most, between, chance_above, level, more_groups, share_over
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import answers, contents, first_turn, is_useless, played_again, replies, stands_in
from keel.envs.episode import Transcript

BEYOND = 3  # multiple of rollout.max_turns for which an episode is continued
# single turns that are replayed to see whether the episode ends, and the time limit in seconds
REPLAYED, SECONDS = 16, 5.0


def episode_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Check tool results and endings; skipped for single-turn tasks and if a reward or the environment failed."""
    if not setup.run.task.multi_turn or setup.failures:
        return
    yield from [*call_findings(setup)] or _failing(setup)
    yield from _unfinished(setup)


# ------------------------------------------------------------------------ tool results


def _useless(group: Group, tokenizer: Any, turn: int) -> float | None:
    """The share of a group's replies without information; None if there are no replies.

    Turns that were cut at their limit are skipped, since no tool can answer them better.
    """
    shares: list[tuple[float, float]] = []  # replies per episode, and how many are useless
    for completion in (c for c in group.completions if False in c.action[:turn] or len(c.action) < turn):
        counts, texts = completion.counts, replies(completion, tokenizer)
        wrong = sum(map(is_useless, texts))
        if counts.get("tool/calls"):
            shares.append((counts["tool/calls"], max(counts.get("tool/errors", 0.0), wrong)))
        elif texts:
            shares.append((len(texts), wrong))
    total = sum(count for count, _ in shares)
    return min(1.0, sum(wrong for _, wrong in shares) / total) if total else None


def _failing(setup: KeelSubject) -> Iterator[Finding]:
    """Most replies are errors or empty, significantly above `tool_errors`; a problem is one observation.

    If some are, groups are sampled until the share is significantly above or below the limit.
    """
    tokenizer, limit = setup.policy.tokenizer, setup.thresholds["tool_errors"]
    turn = setup.config.rollout.max_turn_length or setup.config.rollout.max_completion_length

    def useless(groups: Sequence[Group]) -> list[float]:
        shares = (_useless(group, tokenizer, turn) for group in groups)
        return [share for share in shares if share is not None]

    def by_chance(groups: Sequence[Group]) -> bool:
        # the look at single completions is one more
        return chance_above(useless(groups), limit) > level(setup.thresholds, LOOKS + 1)

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
        f"{between(useless(groups))} of the environment's replies on {len(groups)} problems are errors or empty, "
        + (f"{shown.strip()!r} for {asked} different calls" if alike else f"such as {shown.strip()[:80]!r}"),
        "the tool fails or returns nothing for every call"
        if alike
        else "the tool fails, or the model's calls have a wrong format",
        "fix the tool so that it returns a text for every allowed argument; if the calls are wrong, add a warmstart "
        "section on gold episodes",
        severity="error" if fmean(useless(groups)) > setup.thresholds["tool_errors_error"] else "warning",
    )


# ------------------------------------------------------------------------ endings


def unfinished(setup: KeelSubject, group: Group) -> list[bool]:
    """Which of the first episodes had more to do after their last turn; [] if that is unknown.

    For single turns: whether the environment would have replied. One episode of a problem is replayed, for up to
    REPLAYED problems.
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


def _unfinished(setup: KeelSubject) -> Iterator[Finding]:
    """Nearly all episodes end at the turn limit and not by themselves, significantly above `healthy_truncated`.

    Games with a fixed number of turns are judged at that point and do not count.
    """
    alarm, healthy = setup.thresholds["truncated_completions_error"], setup.thresholds["healthy_truncated"]

    def share(group: Group) -> float | None:
        return fmean(ended) if (ended := unfinished(setup, group)) else None

    sampled = share_over(setup, "output/truncated", share, alarm, healthy, level(setup.thresholds))
    if not sampled.sure:
        return
    rows = [pair for group in sampled.groups for pair in zip(unfinished(setup, group), group.rewards, strict=False)]
    judged = fmean(reward.parsed for open_ended, reward in rows if open_ended)
    if judged > setup.thresholds["parse_rate_warning"] and not _goes_on(setup):
        return
    turns = setup.config.rollout.max_turns
    yield finding(
        "output/truncated",
        f"{between(sampled.shares)} of the episodes of {len(sampled.shares)} problems were not finished after their "
        f"last turn (rollout.max_turns={turns}), and {100 * judged:.0f} % of those have an answer that can be parsed",
        "the turn limit is reached before an answer is given, or the environment never ends an episode",
        either(
            times(setup.config.to_dict(), "rollout.max_turns", 3, "three times"),
            "let Episode.step return None when the episode is over",
        ),
        share=sampled.mean,
    )


def _goes_on(setup: KeelSubject) -> bool:
    """Whether the environment gives equal replies to gold and to empty answers, far beyond the run's turn limit."""
    turns = BEYOND * setup.config.rollout.max_turns
    with suppress(Exception):  # a user's environment may raise anything
        for problem in (group.problem for group in setup.groups[:2]):
            gold, nothing = (answers(setup.run.task, problem, [t] * turns) for t in (setup.run.task.gold(problem), ""))
            if gold[-1] is None or gold != nothing:
                return False
        return True
    return False


# ------------------------------------------------------------------------ judging again

EPISODES = 4  # number of episodes that are played again

Totals = tuple[float, float]  # rewards of a completion, judged twice


def rejudged_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Judge again in reverse and in the same order. Episodes of several turns are played again, each alone."""
    if setup.failures or setup.config.reward.shuffle is not None:
        return
    pairs = [*(_episodes(setup) if setup.run.task.multi_turn else _completions(setup))]
    setup.built.judge.drain()
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    largest = max((abs(a) for a, _ in pairs), default=0.0)
    if worst <= SAME * max(1.0, largest):
        return
    yield finding(
        "reward/nondeterministic",
        f"the same completions, judged again, earn rewards that differ by up to {worst:.3g}",
        "the reward is random, or depends on the order of completions or on earlier calls"
        if worst > setup.thresholds["reward_spread"] * largest
        else "a small part of the reward may be random, or depend on earlier calls",
        "let the reward depend only on the problem and the text",
    )


def _completions(setup: KeelSubject) -> Iterator[Totals]:
    for group in setup.groups[: max(2, setup.budget.judgements // 32)]:
        turns = [[completion.text] for completion in group.completions]
        # an alternating judge may give equal rewards in one of the two orders
        other, same = (setup.built.judge.judge(group.problem, order) for order in (turns[::-1], turns))
        for again in (other[::-1] if other else None, same):
            if again:
                yield from ((a.total, b.total) for a, b in zip(group.rewards, again, strict=True))


def _episodes(setup: KeelSubject) -> Iterator[Totals]:
    """Pairs of an episode's reward in the batch and in a replay alone, if the environment replies the same."""
    played, judge = 0, setup.built.judge
    if setup.config.reward.aggregate != "sum" or judge.remote:
        return
    for sample in range(max(len(group.completions) for group in setup.groups)):
        for group in (group for group in setup.groups if sample < len(group.completions)):
            if played < EPISODES and (totals := _alone(setup, group, sample)):
                played += 1
                yield from ((group.rewards[sample].total, total) for total in totals)


def _alone(setup: KeelSubject, group: Group, sample: int) -> list[float]:
    """The rewards of an episode's turns in two new episodes; [] if the replies differ or a reward fails."""
    shown, tokenizer = replies(group.completions[sample], setup.policy.tokenizer), setup.policy.tokenizer
    turns = [t.completion.text for t in setup.turns if (t.request.key, t.sample) == (group.problem.key, sample)]
    before, totals, judge = list[list[str]](), list[float](), setup.built.judge
    failed = len(judge.failures)
    with suppress(Exception):  # a user's environment may raise anything
        for _ in range(2):
            with played_again(setup, group.problem, turns) as (episode, answered):
                now = [*map(contents, answered)]
                alike = all(stands_in(a, b, tokenizer) for a, b in zip(now, shown, strict=False))
                if len(now) < len(shown) or not alike or now not in (before or [now]):
                    return []
                before.append(now)
                rewards = judge.judge(group.problem, [Transcript.of(turns, episode)])
                totals += [reward.total for reward in rewards or ()]
        return totals if len(judge.failures) == failed else []
    return []
