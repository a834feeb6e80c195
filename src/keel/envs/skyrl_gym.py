"""`skyrl_gym:ENV`: an environment of the package skyrl-gym around the problems of another task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from keel.base.types import Problem
from keel.envs.base import Task, TaskWrapper
from keel.envs.games import (
    Game,
    GameTask,
    Messages,
    Outcome,
    Player,
    View,
    check_known,
    imported,
    need,
    users,
)


class SkyRLGame(Game):
    """An environment with `init`, `step` and `close`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, problem: Problem) -> Messages:
        asked = problem.info.get("asked", problem.prompt)
        prompt = users(asked) if isinstance(asked, str) else [dict(message) for message in asked]
        messages, _ = self.env.init(prompt)
        return list(messages)

    def step(self, text: str) -> Outcome:
        output = self.env.step(text)
        return Outcome(list(output["observations"]), float(output["reward"]), bool(output["done"]))

    def counts(self) -> Mapping[str, float]:
        figures = self.env.get_metrics().items()
        return {f"env/{name}": float(value) for name, value in figures if isinstance(value, int | float)}

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class SkyRL(GameTask, TaskWrapper):
    """The problems of `inner`, answered and judged by an environment that is given their answers."""

    inner: Task
    environment: str
    make: Callable[..., Any]
    extras: Mapping[str, Any]
    player: Player | None = None
    view: View | None = None
    success: float = 1.0

    @property
    def name(self) -> str:
        return f"skyrl_gym:{self.environment}"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """The task's own problems, as the environment presents them."""
        return [self._opened(problem) for problem in self.inner.sample(count, seed=seed, step=step)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self._opened(problem) for problem in self.inner.held_out(count, seed=seed)]

    def game(self, problem: Problem) -> Game:
        truth = {"ground_truth": problem.answer}
        given = {"reward_spec": truth, "reward_model": truth, "extra_info": {}, **self.extras, **problem.info}
        return SkyRLGame(self.make(extras=given))

    def identity(self, problem: Problem) -> str:
        return str(problem.info.get("asked", problem.prompt))

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """What fits as the environment presents it."""
        return super().filter_problems(lambda problem: fits(self._opened(problem)))

    def _opened(self, problem: Problem) -> Problem:
        return replace(problem, prompt=self.opening(problem), info={**problem.info, "asked": problem.prompt})


def skyrl_gym(
    environment: str,
    task: Task,
    extras: Mapping[str, Any] | None = None,
    env_config: Mapping[str, Any] | None = None,
    player: str | None = None,
    view: str | None = None,
    success: float = 1.0,
) -> SkyRL:
    """An environment of skyrl-gym around `task`, whose answers are its `ground_truth`."""
    library = need("skyrl_gym", f"skyrl_gym:{environment}", "skyrl-gym")
    check_known("skyrl_gym", environment, library.registry, "skyrl_gym.pprint_registry()")
    config = need("omegaconf", f"skyrl_gym:{environment}", "skyrl-gym").OmegaConf.create(dict(env_config or {}))
    return SkyRL(
        task,
        environment,
        lambda extras: library.make(environment, env_config=config, extras=extras),
        dict(extras or {}),
        imported("player", player),
        imported("view", view),
        success,
    )
