"""Rewards by hand, and every way in which a user's function can fail."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs import TaskWrapper
from keel.envs.arithmetic import arithmetic
from keel.envs.countdown import countdown
from keel.envs.judge import Judge
from keel.envs.mixture import mixture
from keel.envs.rewards import as_reward, build_reward, build_rewards, check_reward, combine, wrap

TASK = arithmetic()
PROBLEM = Problem("add:3,4", "3+4=", "7")
HANG = threading.Event()


def judge_of(function: Any, **options: Any) -> Judge:
    return Judge([wrap(function, "mine")], **options)


@pytest.mark.parametrize("seconds", [1e10, 1e38])
def test_a_limit_longer_than_a_thread_can_wait_is_no_limit(seconds: float) -> None:
    async def later(problem: Problem, text: str) -> float:
        return 0.5

    for function in (lambda problem, text: 0.5, later):
        assert judge_of(function, timeout_s=seconds).judge(PROBLEM, [["7"]])[0].total == 0.5


def test_the_task_is_its_own_judge_by_default() -> None:
    rewards = Judge.of(TASK).judge(PROBLEM, [["7"], ["8"], []])
    assert rewards == (
        Reward(1.0, {"correct": 1.0}, True),
        Reward(0.0, {"correct": 0.0}, True),
        Reward(0.0, {"correct": 0.0}, False),
    )


@pytest.mark.parametrize(
    ("entry", "text", "value"),
    [
        ({"name": "exact"}, " 7 ", 1.0),
        ({"name": "exact"}, "7.", 0.0),
        ({"name": "numeric"}, "it is 7.", 1.0),
        ({"name": "numeric", "tag": "answer"}, "<answer>7</answer> 9", 1.0),
        ({"name": "numeric"}, "none", 0.0),
        ({"name": "format"}, "<answer>x</answer>", 1.0),
        ({"name": "format", "tags": ["think", "answer"]}, "<think>x</think>", 0.5),
        ({"name": "format"}, "<answer>x</answer><answer>", 0.0),
        ({"name": "format", "pattern": r"\d+"}, "12", 1.0),
        ({"name": "format", "pattern": r"\d+"}, "12a", 0.0),
        ({"name": "length", "target": 2, "scale": 10}, "12345", -0.3),
        ({"name": "length", "target": 9}, "12345", 0.0),
    ],
)
def test_named_rewards(entry: dict[str, Any], text: str, value: float) -> None:
    rewards = Judge.of(TASK, [entry]).judge(PROBLEM, [[text]])
    assert rewards is not None
    assert rewards[0].total == pytest.approx(value)
    assert rewards[0].parts[entry["name"]] == pytest.approx(value)


def test_a_weighted_sum_keeps_its_parts_before_weights() -> None:
    entries = [{"name": "exact", "weight": 2.0}, {"name": "length", "weight": 0.5, "scale": 10}, {"name": "exact"}]
    rewards = Judge.of(TASK, entries).judge(PROBLEM, [["7"]])
    assert rewards is not None
    assert rewards[0].parts == {"exact": 1.0, "length": -0.1, "exact#2": 1.0}
    assert rewards[0].total == pytest.approx(2.0 - 0.05 + 1.0)


def test_normalised_sum_by_hand() -> None:
    totals = combine(
        {"a": [0.0, 100.0], "b": [1.0, 1.0], "c": [3.0, 1.0]}, {"a": 1.0, "b": 5.0, "c": 0.5}, "normalised_sum"
    )
    assert totals == pytest.approx([-1 + 0.5, 1 - 0.5])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.1, 50), st.floats(-9, 9))
def test_normalised_sum_forgets_scale_and_offset(values: list[float], scale: float, offset: float) -> None:
    if max(values) - min(values) < 1e-3:
        return
    first = combine({"a": values}, {"a": 1.0}, "normalised_sum")
    second = combine({"a": [scale * v + offset for v in values]}, {"a": 1.0}, "normalised_sum")
    assert first == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, Reward(1.0)),
        (True, Reward(1.0)),
        (numpy.float32(0.5), Reward(0.5)),
        (torch.tensor(0.25), Reward(0.25)),
        ({"a": 1, "b": 2}, Reward(3.0, {"a": 1.0, "b": 2.0})),
        ({"a": 1, "total": 9}, Reward(9.0, {"a": 1.0})),
        (Reward(0.5, {"x": 1}, False), Reward(0.5, {"x": 1.0}, False)),
    ],
)
def test_what_a_function_may_return(value: Any, expected: Reward) -> None:
    assert as_reward(value) == expected


def sees_turns(problem: Problem, text: str, turns: Sequence[str], bonus: float = 0.0) -> float:
    return len(turns) + bonus


def test_users_functions_by_name_with_their_parameters_and_turns() -> None:
    part = build_reward(f"{__name__}:sees_turns", TASK, bonus=0.5, label="turns")
    rewards = Judge([part]).judge(PROBLEM, [["a", "b"]])
    assert rewards == (Reward(2.5, {"turns": 2.5}),)


def test_dicts_are_logged_below_their_name() -> None:
    rewards = judge_of(lambda problem, text: {"a": 1, "b": 2}).judge(PROBLEM, [["x"]])
    assert rewards == (Reward(3.0, {"mine": 3.0, "mine/a": 1.0, "mine/b": 2.0}),)


def raises(problem: Problem, text: str) -> float:
    raise RuntimeError("two\nlines")


FAULTS: list[tuple[Any, str, str]] = [
    (raises, "raised", "raised RuntimeError: two"),
    (lambda problem, text: sys.exit(3), "raised", "raised SystemExit: 3"),
    (lambda problem, text: None, "invalid", "returned None"),
    (lambda problem, text: float("nan"), "invalid", "nan"),
    (lambda problem, text: float("inf"), "invalid", "inf"),
    (lambda problem, text: "1.0", "invalid", "a str"),
    (lambda problem, text: [1.0], "invalid", "a list"),
    (lambda problem, text: torch.ones(2), "invalid", "a Tensor"),
    (lambda problem, text: {"a": None}, "invalid", "'a' is None"),
    (lambda problem, text: Reward(float("nan")), "invalid", "'total' is nan"),
    (lambda problem, text: HANG.wait(20), "timeout", "did not return within 0.1 s"),
    (lambda problem: 1.0, "raised", "TypeError"),
]


@pytest.mark.parametrize(("function", "kind", "cause"), FAULTS)
def test_stop_names_function_problem_and_cause(function: Any, kind: str, cause: str) -> None:
    judge = judge_of(function, timeout_s=0.1)
    with pytest.raises(KeelError) as caught:
        judge.judge(PROBLEM, [["7"]])
    message = str(caught.value)
    assert all(part in message for part in ("mine", "'add:3,4'", cause, "reward.on_error"))
    assert "\n" not in message
    assert [f.kind for f in judge.failures] == [kind]


@pytest.mark.parametrize(("function", "kind", "cause"), FAULTS)
def test_zero_goes_on_and_counts(function: Any, kind: str, cause: str) -> None:
    judge = judge_of(
        lambda problem, text: function(problem, text) if text == "bad" else 1.0, timeout_s=0.1, on_error="zero"
    )
    rewards = judge.judge(PROBLEM, [["ok"], ["bad"], ["ok"]])
    assert rewards is not None
    assert [r.total for r in rewards] == [1.0, 0.0, 1.0]
    assert [r.parsed for r in rewards] == [True, False, True]
    assert judge.counts == {"mine": 1}
    (failure,) = judge.drain()
    assert (failure.function, failure.problem, failure.sample, failure.kind) == ("mine", "add:3,4", 1, kind)
    assert judge.drain() == []


def test_skip_group_skips_that_group_and_says_so() -> None:
    judge = judge_of(lambda problem, text: None if text == "bad" else 1.0, on_error="skip_group")
    assert judge.judge(PROBLEM, [["ok"], ["bad"], ["bad"]]) is None
    assert len(judge.drain()) == 1
    assert judge.judge(PROBLEM, [["ok"]]) is not None


def test_a_failure_of_one_part_zeroes_all_of_them() -> None:
    judge = Judge([wrap(lambda p, t: 1.0, "good"), wrap(raises, "bad")], on_error="zero")
    rewards = judge.judge(PROBLEM, [["x"]])
    assert rewards == (Reward(0.0, {"good": 0.0, "bad": 0.0}, False),)


def test_hung_calls_are_counted_and_too_many_stop_the_run() -> None:
    judge = judge_of(lambda problem, text: HANG.wait(20), timeout_s=0.02, on_error="zero", max_hung=2)
    judge.judge(PROBLEM, [["a"], ["b"]])
    assert judge.hung.alive == 2
    with pytest.raises(KeelError, match="3 calls hang"):
        judge.judge(PROBLEM, [["c"]])


def test_a_judge_apart_has_failures_of_its_own_and_a_limit_for_all_of_its_calls() -> None:
    judge = Judge([wrap(lambda problem, text: HANG.wait(20), "slow", trusted=True)], timeout_s=0.05, on_error="zero")
    apart = judge.for_thread()
    assert apart.judge(PROBLEM, [["x"]]) == (Reward(0.0, {"slow": 0.0}, parsed=False),)
    assert [failure.kind for failure in apart.drain()] == ["timeout"]
    assert judge.drain() == []


@pytest.mark.parametrize("apart", [False, True])
def test_concurrent_rewards_of_a_users_task_have_the_time_limit(apart: bool) -> None:
    class Slow(TaskWrapper):
        name, inner, reward_concurrency = "slow", TASK, 2

        def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
            if turns[-1] == "8":
                time.sleep(3)
            return super().reward(problem, turns)

    judge = Judge.of(Slow(), on_error="zero", timeout_s=0.2)
    judge = judge.for_thread() if apart else judge
    start = time.monotonic()
    rewards = judge.judge(PROBLEM, [["7"], ["8"], ["7"]])
    assert time.monotonic() - start < 2
    assert rewards is not None
    assert [reward.total for reward in rewards] == [1.0, 0.0, 1.0]
    assert [(failure.sample, failure.kind) for failure in judge.drain()] == [(1, "timeout")]


def test_a_late_answer_is_nobody_elses() -> None:
    """The call that timed out returns while the next one runs: each gets its own value."""

    def slow(problem: Problem, text: str) -> float:
        time.sleep(0.3 if text == "slow" else 0.0)
        return 5.0 if text == "slow" else 1.0

    judge = judge_of(slow, timeout_s=0.15, on_error="zero")
    assert [r.total for r in judge.judge(PROBLEM, [["slow"], ["a"]]) or ()] == [0.0, 1.0]
    time.sleep(0.3)
    assert [r.total for r in judge.judge(PROBLEM, [["a"], ["a"]]) or ()] == [1.0, 1.0]


def test_an_interrupted_call_leaves_no_answer_behind() -> None:
    """Ctrl-C while a reward runs, as in a notebook: the next call starts afresh."""

    def interrupts(problem: Problem, text: str) -> float:
        if text == "2":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        return float(text)

    judge = judge_of(interrupts)
    judge.judge(PROBLEM, [["1"]])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            judge.judge(PROBLEM, [["2"]])
    finally:
        signal.signal(signal.SIGINT, before)
    assert [r.total for r in judge.judge(PROBLEM, [["3"], ["4"]]) or ()] == [3.0, 4.0]
    until = time.monotonic() + 5
    while judge.hung.alive and time.monotonic() < until:  # the call itself cannot be ended
        time.sleep(0.02)
    assert judge.hung.alive == 0


def test_a_users_task_is_guarded_alone_and_in_a_mixture() -> None:
    class Own(TaskWrapper):
        name, inner = "own", TASK

        def reward(self, problem: Problem, turns: Sequence[str]) -> Any:
            return HANG.wait(20)

    own: Any = Own()
    for task in (own, mixture([TASK, own], [0, 1])):
        problem = task.sample(1, seed=0, step=0)[0]
        with pytest.raises(KeelError, match="did not return"):
            Judge.of(task, timeout_s=0.05).judge(problem, [["7"]])


def test_our_own_rewards_fail_by_name_too() -> None:
    with pytest.raises(KeelError, match=r"task on problem 'x'.*raised KeyError"):
        Judge.of(countdown()).judge(Problem("x", "no info"), [["<answer>1</answer>"]])


def test_one_worker_serves_many_calls() -> None:
    seen: set[int] = set()
    judge = judge_of(lambda problem, text: float(seen.add(threading.get_ident()) is None))
    for _ in range(20):
        judge.judge(PROBLEM, [["x"]] * 4)
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_shuffled_rewards_are_the_same_in_sum_and_say_nothing_in_place() -> None:
    judge = Judge.of(TASK, shuffle=1)
    places = []
    for sample in range(400):
        episodes = [["7"], [str(sample + 8)], [str(sample + 9)], ["x"]]
        rewards = judge.judge(PROBLEM, episodes)
        assert rewards is not None
        assert rewards == judge.judge(PROBLEM, episodes)
        assert sum(r.total for r in rewards) == 1.0
        places.append([r.total for r in rewards].index(1.0))
    assert all(70 < places.count(i) < 130 for i in range(4))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("exat", {}, "did you mean 'exact'"),
        ("numeric", {"tags": 1}, "did you mean 'tag'"),
        ("task", {"x": 1}, "takes no parameters"),
        ("format", {"pattern": "("}, "a valid regular expression"),
        ("no.module:f", {}, "cannot import reward"),
        (f"{__name__}:sees_turns", {"bonuss": 1}, "did you mean 'bonus'"),
    ],
)
def test_bad_entries_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        check_reward(name, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error"),
        ({"aggregate": "normalized_sum"}, "did you mean normalised_sum"),
        ({"timeout_s": 0}, "above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        judge_of(lambda p, t: 1.0, **options)


def test_a_weight_must_be_a_number() -> None:
    with pytest.raises(KeelError, match="weight"):
        build_rewards([{"name": "exact", "weight": "much"}], TASK)
