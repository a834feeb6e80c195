"""The judge: runs rewards over a group and survives what users' functions do, without hiding any of it."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from keel.errors import KeelError, unknown
from keel.tasks.base import Task
from keel.tasks.concurrent import Late, Loop, Outcome, run_threads
from keel.tasks.problems import stream
from keel.tasks.rewards import AGGREGATES, TASK, RewardPart, as_reward, build_reward, build_rewards, combine
from keel.types import Problem, Reward

ON_ERROR = ("stop", "zero", "skip_group")


@dataclass(frozen=True)
class Failure:
    """One call that gave no reward: whose, on which completion of which problem, and why."""

    function: str
    problem: str
    sample: int
    kind: str  # raised | invalid | timeout
    cause: str

    def __str__(self) -> str:
        return f"{self.function} on problem {self.problem!r}, completion {self.sample}: {self.cause}"


class CallFailed(Exception):
    """A user's function raised, returned nonsense or did not return; never leaves this room."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind, self.cause = kind, cause


class Guard:
    """Calls functions in one worker thread with a time limit.

    Python cannot end a thread. One that hangs is left behind (as a daemon, so that the process can end), counted, and
    replaced; each of them may go on using the CPU, so after `max_hung` the run stops whatever was configured.
    """

    def __init__(self, timeout_s: float | None = 30.0, max_hung: int = 8) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise KeelError(f"reward.timeout_s is {timeout_s}: it must be above 0, or null for no limit")
        self.timeout_s, self.max_hung, self.hung = timeout_s, max_hung, 0
        self._jobs: queue.SimpleQueue[Any] | None = None
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's value, or CallFailed."""
        if self.timeout_s is None:
            return call_here(function, *args)
        if self._jobs is None:
            self._jobs, self._done = queue.SimpleQueue(), queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs, self._done), name="keel-reward", daemon=True).start()
        self._jobs.put((function, args))
        try:
            value, error = self._done.get(timeout=self.timeout_s)
        except BaseException as stopped:  # time is up, or Ctrl-C: a later answer must not be taken for the next call's
            self.close()
            if not isinstance(stopped, queue.Empty):
                raise
            self.hung += 1
            raise CallFailed("timeout", late(self.timeout_s)) from None
        return _outcome(value, error)

    def close(self) -> None:
        """Let the worker end, when it returns; whatever it still answers goes to a queue that nobody reads."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


class Judge:
    """Rewards of whole groups. What fails is named and counted in `failures`, and handled as `on_error` says.

    `stop` raises a KeelError; `zero` gives the completion 0 in every part; `skip_group` leaves the group out, since a
    made-up 0 would count in the comparison with its siblings. The loop reads and empties the record with `drain`.
    `shuffle` (a seed) deals the rewards of a group out at random among its completions: a control that must not learn.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        *,
        aggregate: str = "sum",
        timeout_s: float | None = 30.0,
        on_error: str = "stop",
        max_hung: int = 8,
        shuffle: int | None = None,
    ) -> None:
        if on_error not in ON_ERROR:
            raise unknown("reward.on_error", on_error, ON_ERROR)
        if aggregate not in AGGREGATES:
            raise unknown("reward.aggregate", aggregate, AGGREGATES)
        if not parts:
            raise KeelError("a judge needs at least one reward")
        twice = next((name for name, count in Counter(part.name for part in parts).items() if count > 1), None)
        if twice is not None:
            raise KeelError(f"two rewards are called {twice!r}: give one of them another label")
        self.parts, self.aggregate, self.on_error, self.shuffle = tuple(parts), aggregate, on_error, shuffle
        self.guard = Guard(timeout_s, max_hung)
        self.loop = Loop(timeout_s)
        self.failures: list[Failure] = []
        self.counts: Counter[str] = Counter()  # by function, over the whole run

    @classmethod
    def of(cls, task: Task, entries: Sequence[dict[str, Any]] = (), **options: Any) -> Judge:
        """The judge of `rewards:` (default: the task's own reward)."""
        return cls(build_rewards(entries, task), **options)

    def judge(
        self, problem: Problem, episodes: Sequence[Sequence[str]], failed: Collection[int] = ()
    ) -> tuple[Reward, ...] | None:
        """One reward for the turns of each episode, or None where the group is to be skipped.

        `failed` are episodes that broke before they could be judged; they earn 0.
        """
        table: list[list[Reward]] = []
        called = {i: self._together(part, problem, episodes, failed) for i, part in enumerate(self.parts)}
        for sample, turns in enumerate(episodes):
            row = None if sample in failed else self._row(problem, sample, turns, called)
            if row is None and self.on_error == "skip_group":
                return None
            table.append(row or [Reward(0.0, parsed=False)] * len(self.parts))
        values = {p.name: [row[i].total for row in table] for i, p in enumerate(self.parts)}
        totals = combine(values, {p.name: p.weight for p in self.parts}, self.aggregate)
        rewards = [
            Reward(total, self._named(row), all(reward.parsed for reward in row))
            for total, row in zip(totals, table, strict=True)
        ]
        if self.shuffle is not None:
            stream("shuffle", self.shuffle, problem.key, *(turn for turns in episodes for turn in turns)).shuffle(
                rewards
            )
        return tuple(rewards)

    def respond(self, task: Any, problem: Problem, sample: int, turns: Sequence[str]) -> str | None:
        """The environment's message, under the same limits; raises CallFailed once the failure is written down."""
        called = f"{task.name}.respond"
        try:
            message = self.guard.call(task.respond, problem, tuple(turns))
            if message is not None and not isinstance(message, str):
                raise CallFailed("invalid", f"returned a {type(message).__name__}, not a string or None")
            return message
        except CallFailed as failure:
            self._record(called, problem, sample, failure)
            raise

    def drain(self) -> list[Failure]:
        """The failures since the last call."""
        found = list(self.failures)
        self.failures.clear()
        return found

    def beside(self, task: Task) -> Judge:
        """This judge with the task's own reward beside its parts at weight 0: whether an answer is right stays known
        whatever is paid for it. Failures are written down in the same record.
        """
        if self.called(task) is not None:
            return self
        taken = {part.name for part in self.parts}
        label = next(name for name in (TASK, *(f"{TASK}#{n}" for n in range(2, len(taken) + 3))) if name not in taken)
        other = copy(self)
        other.parts = (*self.parts, replace(build_reward(TASK, task, label=label), weight=0.0))
        return other

    def called(self, task: Task) -> str | None:
        """The name of the part that is the task's own reward, None where there is none."""
        return next((part.name for part in self.parts if part.function == task.reward), None)

    def _together(
        self, part: RewardPart, problem: Problem, episodes: Sequence[Sequence[str]], failed: Collection[int]
    ) -> dict[int, Outcome]:
        """The outcomes by completion of a part that judges many at a time; of any other part, none yet."""
        waiting = [sample for sample in range(len(episodes)) if sample not in failed]
        calls = [(part.function, (problem, tuple(episodes[sample]))) for sample in waiting]
        if part.asynchronous:
            return dict(zip(waiting, self.loop.run(calls), strict=True))
        if part.at_once > 1:
            return dict(zip(waiting, run_threads(calls, part.at_once, _attempt), strict=True))
        return {}

    def _row(
        self, problem: Problem, sample: int, turns: Sequence[str], called: Mapping[int, Mapping[int, Outcome]]
    ) -> list[Reward] | None:
        """The parts of one completion; None, with the failures written down, if any of them failed."""
        row = []
        for index, part in enumerate(self.parts):
            try:
                row.append(self._call(part, problem, turns, called[index].get(sample)))
            except CallFailed as failure:
                self._record(part.name, problem, sample, failure)
                return None
        return row

    def _call(self, part: RewardPart, problem: Problem, turns: Sequence[str], outcome: Outcome | None) -> Reward:
        args = (problem, tuple(turns))
        if outcome is not None:
            value = self._outcome(*outcome)
        else:
            value = call_here(part.function, *args) if part.trusted else self.guard.call(part.function, *args)
        try:
            return as_reward(value)
        except ValueError as error:
            raise CallFailed("invalid", str(error)) from error

    def _outcome(self, value: Any, error: BaseException | None) -> Any:
        if isinstance(error, Late):
            raise CallFailed("timeout", late(self.guard.timeout_s))
        return _outcome(value, error)

    def _record(self, called: str, problem: Problem, sample: int, failed: CallFailed) -> None:
        failure = Failure(called, problem.key, sample, failed.kind, failed.cause)
        self.failures.append(failure)
        self.counts[called] += 1
        if self.on_error == "stop":
            raise KeelError(f"reward {failure}; mend it, or set reward.on_error to zero or skip_group") from failed
        hung = self.guard.hung + self.loop.hung
        if hung > self.guard.max_hung:
            raise KeelError(
                f"reward {failure}; {hung} calls hang in threads that cannot be ended: mend the function"
            ) from failed

    def _named(self, row: Sequence[Reward]) -> dict[str, float]:
        """The values that are logged: each part by its name, and what it is made of below that."""
        named: dict[str, float] = {}
        for part, reward in zip(self.parts, row, strict=True):
            inner = {(k if part.name == TASK else f"{part.name}/{k}"): v for k, v in reward.parts.items()}
            named |= inner if part.name == TASK and inner else {part.name: reward.total, **inner}
        return named


def late(timeout_s: float | None) -> str:
    """What is said of a call that took too long."""
    return f"did not return within {timeout_s:g} s (reward.timeout_s)"


def call_here(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value, or CallFailed, without a thread or a time limit."""
    return _outcome(*_attempt(function, args))


def _work(jobs: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        done.put(_attempt(*job))


def _attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's sys.exit() must not end the worker without a word
        return None, error


def _outcome(value: Any, error: BaseException | None) -> Any:
    if error is None:
        return value
    first = next(iter(str(error).strip().splitlines()), "")
    raise CallFailed("raised", f"raised {type(error).__name__}" + (f": {first}" if first else "")) from error
