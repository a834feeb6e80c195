"""The base of adapters to other packages' environments: episodes, their randomness, demonstrations, problems.

An adapter derives from `Game`. `SeededTask` is for environments that generate their problems: a problem is a seed, and
the first observation with this seed is the prompt. `GivenTask` is for environments that take another task's problems.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from keel.base.errors import KeelError, did_you_mean, first_line
from keel.base.parts import import_object
from keel.base.types import Message, Problem, Reward
from keel.envs.base import Task, TaskWrapper
from keel.envs.calls import is_async
from keel.envs.episode import Episode, close_sync, run_sync, step_sync
from keel.envs.problems import held_out_problems, seeded_rng, training_problems

SEEDS = 2**31
LONGEST_GAME = 1000  # maximum turns of a demonstration's game
LOCK_PATIENCE_S = 10.0
NOTED_CHARACTERS = 2000  # characters of an environment's answer in the notes of a turn

Messages = Sequence[Message]
Player = Callable[[Any, str], str]  # maps the package's environment and the last observation to the next turn
View = Callable[[str], str]


@dataclass(frozen=True)
class TurnResult:
    """An environment's answer to a turn: its messages, the reward of this turn, whether the episode is over."""

    messages: Messages
    reward: float = 0.0
    over: bool = False


class Game:
    """One environment of a package; `env` is the package's own object, which players may read.

    For environments behind a server (`RemoteEpisode`), `reset`, `step` and `close` are coroutine functions.
    """

    env: Any

    def reset(self, problem: Problem) -> Any:
        """Start the episode of a problem; returns the first observation, as the prompt's `Messages`."""
        raise NotImplementedError

    def step(self, text: str) -> Any:
        """Play one turn of the model; returns a `TurnResult`."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, float]:
        """The environment's own metrics, which are logged."""
        return {}

    def close(self) -> Any:
        """Release the environment's resources; may be called twice."""


class RandomStream:
    """A context manager that replaces the state of `random` and `numpy.random` by one environment's, seeded by `parts`.

    Many environments draw from these global generators. Inside `with` they have this object's state; afterwards their
    old state is restored. Other code between the turns therefore does not change an episode.
    """

    _lock = threading.Lock()

    def __init__(self, *parts: object) -> None:
        import numpy as np

        rng = seeded_rng(*parts)
        own = random.Random(rng.getrandbits(64)).getstate(), np.random.RandomState(rng.getrandbits(32)).get_state()
        self._own: tuple[Any, Any] = own

    def __enter__(self) -> None:
        lock = RandomStream._lock
        if not lock.acquire(timeout=LOCK_PATIENCE_S):  # a hanging call holds the lock: other calls use a new one
            lock = RandomStream._lock = threading.Lock()
            lock.acquire()
        self._held = lock
        self._outer = _states()
        _set_states(self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if RandomStream._lock is self._held:
            self._own = _states()
            _set_states(self._outer)
        self._held.release()


def _states() -> tuple[Any, Any]:
    import numpy as np

    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _set_states(states: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


class GameEpisode(Episode):
    """One episode of a game. Its reward is the sum over its turns; a sum of at least `success` is `correct`.

    `opening` are the first messages for the model, `observation` is the text of the last ones, and `schemas` are the
    schemas of the prompt's tools.
    """

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, task: GameTask, problem: Problem) -> None:
        self.task, self.problem, self.total = task, problem, 0.0
        self._notes = list[str]()
        self.opening, self.observation = list[Message](), ""
        self.random = RandomStream(task.name, task.identity(problem))
        with self.random:
            self.game = task.make(problem)

    def begin(self) -> Any:
        with self.random:
            self.see(self.game.reset(self.problem))

    def step(self, text: str) -> Any:
        with self.random:
            outcome = self.game.step(text)
        return self.seen(outcome)

    def see(self, messages: Messages) -> None:
        self.opening = self.task.viewed(messages)
        self.observation = _text(self.opening)

    def seen(self, outcome: TurnResult) -> Messages | str | None:
        """Add a turn's reward; returns the next messages for the model, or None."""
        self.total += float(outcome.reward)
        unread = _text(outcome.messages) if outcome.over or self.task.view else ""
        self._notes.append(f"reward {outcome.reward:g}\n{unread[:NOTED_CHARACTERS]}".strip())
        if outcome.over:
            return None
        messages = self.task.viewed(outcome.messages)
        self.observation = _text(messages)
        return messages or ""

    def reward(self) -> Reward:
        return Reward(self.total, {"correct": float(self.total >= self.task.success - 1e-9)})

    def counts(self) -> Mapping[str, float]:
        return self.game.counts()

    def turn_notes(self) -> list[str]:
        """Each turn's reward, and the environment's answer if `view` changes it or if the episode is over."""
        return self._notes

    def close(self) -> Any:
        self.game.close()


class RemoteEpisode(GameEpisode):
    """An episode of an environment behind a server. The first step starts it, so that episodes start concurrently."""

    async def begin(self) -> None:
        self.see(await self.game.reset(self.problem))

    async def step(self, text: str) -> Messages | str | None:
        if not self.opening:
            await self.begin()
            self.task.check_opening(self)
        outcome = await self.game.step(text)
        if outcome.over:
            await self.game.close()  # servers limit the number of open episodes
        return self.seen(outcome)

    async def close(self) -> None:
        await self.game.close()


class GameTask(Task):
    """A task whose episodes are games. `player` gives demonstrations, `view` converts observations for the model."""

    make: Callable[[Problem], Game]  # the environment of a problem, not reset yet
    player: Player | None
    view: View | None
    success: float
    kind: type[GameEpisode]
    advice: str  # appended to the error of an environment that does not start

    @property
    def trusted(self) -> bool:
        return False  # environments are third-party code

    @property
    def prompts_only(self) -> bool:
        return False

    def identity(self, problem: Problem) -> str:
        """The seed of the random state of a problem's episodes. Mixtures change the problem's key, but not this."""
        raise NotImplementedError

    def start(self, problem: Problem) -> Episode:
        """A new game, whose first observation must be the problem's prompt."""
        episode = self.kind(self, problem)
        if not is_async(episode.begin):
            try:
                episode.begin()
                self.check_opening(episode)
            except BaseException:
                with suppress(Exception):
                    episode.close()
                raise
        return episode

    def check_opening(self, episode: GameEpisode) -> None:
        """Refuse an episode whose first observation is not its problem's prompt."""
        if episode.opening != episode.problem.prompt:
            raise KeelError(
                f"{self.name} started {episode.problem.key!r} with an observation that differs from the prompt"
            )

    def gold(self, problem: Problem) -> str:
        return self.gold_turns(problem)[-1]

    def gold_turns(self, problem: Problem) -> list[str]:
        """The turns of `player`, played on a new episode."""
        player = required_player(self.name, self.player)
        own, turns = RandomStream(self.name, "player", self.identity(problem)), list[str]()
        with self._opened(problem) as episode:
            while len(turns) < LONGEST_GAME:
                with own:
                    turns.append(player(episode.game.env, episode.observation))
                if step_sync(episode, turns[-1]) is None:
                    return turns
        raise KeelError(f"{self.name}: task.player did not finish its game within {LONGEST_GAME} turns")

    def opened(self, problem: Problem) -> Problem:
        """The problem with the first observation of its episodes as its prompt, and their tools."""
        try:
            with self._opened(problem) as episode:
                return replace(problem, prompt=episode.opening, tools=episode.schemas)
        except KeelError:
            raise
        except Exception as error:  # environments may raise anything
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise KeelError(f"{self.name} does not start: {cause}{self.advice}") from error

    @contextmanager
    def _opened(self, problem: Problem) -> Iterator[GameEpisode]:
        episode = self.kind(self, problem)
        try:
            run_sync(episode.begin)
            yield episode
        finally:
            close_sync(episode)

    def viewed(self, messages: Messages) -> list[Message]:
        """The messages after `view`."""
        return [{**m, "content": self.view(m["content"])} if self.view else dict(m) for m in messages]


@dataclass(frozen=True)
class SeededTask(GameTask):
    """Problems are seeds; a hash of the seed decides which are held out. `make` builds the environment of a problem."""

    name: str
    make: Callable[[Problem], Game]
    player: Player | None = None
    view: View | None = None
    success: float = 1.0
    kind: type[GameEpisode] = GameEpisode
    advice: str = ""
    prompts_repeat: bool = field(default=True, init=False)

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        drawn = training_problems(_draw, count, seeded_rng(self.name, "train", seed, step))
        return [self.opened(problem) for problem in drawn]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        drawn = held_out_problems(_draw, count, seeded_rng(self.name, "held-out", seed))
        return [self.opened(problem) for problem in drawn]

    def identity(self, problem: Problem) -> str:
        return str(problem.info["seed"])

    def check(self) -> None:
        """Refuse an environment that does not start, or whose first observation is not determined by the seed."""
        problem = Problem("0", "", info={"seed": 0})
        if self.opened(problem) != self.opened(problem):
            raise KeelError(
                f"{self.name} gives different first observations for the same seed, so the completions of a group "
                "would have different problems"
            )


def seeded_task(
    name: str,
    make: Callable[[Problem], Game],
    player: str | None,
    view: str | None,
    success: float,
    kind: type[GameEpisode] = GameEpisode,
    advice: str = "",
) -> SeededTask:
    """A `SeededTask` with the user's `player` and `view`, `module:attr`, after a check that it starts."""
    task = SeededTask(name, make, imported("player", player), imported("view", view), success, kind, advice)
    task.check()
    return task


@dataclass(frozen=True)
class GivenTask(GameTask, TaskWrapper):
    """The problems of `inner`, played in the environments that `make` builds from them.

    `info["asked"]` is the prompt of the inner task.
    """

    inner: Task
    name: str = field()  # no default: the wrapper has an attribute of that name
    make: Callable[[Problem], Game]
    player: Player | None = None
    view: View | None = None
    success: float = 1.0
    kind: type[GameEpisode] = GameEpisode
    advice: str = ""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """The inner task's problems, with the environment's first observation as the prompt."""
        return [self.opened(problem) for problem in self.inner.sample(count, seed=seed, step=step)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self.opened(problem) for problem in self.inner.held_out(count, seed=seed)]

    def identity(self, problem: Problem) -> str:
        return str(inner_prompt(problem))

    def opened(self, problem: Problem) -> Problem:
        opened = super().opened(problem)
        return replace(opened, info={**problem.info, "asked": inner_prompt(problem)})

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """Filter problems by the environment's prompt."""
        return TaskWrapper.filter_problems(self, lambda problem: fits(self.opened(problem)))


def inner_prompt(problem: Problem) -> str | Messages:
    """The inner task's prompt of a `GivenTask`'s problem."""
    own: str | Messages = problem.info.get("asked", problem.prompt)
    return own


def _draw(rng: random.Random) -> tuple[str, Problem]:
    seed = rng.randrange(SEEDS)
    return str(seed), Problem(str(seed), "", info={"seed": seed})


def required_player(task: str, player: Player | None) -> Player:
    """The player of demonstrations; raises a KeelError if it is None."""
    if player is None:
        raise KeelError(f"{task} has no gold answer: give task.player=module:attr for a warm start and keel check-task")
    return player


def _text(messages: Messages) -> str:
    return "\n".join(message["content"] for message in messages)


def users(text: str) -> list[Message]:
    """A text as a user's message."""
    return [{"role": "user", "content": text}]


def need(module: str, what: str, extra: str) -> Any:
    """Import the package of an environment."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KeelError(f"the task {what} needs {error.name}: pip install 'keel-rl[{extra}]'") from error


def check_known(package: str, environment: str, known: Iterable[str], listing: str) -> None:
    """Refuse a name that the package does not register. The error names the package's function that lists all names."""
    names = list(known)
    if environment not in names:
        hint = did_you_mean(environment, names)
        raise KeelError(f"{package} has no environment {environment!r}: {hint}{listing} lists its {len(names)}")


def imported(option: str, spec: str | None) -> Any:
    """Import the user's function `module:attr`; None without one."""
    return None if spec is None else import_object(spec, f"task.{option}")
