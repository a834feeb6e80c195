"""Run rewards over a group. Failures of user functions are recorded and handled by `reward.on_error`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

from keel.base.errors import KeelError
from keel.base.options import read_options
from keel.base.types import Problem, Reward, RewardFailure
from keel.envs.base import Task
from keel.envs.calls import LOOP, CallFailed, HungCalls, Outcome, TooManyHungCalls, call, call_inline, call_sync
from keel.envs.options import RewardOptions
from keel.envs.problems import seeded_rng
from keel.envs.rewards import TASK, RewardPart, as_reward, build_reward, build_rewards, combine


class Judge:
    """Compute the rewards of groups. Failures are recorded in `failures`, which `drain` returns and clears.

    `options` is the section `reward`; single options may be given as keywords: `Judge(parts, on_error="zero")`.
    `on_error`: `stop` raises a KeelError; `zero` gives the completion 0 in every part; `skip_group` drops the group,
    because a 0 would change the advantages of the others. With more than `max_hung` hanging calls the run stops in any
    case. `shuffle` (a seed) permutes the rewards within each group, for a control run that must not improve.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        options: RewardOptions | None = None,
        *,
        max_hung: int = 8,
        **changes: Any,
    ) -> None:
        if not parts:
            raise KeelError("a judge needs at least one reward")
        twice = next((name for name, count in Counter(part.name for part in parts).items() if count > 1), None)
        if twice is not None:
            raise KeelError(f"two rewards have the name {twice!r}: set another label for one of them")
        self.parts, self.options = tuple(parts), options or read_options(RewardOptions, changes, "reward")
        self.max_hung, self.hung = max_hung, HungCalls()
        self.failures: list[RewardFailure] = []
        self.counts: Counter[str] = Counter()  # failures by function over the run
        self.asked: Counter[str] = Counter()  # graded episodes by part, shared with copies of this judge

    @classmethod
    def of(
        cls,
        task: Task,
        entries: Sequence[Mapping[str, Any]] = (),
        options: RewardOptions | None = None,
        **changes: Any,
    ) -> Judge:
        """Build the judge from the entries of `rewards:` (default: the task's own reward)."""
        return cls(build_rewards(entries, task), options, **changes)

    def judge(
        self,
        problem: Problem,
        episodes: Sequence[Sequence[str]],
        failed: Collection[int] = (),
        also: Callable[[int], bool] = lambda sample: True,
    ) -> tuple[Reward, ...] | None:
        """One reward per episode, or None if the group is skipped.

        `failed` are the indices of episodes that failed before grading. They count as failed rewards, and so do
        episodes for which `also` returns False; it is called after the reward.
        """
        episodes = [turns if isinstance(turns, tuple) else tuple(turns) for turns in episodes]
        self.asked.update({part.name: len(episodes) for part in self.parts})
        table: list[list[Reward]] = []
        outcomes = {i: self._together(part, problem, episodes, failed) for i, part in enumerate(self.parts)}
        for sample, turns in enumerate(episodes):
            row = None if sample in failed else self._row(problem, sample, turns, outcomes)
            if row is not None and not also(sample):
                row = None
            if row is None and self.options.on_error == "skip_group":
                return None
            table.append(row or [Reward(0.0, parsed=False)] * len(self.parts))
        values = {p.name: [row[i].total for row in table] for i, p in enumerate(self.parts)}
        totals = combine(values, {p.name: p.weight for p in self.parts}, self.options.aggregate)
        rewards = [
            Reward(
                total,
                self._named(row),
                all(reward.parsed for reward in row),
                "\n".join(dict.fromkeys(reward.details for reward in row if reward.details)),
            )
            for total, row in zip(totals, table, strict=True)
        ]
        if (seed := self.options.shuffle) is not None:
            seeded_rng("shuffle", seed, problem.key, *(turn for turns in episodes for turn in turns)).shuffle(rewards)
        return tuple(rewards)

    def drain(self) -> list[RewardFailure]:
        """Return and clear the failures since the last call."""
        drained = list(self.failures)
        self.failures.clear()
        return drained

    def for_thread(self) -> Judge:
        """A copy with its own record of failures, for use in another thread.

        There trusted rewards get a time limit too: math-verify's limit uses a signal, which needs the main thread.
        Those with concurrent calls keep their own limits.
        """
        other = copy(self)
        other.failures = []
        other.parts = tuple(replace(part, trusted=part.trusted and part.at_once > 1) for part in self.parts)
        return other

    def with_task_reward(self, task: Task) -> Judge:
        """A copy that also calls the task's own reward, at weight 0, to measure correctness under any rewards.

        The copy shares the record of failures.
        """
        if self.task_part(task) is not None:
            return self
        names = {part.name for part in self.parts}
        label = next(name for name in (TASK, *(f"{TASK}#{n}" for n in range(2, len(names) + 3))) if name not in names)
        other = copy(self)
        other.parts = (*self.parts, replace(build_reward(TASK, task, label=label), weight=0.0))
        return other

    def task_part(self, task: Task) -> str | None:
        """The name of the part that is the task's own reward, or None."""
        return next((part.name for part in self.parts if part.function == task.reward), None)

    @property
    def remote(self) -> list[str]:
        """The names of the parts that call a remote service or are coroutine functions."""
        return [part.name for part in self.parts if part.remote or part.asynchronous]

    def _together(
        self, part: RewardPart, problem: Problem, episodes: Sequence[Sequence[str]], failed: Collection[int]
    ) -> dict[int, Outcome]:
        """The outcomes of a part with concurrent calls, by completion; empty for other parts."""
        if not part.asynchronous and part.at_once == 1:
            return {}
        waiting = [sample for sample in range(len(episodes)) if sample not in failed]
        # trusted parts with concurrent calls (http, chat_judge, code) have their own time limits
        limit = None if part.trusted and not part.asynchronous else self.options.timeout_s
        gate = None if part.asynchronous else asyncio.Semaphore(part.at_once)

        async def judged(turns: Sequence[str]) -> Any:
            async with gate or nullcontext():
                return await call(part.function, problem, turns, timeout_s=limit, hung=self.hung)

        return dict(zip(waiting, LOOP.run([judged(episodes[i]) for i in waiting], limit, self.hung), strict=True))

    def _row(
        self, problem: Problem, sample: int, turns: Sequence[str], outcomes: Mapping[int, Mapping[int, Outcome]]
    ) -> list[Reward] | None:
        """The rewards of one completion by part, or None if any failed; failures are recorded."""
        row = []
        for index, part in enumerate(self.parts):
            try:
                row.append(self._call(part, problem, turns, outcomes[index].get(sample)))
            except CallFailed as failure:
                self.record(part.name, problem, sample, failure)
                return None
        return row

    def _call(self, part: RewardPart, problem: Problem, turns: Sequence[str], outcome: Outcome | None) -> Reward:
        value, error = outcome or (None, None)
        if error is not None:
            raise error
        if outcome is None and part.trusted:
            value = call_inline(part.function, problem, turns)
        elif outcome is None:
            value = call_sync(part.function, problem, turns, timeout_s=self.options.timeout_s, hung=self.hung)
        try:
            return as_reward(value)
        except ValueError as error:
            raise CallFailed("invalid", str(error)) from error

    def record(self, function: str, problem: Problem, sample: int, failed: CallFailed) -> None:
        """Record a failure; raises if it must stop the run."""
        failure = RewardFailure(function, problem.key, sample, failed.kind, failed.cause)
        self.failures.append(failure)
        self.counts[function] += 1
        if not self.stops():
            return
        if self.options.on_error == "stop":
            raise KeelError(f"reward {failure}; fix it, or set reward.on_error to zero or skip_group") from failed
        raise TooManyHungCalls(
            f"reward {failure}; {self.hung.alive} calls hang in threads that cannot be stopped: fix the function"
        ) from failed

    def stops(self) -> bool:
        """Whether a failure now stops the run."""
        return self.options.on_error == "stop" or self.hung.alive > self.max_hung

    def _named(self, row: Sequence[Reward]) -> dict[str, float]:
        """The logged values: each part by name, and its own parts as `name/part` (the task's as `part`)."""
        values: dict[str, float] = {}
        for part, reward in zip(self.parts, row, strict=True):
            inner = {(k if part.name == TASK else f"{part.name}/{k}"): v for k, v in reward.parts.items()}
            values |= inner if part.name == TASK and inner else {part.name: reward.total, **inner}
        return values
