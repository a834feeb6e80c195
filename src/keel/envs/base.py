"""What a task is: problems that are stable under a seed, a gold answer, and a reward with named parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from keel.base.errors import KeelError
from keel.base.parts import Forwarded
from keel.base.types import Group, Problem, Reward
from keel.envs.episode import Episode, Reply, SingleTurn, Transcript, close_now, start_now, step_now

if TYPE_CHECKING:
    from keel.envs.attacks import Attack

REQUIRED = ("sample", "held_out", "gold", "reward")  # what has no default


class Task:
    """Everything that training, evaluation and reports may ask of a task, with its default.

    A user's own (`task.name: module:attr`) derives from it, gives it a `name`, and writes `sample`, `held_out`, `gold`
    and `reward`, or, where the environment answers the model, `start` instead of `reward`. The other methods are
    there to be overridden where a task has more to say.
    """

    if TYPE_CHECKING:  # read-only to type checkers; at run time plain attributes, which a class or an object may set

        @property
        def name(self) -> str:
            """What the task is called in records and messages."""

        @property
        def notes(self) -> tuple[str, ...]:
            """Sentences on how the data were read, printed once when a run begins."""

        @property
        def unanswered(self) -> bool:
            """Whether there are no gold answers and no reward of its own: the configured rewards say what is good."""

        @property
        def evaluation_only(self) -> bool:
            """Whether all its problems are held out, so that `sample` refuses."""

        @property
        def judged_at_once(self) -> int:
            """How many completions of a group `reward` may be asked about at the same time, in threads."""

    else:
        notes, unanswered, evaluation_only, judged_at_once = (), False, False, 1

    @property
    def trusted(self) -> bool:
        """Whether only Keel's own code reads completions, so that the reward needs no time limit around it."""
        return type(self).__module__.startswith(("keel.envs.", "keel.recipes."))

    @property
    def several_turns(self) -> bool:
        """Whether the environment answers the model, so that an episode may have more than one turn."""
        return type(self).start is not Task.start

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step: the same for the same (seed, step), never one that is held out."""
        raise NotImplementedError

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """A fixed set for evaluation, disjoint from everything that `sample` returns."""
        raise NotImplementedError

    def labels(self) -> tuple[str, ...]:
        """The names of the tasks that its problems are of: its own, or those that it is made of."""
        return (self.name,)

    def label(self, problem: Problem) -> str:
        """Which of `labels` a problem is of."""
        return self.name

    def gold(self, problem: Problem) -> str:
        """A completion that earns the full reward; with several turns, the last of them."""
        raise NotImplementedError

    def gold_turns(self, problem: Problem) -> list[str]:
        """The model's turns of an episode that earns the full reward."""
        return [self.gold(problem)]

    def demonstrates(self, problem: Problem) -> bool:
        """Whether the gold turns are fit to learn from: a warm start draws another problem in place of one that is not.

        Such as turns that state what a policy could not know; they are still what earns most.
        """
        return True

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """Judge the texts of the model's turns: one, unless the task starts episodes, which judge themselves.

        Turns that come without their episode, such as gold ones, are played on a new one.
        """
        if isinstance(turns, Transcript) and turns.episode is not None:
            return turns.episode.reward()
        with played(self, problem, turns) as (episode, _):
            return episode.reward()

    def start(self, problem: Problem) -> Episode:
        """A new episode of a problem, for one completion alone; a task that writes this has several turns."""
        return SingleTurn(partial(self.reward, problem))

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Figures of the task's own over the judged groups of an evaluation, beside pass@1."""
        return {}

    def attacks(self, problem: Problem) -> Sequence[Attack]:
        """Answers that try to earn without solving, which `keel check-task` tries beside its usual ones."""
        return ()

    def totals(self) -> Mapping[str, float]:
        """Running counts of what the task works with; each step logs by how much they grew, as `task/NAME`."""
        return {}

    def picture(self, problem: Problem, text: str) -> str | None:
        """An SVG of an answer, shown under the completions that the report tracks."""
        return None

    def fingerprint(self) -> str | None:
        """A digest of the data that the task reads: a run refuses to resume where it has changed."""
        return None

    def keep(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """The task with only those problems of its data that `fits` accepts, and how many were left out.

        None: the task makes its problems, and nothing can be left out.
        """
        return None


@contextmanager
def played(task: Task, problem: Problem, turns: Iterable[str]) -> Iterator[tuple[Episode, list[Reply | None]]]:
    """A new episode after these turns of the model, up to the one that ends it, and its replies; closed afterwards."""
    episode, replies = start_now(task.start, problem), list[Reply | None]()
    try:
        for text in turns:
            replies.append(step_now(episode, text))
            if replies[-1] is None:
                break
        yield episode, replies
    finally:
        close_now(episode)


MEMBERS = tuple(name for name in ("name", *vars(Task)) if not name.startswith("_"))


class TaskWrapper(Task):
    """A task around another, `inner`: all that it does not define itself is the inner task's, whatever `Task` lists."""

    inner: Task

    vars().update({name: Forwarded(name) for name in MEMBERS})

    @property
    def trusted(self) -> bool:
        return super().trusted and self.inner.trusted

    @property
    def several_turns(self) -> bool:
        return self._starts_episodes or self.inner.several_turns

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """The inner task's; the episode's, where the wrapper starts those itself."""
        return super().reward(problem, turns) if self._starts_episodes else self.inner.reward(problem, turns)

    @property
    def _starts_episodes(self) -> bool:
        return type(self).start is not TaskWrapper.start

    def gold_turns(self, problem: Problem) -> list[str]:
        """The inner task's, which end with this task's own gold answer."""
        return [*self.inner.gold_turns(problem)[:-1], self.gold(problem)]

    def start(self, problem: Problem) -> Episode:
        """The inner task's; of a task of one turn, an episode that is judged by this wrapper."""
        return self.inner.start(problem) if self.inner.several_turns else super().start(problem)

    def keep(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """This wrapper around what the inner task keeps, which is asked about the inner problems."""
        filtered = self.inner.keep(fits)
        return None if filtered is None else (self.around(filtered[0]), filtered[1])

    def around(self, inner: Task) -> Self:
        """This wrapper around another task."""
        wrapper = copy(self)
        object.__setattr__(wrapper, "inner", inner)  # a wrapper may be a frozen dataclass
        return wrapper


def check_is_task(candidate: Any, what: str, required: Sequence[str] = REQUIRED) -> Task:
    """The object, where it is a task; `what` says whose it is in the line that refuses another.

    `required` are the members that it has to write itself: of a wrapper's inner task, those that the wrapper does not.
    """
    kind = type(candidate).__name__
    if not isinstance(candidate, Task):
        raise KeelError(f"{what} a {kind}, which does not derive from keel.envs.Task: see docs/extending.md")
    if isinstance(candidate, TaskWrapper):
        forwarded = [name for name in required if getattr(type(candidate), name) is getattr(TaskWrapper, name)]
        check_is_task(getattr(candidate, "inner", None), f"{what} a {kind} around", forwarded)
    missing = [name for name in required if getattr(type(candidate), name) is getattr(Task, name)]
    if candidate.several_turns and "reward" in missing:
        missing.remove("reward")  # its episodes have it
    if lacks := ", ".join(missing) or ("" if isinstance(getattr(candidate, "name", None), str) else "name"):
        raise KeelError(f"{what} a {kind} without {lacks}: see keel.envs.Task")
    return candidate
