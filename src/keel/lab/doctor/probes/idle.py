"""Episodes that call their tools and never answer: where answers are what is judged, they earn nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.base.types import Problem
from keel.envs.base import played
from keel.envs.toolbox import ToolEpisode
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import with_single_ones
from keel.lab.doctor.probes.exploits import nearly_all
from keel.lab.doctor.probes.gold_likelihood import gold_or_none
from keel.lab.doctor.probes.replayed import asked_of
from keel.lab.doctor.probes.replies import contents, first_turn, is_useless
from keel.lab.doctor.setup import ProbeSetup

FIRST, PROBLEMS = 4, 24  # problems that must pay before more are asked, and how many those are
JUDGED = 4  # episodes of a problem
SECONDS = 5.0


def idle_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Calls of the batch, over and over or with nothing behind them, that earn what the gold answer alone does."""
    judge, began = setup.built.judge, time.monotonic()
    if not setup.run.task.several_turns or setup.run.task.unanswered or judge.remote or setup.failures:
        return
    paid: dict[str, list[float]] = {"that is made until the turns are used up": [], "with nothing behind it": []}
    shown = ""
    for number, (problem, call) in enumerate(_calls(setup)):
        if number >= PROBLEMS or setup.judgements_left < JUDGED or time.monotonic() - began > SECONDS:
            break
        if number >= FIRST and max(map(fmean, paid.values())) < thresholds["exploit_share"]:
            break
        gold = gold_or_none(setup.run.task, problem) or []
        if len(gold) != 1:
            return  # what is judged is what episodes do, and not an answer
        turns = [call] * setup.config.rollout.max_turns
        rewards = judge.judge(problem, [gold, [""], turns, [call, ""]])
        if rewards is None or rewards[0].total <= rewards[1].total:
            return
        least = rewards[1].total + thresholds["exploit_share"] * (rewards[0].total - rewards[1].total)
        for values, reward in zip(paid.values(), rewards[2:], strict=True):
            values.append(float(reward.total >= least))
        shown = call
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


def _calls(setup: ProbeSetup) -> Iterator[tuple[Problem, str]]:
    """Of each problem one first turn whose call was answered: of the batch, then of others."""
    known, groups = set[str](), list(setup.groups)
    for more in (False, True):
        found = list[tuple[Problem, str]]()
        for group in with_single_ones(setup, groups)[len(groups) :] if more else groups:
            text = first_turn(group.completions[0], setup.policy.tokenizer, setup.sampling.stop)
            with suppress(Exception):  # a user's environment may raise anything
                with played(setup.run.task, group.problem, [text]) as (episode, (reply, *_)):
                    calls = isinstance(episode, ToolEpisode) and bool(asked_of(episode, text))
                answered = reply is not None and not is_useless(contents(reply))
                if calls and answered and group.problem.key not in known:
                    known.add(group.problem.key)
                    found.append((group.problem, text))
        yield from found
