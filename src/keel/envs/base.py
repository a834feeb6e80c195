"""The interface of a task: problems that depend only on the seed, gold answers, and a reward with named parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from keel.base.errors import KeelError
from keel.base.parts import DelegatedAttribute
from keel.base.types import Group, Problem, Reward
from keel.envs.episode import Episode, Reply, SingleTurn, Transcript, close_sync, start_sync, step_sync

if TYPE_CHECKING:
    from keel.envs.attacks import Attack
    from keel.envs.endpoint import ModelAccess
    from keel.envs.episode import PlayedEpisode

    Play = Callable[[Problem, int], Awaitable[PlayedEpisode]]  # (problem, index of the completion)

REQUIRED = ("sample", "held_out", "gold", "reward")  # methods without a default


class Task:
    """The base class of all tasks, with defaults for optional methods.

    A custom task (`task.name: module:attr`) derives from it, sets `name`, and implements `sample`, `held_out`, `gold`
    and `reward`. A multi-turn task implements `start` instead of `reward`. All other methods are optional.
    """

    if TYPE_CHECKING:  # read-only for type checkers; plain attributes at run time

        @property
        def name(self) -> str:
            """The name in records and messages."""

        @property
        def notes(self) -> tuple[str, ...]:
            """Notes on how the data were read, printed once at the start of a run."""

        @property
        def prompts_only(self) -> bool:
            """Whether the task has prompts but no gold answers and no reward; then `rewards` must be configured."""

        @property
        def evaluation_only(self) -> bool:
            """Whether all problems are held out, so that `sample` raises."""

        @property
        def reward_concurrency(self) -> int:
            """Number of concurrent threads in which `reward` may be called for a group."""

        @property
        def prompts_repeat(self) -> bool:
            """Whether different problems may have the same prompt, because only their episodes differ."""

        @property
        def plays(self) -> bool:
            """Whether the episodes call the model through an endpoint. Such a task implements `playing`."""

    else:
        notes, prompts_only, evaluation_only, reward_concurrency, prompts_repeat = (), False, False, 1, False
        plays = False

    @property
    def trusted(self) -> bool:
        """Whether only Keel's code reads completions, so that the reward needs no time limit."""
        return type(self).__module__.startswith(("keel.envs.", "keel.recipes."))

    @property
    def multi_turn(self) -> bool:
        """Whether the environment replies to the model, so that an episode may have several turns."""
        return type(self).start is not Task.start

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """The training problems of a step, determined by (seed, step). Never returns held-out problems."""
        raise NotImplementedError

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """A fixed evaluation set, disjoint from everything that `sample` returns."""
        raise NotImplementedError

    def labels(self) -> tuple[str, ...]:
        """The name of the task, or for a mixture the names of its tasks."""
        return (self.name,)

    def label(self, problem: Problem) -> str:
        """The entry of `labels` for the task of a problem."""
        return self.name

    def stratum(self, problem: Problem) -> str:
        """A name for problems of similar difficulty. A curriculum estimates a new problem's signal from its stratum."""
        return ""

    def gold(self, problem: Problem) -> str:
        """A completion that earns the full reward; for multi-turn tasks, the last turn."""
        raise NotImplementedError

    def gold_turns(self, problem: Problem) -> list[str]:
        """The model turns of an episode that earns the full reward."""
        return [self.gold(problem)]

    def usable_for_sft(self, problem: Problem) -> bool:
        """Whether an SFT warm start may train on the gold turns; if False, it draws another problem.

        Return False for turns that state facts the policy cannot know.
        """
        return True

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """Grade the model turns. Single-turn tasks implement this; multi-turn tasks use the reward of the episode.

        Turns without an episode, such as gold turns, are replayed on a new one.
        """
        if isinstance(turns, Transcript) and turns.episode is not None:
            return turns.episode.reward()
        with play_turns(self, problem, turns) as (episode, _):
            return episode.reward()

    def start(self, problem: Problem) -> Episode:
        """Start a new episode for one completion. A task that implements this is multi-turn."""
        return SingleTurn(partial(self.reward, problem))

    def playing(self, model: ModelAccess) -> AbstractAsyncContextManager[Play]:
        """Return a function that plays a whole episode of a problem with the model behind an endpoint."""
        raise NotImplementedError

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Additional metrics over the graded groups of an evaluation."""
        return {}

    def attacks(self, problem: Problem) -> Sequence[Attack]:
        """Additional reward-hacking answers for `keel check-task`."""
        return ()

    def counters(self) -> Mapping[str, float]:
        """Running counters; each step logs their increase as `task/NAME`."""
        return {}

    def picture(self, problem: Problem, text: str) -> str | None:
        """An SVG of an answer for the tracked completions of the report."""
        return None

    def fingerprint(self) -> str | None:
        """A digest of the task's data. A run refuses to resume if it has changed."""
        return None

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """The task with only the problems that `fits` accepts, and the number of dropped problems.

        None: the task generates its problems, so none can be dropped.
        """
        return None


@contextmanager
def play_turns(task: Task, problem: Problem, turns: Iterable[str]) -> Iterator[tuple[Episode, list[Reply | None]]]:
    """Play model turns on a new episode until it ends. Yields the episode and its replies, then closes it."""
    episode, replies = start_sync(task.start, problem), list[Reply | None]()
    try:
        for text in turns:
            replies.append(step_sync(episode, text))
            if replies[-1] is None:
                break
        yield episode, replies
    finally:
        close_sync(episode)


MEMBERS = tuple(name for name in ("name", *vars(Task)) if not name.startswith("_"))


class TaskWrapper(Task):
    """A wrapper around the task `inner`. It forwards every member of `Task` that it does not define."""

    inner: Task

    vars().update({name: DelegatedAttribute(name) for name in MEMBERS})

    @property
    def trusted(self) -> bool:
        return super().trusted and self.inner.trusted

    @property
    def multi_turn(self) -> bool:
        return self._starts_episodes or self.inner.multi_turn

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """The inner task's reward, or the episode's if the wrapper starts episodes."""
        return super().reward(problem, turns) if self._starts_episodes else self.inner.reward(problem, turns)

    @property
    def _starts_episodes(self) -> bool:
        return type(self).start is not TaskWrapper.start

    def gold_turns(self, problem: Problem) -> list[str]:
        """The inner task's gold turns, with the last one replaced by this task's gold answer."""
        return [*self.inner.gold_turns(problem)[:-1], self.gold(problem)]

    def start(self, problem: Problem) -> Episode:
        """The inner task's episode, or for a single-turn task one that this wrapper grades."""
        return self.inner.start(problem) if self.inner.multi_turn else super().start(problem)

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """Filter the inner task."""
        filtered = self.inner.filter_problems(fits)
        return None if filtered is None else (self.with_inner(filtered[0]), filtered[1])

    def with_inner(self, inner: Task) -> Self:
        """A copy of this wrapper with another inner task."""
        wrapper = copy(self)
        object.__setattr__(wrapper, "inner", inner)  # a wrapper may be a frozen dataclass
        return wrapper


def check_is_task(candidate: Any, what: str, required: Sequence[str] = REQUIRED) -> Task:
    """Return the candidate if it is a task, else raise a KeelError that starts with `what`.

    `required` are the methods that it must implement. A wrapper's inner task must implement those that the wrapper
    forwards.
    """
    kind = type(candidate).__name__
    if not isinstance(candidate, Task):
        raise KeelError(f"{what} a {kind}, which does not derive from keel.envs.Task: see docs/extending.md")
    if isinstance(candidate, TaskWrapper):
        forwarded = [name for name in required if getattr(type(candidate), name) is getattr(TaskWrapper, name)]
        check_is_task(getattr(candidate, "inner", None), f"{what} a {kind} around", forwarded)
    missing = [name for name in required if getattr(type(candidate), name) is getattr(Task, name)]
    if candidate.multi_turn and "reward" in missing:
        missing.remove("reward")  # episodes have their own reward
    if lacks := ", ".join(missing) or ("" if isinstance(getattr(candidate, "name", None), str) else "name"):
        raise KeelError(f"{what} a {kind} without {lacks}: see keel.envs.Task")
    return candidate
