"""`gem:ENV`: an environment of the package gem (gem-llm)."""

from __future__ import annotations

import logging
from typing import Any

from keel.base.types import Problem
from keel.envs.games import Game, Messages, Outcome, SeededTask, check_known, imported, need, users


class GemGame(Game):
    """An environment with `reset` and a `step` of five values."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, problem: Problem) -> Messages:
        observation, info = self.env.reset(seed=problem.info["seed"])
        return users(_around(observation, info))

    def step(self, text: str) -> Outcome:
        observation, reward, terminated, truncated, info = self.env.step(text)
        return Outcome(users(_around(observation, info)), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        getattr(self.env, "close", lambda: None)()


def gem(
    environment: str, player: str | None = None, view: str | None = None, success: float = 1.0, **params: Any
) -> SeededTask:
    """An environment of gem, with its own parameters beside these.

    `player` and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a demonstration,
    `view(text)` what the model reads of an observation. Rewards that add up to `success` count as correct.
    """
    library = _library(environment)
    check_known("gem", environment, library.envs.registration.ENV_REGISTRY, "gem.print_envs()")
    task = SeededTask(
        f"gem:{environment}",
        lambda problem: GemGame(library.make(environment, **params)),
        imported("player", player),
        imported("view", view),
        success,
    )
    task.check()
    return task


def _library(environment: str) -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        library = need("gem", f"gem:{environment}", "gem")
        need("gem.envs", f"gem:{environment}", "gem")  # registers the environments
    finally:
        root.handlers[:] = handlers  # gem sets up the process's log
        root.setLevel(level)
    return library


def _around(observation: str, info: dict[str, Any]) -> str:
    """The observation with what gem's own wrappers put before and after it."""
    return "\n".join(part for part in (info.get("prefix"), observation, info.get("suffix")) if part)
