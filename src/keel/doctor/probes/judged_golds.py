"""What gold answers earn by the configured rewards, beside empty answers and those of other problems."""

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

MOST, MOST_EPISODES, MOST_REMOTE = 64, 16, 2  # problems whose gold answers are judged
FEWEST = 4
COMPARED = 6  # problems on which wrong answers are judged too, each with so many of them beside an empty one
WRONG = 2
SECONDS = 2.0  # after which no further problem is judged, nor attacked


@dataclass(frozen=True)
class JudgedGold:
    """What a problem's gold turns earn, what an empty answer does, and what other problems' gold answers do there."""

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
        """Whether most wrong answers earn more."""
        return sum(total > self.gold + SAME for total in self.others) > len(self.others) / 2

    @property
    def top(self) -> float:
        return max(self.empty, *self.others) if self.others else self.empty


def judged_golds(setup: KeelSubject) -> list[JudgedGold]:
    """The gold answers of many problems under the configured rewards, the first beside wrong ones of the same form.

    The others are compared with what those earn, and only where they are no better with wrong ones of their own. It
    ends after three times as many where all of them earn, or none does. Parts are summed, whatever `reward.aggregate`
    says: what is normalised within a group cannot be compared with what another text would earn.

    None where there are no gold answers, where rewards are dealt out at random, or where the gold turns are not fit to
    be shown or do not end their episode.
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
    """Whether a gold answer earns no less than any other that was judged there, and more than some."""
    rounding = SAME * max(abs(row.gold), abs(row.top))
    return row.gold >= row.top - rounding and row.gold > row.bottom + rounding


def totals_of(setup: KeelSubject, problem: Problem, episodes: Sequence[Turns]) -> list[float]:
    """The sum of the rewards of each; −∞ where it failed, or where a judge elsewhere may not be asked any more."""
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
    """Problems with their gold turns: those of the batch, then others, each prompt once."""
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
    """Whether an episode is over after these turns: gold turns of one that is not are only a part of an answer."""
    return None in answers(task, problem, turns)


def reward_scale(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float:
    """The range of the rewards that were seen, what a difference is measured by; without gold answers, the largest."""
    totals = [reward.total for group in setup.groups for reward in group.rewards]
    if not judged or setup.config.reward.aggregate != "sum":
        return max(map(abs, totals))
    totals += [total for row in judged for total in (row.gold, row.empty, *row.others)]
    return max(totals) - min(totals)


def solved_at(setup: KeelSubject, judged: Sequence[JudgedGold]) -> float | None:
    """What a right answer earns, where gold answers earn more than wrong ones do, in a group as well."""
    paid = [row.gold for row in judged if row.gold > row.bottom + SAME]
    return min(paid) if 2 * len(paid) > len(judged) and setup.config.reward.aggregate == "sum" else None
