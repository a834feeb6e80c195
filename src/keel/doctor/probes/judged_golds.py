"""Rewards of gold answers under the configured rewards, against those of empty and wrong answers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from keel.base.errors import KeelError
from keel.base.types import Problem, RewardFailure
from keel.doctor.evidence import SAME
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.replies import answers
from keel.envs import Task
from keel.envs.attacks import GoldBatch, Turns

# problems whose gold answers are judged: in general, with episodes, with a remote judge
MOST, MOST_EPISODES, MOST_REMOTE = 64, 16, 2
FEWEST = 4
COMPARED = 6  # number of problems with wrong answers too: an empty one and WRONG others
WRONG = 2
SECONDS = 2.0  # seconds after which no further problem is judged or attacked


@dataclass(frozen=True)
class JudgedGold:
    """The rewards of a problem's gold turns, of an empty answer, and of other problems' gold answers."""

    problem: Problem
    turns: Turns
    gold: float
    empty: float
    others: tuple[float, ...]

    @property
    def bottom(self) -> float:
        return min(self.empty, *self.others) if self.others else self.empty

    @property
    def is_least(self) -> bool:
        """Whether most wrong answers earn more than the gold one."""
        return sum(total > self.gold + SAME for total in self.others) > len(self.others) / 2

    @property
    def top(self) -> float:
        return max(self.empty, *self.others) if self.others else self.empty


def judged_golds(setup: KeelSubject) -> list[JudgedGold]:
    """Judge the gold answers of many problems; for the first ones also wrong answers of the same format.

    Later gold answers are compared with these wrong answers first, and with their own only if they earn no more.
    Judging stops after three times as many problems if all gold answers earn, or none does. Reward parts are summed,
    whatever `reward.aggregate` says, since rewards normalised within a group cannot be compared with those of other
    texts.

    Empty if there are no gold answers, if rewards are shuffled, or if gold turns are not usable for SFT or do not end
    their episode.
    """
    task = setup.run.task
    if task.prompts_only or setup.config.reward.shuffle is not None or setup.failures:
        return []
    try:
        batch = _batch(setup, task)
    except (KeelError, NotImplementedError):
        return []
    rows: list[JudgedGold] = []
    judgements, began = setup.judgements_left, time.monotonic()
    compared = min(COMPARED, setup.budget.judgements // 20)
    for index, (problem, turns) in enumerate(zip(batch.problems, batch.golds, strict=True)):
        settled = len({_earns(row) for row in rows}) == 1
        if (index >= FEWEST and time.monotonic() - began > SECONDS) or (index >= 3 * compared and settled):
            break
        wrong: list[Turns] = [("",), *batch.neighbours(index)[:WRONG]]
        totals, failures = _judged(setup, problem, [turns] if index >= compared and rows else [turns, *wrong])
        setup.shared.setdefault("failed golds", []).extend(
            failure for failure in failures if failure.sample == 0 and failure.kind == "invalid"
        )
        if len(totals) == 1 and totals[0] > max(row.top for row in rows[:compared]):
            totals += [max(row.empty for row in rows[:compared])]
        elif len(totals) == 1:
            totals += totals_of(setup, problem, wrong)
        if all(map(math.isfinite, totals)):
            rows.append(JudgedGold(problem, turns, totals[0], totals[1], tuple(totals[2:])))
    setup.shared["seconds a judgement"] = (time.monotonic() - began) / max(judgements - setup.judgements_left, 1)
    return rows


def _earns(row: JudgedGold) -> bool:
    """Whether a gold answer earns the highest reward on its problem, and not all answers earn it."""
    rounding = SAME * max(abs(row.gold), abs(row.top))
    return row.gold >= row.top - rounding and row.gold > row.bottom + rounding


def totals_of(setup: KeelSubject, problem: Problem, episodes: Sequence[Turns]) -> list[float]:
    """The total reward of each episode; −∞ if it failed or if the budget of a remote judge is used up."""
    return _judged(setup, problem, episodes)[0]


def _judged(setup: KeelSubject, problem: Problem, episodes: Sequence[Turns]) -> tuple[list[float], list[RewardFailure]]:
    judge = copy(setup.built.judge)
    judge.options = judge.options.model_copy(update={"aggregate": "sum"})
    asked = episodes[: setup.judgements_left] if judge.remote else episodes
    rewards = (judge.judge(problem, asked) or ()) if asked else ()
    failures = [*judge.drain()]
    failed = {failure.sample for failure in failures}
    totals = [-math.inf if i in failed else reward.total for i, reward in enumerate(rewards)]
    return totals + [-math.inf] * (len(episodes) - len(totals)), failures


def _batch(setup: KeelSubject, task: Task) -> GoldBatch:
    """Problems with gold turns: the batch's, then further ones with distinct prompts."""
    most = MOST_REMOTE if setup.built.judge.remote else MOST_EPISODES if task.multi_turn else MOST
    problems = {str(group.problem.prompt): group.problem for group in setup.groups[:most]}
    seed = setup.config.run.seed
    for problem in () if len(problems) >= most else task.sample(most, seed=seed, step=1):
        problems.setdefault(str(problem.prompt), problem)
    shown = [(p, tuple(task.gold_turns(p))) for p in [*problems.values()][:most] if task.usable_for_sft(p)]
    if task.multi_turn:
        shown = [(problem, turns) for problem, turns in shown if _ends(task, problem, turns)]
    return GoldBatch(tuple(problem for problem, _ in shown), tuple(turns for _, turns in shown))


def _ends(task: Task, problem: Problem, turns: Turns) -> bool:
    """Whether these gold turns end the episode. Otherwise they are only part of an answer."""
    return None in answers(task, problem, turns)


def reward_scale(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float:
    """The range of all observed rewards, as the scale of differences; without gold answers, the largest magnitude."""
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    if not judged or setup.config.reward.aggregate != "sum":
        return max(map(abs, totals))
    totals += [total for row in judged for total in (row.gold, row.empty, *row.others)]
    return max(totals) - min(totals)


def solved_at(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float | None:
    """The reward of a right answer, if gold answers earn more than wrong ones, also within groups."""
    paid = [row.gold for row in judged if row.gold > row.bottom + SAME]
    return min(paid) if 2 * len(paid) > len(judged) and setup.config.reward.aggregate == "sum" else None
