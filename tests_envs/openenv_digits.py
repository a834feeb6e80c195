"""A server of openenv's own classes: guess a digit in four turns."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    digit: int


class Told(Observation):
    text: str
    low: int = 0
    high: int = 9


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        self.digit, self.low, self.high, self.turns = random.Random(seed).randrange(10), 0, 9, 0
        return Told(text="guess a digit")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        self.turns += 1
        if action.digit < self.digit:
            self.low = max(self.low, action.digit + 1)
        elif action.digit > self.digit:
            self.high = min(self.high, action.digit - 1)
        hit = action.digit == self.digit
        text = "hit" if hit else "higher" if action.digit < self.digit else "lower"
        return Told(text=text, low=self.low, high=self.high, reward=float(hit), done=hit or self.turns == 4)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


class Serving:
    """A server on loopback, in a thread."""

    def __init__(self, environment: type[Environment] = Digits, port: int = 0, sessions: int = 64, app: Any = None):
        made = app or create_fastapi_app(environment, Guess, Told, max_concurrent_envs=sessions)
        self.server = uvicorn.Server(uvicorn.Config(made, port=port, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


def player(result: Any, observation: str) -> str:
    """The middle of the range."""
    return str((result.observation["low"] + result.observation["high"]) // 2)


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Digits, Guess, Told, max_concurrent_envs=128), port=8124, log_level="warning")
