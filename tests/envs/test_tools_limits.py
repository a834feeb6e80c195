"""Tools that are slow, hang or are called at the same time: each episode hears its own results, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from envs.playing import counts, replies, reply
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs import Episode, Task
from keel.envs.calls import CallFailed, HungCalls, TooManyHungCalls, call_sync
from keel.envs.episode import SingleTurn
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.rewards import wrap
from keel.envs.toolbox import MAX_HUNG, Toolbox, ToolEpisode
from keel.envs.tools import tool


def turn(name: str, *queries: str) -> str:
    """A turn with one call of the tool for each query."""
    calls = (json.dumps({"name": name, "arguments": {"query": query}}) for query in queries)
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


class Own(Task):
    """A task of the user's with episodes of the class given."""

    name = "own"

    def __init__(self, episode: Any) -> None:
        self.episode = episode

    def start(self, problem: Problem) -> Episode:
        made: Episode = self.episode(problem)
        return made


def test_an_abandoned_turn_neither_answers_others_nor_goes_on() -> None:
    """The slow turn is given up in the middle of its second call, and the next one begins while that still runs."""
    asked: list[str] = []

    async def look_slowly(query: str) -> str:
        asked.append(query)
        await asyncio.to_thread(time.sleep, 0.2 if query.startswith("slow") else 0.02)
        return f"<{query}>"

    class Dawdles(SingleTurn):
        at_once = 1

        async def step(self, text: str) -> Any:
            return " ".join([await look_slowly(f"{text}{number}") for number in range(4)])

    words = ("slow", "b", "c", "d")
    late, *said = replies(Own(Dawdles), [(Problem(word, "?"), word) for word in words], timeout_s=0.3)
    assert isinstance(late, CallFailed)
    assert said == [f"<{word}0> <{word}1> <{word}2> <{word}3>" for word in ("b", "c", "d")]
    assert [query for query in asked if query.startswith("slow")] == ["slow0", "slow1"]


def test_several_threads_may_call_at_a_time() -> None:
    """All eight calls wait for each other, and each caller gets its own value."""
    together = threading.Barrier(8)
    got: dict[int, int] = {}

    def ask(number: int) -> None:
        got[number] = call_sync(lambda: (together.wait(10), 10 * number)[1], timeout_s=20.0, hung=HungCalls())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: 10 * number for number in range(8)}


def test_a_coroutine_that_waits_for_its_own_loop_is_an_error_and_no_deadlock() -> None:
    async def waits() -> Any:
        return call_sync(lambda: 1, timeout_s=None, hung=HungCalls())

    with pytest.raises(CallFailed, match="raised RuntimeError: a coroutine cannot wait for its own event loop"):
        call_sync(waits, timeout_s=20.0, hung=HungCalls())


def test_a_child_process_calls_with_threads_of_its_own() -> None:
    assert call_sync(lambda: 1, timeout_s=20.0, hung=HungCalls()) == 1
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a child that waits for its parent's threads would wait for ever
        try:
            os._exit(call_sync(lambda: 7, timeout_s=5.0, hung=HungCalls()))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def _release() -> Any:
    """Let go of whatever hangs when a test is over."""
    RELEASE.clear()
    yield
    RELEASE.set()


def with_tools(*tools: Any) -> tuple[Any, Problem]:
    task: Any = build_task("tools", task={"name": "arithmetic"}, tools=list(tools))
    return task, task.sample(1, seed=0, step=0)[0]


def heard(reply: Any) -> list[str]:
    """What the messages of a reply say."""
    return [message["content"] for message in reply]


@tool(timeout_s=0.2)
def hang(query: str) -> str:
    """Never returns in time."""
    RELEASE.wait(20)
    return query


@pytest.mark.parametrize("at_once", [1, 3])
def test_calls_that_hang_are_told_to_the_model_and_counted_however_many_a_turn_has(at_once: int) -> None:
    """Four calls of 0.2 s take longer than reward.timeout_s, under which the reward and not the tools stand."""
    task, _ = with_tools(tool(hang.function, timeout_s=0.2, at_once=at_once))
    text = turn("hang", "a", "b", "c", "d")
    said = replies(task, [(problem, text) for problem in task.sample(at_once, seed=0, step=0)], timeout_s=0.5)
    assert [heard(reply) for reply in said] == [["error: hang took too long"] * 4] * at_once
    counted = counts(task, task.sample(1, seed=0, step=0)[0], [turn("hang", "a")])
    assert (counted["tool/timeout"], counted["tool/errors"], counted["tool/calls"]) == (1.0, 1.0, 1.0)


def test_the_calls_of_a_turn_have_a_limit_together() -> None:
    toolbox = Toolbox(lambda problem: [hang], turn_s=0.45)
    began = time.monotonic()
    said = reply(toolbox, Problem("p", "?"), [turn("hang", *"abcdefgh")])
    assert time.monotonic() - began < 1.0
    late, unmade = "error: hang took too long", "error: hang was not called: this turn's calls took too long together"
    assert heard(said) == [late] * 3 + [unmade] * 5


def test_a_tool_may_take_as_long_as_it_says_whatever_the_reward_may() -> None:
    @tool(timeout_s=5.0)
    def slow(query: str) -> str:
        """Slow."""
        time.sleep(0.4)
        return query

    task, problem = with_tools(slow)
    (said,) = replies(task, [(problem, turn("slow", "a", "b"))], timeout_s=0.1)
    assert heard(said) == ["a", "b"]


def test_a_task_that_hangs_beside_its_tools_is_still_given_up() -> None:
    toolbox = Toolbox(lambda problem: [tool(look)])

    class Stuck(ToolEpisode):
        async def step(self, text: str) -> Any:
            said = await super().step(text)
            await asyncio.sleep(20)
            return said

    (failure,) = replies(Own(partial(Stuck, toolbox)), [(Problem("p", "?"), turn("look", "a"))], timeout_s=0.2)
    assert isinstance(failure, CallFailed)
    assert "did not return" in failure.cause


def look(query: str) -> str:
    """Look something up."""
    time.sleep(0.05)
    return f"<{query}>"


def test_calls_that_return_late_are_no_longer_counted_as_hung() -> None:
    """Twelve calls are given up, more than may hang at a time; each has returned before the next begins."""

    @tool(timeout_s=0.02)
    def late(query: str) -> str:
        """Returns late."""
        time.sleep(0.06)
        return query

    toolbox = Toolbox(lambda problem: [late])
    for number in range(12):
        said = reply(toolbox, Problem(f"p{number}", "?"), [turn("late", "a")])
        assert heard(said) == ["error: late took too long"]
        time.sleep(0.1)


def test_a_tool_that_hangs_for_good_stops_the_run() -> None:
    task, problem = with_tools(tool(hang.function, timeout_s=0.02))
    for number in range(MAX_HUNG):
        replies(task, [(problem, turn("hang", str(number)))])
    with pytest.raises(TooManyHungCalls, match=rf"^tool 'hang' hangs: {MAX_HUNG + 1} calls did not return"):
        replies(task, [(problem, turn("hang", "the last"))])


def test_a_reward_that_returns_late_does_not_stop_a_run_in_the_end() -> None:
    def late(problem: Problem, text: str) -> float:
        time.sleep(0.06)
        return 1.0

    judge = Judge([wrap(late)], timeout_s=0.02, on_error="zero", max_hung=2)
    for _ in range(6):
        judge.judge(Problem("p", "?"), [["a"]])
        time.sleep(0.1)
    assert judge.hung.alive == 0
    assert judge.counts == {"late": 6}


LOOPS: set[int] = set()


async def fetch(query: str) -> list[str]:
    """Fetch something, in a while."""
    LOOPS.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0.01)
    if query == "gone":
        raise OSError("no such page")
    return [query, query]


def contents(task: Any, problem: Problem, text: str) -> list[str]:
    return heard(reply(task, problem, [text]))


def test_a_coroutine_function_is_awaited_on_one_loop() -> None:
    LOOPS.clear()
    task, problem = with_tools(fetch)
    assert contents(task, problem, turn("fetch", "a", "gone")) == [
        "['a', 'a']",
        "error: fetch raised OSError: no such page",
    ]
    assert contents(task, problem, turn("fetch", "b")) == ["['b', 'b']"]
    assert len(LOOPS) == 1
    assert counts(task, problem, [turn("fetch", "a", "gone")])["tool/failed"] == 1.0


def test_a_coroutine_that_takes_too_long_is_ended_and_leaves_nothing_behind() -> None:
    ended = threading.Event()

    @tool(timeout_s=0.05)
    async def forever(query: str) -> str:
        """Never returns."""
        try:
            await asyncio.sleep(20)
        finally:
            ended.set()
        return query

    task, problem = with_tools(forever)
    for number in range(12):  # more than may hang at a time
        assert contents(task, problem, turn("forever", str(number))) == ["error: forever took too long"]
    assert ended.is_set()


def test_a_coroutine_that_will_not_end_leaves_those_beside_it_alone() -> None:
    """The stubborn call is given up after 0.8 s; the good one began before that and ends after it."""

    @tool(timeout_s=0.2, at_once=2)
    async def stubborn(query: str) -> str:
        """Ignores that its time is over."""
        while not RELEASE.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return query

    @tool(timeout_s=10.0, at_once=2)
    async def patient(query: str) -> str:
        """Takes a while."""
        await asyncio.sleep(1.2)
        return f"<{query}>"

    task, problem = with_tools(stubborn, patient)
    asked = [(problem, turn(name, "a")) for name in ("stubborn", "patient")]
    assert first(replies(task, asked)) == ["error: stubborn took too long", "<a>"]
    hung = task.toolbox.hung(stubborn)
    assert hung.alive == 1
    RELEASE.set()
    until = time.monotonic() + 5
    while hung.alive and time.monotonic() < until:
        time.sleep(0.02)
    assert hung.alive == 0


def test_a_coroutine_that_blocks_its_loop_is_told_to_the_model_and_holds_no_other_episode_up() -> None:
    @tool(timeout_s=0.2, at_once=2)
    async def blocks(query: str) -> str:
        """Wait without awaiting."""
        if query == "a":
            RELEASE.wait(20)
        return f"<{query}>"

    task, problem = with_tools(blocks, look)
    told = replies(task, [(problem, turn("blocks", "a")), (problem, turn("look", "b"))], timeout_s=0.1)
    assert first(told) == ["error: blocks took too long", "<b>"]
    assert task.toolbox.hung(blocks).alive == 1
    assert contents(task, problem, turn("blocks", "c")) == ["<c>"]


class Tedious:
    def __str__(self) -> str:
        time.sleep(0.3)
        return "at last"


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_call_and_the_text_of_its_value_share_one_limit(kind: str) -> None:
    """Each takes 0.3 s, within the limit alone and beyond it together."""

    @tool(timeout_s=0.5)
    def tedious(query: str) -> Any:
        """Takes its time twice."""
        time.sleep(0.3)
        return Tedious()

    @tool(name="tedious", timeout_s=0.5)
    async def awaited(query: str) -> Any:
        """Takes its time twice."""
        await asyncio.sleep(0.3)
        return Tedious()

    task, problem = with_tools(tedious if kind == "function" else awaited)
    assert contents(task, problem, turn("tedious", "a")) == ["error: tedious took too long"]


class Untold:
    def __str__(self) -> str:
        raise ValueError("no words")


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words either")


def untold(query: str) -> Untold:
    """Return what has no text."""
    return Untold()


def unsayable(query: str) -> str:
    """Raise what has no text."""
    raise Unsayable


def test_results_and_errors_without_a_text_are_failures_of_the_tool() -> None:
    task, problem = with_tools(untold, unsayable)
    assert contents(task, problem, turn("untold", "a")) == ["error: untold raised ValueError: no words"]
    assert contents(task, problem, turn("unsayable", "a")) == ["error: unsayable raised Unsayable"]
    assert counts(task, problem, [turn("untold", "a")])["tool/failed"] == 1.0


def many(task: Any, count: int) -> list[tuple[Problem, str]]:
    """One turn a problem, each with a call of its own."""
    name = task.tools[0].name
    return [(problem, turn(name, problem.key)) for problem in task.sample(count, seed=0, step=0)]


def first(told: list[Any]) -> list[str]:
    return [reply[0]["content"] for reply in told]


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_calls_of_different_episodes_run_together_and_keep_their_places(kind: str) -> None:
    """Each of eight calls waits for the other seven: one after the other, none would return in time."""
    here, there = threading.Barrier(8), asyncio.Barrier(8)

    def waits(query: str) -> str:
        """Wait for the others."""
        here.wait(10)
        return f"<{query}>"

    async def awaits(query: str) -> str:
        """Wait for the others."""
        await there.wait()
        return f"<{query}>"

    task, _ = with_tools(tool(waits, at_once=8) if kind == "function" else awaits)
    episodes = many(task, 8)
    assert first(replies(task, episodes)) == [f"<{problem.key}>" for problem, _ in episodes]


def test_a_plain_function_is_called_by_one_episode_at_a_time() -> None:
    """Also where another tool lets several episodes be played together, and however long the others have to wait."""
    running, most = 0, 0

    @tool(timeout_s=0.25)
    def alone(query: str) -> str:
        """Not to be called twice at a time."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return f"<{query}>"

    task, _ = with_tools(alone, tool(look, at_once=8))
    asked = many(task, 12)
    assert first(replies(task, asked, timeout_s=0.3)) == [f"<{problem.key}>" for problem, _ in asked]
    assert most == 1


def test_no_calls_at_once_are_refused() -> None:
    with pytest.raises(KeelError, match="at_once is 0"):
        tool(look, at_once=0)
