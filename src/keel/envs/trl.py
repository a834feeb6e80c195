"""`trl:MODULE:ATTR`: the `environment_factory` of TRL's GRPOTrainer. TRL itself is not needed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keel.base.errors import KeelError
from keel.base.parts import import_object
from keel.base.types import Message, Problem, Reward
from keel.envs.calls import is_async
from keel.envs.episode import run_sync
from keel.envs.games import (
    Game,
    GameEpisode,
    GameTask,
    GivenTask,
    Messages,
    RandomStream,
    imported,
    seeded_task,
    users,
)
from keel.envs.registry import inner_task
from keel.envs.toolbox import Toolbox, ToolEpisode
from keel.envs.tools import MAX_CHARACTERS, TIMEOUT_S, Tool, tool
from keel.envs.with_tools import offer

OWN = ("reset", "get_reward")  # methods that are not tools
HIDDEN = ("asked", "mixture", "prompt_tokens_cut")  # Keel's own entries of a problem's info, which are not columns


class TrlGame(Game):
    """An object with `reset`, tools and optionally `get_reward`, for one row of the data.

    `toolbox` and `limits` are the options of its tools, `judge` is the user's reward function.
    """

    def __init__(
        self, env: Any, row: Mapping[str, Any], toolbox: Toolbox, limits: Mapping[str, Any], judge: Any
    ) -> None:
        self.env, self.row, self.toolbox, self.limits, self.judge = env, row, toolbox, limits, judge
        kind = type(env).__name__
        if not callable(getattr(env, "reset", None)):
            raise KeelError(f"{kind} has no method reset, which an environment of TRL has")
        if judge is None and not callable(getattr(env, "get_reward", None)):
            raise KeelError(f"{kind} has no method get_reward: add one, or give task.reward=module:attr")

    def reset(self, problem: Problem) -> Messages:
        """The prompt, followed by the text that `reset` returns. `reset` gets the columns that its parameters name."""
        parameters = inspect.signature(self.env.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        text = self.env.reset(**{name: value for name, value in self.row.items() if takes_all or name in parameters})
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned a {type(text).__name__}, not a text or None")
        *before, last = [dict(message) for message in self.row["prompt"]]
        return [*before, {**last, "content": last["content"] + (text or "")}]

    @property
    def methods(self) -> list[Callable[..., Any]]:
        """The public methods, which are the tools."""
        names = [name for name, _ in inspect.getmembers(type(self.env), inspect.isfunction)]
        return [getattr(self.env, name) for name in names if name not in OWN and not name.startswith("_")]

    def tool(self, method: Callable[..., Any], stream: RandomStream) -> Tool:
        """A method as a tool. Methods without concurrent calls draw from the episode's random stream."""
        made: Tool = tool(method, **self.limits)
        if is_async(method) or made.at_once > 1:
            return made

        @functools.wraps(method)
        def call(**arguments: Any) -> Any:
            with stream:
                return method(**arguments)

        return replace(made, function=call)

    def earned(self, messages: Sequence[Message]) -> float:
        """`get_reward()` of the environment, plus the value of the reward function for this completion."""
        own = getattr(self.env, "get_reward", None)
        total = 0.0 if own is None else float(run_sync(own))
        if self.judge is not None:
            columns = {name: [value] for name, value in self.row.items() if name != "prompt"}
            batch = {"prompts": [self.row["prompt"]], "completions": [list(messages)], "environments": [self.env]}
            (value,) = run_sync(functools.partial(self.judge, **batch, **columns))
            total += float(value or 0.0)
        return total


class TrlEpisode(ToolEpisode, GameEpisode):
    """An episode with tool calls, which ends with a turn without a call. The environment then gives its reward."""

    game: TrlGame

    def __init__(self, task: GameTask, problem: Problem) -> None:
        GameEpisode.__init__(self, task, problem)
        tools = [self.game.tool(method, self.random) for method in self.game.methods]
        ToolEpisode.__init__(self, replace(self.game.toolbox, tools=lambda problem: tools), problem)
        self.messages = list[Message]()
        self.earned: float | None = None

    def see(self, messages: Messages) -> None:
        """Store the first observation, with the tools as TRL's schemas, or described in tags."""
        if self.toolbox.format == "json":
            from transformers.utils import get_json_schema

            self.schemas = [get_json_schema(method) for method in self.game.methods]
            return super().see(messages)
        described = offer(Problem("", messages), tuple(self.offered.values()), self.toolbox.format).prompt
        return super().see([dict(message) for message in described if not isinstance(message, str)])

    async def step(self, text: str) -> str | list[Message] | None:
        reply = await super().step(text)
        replies = users(reply) if isinstance(reply, str) else reply or []
        self.messages += [{"role": "assistant", "content": text}, *replies]
        self.observation = "\n".join(message["content"] for message in replies)
        return reply

    def reward(self) -> Reward:
        if self.earned is None:
            with self.random:
                self.earned = self.total = self.game.earned(self.messages)
        return GameEpisode.reward(self)


def trl(
    factory: str,
    task: Mapping[str, Any] | None = None,
    reward: str | None = None,
    format: str = "json",
    timeout_s: float | None = TIMEOUT_S,
    max_characters: int = MAX_CHARACTERS,
    at_once: int | None = None,
    player: str | None = None,
    success: float = 1.0,
) -> GameTask:
    """An environment_factory of TRL, or a dict of them, around the rows of `task`, written as in `task:`.

    Without a task a problem is a seed of `random`. `reward` is a reward function of TRL, `module:attr`, added to the
    environment's `get_reward`. `format`, `timeout_s`, `max_characters` and `at_once` are those of tools. `player(env,
    observation)`, `module:attr`, gives the next turn of a demonstration. Rewards of at least `success` count as
    correct.
    """
    inner = None if task is None else inner_task(f"trl:{factory}", task)
    made = import_object(factory, "task", callable_only=False)
    factories = dict(made) if isinstance(made, Mapping) else {None: made}
    judge = imported("reward", reward)
    for each in factories.values():
        _check_factory(factory, each, judge)
    if isinstance(made, Mapping) and inner is None:
        raise KeelError(f"trl:{factory} is a dict: give task.task, whose rows name one of its keys as `environment`")
    toolbox = Toolbox(lambda problem: (), format)
    limits = {"timeout_s": timeout_s, "max_characters": max_characters, "at_once": at_once}

    def game(problem: Problem) -> Game:
        row = columns(problem, problem.prompt if inner is not None else "")
        name = row.pop("environment", None) if isinstance(made, Mapping) else None
        if name not in factories:
            raise KeelError(
                f"{problem.key}: environment is {name!r}, but trl:{factory} has {', '.join(map(str, factories))}"
            )
        return TrlGame(factories[name](), row, toolbox, limits, judge)

    if inner is None:
        return seeded_task(f"trl:{factory}", game, player, None, success, TrlEpisode)
    return GivenTask(inner, f"trl:{factory}", game, imported("player", player), success=success, kind=TrlEpisode)


def columns(problem: Problem, prompt: str | Messages) -> dict[str, Any]:
    """The row of a problem as TRL passes it to `reset` and to reward functions; a seeded problem's row is its seed."""
    row = {name: value for name, value in problem.info.items() if name not in HIDDEN}
    own = problem.info.get("asked", prompt)
    answer = {} if problem.answer is None else {"answer": problem.answer}
    return {**answer, **row, "prompt": users(own) if isinstance(own, str) else own}


def _check_factory(name: str, factory: Any, judge: Any) -> None:
    """Refuse a factory that takes arguments, or whose environment has no reward."""
    if not callable(factory):
        raise KeelError(f"trl:{name} is a {type(factory).__name__}: give an environment_factory or a dict of them")
    required = [
        p
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    needed = [p.name for p in required]
    if len(needed) == 2 and all(p.kind is not p.KEYWORD_ONLY for p in required):
        raise KeelError(
            f"trl:{name} takes ({', '.join(needed)}), like a rollout_func, which samples by itself: its "
            "log-probabilities and a resume would be unchecked; give an environment_factory, or a task with episodes"
        )
    if needed:
        raise KeelError(f"trl:{name} takes ({', '.join(needed)}): an environment_factory takes no arguments")
