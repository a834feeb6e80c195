"""`skyrl_gym:ENV`: an environment of the package skyrl-gym around the problems of another task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.base.types import Problem
from keel.envs.base import Task
from keel.envs.games import Game, GivenTask, Messages, Outcome, asked, check_known, imported, need, users


class SkyRLGame(Game):
    """An environment with `init`, `step` and `close`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, problem: Problem) -> Messages:
        own = asked(problem)
        messages, _ = self.env.init(users(own) if isinstance(own, str) else [dict(message) for message in own])
        return list(messages)

    def step(self, text: str) -> Outcome:
        output = self.env.step(text)
        return Outcome(list(output["observations"]), float(output["reward"]), bool(output["done"]))

    def counts(self) -> Mapping[str, float]:
        figures = self.env.get_metrics().items()
        return {f"env/{name}": float(value) for name, value in figures if isinstance(value, int | float)}

    def close(self) -> None:
        self.env.close()


def skyrl_gym(
    environment: str,
    task: Task,
    extras: Mapping[str, Any] | None = None,
    env_config: Mapping[str, Any] | None = None,
    player: str | None = None,
    view: str | None = None,
    success: float = 1.0,
) -> GivenTask:
    """An environment of skyrl-gym around `task`, whose answers are its `ground_truth`."""
    library = need("skyrl_gym", f"skyrl_gym:{environment}", "skyrl-gym")
    check_known("skyrl_gym", environment, library.registry, "skyrl_gym.pprint_registry()")
    config = need("omegaconf", f"skyrl_gym:{environment}", "skyrl-gym").OmegaConf.create(dict(env_config or {}))
    rest = dict(extras or {})

    def make(problem: Problem) -> Game:
        truth = {"ground_truth": problem.answer}
        row = {"reward_spec": truth, "reward_model": truth, "extra_info": {}, **rest, **problem.info}
        return SkyRLGame(library.make(environment, env_config=config, extras=row))

    name = f"skyrl_gym:{environment}"
    return GivenTask(task, name, make, imported("player", player), imported("view", view), success)
