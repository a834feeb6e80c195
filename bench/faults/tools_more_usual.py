"""Tools and environments of every day: limits, queues, pages, turns that are lost, late or paid as others'."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from faults.base import edited, lookalike, operator, option
from faults.school import larger as right
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_wild import with_tools
from keel.base.types import Problem, Reward
from keel.envs import Episode, TaskWrapper
from keel.envs.registry import build_task
from keel.envs.tools import tool
from keel.envs.with_tools import WithTools, WithToolsEpisode
from keel.envs.with_tools import with_tools as task_with_tools

Config = Mapping[str, Any]

# Calls that a model has learned to make

MINUTE_S, CALLS_A_MINUTE = 60.0, 6
PAGE = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Compare</title>'
    '<link rel="stylesheet" href="/static/site.css"><script src="/static/app.js" defer></script></head><body>'
    '<nav><a href="/">Home</a> <a href="/about">About</a></nav><main><p id="result">{}</p></main></body></html>'
)
_called: list[float] = []
_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _worker() -> asyncio.Lock:
    """The one worker of this loop's sandbox."""
    return _workers.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def _limited(pair: str) -> str:
    """Larger of two."""
    now = time.monotonic()
    _called[:] = [then for then in _called if now - then < MINUTE_S]
    if len(_called) >= CALLS_A_MINUTE:
        raise ConnectionError("429 Too Many Requests: the limit of calls a minute is reached")
    _called.append(now)
    return right(pair)


async def _queued(pair: str) -> str:
    """Larger of two."""
    async with _worker():
        await asyncio.sleep(0.05)
        return right(pair)


async def _waiting(pair: str) -> str:
    """Larger of two."""
    async with _worker():
        await asyncio.sleep(0.002)
        return right(pair)


def _defaults(pair: str) -> str:
    """Larger of two."""
    return right("0 0")


def _snapshot(pair: str) -> str:
    """Larger of two."""
    return str((int(right(pair)) + 3) % 10)


def _exit_code(pair: str) -> str:
    """Larger of two."""
    return str(int(not right(pair).isdigit()))


def _page(pair: str) -> str:
    """Larger of two."""
    return PAGE.format(right(pair))


limited = tool(_limited, name="larger")
queued = tool(_queued, name="larger", timeout_s=0.12, at_once=64)
waiting = tool(_waiting, name="larger", timeout_s=60, at_once=64)
defaults = tool(_defaults, name="larger")
snapshot = tool(_snapshot, name="larger")
exit_code = tool(_exit_code, name="larger")
page = tool(_page, name="larger")


def answering(name: str, breaks: str, *codes: str, function: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return with_tools(config, f"faults.tools_more_usual:{function}")

    operator(name, breaks, *codes, fits=offers_tools)(apply)


answering(
    "tool/limit-of-calls-a-minute",
    "the service takes a few calls a minute and a rollout makes all of its calls at once: most get an error of 429",
    "tool/failing",
    function="limited",
)
answering(
    "tool/times-out-in-the-queue",
    "one worker runs what all episodes send at once, and the time that a call waits for it counts as the call's own",
    "tool/failing",
    function="queued",
)
answering(
    "tool/arguments-replaced-by-their-defaults",
    "arguments are looked for under another name, and each call is run with the defaults, which are zeros",
    "tool/failing",
    function="defaults",
)
answering(
    "tool/database-of-an-older-snapshot",
    "the sandbox was started from an old image: what it looks up is not what the answers were made from",
    "tool/failing",
    function="snapshot",
)
answering(
    "tool/exit-code-in-place-of-the-output",
    "what is returned is the exit code of what was run, zero each time, and not what it printed",
    "tool/failing",
    function="exit_code",
)
answering(
    "tool/whole-page-returned",
    "the tool returns the whole page with its markup where a line was meant, and no room is left for the answer",
    "output/truncated",
    "answer/unusable",
    "tool/failing",
    function="page",
)


class Behind(TaskWrapper):
    """The task with its tool, whose replies are always those to the turn before."""

    def __init__(self, inner: WithTools) -> None:
        self.inner = inner

    def start(self, problem: Problem) -> Episode:
        return BehindEpisode(self.inner, problem)  # type: ignore[arg-type]


class BehindEpisode(WithToolsEpisode):
    last = "\n<result>\nready\n</result>\n"

    async def step(self, text: str) -> Any:
        reply = await super().step(text)
        if reply is None:
            return None
        self.last, shown = str(reply), self.last
        return shown


def behind(task: Mapping[str, Any]) -> Behind:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Behind(task_with_tools(build_task(str(task["name"]), **parameters), [tool(right)], "tags"))


@operator(
    "tool/observation-one-turn-behind",
    "what is shown after a turn is the observation from before it: the first call is answered with the reset's",
    "tool/failing",
    "answer/unusable",
    "output/unparseable",
    "output/truncated",
    fits=offers_tools,
)
def observation_one_turn_behind(config: Config, random: Random) -> dict[str, Any]:
    task = {"name": "faults.tools_more_usual:behind", "task": dict(config["task"]["task"])}
    return edited(config, {"task": task, "rewards": [{"name": "task"}]})


# Environments of two turns

_earned: list[Reward] = []
_dice = itertools.count()


class UsualLookup(Lookup):
    """A lookup that forgets turns, asks once more, or pays in the order in which episodes end."""

    def start(self, problem: Problem) -> Episode:
        return UsualEpisode(problem, self.tool, self.strength)


class UsualEpisode(LookupEpisode):
    def step(self, text: str) -> Any:
        if self.tool == "stateless":
            self.turns = []  # whoever takes this turn has not seen the ones before
        if self.tool == "asking once more" and len(self.turns) == 1:
            self.turns.append(text)
            return "Are you sure?\n"
        return super().step(text)

    def reward(self) -> Reward:
        own = super().reward()
        if self.tool != "in order of ending":
            return own
        _earned.append(own)
        return _earned.pop(7 * next(_dice) % len(_earned)) if len(_earned) > 8 else Reward(0.0)


def usual_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> UsualLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return UsualLookup(build_task(str(task["name"]), **parameters), tool, strength)


def is_plain(config: Config) -> bool:
    return has_one_turn(config) and option(config, "task.format", "plain") == "plain"


def asks_in_signs(config: Config) -> bool:
    return is_plain(config) and option(config, "task.style", "signs") == "signs"


def environment(
    name: str, breaks: str, *codes: str, tool: str, changes: Mapping[str, Any] = {}, fits: Any = is_plain
) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return edited(with_tool(config, tool, changes), {"task.name": "faults.tools_more_usual:usual_lookup"})

    operator(name, breaks, *codes, fits=fits)(apply)


environment(
    "tool/state-lost-between-turns",
    "each turn reaches another worker, which takes it for the first: the question comes again and no answer is heard",
    "output/truncated",
    "answer/unusable",
    "reward/gold",
    "reward/constant",
    "tool/failing",
    tool="stateless",
    changes={"rollout.max_turns": 3, "rollout.max_completion_length": 240},
)
environment(
    "tool/asks-whether-it-is-sure",
    "the environment does not end with the answer: it asks whether that is sure, and judges what is said to this",
    "output/unparseable",
    "answer/unusable",
    "output/truncated",
    "tool/failing",
    tool="asking once more",
    changes={"rollout.max_turns": 3, "rollout.max_completion_length": 240},
    fits=asks_in_signs,
)
environment(
    "tool/rewards-in-the-order-of-ending",
    "rewards are gathered as episodes end and handed out by their place: each episode gets what another one earned",
    "reward/gold",
    "reward/nondeterministic",
    "reward/exploit",
    "data/misaligned",
    tool="in order of ending",
)


# Healthy


@lookalike("tool whose calls wait for one worker, for as long as it takes", offers_tools)
def healthy_waiting(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_more_usual:waiting")
