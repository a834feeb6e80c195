"""Rewards for tool calls, on hand-written episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes.exploits import idle_findings
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.envs import Episode
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.rewards.part import RewardPart
from keel.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PAIRS = [(a, b) for a in range(10) for b in range(10) if a != b]


def larger(pair: str) -> str:
    """Larger of two."""
    return str(max(map(int, pair.split())))


TASK = build_task(
    "tools",
    task={"name": "arithmetic", "skill": "max", "low": 0, "high": 9},
    tools=[f"{__name__}:larger"],
    format="tags",
)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def episode(a: int, b: int, result: str, asked: str | None = None, said: str = "5") -> Group:
    """A problem, a call with its two numbers or with others, the result, and the answer."""
    problem = Problem(f"max:{a},{b}", f"max {a} {b}=", answer=str(max(a, b)))
    call, reply, answer = encode(f"<larger> {asked or f'{a} {b}'} </larger>"), encode(f"\n{result}\n"), encode(said)
    tokens = (*call, *reply, *answer)
    action = (*(True,) * len(call), *(False,) * len(reply), *(True,) * len(answer))
    zeros = (0.0,) * len(tokens)
    return Group(problem, encode(str(problem.prompt)), (Completion(tokens, action, zeros, zeros, "", "eos"),))


def setup_of(groups: Sequence[Group], task: Any = TASK, judge: Any = None) -> Any:
    return SimpleNamespace(
        thresholds=load_thresholds(),
        groups=tuple(groups),
        run=SimpleNamespace(task=task),
        policy=SimpleNamespace(tokenizer=TOKENIZER, context_length=None),
        config=SimpleNamespace(rollout=SimpleNamespace(max_turns=3), run=SimpleNamespace(seed=0)),
        built=SimpleNamespace(judge=judge),
        sampling=SimpleNamespace(stop=()),
        failures=(),
        shared={},
        budget=Budget(doubt_s=0.0, spent_s=1.0),  # nothing is sampled
    )


def paying(pays: Callable[[Episode], float]) -> Any:
    """The task with its own reward of the episode."""

    def reward(problem: Problem, turns: Sequence[str]) -> Reward:
        from keel.envs.base import play_turns

        with play_turns(TASK, problem, turns) as (own, _):
            earned = own.reward()
            return replace(earned, total=earned.total + pays(own))

    return Judge([RewardPart("task", reward, 1.0, trusted=True)])


PAYING: dict[str, Callable[[Any], float]] = {
    "for each call": lambda own: sum(not result.is_error for result in own.every_result),
    "for no answer": lambda own: float(not own.is_over),
}


HONEST: dict[str, Callable[[Any], float]] = {
    "for the answer": lambda own: 0.0,
    "for a call and the answer": lambda own: float(any(not result.is_error for result in own.every_result)),
}


@pytest.mark.parametrize("what", [*PAYING, *HONEST])
def test_calls_that_are_paid_are_an_exploit(what: str) -> None:
    groups = [episode(a, b, str(max(a, b))) for a, b in PAIRS[:24]]
    pays = (PAYING | HONEST)[what]
    found = [*idle_findings(setup_of(groups, judge=paying(pays)))]
    assert [finding.code for finding in found] == ["reward/exploit"] * (what in PAYING)
