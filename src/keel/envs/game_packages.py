"""Adapters to the packages textarena, gem (gem-llm), skyrl-gym and openenv."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.base.parts import import_object, is_import_path
from keel.base.types import Problem
from keel.envs.games import (
    Game,
    GivenTask,
    Messages,
    Player,
    RemoteEpisode,
    SeededTask,
    TurnResult,
    check_known,
    imported,
    inner_prompt,
    need,
    seeded_task,
    users,
)
from keel.envs.http import START_SERVER, check_address, expanded, expanded_text
from keel.envs.registry import inner_task

MODEL = 0  # the model's seat


class TextArenaGame(Game):
    """A game in which the model is player 0, and `opponent` plays the others."""

    def __init__(self, library: Any, game: Any, num_players: int, opponent: Player | None) -> None:
        self.game, self.num_players, self.opponent = game, num_players, opponent
        self.env = game
        while isinstance(self.env, library.Wrapper):  # wrappers repeat earlier observations
            self.env = self.env.env

    def reset(self, problem: Problem) -> Messages:
        self.game.reset(num_players=self.num_players, seed=problem.info["seed"])
        self._play_others(done=False)
        return users(self._observation())

    def step(self, text: str) -> TurnResult:
        done, _ = self.game.step(text)
        if not self._play_others(done):
            return TurnResult(users(self._observation()))
        rewards, _ = self.game.close()
        return TurnResult((), float((rewards or {}).get(MODEL, 0.0)), over=True)

    def _play_others(self, done: bool) -> bool:
        """Let the other players move until it is the model's turn; returns whether the game is over."""
        while not done and self.env.state.current_player_id != MODEL:
            if self.opponent is None:
                raise KeelError("it is another player's turn: give task.opponent=module:attr")
            done, _ = self.game.step(self.opponent(self.env, self._observation()))
        return bool(done)

    def _observation(self) -> str:
        """The new observations of the player whose turn it is, without its own moves."""
        player, messages = self.env.get_observation()
        names = self.env.state.role_mapping
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages if sender != player
        )


def textarena(
    game: str,
    player: str | None = None,
    opponent: str | None = None,
    num_players: int | None = None,
    view: str | None = None,
    success: float = 1.0,
    **params: Any,
) -> SeededTask:
    """A game of textarena, in which the model is player 0. The other parameters are the game's.

    `player`, `opponent` and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a
    demonstration, `opponent(env, observation)` the move of each other player, `view(text)` the model's text for an
    observation. `num_players` is 1 without an opponent and 2 with one. A reward of at least `success` is correct.
    """
    library = need("textarena", f"textarena:{game}", "textarena")
    registry = library.envs.registration.ENV_REGISTRY
    check_known("textarena", game, registry, "textarena.pprint_registry_detailed()")
    others: Player | None = imported("opponent", opponent)
    count = num_players or (1 if others is None else 2)
    advice = f" (with {count} players: set task.num_players, and task.opponent for the other players)"
    return seeded_task(
        f"textarena:{game}",
        lambda problem: TextArenaGame(library, library.make(game, **params), count, others),
        player,
        view,
        success,
        advice="" if num_players else advice,
    )


class GemGame(Game):
    """An environment of gem, whose `step` returns five values."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, problem: Problem) -> Messages:
        observation, info = self.env.reset(seed=problem.info["seed"])
        return users(_around(observation, info))

    def step(self, text: str) -> TurnResult:
        observation, reward, terminated, truncated, info = self.env.step(text)
        return TurnResult(users(_around(observation, info)), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        getattr(self.env, "close", lambda: None)()


def gem(
    environment: str, player: str | None = None, view: str | None = None, success: float = 1.0, **params: Any
) -> SeededTask:
    """An environment of gem. The other parameters are the environment's.

    `player` and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a demonstration,
    `view(text)` the model's text for an observation. An episode is correct if its rewards sum to at least `success`.
    """
    library = _library(environment)
    check_known("gem", environment, library.envs.registration.ENV_REGISTRY, "gem.print_envs()")
    return seeded_task(
        f"gem:{environment}", lambda problem: GemGame(library.make(environment, **params)), player, view, success
    )


def _library(environment: str) -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        library = need("gem", f"gem:{environment}", "gem")
        need("gem.envs", f"gem:{environment}", "gem")  # registers the environments
    finally:
        root.handlers[:] = handlers  # gem configures the process's logging
        root.setLevel(level)
    return library


def _around(observation: str, info: dict[str, Any]) -> str:
    """The observation with the texts that gem's wrappers put before and after it."""
    return "\n".join(part for part in (info.get("prefix"), observation, info.get("suffix")) if part)


class SkyRLGame(Game):
    """An environment of skyrl-gym, with `init`, `step` and `close`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, problem: Problem) -> Messages:
        own = inner_prompt(problem)
        messages, _ = self.env.init(users(own) if isinstance(own, str) else [dict(message) for message in own])
        return list(messages)

    def step(self, text: str) -> TurnResult:
        output = self.env.step(text)
        return TurnResult(list(output["observations"]), float(output["reward"]), bool(output["done"]))

    def counts(self) -> Mapping[str, float]:
        figures = self.env.get_metrics().items()
        return {f"env/{name}": float(value) for name, value in figures if isinstance(value, int | float)}

    def close(self) -> None:
        self.env.close()


def skyrl_gym(
    environment: str,
    task: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
    env_config: Mapping[str, Any] | None = None,
    player: str | None = None,
    view: str | None = None,
    success: float = 1.0,
) -> GivenTask:
    """An environment of skyrl-gym for the problems of `task`, written as in `task:`; answers are the ground truth.

    `extras` are further fields of a row, such as max_turns, and `env_config` the environment's configuration. `player`
    and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a demonstration,
    `view(text)` the model's text for an observation. An episode is correct if its rewards sum to at least `success`.
    """
    inner = inner_task(f"skyrl_gym:{environment}", task)
    library = need("skyrl_gym", f"skyrl_gym:{environment}", "skyrl-gym")
    check_known("skyrl_gym", environment, library.registry, "skyrl_gym.pprint_registry()")
    config = need("omegaconf", f"skyrl_gym:{environment}", "skyrl-gym").OmegaConf.create(dict(env_config or {}))
    rest = dict(extras or {})

    def make(problem: Problem) -> Game:
        truth = {"ground_truth": problem.answer}
        row = {"reward_spec": truth, "reward_model": truth, "extra_info": {}, **rest, **problem.info}
        return SkyRLGame(library.make(environment, env_config=config, extras=row))

    name = f"skyrl_gym:{environment}"
    return GivenTask(inner, name, make, imported("player", player), imported("view", view), success)


BASE = ("reward", "done", "metadata")  # fields that every observation has, in addition to the environment's own
MAX_MIB = 1.0  # maximum size of an answer
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
        """Play one turn. If the server rejects an action as invalid, the model gets a message and may try again."""
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
        finally:  # after a lost connection the client reconnects automatically, to a new environment
            if self.session is not None and self.client._ws not in (None, self.session):
                raise ConnectionError("the connection to the server was lost, which ends the episode")

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
    field that the model gets, or a function of the observation; by default the model gets all fields as JSON. `client`
    is the environment's own client class, `module:attr`. `headers` may contain environment variables. `player(result,
    observation)`, `module:attr`, gives the next turn of a demonstration. An episode is correct if its rewards sum to at
    least `success`.
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

    return seeded_task("openenv", game, player, None, success, RemoteEpisode, START_SERVER)
