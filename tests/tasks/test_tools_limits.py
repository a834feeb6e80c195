"""Tools that are slow, hang or are called at the same time: each episode hears its own results, within limits."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from keel.tasks import build_task
from keel.tasks.guard import CallFailed, Guard
from keel.tasks.judge import Judge
from keel.types import Problem


def turn(name: str, *queries: str) -> str:
    """A turn with one call of the tool for each query."""
    calls = (json.dumps({"name": name, "arguments": {"query": query}}) for query in queries)
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


class Dawdles:
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
    with pytest.raises(CallFailed):
        judge.respond(task, Problem("a", "?"), 0, ["slow"])
    for word in ("b", "c", "d"):
        said = judge.respond(task, Problem(word, "?"), 0, [word])
        assert said == f"<{word}0> <{word}1> <{word}2> <{word}3>"
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
