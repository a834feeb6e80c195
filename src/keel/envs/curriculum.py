"""A curriculum: problems are drawn in proportion to how often their groups carry signal.

A group carries signal if its rewards differ; otherwise all its advantages are 0. With rewards 0 and 1, pass rate p and
G completions, the probability of signal is 1 − p^G − (1 − p)^G, so problems with medium pass rates are preferred.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from keel.base.types import Group, Problem
from keel.envs.base import Task
from keel.envs.options import CurriculumOptions
from keel.envs.problems import shares_of

Tally = tuple[float, float, int]  # the decayed number of groups, of groups with signal, and the step of both
FORGOTTEN = 0.01  # a problem whose decayed number of groups is lower is removed


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group differ and the policy sampled any of its tokens."""
    acted = any(any(completion.action) for completion in group.completions)
    return acted and len({reward.total for reward in group.rewards}) > 1


@dataclass(frozen=True)
class Curriculum:
    """Decayed counts of groups by problem and by stratum: plain data, saved in checkpoints.

    The expected signal of a stratum is (signals + 1) / (groups + 1), and that of a problem is
    (signals + expected signal of its stratum) / (groups + 1). The weight of a group halves every `half_life` steps. A
    new problem therefore has the estimate of its stratum, and the estimate of a problem not drawn for long returns to
    it.
    """

    strata: Mapping[str, Tally] = field(default_factory=dict)
    problems: Mapping[str, Tally] = field(default_factory=dict)

    def expected(self, task: Task, problem: Problem, options: CurriculumOptions, step: int) -> float:
        """The estimated probability that a group of this problem carries signal."""
        rate = 1.0
        for tallies, name in ((self.strata, stratum_of(task, problem)), (self.problems, identity(problem))):
            groups, signals = _decayed(tallies.get(name), options, step)
            rate = (signals + rate) / (groups + 1)
        return rate

    def observe(self, task: Task, groups: Sequence[Group], options: CurriculumOptions, step: int) -> Curriculum:
        """The curriculum after the groups of a step."""
        strata, problems = dict(self.strata), dict(self.problems)
        for group in groups:
            for tallies, name in ((strata, stratum_of(task, group.problem)), (problems, identity(group.problem))):
                count, signals = _decayed(tallies.get(name), options, step)
                tallies[name] = (count + 1, signals + has_signal(group), step)
        known = {name: tally for name, tally in problems.items() if _decayed(tally, options, step)[0] >= FORGOTTEN}
        return Curriculum(strata, known)

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Sequence[float]]]) -> Curriculum:
        return cls(**{kind: {name: (n, k, int(at)) for name, (n, k, at) in data[kind].items()} for kind in data})


@dataclass(frozen=True)
class Draw:
    """Problems drawn from candidates, with each candidate's probability of being drawn."""

    task: Task
    candidates: tuple[Problem, ...]
    expected: tuple[float, ...]
    probabilities: tuple[float, ...]
    picked: tuple[int, ...]

    @property
    def problems(self) -> list[Problem]:
        return [self.candidates[index] for index in self.picked]


def draw(
    curriculum: Curriculum,
    task: Task,
    candidates: Sequence[Problem],
    count: int,
    options: CurriculumOptions,
    *,
    step: int,
    rng: random.Random,
) -> Draw:
    """Draw `count` candidates with probabilities in proportion to their expected signal.

    With small data, candidates may repeat. Repetitions are drawn only if fewer than `count` problems are different.
    """
    different = {identity(problem): problem for problem in reversed(candidates)}
    candidates = [*reversed(different.values())] if len(different) >= count else candidates
    expected = tuple(curriculum.expected(task, problem, options, step) for problem in candidates)
    probabilities = inclusion(expected, count)
    taken = shares_of(probabilities, min(count, len(candidates)), rng)
    picked = tuple(index for index, times in enumerate(taken) if times)
    return Draw(task, tuple(candidates), expected, probabilities, picked)


def inclusion(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """Probabilities in proportion to positive weights that sum to `count`, none above 1."""
    certain: set[int] = set()
    while len(certain) < len(weights):
        total = sum(weight for index, weight in enumerate(weights) if index not in certain)
        scale = (count - len(certain)) / total
        over = {i for i, weight in enumerate(weights) if i not in certain and scale * weight >= 1}
        if not over:
            break
        certain |= over
    return tuple(1.0 if index in certain else scale * weight for index, weight in enumerate(weights))


def describe_draws(draws: Sequence[Draw]) -> dict[str, float]:
    """Metrics of drawn problems and candidates: expected signal, shares of strata, KL from uniform in nats."""
    metrics: dict[str, float] = {}
    drawn = sum(len(one.picked) for one in draws)
    candidates = sum(len(one.candidates) for one in draws)
    metrics["data/expected_signal"] = fmean(one.expected[index] for one in draws for index in one.picked)
    metrics["data/expected_signal_of_task"] = fmean(rate for one in draws for rate in one.expected)
    shares = [probability / drawn for one in draws for probability in one.probabilities]
    metrics["data/shift_kl"] = sum(share * math.log(share * candidates) for share in shares if share)
    mine = Counter(stratum_of(one.task, problem) for one in draws for problem in one.problems)
    tasks = Counter(stratum_of(one.task, problem) for one in draws for problem in one.candidates)
    for stratum, count in sorted(tasks.items()):
        metrics[f"data/share/{stratum}"] = mine[stratum] / drawn
        metrics[f"data/share_of_task/{stratum}"] = count / candidates
    return metrics


def stratum_of(task: Task, problem: Problem) -> str:
    """The label of a problem's task, with its stratum if it has one."""
    return "/".join(filter(None, (task.label(problem), task.stratum(problem))))


def identity(problem: Problem) -> str:
    """The key of a problem without the number of a repetition in a batch."""
    return problem.key.partition("#")[0]


def _decayed(tally: Tally | None, options: CurriculumOptions, step: int) -> tuple[float, float]:
    """(groups, signals), decayed to `step`."""
    if tally is None:
        return 0.0, 0.0
    groups, signals, at = tally
    left = 0.5 ** ((step - at) / options.half_life)
    return groups * left, signals * left
