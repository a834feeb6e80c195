"""The checks of `keel check-task`, and its examples. They need a tokenizer, but no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.base import Task
from keel.envs.judge import Judge
from keel.envs.rewards import as_reward

STEPS = 4  # checked training steps
NONSENSE = ("", "no", "<answer>", "\x00\n∞" * 3, "I do not know. " * 40)
REFUSAL = "I do not know."
MAX_REMOTE = 4  # problems graded by a remote judge
EXAMPLES = 3


@dataclass(frozen=True)
class ValidityCheck:
    """The result of one check; `detail` describes what was checked, or the first failure."""

    name: str
    ok: bool
    detail: str


def check(task: Task, count: int = 32, seed: int = 0) -> None:
    """Raise a KeelError at the first failed check; see `checks`."""
    for result in checks(task, count, seed):
        if not result.ok:
            raise KeelError(f"task {task.name!r}: {result.detail}")


def checks(task: Task, count: int = 32, seed: int = 0) -> Iterator[ValidityCheck]:
    """Run the checks one by one.

    The number of problems is as requested; (seed, step) determines the problems; keys are unique within a batch; no
    held-out problem is in the training data. Rewards are finite and deterministic; gold answers are graded correct,
    earn more than an empty answer and at least as much as any other; answers of other problems earn less at least once.
    """
    drawn = _DrawnProblems(task, count, seed)
    for name, property_of in PROPERTIES.items():
        yield outcome(name, partial(property_of, drawn))


def outcome(name: str, run: Callable[[], str]) -> ValidityCheck:
    """Run one check and catch its failure."""
    try:
        return ValidityCheck(name, True, run())
    except (CheckFailed, KeelError) as error:
        return ValidityCheck(name, False, str(error))
    except Exception as error:  # a user's task may raise anything
        first = next(iter(str(error).strip().splitlines()), "")
        return ValidityCheck(name, False, f"raised {type(error).__name__}" + (f": {first}" if first else ""))


def training_steps(task: Task, count: int, seed: int, steps: int) -> list[list[Problem]]:
    """The problems of the first training steps; empty for an evaluation-only task."""
    steps = 0 if task.evaluation_only else steps
    return [task.sample(count, seed=seed, step=step) for step in range(steps)]


def first_problems(task: Task, count: int, seed: int) -> list[Problem]:
    """Training problems, or held-out problems of an evaluation-only task."""
    (batch,) = training_steps(task, count, seed, 1) or [task.held_out(count, seed=seed)]
    return batch


class CheckFailed(Exception):
    """A check has failed."""


def expect(fine: bool, what: str) -> None:
    """Raise `CheckFailed` unless `fine`."""
    if not fine:
        raise CheckFailed(what)


class _DrawnProblems:
    """The checked problems of a task, drawn at first use."""

    def __init__(self, task: Task, count: int, seed: int) -> None:
        self.task, self.count, self.seed = task, count, seed

    @cached_property
    def steps(self) -> list[list[Problem]]:
        return training_steps(self.task, self.count, self.seed, STEPS)

    @cached_property
    def held(self) -> list[Problem]:
        return self.task.held_out(self.count, seed=self.seed)

    @property
    def problems(self) -> list[Problem]:
        """The problems whose rewards are checked."""
        return [*(problem for batch in self.steps[:1] for problem in batch), *self.held]

    def reward(self, problem: Problem, *turns: str) -> Reward:
        try:
            first, again = (as_reward(self.task.reward(problem, turns)) for _ in range(2))
        except ValueError as error:  # not finite, or not a reward
            raise CheckFailed(f"the reward of {problem.key!r} for {turns[-1][:40]!r}: {error}") from error
        expect(first == again, f"the reward of {problem.key!r} changes from call to call")
        return first

    def gold(self, problem: Problem) -> float:
        return self.reward(problem, *self.task.gold_turns(problem)).total


def _sizes(drawn: _DrawnProblems) -> str:
    count = drawn.count
    expect(all(len(batch) == count for batch in drawn.steps), f"sample({count}) must return {count} problems")
    expect(0 < len(drawn.held) <= count, f"held_out({count}) must return 1 to {count} problems")
    if not drawn.steps:
        return f"evaluation only: {len(drawn.held)} held-out problems, none for training"
    return f"{STEPS} steps of {count} problems, {len(drawn.held)} held out"


def _deterministic(drawn: _DrawnProblems) -> str:
    task, count, seed = drawn.task, drawn.count, drawn.seed
    same = all(task.sample(count, seed=seed, step=0) == batch for batch in drawn.steps[:1])
    expect(same, "sample must return the same problems for the same seed and step")
    same = task.held_out(count, seed=seed) == drawn.held
    expect(same, "held_out must return the same problems for the same seed")
    return f"two calls with seed {seed} return the same problems"


def _keys(drawn: _DrawnProblems) -> str:
    for batch in (*drawn.steps, drawn.held):
        keys = {p.key for p in batch}
        expect(len(keys) == len(batch), "two problems of a batch have the same key, which seeds the sampling noise")
    return "keys are unique within a batch"


def _disjoint(drawn: _DrawnProblems) -> str:
    what = "keys" if drawn.task.prompts_repeat else "prompts"
    trained = {_identity(drawn.task, p) for batch in drawn.steps for p in batch}
    shared = [p.key for p in drawn.held if _identity(drawn.task, p) in trained]
    expect(not shared, f"a held-out problem is in the training data: {shared[:1]}")
    return f"none of {len(drawn.held)} held-out {what} is among {len(trained)} in training"


def _identity(task: Task, problem: Problem) -> str:
    return problem.key if task.prompts_repeat else str(problem.prompt)


def _finite(drawn: _DrawnProblems) -> str:
    for problem in drawn.problems[:8]:
        for text in NONSENSE:
            drawn.reward(problem, text)
    for problem in drawn.problems:
        with suppress(KeelError):  # the next check reports missing gold answers
            drawn.reward(problem, *drawn.task.gold_turns(problem))
    return f"rewards of {len(drawn.problems)} gold answers and of nonsense are finite and deterministic"


def _gold(drawn: _DrawnProblems) -> str:
    for problem in drawn.problems:
        correct = drawn.reward(problem, *drawn.task.gold_turns(problem)).parts.get("correct", 1.0) >= 1.0
        expect(correct, f"the gold answer of {problem.key!r} is not judged correct")
    totals = [drawn.gold(problem) for problem in drawn.problems]
    unfit = sum(not drawn.task.usable_for_sft(problem) for problem in drawn.problems)
    rest = f"; {unfit} are not used in a warm start" if unfit else ""
    return f"{len(totals)} gold answers are judged correct and earn {_span(totals)}{rest}"


def _empty(drawn: _DrawnProblems) -> str:
    totals = [drawn.reward(problem, "").total for problem in drawn.problems]
    for problem, total in zip(drawn.problems, totals, strict=True):
        expect(total < drawn.gold(problem), f"an empty answer to {problem.key!r} earns as much as the gold one")
    return f"an empty answer earns {_span(totals)}"


def _gold_is_best(drawn: _DrawnProblems) -> str:
    problems = drawn.problems
    for index, problem in enumerate(problems):
        full = drawn.gold(problem)
        others = [drawn.task.gold_turns(other) for other in problems[max(0, index - 2) : index + 3]]
        for turns in (*others, *([text] for text in (NONSENSE if index < 8 else ()))):
            fine = drawn.reward(problem, *turns).total <= full
            expect(fine, f"another answer to {problem.key!r} earns more than the gold one: {turns[-1][:40]!r}")
    return "answers to other problems and nonsense, short or long, do not earn more than the gold answer"


def _wrong(drawn: _DrawnProblems) -> str:
    gold = drawn.task.gold_turns
    pairs = [(p, q) for p, q in pairwise(drawn.problems) if gold(p) != gold(q)]
    less = [drawn.reward(p, *gold(q)).total < drawn.gold(p) for p, q in pairs]
    expect(not less or any(less), "the answer to another problem always earns the full reward")
    return f"the answer to another problem earns less in {sum(less)} of {len(less)} cases"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


PROPERTIES: dict[str, Callable[[_DrawnProblems], str]] = {
    "problems as asked": _sizes,
    "deterministic": _deterministic,
    "distinct keys": _keys,
    "held out": _disjoint,
    "finite rewards": _finite,
    "gold is correct": _gold,
    "empty earns less": _empty,
    "gold earns most": _gold_is_best,
    "wrong earns less": _wrong,
}


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


def examples(task: Task, judge: Judge | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Examples: problems with the rewards of the gold answer and of a wrong one, by part."""
    problems = first_problems(task, EXAMPLES, seed)
    judge = judge or Judge.of(task)
    worked = []
    for number, problem in enumerate(problems[:EXAMPLES]):
        gold, wrong = task.gold_turns(problem), wrong_answer(task, problem, problems[number - 1])
        judged = judge.judge(problem, [gold, wrong])
        if judged is None:
            raise KeelError(f"the rewards failed on problem {problem.key!r}: {judge.failures[-1]}")
        graded = [
            {"text": "\n".join(turns), "total": r.total, "parts": dict(r.parts)}
            for turns, r in zip((gold, wrong), judged, strict=True)
        ]
        worked.append({"key": problem.key, "prompt": problem.prompt, "gold": graded[0], "wrong": graded[1]})
    return worked


def wrong_answer(task: Task, problem: Problem, other: Problem) -> list[str]:
    """Turns that earn less: the gold answer of another problem, or a refusal if that is correct here too."""
    gold, candidate = task.gold_turns(problem), task.gold_turns(other)
    earned = [as_reward(task.reward(problem, turns)).total for turns in (gold, candidate)]
    return candidate if earned[1] < earned[0] else [REFUSAL]


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
