"""Checks of `keel check-task` that need a tokenizer or configured rewards, and its examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.base import Task
from keel.envs.judge import Judge
from keel.envs.rewards import as_reward
from keel.envs.validity import ValidityCheck, checks, expect, first_problems, outcome, training_steps

NONSENSE = "I do not know."
MAX_REMOTE = 4  # problems graded by a remote judge
EXAMPLES = 3


class PromptRenderer(Protocol):
    """Render a problem to tokens, as `keel.rollout.render` does."""

    tokenizer: Any

    def prompt(self, problem: Problem) -> tuple[int, ...]: ...


def prove(
    task: Task, *, renderer: PromptRenderer, strict: bool, judge: Judge | None = None, count: int = 32, seed: int = 0
) -> Iterator[ValidityCheck]:
    """Run all checks of a task, including tokenizer and configured rewards.

    `strict`: the tokenizer is that of the trained model, so unknown characters are an error. Otherwise texts with
    unknown characters are skipped and counted.
    """
    yield from checks(task, count, seed)
    drawn: list[Problem] = []

    def problems() -> Sequence[Problem]:
        if not drawn:
            training = training_steps(task, count, seed, 1)
            drawn.extend(problem for batch in (*training, task.held_out(count, seed=seed)) for problem in batch)
        return drawn

    yield outcome("prompts round-trip", partial(_prompts, problems, renderer, strict))
    yield outcome("answers round-trip", partial(_answers, problems, task, renderer.tokenizer, strict))
    if judge is not None:
        yield outcome("configured rewards", partial(_rewards, problems, task, judge))


def examples(task: Task, judge: Judge | None = None, count: int = EXAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Examples: problems with the rewards of the gold answer and of a wrong one, by part."""
    problems = first_problems(task, max(count, 2), seed)
    judge = judge or Judge.of(task)
    worked = []
    for number, problem in enumerate(problems[:count]):
        gold, wrong = task.gold_turns(problem), wrong_answer(task, problem, problems[number - 1])
        judged = judge.judge(problem, [gold, wrong])
        if judged is None:
            raise KeelError(f"the rewards failed on problem {problem.key!r}: {judge.failures[-1]}")
        paid = [
            {"text": "\n".join(turns), "total": r.total, "parts": dict(r.parts)}
            for turns, r in zip((gold, wrong), judged, strict=True)
        ]
        worked.append({"key": problem.key, "prompt": problem.prompt, "gold": paid[0], "wrong": paid[1]})
    return worked


def wrong_answer(task: Task, problem: Problem, other: Problem) -> list[str]:
    """Turns that earn less: the gold answer of another problem, or a refusal if that is correct here too."""
    gold, candidate = task.gold_turns(problem), task.gold_turns(other)
    earned = [as_reward(task.reward(problem, turns)).total for turns in (gold, candidate)]
    return candidate if earned[1] < earned[0] else [NONSENSE]


def _prompts(problems: Callable[[], Sequence[Problem]], renderer: PromptRenderer, strict: bool) -> str:
    """Check that every message is unchanged after encoding and decoding."""
    left_out = 0
    for problem in problems():
        texts = [problem.prompt] if isinstance(problem.prompt, str) else [m["content"] for m in problem.prompt]
        back = renderer.tokenizer.decode(list(renderer.prompt(problem)), skip_special_tokens=False)
        lost = [text for text in texts if text.strip() not in back]
        if lost and not strict and not all(_covers(renderer.tokenizer, text) for text in lost):
            left_out += 1
            continue
        expect(not lost, f"the prompt of {problem.key!r} changes in tokenization: {_difference(lost, back)}")
    return _summary(len(problems()), left_out, "prompts are unchanged after encoding and decoding")


def _answers(problems: Callable[[], Sequence[Problem]], task: Task, tokenizer: Any, strict: bool) -> str:
    """Check that the gold answer earns the full reward after encoding and decoding."""
    left_out = 0
    for problem in problems():
        gold = task.gold_turns(problem)
        back = [_back(tokenizer, turn) for turn in gold]
        full, earned = (as_reward(task.reward(problem, turns)).total for turns in (gold, back))
        if earned < full and not strict and not all(_covers(tokenizer, turn) for turn in gold):
            left_out += 1
            continue
        what = f"tokenization changes the gold answer of {problem.key!r} to {back[-1][:60]!r}"
        expect(earned >= full, f"{what}, which earns {earned:g} instead of {full:g}")
    return _summary(len(problems()), left_out, "gold answers earn the full reward after encoding and decoding")


def _rewards(problems: Callable[[], Sequence[Problem]], task: Task, judge: Judge) -> str:
    """Check that the configured rewards give the gold answer more than a wrong and an empty one of its group."""
    chosen = problems()[: MAX_REMOTE if judge.remote else None]
    names = ", ".join(part.name for part in judge.parts)
    for number, problem in enumerate(chosen):
        wrong = wrong_answer(task, problem, chosen[number - 1])
        judged = judge.judge(problem, [task.gold_turns(problem), wrong, [""]])
        expect(
            judged is not None and not judge.failures, f"a reward failed: {judge.failures[:1] and judge.failures[0]}"
        )
        totals = [reward.total for reward in judged or ()]
        for what, total in zip(("a wrong answer", "an empty answer"), totals[1:], strict=True):
            fine = total < totals[0]
            expect(fine, f"{what} to {problem.key!r} earns {total:g} under {names}, the gold answer {totals[0]:g}")
    return f"under {names} gold answers earn more than wrong and empty ones on {len(chosen)} problems"


def _back(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True))


def _covers(tokenizer: Any, text: str) -> bool:
    """Whether the tokenizer has a token for every character of a text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return unknown is None or unknown not in tokenizer.encode(text, add_special_tokens=False)


def _summary(count: int, left_out: int, what: str) -> str:
    rest = f"; {left_out} skipped for characters that this tokenizer does not know" if left_out else ""
    return f"{count - left_out} {what}{rest}"


def _difference(lost: Sequence[str], back: str) -> str:
    return f"{lost[0].strip()[:60]!r} became {back[:60]!r}" if lost else ""
