"""What a task is: problems that are stable under a seed, a gold answer, and a reward with named parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from keel.base.errors import KeelError
from keel.base.types import Group, Message, Problem, Reward

REQUIRED = ("sample", "held_out", "gold", "reward")  # what has no default


class Task:
    """Everything that training, evaluation and reports may ask of a task, with its default.

    A user's own (`task.name: module:attr`) derives from it, gives it a `name`, and writes `sample`, `held_out`, `gold`
    and `reward`; the other methods are there to be overridden where a task has more to say.
    """

    if TYPE_CHECKING:  # read-only to type checkers; at run time plain attributes, which a class or an object may set

        @property
        def name(self) -> str:
            """What the task is called in records and messages."""

        @property
        def notes(self) -> tuple[str, ...]:
            """Sentences on how the data were read, told once when a run begins."""

        @property
        def unanswered(self) -> bool:
            """Whether there are no gold answers and no reward of its own: the configured rewards say what is good."""

    else:
        notes, unanswered = (), False

    @property
    def trusted(self) -> bool:
        """Whether only Keel's own code reads completions, so that the reward needs no time limit around it."""
        return type(self).__module__.startswith("keel.envs.")

    @property
    def several_turns(self) -> bool:
        """Whether the environment answers the model, so that an episode may have more than one turn."""
        return type(self).respond is not Task.respond

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step: the same for the same (seed, step), never one that is held out."""
        raise NotImplementedError

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """A fixed set for evaluation, disjoint from everything that `sample` returns."""
        raise NotImplementedError

    def gold(self, problem: Problem) -> str:
        """A completion that earns the full reward; with several turns, the last of them."""
        raise NotImplementedError

    def gold_turns(self, problem: Problem) -> list[str]:
        """The model's turns of an episode that earns the full reward."""
        return [self.gold(problem)]

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """Judge an episode by the texts of the model's turns (one text in the usual case)."""
        raise NotImplementedError

    def respond(self, problem: Problem, turns: Sequence[str]) -> str | Sequence[Message] | None:
        """What the environment says after the model's turns so far, or None to end the episode."""
        return None

    def counts(self, problem: Problem, turns: Sequence[str]) -> Mapping[str, float]:
        """Figures of an episode that are logged, such as `tool/calls`."""
        return {}

    def at_once(self, problem: Problem) -> int:
        """How many episodes may be answered at the same time."""
        return 1

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Figures of the task's own over the judged groups of an evaluation, beside pass@1."""
        return {}

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


MEMBERS = tuple(name for name in ("name", *vars(Task)) if not name.startswith("_"))


class _Forwarded:
    """An attribute of the inner task; one that a wrapper, or an object of it, has itself comes first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self.name)


class TaskWrapper(Task):
    """A task around another, `inner`: all that it does not define itself is the inner task's, whatever `Task` lists."""

    inner: Task

    vars().update({name: _Forwarded(name) for name in MEMBERS})

    @property
    def trusted(self) -> bool:
        return super().trusted and self.inner.trusted

    def gold_turns(self, problem: Problem) -> list[str]:
        """The inner task's, which end with this task's own gold answer."""
        return [*self.inner.gold_turns(problem)[:-1], self.gold(problem)]

    def keep(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """This wrapper around what the inner task keeps."""
        kept = self.inner.keep(fits)
        return None if kept is None else (self.around(kept[0]), kept[1])

    def around(self, inner: Task) -> Self:
        """This wrapper around another task."""
        made = copy(self)
        object.__setattr__(made, "inner", inner)  # a wrapper may be a frozen dataclass
        return made


def check_is_task(made: Any, what: str) -> Task:
    """The object, where it is a task; `what` says whose it is in the line that refuses another."""
    kind = type(made).__name__
    if not isinstance(made, Task):
        raise KeelError(f"{what} a {kind}, which does not derive from keel.envs.Task: see docs/upgrading.md")
    missing = [name for name in REQUIRED if getattr(type(made), name) is getattr(Task, name)]
    if lacks := ", ".join(missing) or ("" if isinstance(getattr(made, "name", None), str) else "name"):
        raise KeelError(f"{what} a {kind} without {lacks}: see keel.envs.Task")
    return made
