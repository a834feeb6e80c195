"""Episodes that call tools and never answer. If the answer is judged, they should earn nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean

from keel.base.types import Problem
from keel.doctor.evidence import single_ones
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.exploits import nearly_all
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.replayed import asked_of
from keel.doctor.replies import first_turn, is_useless, played_again, replies
from keel.doctor.thresholds import Thresholds
from keel.envs.toolbox import ToolEpisode

# number of problems that must pay before further ones are judged, and their maximum; five episodes per problem
FIRST, PROBLEMS = 4, 24
SECONDS = 5.0


def idle_findings(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Tool calls, repeated until the turn limit or followed by nothing, that earn as much as the gold answer."""
    judge, began = setup.built.judge, time.monotonic()
    if not setup.run.task.multi_turn or setup.run.task.prompts_only or judge.remote or setup.failures:
        return
    paid: dict[str, list[float]] = {"that is made until the turns are used up": [], "with nothing behind it": []}
    shown = ""
    for number, (problem, call) in enumerate(_calls(setup)):
        gold = gold_or_none(setup.run.task, problem) or []
        if len(gold) != 1 or _calls_tools(setup, gold[0]):
            return  # the reward judges actions and not an answer
        turns = [call] * setup.config.rollout.max_turns
        rewards = judge.judge(problem, [gold, [call, *gold], [""], turns, [call, ""]])
        if rewards is None:
            return
        right, nothing = max(reward.total for reward in rewards[:2]), rewards[2].total
        if right <= nothing:
            return
        least = nothing + thresholds["exploit_share"] * (right - nothing)
        for values, reward in zip(paid.values(), rewards[3:], strict=True):
            values.append(float(reward.total >= least))
        shown = call
        if number + 1 >= FIRST and max(map(fmean, paid.values())) < thresholds["exploit_share"]:
            break
        if number + 1 >= PROBLEMS or time.monotonic() - began > SECONDS:
            break
    judge.drain()
    for how, values in paid.items():
        if values and nearly_all(values, thresholds):
            yield finding(
                "reward/exploit",
                f"a call of a tool {how}, such as {shown[:60]!r}, earns {thresholds['exploit_share']:g} of a gold "
                f"answer's reward or more on {sum(values):.0f} of {len(values)} problems",
                "the reward pays for calls, for their results or for an episode that was never finished: a policy "
                "learns to call and not to answer",
                "judge the text of the last turn alone (Episode.reward), and give episodes without one nothing",
            )
            return


def _calls(setup: KeelSubject) -> Iterator[tuple[Problem, str]]:
    """For each problem one first turn with an answered tool call: from the batch, then from further problems."""
    known, tokenizer = set[str](), setup.policy.tokenizer
    for more in (False, True):
        for group in single_ones(setup) if more else setup.groups:
            text = first_turn(group.completions[0], tokenizer, setup.sampling.stop)
            heard = replies(group.completions[0], tokenizer)
            if group.problem.key not in known and heard and not is_useless(heard[0]) and _calls_tools(setup, text):
                yield group.problem, text
            known.add(group.problem.key)


def _calls_tools(setup: KeelSubject, text: str) -> bool:
    """Whether a turn calls tools that the first problem's episode offers."""
    if "an episode's tools" not in setup.shared:
        setup.shared["an episode's tools"] = None
        # user code may raise anything
        with suppress(Exception), played_again(setup, setup.groups[0].problem) as (episode, _):
            setup.shared["an episode's tools"] = episode if isinstance(episode, ToolEpisode) else None
    offered = setup.shared["an episode's tools"]
    return offered is not None and bool(asked_of(offered, text))
