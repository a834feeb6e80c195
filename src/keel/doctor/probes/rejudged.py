"""Judge completions again: alone, in another order, and in new episodes. The rewards must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from keel.base.types import Group
from keel.doctor.evidence import SAME
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import contents, played_again, replies, stands_in
from keel.doctor.thresholds import Thresholds
from keel.envs.episode import Transcript

EPISODES = 4  # number of episodes that are played again

Totals = tuple[float, float]  # rewards of a completion, judged twice


def rejudged_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
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
        "reward/fickle",
        f"the same completions, judged again, earn rewards that differ by up to {worst:.3g}",
        "the reward is random, or depends on the order of completions or on what it judged before"
        if worst > thresholds["reward_spread"] * largest
        else "a small part of the reward may be random, or depend on what was judged before",
        "make the reward a function of the problem and the text alone",
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
    """The batch's rewards and those of the same turns alone, if the environment replies the same both times."""
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
