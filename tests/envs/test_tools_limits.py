"""Tools that are slow, hang or are called at the same time: each episode hears its own results, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs import Task, build_task
from keel.envs.concurrent import Loop
from keel.envs.guard import CallFailed, Guard
from keel.envs.judge import Judge
from keel.envs.rewards import wrap
from keel.envs.toolbox import MOST_HUNG, Toolbox
from keel.envs.tools import tool


def turn(name: str, *queries: str) -> str:
    """A turn with one call of the tool for each query."""
    calls = (json.dumps({"name": name, "arguments": {"query": query}}) for query in queries)
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


class Dawdles(Task):
    """A task of the user's whose replies come of a guard of its own: first slowly, then at once."""

    name = "dawdles"

    def __init__(self) -> None:
        self.inner, self.asked = Guard(5.0), []  # type: ignore[var-annotated]

    def respond(self, problem: Problem, turns: Any) -> str:
        return " ".join(self.inner.call(self._look, f"{turns[-1]}{number}") for number in range(4))

    def _look(self, query: str) -> str:
        self.asked.append(query)
        time.sleep(0.2 if query.startswith("slow") else 0.02)
        return f"<{query}>"


def test_an_abandoned_turn_neither_answers_others_nor_goes_on() -> None:
    """The slow turn is given up in the middle of its second call, and the next one begins while that still runs."""
    task = Dawdles()
    judge = Judge.of(build_task("arithmetic"), timeout_s=0.3, on_error="zero")
    episodes = [(Problem(word, "?"), 0, [word]) for word in ("slow", "b", "c", "d")]
    late, *said = judge.respond_all(task, episodes)
    assert isinstance(late, CallFailed)
    assert said == [f"<{word}0> <{word}1> <{word}2> <{word}3>" for word in ("b", "c", "d")]
    time.sleep(0.3)
    assert [query for query in task.asked if query.startswith("slow")] == ["slow0", "slow1"]


def test_a_guard_serves_several_threads_at_a_time() -> None:
    """All eight calls wait for each other inside one guard, and each caller gets its own value."""
    guard, together = Guard(20.0), threading.Barrier(8)
    got: dict[int, int] = {}

    def ask(number: int) -> None:
        got[number] = guard.call(lambda: (together.wait(10), 10 * number)[1])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: 10 * number for number in range(8)}


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
    problems = task.sample(at_once, seed=0, step=0)
    said = Judge.of(task, timeout_s=0.5).respond_all(task, [(problem, 0, [text]) for problem in problems])
    assert [heard(reply) for reply in said] == [["error: hang took too long"] * 4] * at_once
    for problem in problems:
        counts = task.counts(problem, [text])
        assert (counts["tool/timeout"], counts["tool/errors"], counts["tool/calls"]) == (4.0, 4.0, 4.0)


def test_the_calls_of_a_turn_have_a_limit_together() -> None:
    toolbox = Toolbox(lambda problem: [hang], turn_s=0.45)
    began = time.monotonic()
    said = toolbox.respond(Problem("p", "?"), [turn("hang", *"abcdefgh")])
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
    (said,) = Judge.of(task, timeout_s=0.1).respond_all(task, [(problem, 0, [turn("slow", "a", "b")])])
    assert heard(said) == ["a", "b"]


def test_a_task_that_hangs_beside_its_tools_is_still_given_up() -> None:
    class Stuck(Task):
        name = "stuck"
        toolbox = Toolbox(lambda problem: [tool(look)])

        def respond(self, problem: Problem, turns: Any) -> Any:
            said = self.toolbox.respond(problem, turns)
            RELEASE.wait(20)
            return said

    judge = Judge.of(build_task("arithmetic"), timeout_s=0.2, on_error="zero")
    (said,) = judge.respond_all(Stuck(), [(Problem("p", "?"), 0, [turn("look", "a")])])
    assert isinstance(said, CallFailed)
    assert "did not return" in said.cause


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
        said = toolbox.respond(Problem(f"p{number}", "?"), [turn("late", "a")])
        assert heard(said) == ["error: late took too long"]
        time.sleep(0.1)


@pytest.mark.parametrize("on_error", ["stop", "zero", "skip_group"])
def test_a_tool_that_hangs_for_good_stops_the_run_whatever_is_done_about_failures(on_error: str) -> None:
    task, problem = with_tools(tool(hang.function, timeout_s=0.02))
    judge = Judge.of(task, timeout_s=5.0, on_error=on_error)
    for number in range(MOST_HUNG):
        judge.respond_all(task, [(problem, 0, [turn("hang", str(number))])])
    with pytest.raises(KeelError, match=rf"^tool 'hang' hangs: {MOST_HUNG + 1} calls did not return"):
        judge.respond_all(task, [(problem, 0, [turn("hang", "the last")])])


def test_a_reward_that_returns_late_does_not_stop_a_run_in_the_end() -> None:
    def late(problem: Problem, text: str) -> float:
        time.sleep(0.06)
        return 1.0

    judge = Judge([wrap(late)], timeout_s=0.02, on_error="zero", max_hung=2)
    for _ in range(6):
        judge.judge(Problem("p", "?"), [["a"]])
        time.sleep(0.1)
    assert judge.guard.hung == 0
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
    return heard(task.respond(problem, [text]))


def test_a_coroutine_function_is_awaited_on_one_loop() -> None:
    LOOPS.clear()
    task, problem = with_tools(fetch)
    assert contents(task, problem, turn("fetch", "a", "gone")) == [
        "['a', 'a']",
        "error: fetch raised OSError: no such page",
    ]
    assert contents(task, problem, turn("fetch", "b")) == ["['b', 'b']"]
    assert len(LOOPS) == 1
    assert task.counts(problem, [turn("fetch", "a", "gone")])["tool/failed"] == 1.0


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
    asked = [(problem, sample, [turn(name, "a")]) for sample, name in enumerate(("stubborn", "patient"))]
    assert replies(task, asked) == ["error: stubborn took too long", "<a>"]
    assert task.toolbox._loop.hung == 1
    RELEASE.set()
    until = time.monotonic() + 5
    while task.toolbox._loop.hung and time.monotonic() < until:
        time.sleep(0.02)
    assert task.toolbox._loop.hung == 0


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_loop_that_is_closed_under_its_callers_loses_no_call(timeout_s: float | None) -> None:
    """Four threads hand over calls while a fifth closes the loop again and again."""
    loop, over = Loop(timeout_s), threading.Event()
    got: list[Any] = []

    async def same(number: int) -> int:
        await asyncio.sleep(0)
        return number

    def ask() -> None:
        for number in range(50):
            got.extend(loop.run([(same, (number,))]))

    def closing() -> None:
        while not over.is_set():
            loop.close()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    closer = threading.Thread(target=closing)
    for thread in (*threads, closer):
        thread.start()
    for thread in threads:
        thread.join(20)
    over.set()
    closer.join()
    assert Counter(got) == {(number, None): 4 for number in range(50)}


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
    assert task.counts(problem, [turn("untold", "a")])["tool/failed"] == 1.0


def many(task: Any, count: int) -> list[tuple[Problem, int, list[str]]]:
    """One episode a problem, each with a call of its own."""
    (name,) = (made.name for made in task.tools)
    return [(problem, 0, [turn(name, problem.key)]) for problem in task.sample(count, seed=0, step=0)]


def replies(task: Any, episodes: Any, **options: Any) -> list[Any]:
    found = Judge.of(task, **options).respond_all(task, episodes)
    return [reply[0]["content"] if isinstance(reply, list) else reply for reply in found]


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
    assert replies(task, episodes) == [f"<{problem.key}>" for problem, _, _ in episodes]


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
    asked = [(problem, 0, [turn("alone", problem.key)]) for problem in task.sample(12, seed=0, step=0)]
    assert replies(task, asked, timeout_s=0.3) == [f"<{problem.key}>" for problem, _, _ in asked]
    assert most == 1


def test_equal_episodes_share_one_call_and_failures_are_recorded_by_episode() -> None:
    seen: list[str] = []

    def note(query: str) -> str:
        """Note a query."""
        seen.append(query)
        return f"call {len(seen)}"

    task, problem = with_tools(tool(note, at_once=4))
    assert replies(task, [(problem, sample, [turn("note", "a")]) for sample in range(6)]) == ["call 1"] * 6
    assert seen == ["a"]

    class Fails(Task):
        name, toolbox = "fails", task.toolbox

        def respond(self, problem: Problem, turns: Any) -> Any:
            raise OSError("gone")

    judge = Judge.of(task, on_error="zero")
    found = judge.respond_all(Fails(), [(problem, sample, ["a"]) for sample in range(3)])
    assert [str(one) for one in found] == ["raised OSError: gone"] * 3
    assert [failure.sample for failure in judge.drain()] == [0, 1, 2]
    with pytest.raises(KeelError, match=r"fails\.respond on problem .* completion 1: raised OSError: gone"):
        Judge.of(task).respond_all(Fails(), [(problem, 1, ["a"])])


def test_no_calls_at_once_are_refused() -> None:
    with pytest.raises(KeelError, match="at_once is 0"):
        tool(look, at_once=0)
