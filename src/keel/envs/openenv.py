"""`openenv`: an environment behind a server of the package openenv, through its own client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.base.imports import import_object, is_import_path
from keel.base.types import Problem
from keel.envs.games import Game, Messages, RemoteEpisode, SeededTask, TurnResult, imported, need, users
from keel.envs.http import check_address, expanded, expanded_text

BASE = ("reward", "done", "metadata")  # fields that every observation has, in addition to the environment's own
MAX_MIB = 1.0  # bytes of an answer
INVALID = "VALIDATION_ERROR"  # the server's error code for an action that does not fit its class


class OpenEnvGame(Game):
    """One session on a server; `env` is the client's last result."""

    env: Any = None
    session: Any = None
    invalid = 0

    def __init__(
        self,
        client: Any,
        action: Callable[[str], Any],
        text: Callable[[Any], str],
        timeout_s: float,
        params: Mapping[str, Any],
    ) -> None:
        self.client, self.action, self.text, self.timeout_s, self.params = client, action, text, timeout_s, params

    async def reset(self, problem: Problem) -> Messages:
        self.env = await self._answer(self.client.reset(seed=problem.info["seed"], **self.params))
        self.session = self.client._ws
        return users(self.text(self.env.observation))

    async def step(self, text: str) -> TurnResult:
        """Play one turn. The model gets a message for an action that the server's class refuses."""
        try:
            self.env = result = await self._answer(self.client.step(self.action(text)))
        except RuntimeError as error:
            if INVALID not in str(error):
                raise
            self.invalid += 1
            return TurnResult(users("invalid action"))
        messages = () if result.done else users(self.text(result.observation))
        return TurnResult(messages, float(result.reward or 0.0), bool(result.done))

    async def _answer(self, request: Awaitable[Any]) -> Any:
        try:
            return await request
        except TimeoutError:
            raise TimeoutError(f"the server did not answer within {self.timeout_s:g} s (task.timeout_s)") from None
        finally:  # a client that lost its connection reconnects by itself, to a new environment
            if self.session is not None and self.client._ws not in (None, self.session):
                raise ConnectionError("the connection was lost, and the episode with it")

    def counts(self) -> Mapping[str, float]:
        return {"env/invalid_actions": float(self.invalid)}

    async def close(self) -> None:
        await self.client.close()


def openenv(
    url: str,
    action: str,
    observation: str | None = None,
    client: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 20.0,
    player: str | None = None,
    success: float = 1.0,
    **params: Any,
) -> SeededTask:
    """An environment behind an openenv server at `url`; the other parameters are those of its `reset`.

    `action` is the action's field for the model's turn, or a function, `module:attr`, of the turn. `observation` is the
    field that the model gets, or a function of the observation; by default it gets all fields as JSON.
    `client` is a class, `module:attr`, of an environment's own client. `headers` may contain environment variables.
    `player(result, observation)` gives the next turn of a demonstration. Rewards that add up to `success` count as
    correct.
    """
    library = need("openenv.core", "openenv", "openenv")
    check_address(url, headers, timeout_s)
    kind = library.GenericEnvClient if client is None else import_object(client, "task.client")

    def game(problem: Problem) -> Game:
        more = {"headers": expanded(headers)} if headers else {}
        limits = {"connect_timeout_s": timeout_s, "message_timeout_s": timeout_s, "max_message_size_mb": MAX_MIB}
        made = kind(base_url=expanded_text(url, "url"), **limits, **more)
        return OpenEnvGame(made, to_action, to_text, timeout_s, params)

    own_action = imported("action", action) if is_import_path(action) else None
    own_text = imported("observation", observation) if is_import_path(observation) else None

    def to_action(text: str) -> Any:
        return {action: text} if own_action is None else own_action(text)

    def to_text(seen: Any) -> str:
        if own_text is not None:
            return str(own_text(seen))
        fields = seen if isinstance(seen, Mapping) else seen.model_dump()
        if observation is None:
            own = {name: value for name, value in fields.items() if name not in BASE}
            return json.dumps(own, ensure_ascii=False, sort_keys=True, default=str)
        if observation not in fields:
            raise KeelError(f"task.observation is {observation!r}: the environment has {', '.join(fields)}")
        return str(fields[observation])

    task = SeededTask(
        "openenv",
        game,
        imported("player", player),
        success=success,
        kind=RemoteEpisode,
        advice="; start the server, or fix task.url",
    )
    task.check()
    return task
