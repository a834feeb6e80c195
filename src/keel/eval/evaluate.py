"""Evaluate a policy on held-out problems; confidence intervals are clustered by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Group, Problem
from keel.envs.base import Task
from keel.envs.rewards import TASK, as_reward
from keel.eval.statistics import Interval, normal_interval, paired_interval, pass_at_k, wilson
from keel.rollout.collect import Collector

METHOD = "adjusted Wald over the problems' paired differences (Bonett and Price 2012)"
REWARD_METHOD = "normal over the problems' paired differences"


@dataclass(frozen=True)
class EvalResult:
    """The result of one evaluation. `accuracy` is pass@1, the mean over problems of the fraction of correct samples, or
    None if problems have no answers and only the reward counts.

    Intervals are 95 %: Wilson's with an effective sample size for fractions (`wilson`), normal over the problems' means
    for the reward. `extra` holds pass@1 and reward of each task of a mixture, and the task's `extra_metrics`. `shares`
    are the problems' fractions of correct samples.
    """

    task: str
    problems: int
    samples: int
    accuracy: float | None
    ci95: Interval | None
    pass_at: Mapping[int, float]
    pass_at_ci95: Mapping[int, Interval]
    reward: float
    reward_ci95: Interval
    parsed_fraction: float
    truncated_fraction: float
    length_mean: float
    greedy: bool = False
    extra: Mapping[str, float] = field(default_factory=dict)
    shares: tuple[float, ...] = field(default=(), repr=False)
    groups: tuple[Group, ...] = field(default=(), repr=False, compare=False)

    def record(self, split: str) -> dict[str, Any]:
        """A line of eval.jsonl; without pass@1 and pass@k if problems have no answers."""
        answered = {
            "pass@1": self.accuracy,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "pass@k": {str(k): v for k, v in self.pass_at.items()},
        }
        return {
            "task": self.task,
            "split": split,
            **({} if self.accuracy is None else answered),
            "n": self.problems,
            "samples": self.samples,
            "pass_at_ci95": {str(k): list(v) for k, v in self.pass_at_ci95.items()},
            "reward": self.reward,
            "reward_ci95": list(self.reward_ci95) if self.problems > 1 else None,  # JSON has no infinity
            "parsed_fraction": self.parsed_fraction,
            "truncated_fraction": self.truncated_fraction,
            "length_mean": self.length_mean,
            "greedy": self.greedy,
            **({"extra": dict(self.extra)} if self.extra else {}),
        }


def evaluate(
    collector: Collector,
    problems: Sequence[Problem],
    *,
    k: Sequence[int] = (1,),
    samples: int | None = None,
    temperature: float = 1.0,
) -> EvalResult:
    """Sample every problem `samples` times (default: the largest k); the task's own reward judges the samples.

    Temperature 0 is greedy, with one sample. Other options are the collector's. Equal arguments and weights give equal
    results. Evaluations of one run share their sampling noise, so differences come from the policy.
    """
    task = collector.task
    if not problems:
        raise KeelError(f"task {task.name!r} has no held-out problems: check its data, or raise eval.samples")
    greedy = temperature == 0
    count = 1 if greedy else samples or max(k)
    ks = [n for n in sorted(set(k)) if not greedy or n == 1] or [1]
    if ks[0] < 1 or ks[-1] > count:
        raise KeelError(f"eval.k is {list(k)} with {count} samples per problem: each k must be from 1 to {count}")
    sampling = replace(collector.sampling, temperature=temperature, num_generations=count)
    judge = collector.judge if task.prompts_only else collector.judge.with_task_reward(task)
    groups = replace(collector, sampling=sampling, judge=judge).collect(problems)
    return summarise(task, groups, ks, greedy=greedy, task_reward=judge.task_part(task) or TASK)


def summarise(
    task: Task, groups: Sequence[Group], k: Sequence[int], *, greedy: bool = False, task_reward: str = TASK
) -> EvalResult:
    """The result for judged groups of equal size. `task_reward` names the task's own reward in their parts."""
    samples = len(groups[0].completions)
    answered = not task.prompts_only
    right = [_count_correct(task, group, task_reward) for group in groups] if answered else []
    shares = {n: [pass_at_k(samples, c, n) for c in right] for n in {1, *k}}
    shown = k if answered else ()
    rewards = [fmean(r.total for r in group.rewards) for group in groups]
    completions = [c for group in groups for c in group.completions]
    extra = extra_metrics(task, groups)
    return EvalResult(
        task=task.name,
        problems=len(groups),
        samples=samples,
        accuracy=fmean(shares[1]) if answered else None,
        ci95=wilson(shares[1], samples) if answered else None,
        pass_at={n: fmean(shares[n]) for n in shown},
        pass_at_ci95={n: wilson(shares[n], samples) for n in shown},
        reward=fmean(rewards),
        reward_ci95=normal_interval(rewards),
        parsed_fraction=fmean(r.parsed for group in groups for r in group.rewards),
        truncated_fraction=fmean(c.stop_reason == "length" for c in completions),
        length_mean=fmean(sum(c.action) for c in completions),
        greedy=greedy,
        extra={**_by_task(task, groups, {"reward": rewards, **({"pass@1": shares[1]} if answered else {})}), **extra},
        shares=tuple(shares[1]),
        groups=tuple(groups),
    )


def _by_task(task: Task, groups: Sequence[Group], figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each figure (one value per group) over the groups of each task in the mixture `task`."""
    labels = [task.label(group.problem) for group in groups]
    return {
        f"{label}/{name}": fmean(value for value, own in zip(figure, labels, strict=True) if own == label)
        for label in (task.labels() if len(task.labels()) > 1 else ())
        if label in labels
        for name, figure in figures.items()
    }


def extra_metrics(task: Task, groups: Sequence[Group]) -> dict[str, float]:
    """Call the task's `extra_metrics(groups)` and check that it returns finite numbers by name."""
    metrics = task.extra_metrics(groups)
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise KeelError(f"extra_metrics of task {task.name!r} returned a {kind}: it must be a mapping of numbers")
    for name, value in metrics.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise KeelError(f"extra_metrics of task {task.name!r} gave {name}={value!r}: it must be a finite number")
    return {str(name): float(value) for name, value in metrics.items()}


def paired_difference(before: EvalResult, after: EvalResult) -> tuple[float, Interval]:
    """(pass@1 after − before, its 95 % interval), over their common problems.

    Both use the same problems and noise, so shared variance cancels.
    """
    differences = _differences(after.task, [_keyed(result, result.shares) for result in (before, after)])
    return fmean(differences), paired_interval(differences, min(before.samples, after.samples))


def paired_reward(before: EvalResult, after: EvalResult) -> tuple[float, Interval]:
    """(mean reward after − before, its normal 95 % interval over the problems), for problems without answers."""
    means = [_keyed(r, [fmean(p.total for p in group.rewards) for group in r.groups]) for r in (before, after)]
    differences = _differences(after.task, means)
    return fmean(differences), normal_interval(differences)


def difference(before: EvalResult, after: EvalResult) -> dict[str, Any]:
    """The paired difference of two evaluations as data: of pass@1, or of the reward if problems have no answers."""
    if after.accuracy is None:
        mean, interval = paired_reward(before, after)
        return {"reward": mean, "ci95": list(interval) if math.isfinite(interval[0]) else None, "method": REWARD_METHOD}
    mean, interval = paired_difference(before, after)
    return {"pass@1": mean, "ci95": list(interval), "method": METHOD}


def _keyed(result: EvalResult, values: Sequence[float]) -> dict[str, float]:
    return {group.problem.key: value for group, value in zip(result.groups, values, strict=True)}


def _differences(task: str, values: Sequence[Mapping[str, float]]) -> list[float]:
    """After − before of each common problem."""
    first, second = values
    common = [key for key in second if key in first]
    if not common:
        raise KeelError(f"the two evaluations of {task!r} have no problem in common: evaluate the same task and data")
    return [second[key] - first[key] for key in common]


def _count_correct(task: Task, group: Group, task_reward: str) -> int:
    """Count completions with reward part `correct` = 1, or without it, those that reach the gold answer's reward."""
    part = "correct" if task_reward == TASK else f"{task_reward}/correct"
    without = [reward for reward in group.rewards if part not in reward.parts]
    right = sum(reward.parts[part] >= 1.0 for reward in group.rewards if part in reward.parts)
    if not without:
        return right
    full = as_reward(task.reward(group.problem, task.gold_turns(group.problem))).total
    return right + sum(reward.parts.get(task_reward, reward.total) >= full - 1e-9 for reward in without)
