"""Results that help, calls that are paid, and prompts that tell nothing, on episodes that are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes import helpful
from keel.doctor.probes.gold_likelihood import Gold
from keel.doctor.probes.helpful import unhelpful
from keel.doctor.probes.idle import idle_findings
from keel.doctor.probes.repeats import contradiction_findings
from keel.doctor.probes.replayed import Replayed
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.envs import Episode
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.rewards.part import RewardPart
from keel.envs.toolbox import ToolEpisode
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
    """A problem, a call of its two numbers or of others, what it returned, and the answer after it."""
    problem = Problem(f"max:{a},{b}", f"max {a} {b}=", answer=str(max(a, b)))
    call, reply, answer = encode(f"<larger> {asked or f'{a} {b}'} </larger>"), encode(f"\n{result}\n"), encode(said)
    tokens = (*call, *reply, *answer)
    action = (*(True,) * len(call), *(False,) * len(reply), *(True,) * len(answer))
    zeros = (0.0,) * len(tokens)
    return Group(problem, encode(str(problem.prompt)), (Completion(tokens, action, zeros, zeros, "", "eos"),))


def setup_of(groups: Sequence[Group], task: Any = TASK, judge: Any = None) -> Any:
    return SimpleNamespace(
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


def believing(setup: Any, rows: Sequence[Gold]) -> list[torch.Tensor]:
    """A model that says what it reads right before its turn, and else guesses."""
    guesses = deaf(setup, rows)
    read = [row.answer[0] in row.prompt[-3:] for row in rows]
    return [torch.tensor([-0.1]) if right else guess for right, guess in zip(read, guesses, strict=True)]


def deaf(setup: Any, rows: Sequence[Gold]) -> list[torch.Tensor]:
    return [torch.tensor([-2.0 - 0.01 * (hash(row.prompt) % 101)]) for row in rows]


def judged(
    monkeypatch: pytest.MonkeyPatch,
    result: Callable[[int, int], str],
    model: Callable[[Any, Sequence[Gold]], list[torch.Tensor]] = believing,
    asked: str | None = None,
) -> bool:
    monkeypatch.setattr(helpful, "answer_tokens", model)
    groups = [episode(a, b, result(a, b), asked) for a, b in PAIRS]
    rows = [Replayed(g.problem, "", "", "", "", (), "", of_tool=True) for g in groups[:4]]
    return unhelpful(setup_of(groups), rows, load_thresholds()) is not None


@pytest.mark.parametrize(
    "result",
    [lambda a, b: str(min(a, b)), lambda a, b: str((7 * a + 3 * b) % 10), lambda a, b: chr(ord("a") + max(a, b))],
    ids=["the contrary", "of another row", "in other signs"],
)
def test_results_that_help_less_than_those_of_others_are_found(
    monkeypatch: pytest.MonkeyPatch, result: Callable[[int, int], str]
) -> None:
    assert judged(monkeypatch, result)


@pytest.mark.parametrize(
    ("result", "said", "asked", "found"),
    [
        (lambda a, b: max(a, b) + 20, lambda a, b: max(a, b) + 20, None, True),
        (lambda a, b: max(a, b), lambda a, b: max(a, b), None, False),
        (lambda a, b: max(a, b) + 20, lambda a, b: max(a, b), None, False),
        (lambda a, b: max(a, b) + 20, lambda a, b: max(a, b) + 20, "3", False),
    ],
    ids=["copied in vain", "copied and right", "not copied", "asked about something else"],
)
def test_results_that_are_said_and_never_right(
    result: Callable[[int, int], int], said: Callable[[int, int], int], asked: str | None, found: bool
) -> None:
    groups = [episode(a, b, str(result(a, b)), asked, str(said(a, b))) for a, b in PAIRS]
    for earned, is_named in ((0.0, found), (1.0, False), (None, False)):
        rewards = () if earned is None else (Reward(earned),)
        told = helpful._told(setup_of(groups), [replace(group, rewards=rewards) for group in groups])
        assert len(told) == len(PAIRS)
        assert (helpful._copied_in_vain(told, 1.0, load_thresholds()) is not None) == is_named


def test_a_tool_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, lambda a, b: str(max(a, b)))


def test_a_model_that_does_not_listen_says_nothing_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, lambda a, b: str(min(a, b)), deaf)


def test_calls_about_other_questions_say_nothing_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, lambda a, b: "3" if a % 2 else "4", asked="zero")


# Calls that are paid


def paying(pays: Callable[[Episode], float]) -> Any:
    """The task with a reward of its own for the episode."""

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
    found = [*idle_findings(setup_of(groups, judge=paying(pays)), load_thresholds())]
    assert [finding.code for finding in found] == ["reward/exploit"] * (what in PAYING)


# Prompts that tell nothing


class Untold(ToolEpisode):
    """An episode with a tool, that tells its numbers, if at all, in its first reply."""

    def __init__(self, problem: Problem, tells: bool) -> None:
        self.problem, self.tells = problem, tells

    def step(self, text: str) -> str:
        return self.problem.key if self.tells else f"It is {len(text)}."

    def close(self) -> None:
        """It has no tools."""


class Game(Episode):
    """A game that hides a number."""

    def step(self, text: str) -> str:
        return f"Not {text}."


@pytest.mark.parametrize("of", ["silent", "telling", "game"])
def test_one_prompt_for_all_is_no_question_unless_the_first_reply_tells_it(of: str) -> None:
    groups = [replace(episode(a, b, "0", asked="1 " * (1 + a % 3)), prompt_tokens=(5,)) for a, b in PAIRS]
    task = SimpleNamespace(
        prompts_only=False,
        multi_turn=True,
        start=lambda problem: Game() if of == "game" else Untold(problem, of == "telling"),
    )
    setup = setup_of(groups, task, SimpleNamespace(remote=False))
    setup.shared["steps"] = [[(group.problem, group.prompt_tokens) for group in groups]]
    found = [*contradiction_findings(setup, load_thresholds())]
    assert [finding.code for finding in found] == ["prompt/no-question"] * (of == "silent")
