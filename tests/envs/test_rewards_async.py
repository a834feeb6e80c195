"""Coroutines as rewards: together, each within its time, on one loop, and every way in which they can fail."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.envs.rewards import build_reward, wrap

TASK = arithmetic()
PROBLEM = Problem("add:3,4", "3+4=", "7")


async def right(problem: Problem, text: str, bonus: float = 0.0) -> float:
    await asyncio.sleep(0)
    return float(text == problem.answer) + bonus


async def counts_turns(problem: Problem, text: str, turns: Sequence[str]) -> dict[str, float]:
    return {"turns": len(turns)}


class Client:
    async def __call__(self, problem: Problem, text: str) -> float:
        return 3.0


def totals(judge: Judge, *texts: str) -> list[float]:
    return [reward.total for reward in judge.judge(PROBLEM, [[text] for text in texts]) or ()]


def test_values_keep_their_places() -> None:
    assert totals(Judge([wrap(right)]), "7", "8", "7") == [1.0, 0.0, 1.0]
    assert totals(Judge([wrap(functools.partial(right, bonus=0.5))]), "7", "8") == [1.5, 0.5]
    assert totals(Judge([wrap(Client())]), "7") == [3.0]


def test_by_name_with_parameters_and_turns() -> None:
    parts = [build_reward(f"{__name__}:right", TASK, bonus=2.0), build_reward(f"{__name__}:counts_turns", TASK)]
    rewards = Judge(parts).judge(PROBLEM, [["x", "7"]])
    first, second = (f"{__name__}:{name}" for name in ("right", "counts_turns"))
    assert rewards == (Reward(5.0, {first: 3.0, second: 2.0, f"{second}/turns": 2.0}),)


def test_a_group_is_judged_together() -> None:
    """Each waits until all eight have begun: one after the other, none would ever return."""
    begun = 0
    everyone: asyncio.Event | None = None

    async def waits(problem: Problem, text: str) -> float:
        nonlocal begun, everyone
        everyone = everyone or asyncio.Event()
        begun += 1
        if begun == 8:
            everyone.set()
        await everyone.wait()
        return 1.0

    assert totals(Judge([wrap(waits)], timeout_s=20), *"abcdefgh") == [1.0] * 8


def test_groups_share_one_loop() -> None:
    loops: set[int] = set()

    async def notes(problem: Problem, text: str) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    judge = Judge([wrap(notes)])
    for _ in range(3):
        totals(judge, "a", "b")
    assert len(loops) == 1


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("slow", "did not return within 0.2 s"), ("raises", "raised ValueError: one"), ("nan", "nan"), ("none", "None"),
     ("exits", "raised SystemExit"), ("own timeout", "raised TimeoutError: theirs")],
)  # fmt: skip
def test_only_the_one_that_fails_is_zero(kind: str, cause: str) -> None:
    async def faulty(problem: Problem, text: str) -> Any:
        if text != "bad":
            return 1.0
        if kind == "slow":
            await asyncio.sleep(20)
        if kind == "raises":
            raise ValueError("one\ntwo")
        if kind == "exits":
            raise SystemExit(3)
        if kind == "own timeout":
            raise TimeoutError("theirs")
        return float("nan") if kind == "nan" else None

    judge = Judge([wrap(faulty, "mine")], timeout_s=0.2, on_error="zero")
    assert totals(judge, "ok", "bad", "ok") == [1.0, 0.0, 1.0]
    (failure,) = judge.drain()
    assert (failure.function, failure.sample) == ("mine", 1)
    assert cause in failure.cause
    with pytest.raises(KeelError, match="mine on problem 'add:3,4', completion 0"):
        totals(Judge([wrap(faulty, "mine")], timeout_s=0.2), "bad")
    assert Judge([wrap(faulty)], timeout_s=0.2, on_error="skip_group").judge(PROBLEM, [["ok"], ["bad"]]) is None


def test_a_coroutine_that_blocks_is_left_behind_and_too_many_stop_the_run() -> None:
    release = threading.Event()

    async def blocks(problem: Problem, text: str) -> float:
        if text == "block":
            release.wait(20)
        return 1.0

    judge = Judge([wrap(blocks, "mine")], timeout_s=0.05, on_error="zero", max_hung=1)
    began = time.monotonic()
    assert totals(judge, "block", "ok") == [0.0, 0.0]
    assert all("<locals>.blocks blocks the event loop" in failure.cause for failure in judge.drain())
    assert time.monotonic() - began < 5
    assert totals(judge, "ok") == [1.0]
    with pytest.raises(KeelError, match="2 calls hang"):
        totals(judge, "block")
    release.set()


def test_beside_others_and_without_a_limit() -> None:
    judge = Judge([wrap(right, "a"), wrap(lambda problem, text: 0.5, "b", weight=2.0)], timeout_s=None)
    rewards = judge.judge(PROBLEM, [["7"], ["8"]], failed={1})
    assert rewards == (Reward(2.0, {"a": 1.0, "b": 0.5}), Reward(0.0, {"a": 0.0, "b": 0.0}, False))
