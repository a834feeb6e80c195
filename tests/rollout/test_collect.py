"""The turn loop against an engine that writes down what it is asked, and against the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.base.types import Completion, Problem, Reward
from keel.envs import Episode, Task
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.envs.rewards import wrap
from keel.models.tiny import tiny_model
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.render import Renderer

from . import shapes

MODEL, TOKENIZER = tiny_model()
EOS = TOKENIZER.eos_token_id


@dataclass
class Scripted(Engine):
    """An engine that says the next line of a script for each sample, and EOS."""

    lines: dict[int, list[str]]
    asked: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> list[list[Completion]]:
        self.asked += requests
        samples = [r.samples if r.samples is not None else range(sampling.num_generations) for r in requests]
        return [[self._say(s, r, sampling) for s in some] for r, some in zip(requests, samples, strict=True)]

    def _say(self, sample: int, request: Request, sampling: SamplingParams) -> Completion:
        turn = 0 if request.start == 0 else 1
        limit = sampling.max_completion_length if request.max_new is None else request.max_new
        text = self.lines[sample][turn]
        tokens = (*TOKENIZER.encode(text), EOS)[:limit]
        reason = "eos" if tokens[-1] == EOS else "length"
        logp = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
        return Completion(tokens, (True,) * len(tokens), logp, logp, text, reason)


@dataclass
class Guessing(Episode):
    answer: str
    turns: list[str] = field(default_factory=list)

    def step(self, text: str) -> Any:
        self.turns.append(text)
        return None if text == self.answer else "no\n"

    def reward(self) -> Reward:
        return Reward(float(self.turns[-1] == self.answer), {"turns": float(len(self.turns))})


class Guess(Task):
    """Higher or lower: the environment answers until the number is hit; the reward is paid for the last turn."""

    name = "guess"

    def start(self, problem: Problem) -> Episode:
        return Guessing(str(problem.answer))

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem("a", "?", "7")]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem("b", "?", "7")]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)


def play(lines: dict[int, list[str]], length: int = 20, **options: Any) -> tuple[Any, Scripted]:
    engine = Scripted(lines)
    sampling = SamplingParams(num_generations=len(lines), max_completion_length=length)
    options = {"max_turns": 2, **options}
    task, rendering = options.pop("task", Guess()), {n: options.pop(n) for n in ("chat_template",) if n in options}
    options.setdefault("judge", Judge.of(task))
    collector = Collector(engine, task, Renderer(TOKENIZER, **rendering), sampling, **options)
    (group,) = collector.collect([Problem("a", "?", "7")])
    return group, engine


def test_one_turn_is_what_the_engine_returned() -> None:
    engine = NativeEngine(MODEL, TOKENIZER)
    task, sampling = arithmetic(), SamplingParams(num_generations=3, max_completion_length=5)
    problems = task.sample(4, seed=1, step=2)
    collector = Collector(engine, task, Renderer(TOKENIZER), sampling, Judge.of(task), seed=1)
    groups = collector.collect(problems, attempt=3, step=2)
    requests = [Request(p.key, tuple(TOKENIZER.encode(p.prompt))) for p in problems]
    expected = engine.generate(requests, sampling, seed=1, attempt=3, step=2)
    assert [list(g.completions) for g in groups] == expected
    assert [g.problem for g in groups] == problems
    for group in groups:
        assert list(group.rewards) == [task.reward(group.problem, [c.text]) for c in group.completions]


def test_turns_are_appended_and_messages_are_no_actions() -> None:
    group, _ = play({0: ["7", ""], 1: ["3", "7"], 2: ["33", "4"]})
    first, second, third = group.completions
    assert TOKENIZER.decode(first.tokens) == "7<eos>"
    assert TOKENIZER.decode(second.tokens) == "3<eos>no\n7<eos>"
    assert second.action == (True, True, False, False, False, True, True)
    assert second.sample_logp == (-0.1, -0.2, 0.0, 0.0, 0.0, -0.1, -0.2)
    assert second.filtered_logp == second.sample_logp
    assert second.text == "3\nno\n\n7"
    assert len(third.tokens) == 8
    assert [r.total for r in group.rewards] == [1.0, 1.0, 0.0]
    assert [r.parts["turns"] for r in group.rewards] == [1.0, 2.0, 2.0]


def test_later_requests_continue_context_position_and_budget() -> None:
    _, engine = play({0: ["7", ""], 1: ["3", "7"], 2: ["33", "4"]}, length=20)
    prompt = tuple(TOKENIZER.encode("?"))
    _, second, third = engine.asked
    assert second == Request("a", (*prompt, *TOKENIZER.encode("3<eos>no\n")), samples=(1,), start=5, max_new=15)
    assert third == Request("a", (*prompt, *TOKENIZER.encode("33<eos>no\n")), samples=(2,), start=6, max_new=14)


def test_the_budget_is_the_episodes() -> None:
    group, _ = play({0: ["3", "12345678"]}, length=7)
    (completion,) = group.completions
    assert len(completion.tokens) == 7
    assert completion.stop_reason == "length"
    group, engine = play({0: ["3", "7"]}, length=5)  # the message fills the budget: no room for another turn
    assert TOKENIZER.decode(group.completions[0].tokens) == "3<eos>"
    assert group.completions[0].stop_reason == "length"
    assert len(engine.asked) == 1


def test_max_turns_ends_an_episode() -> None:
    group, engine = play({0: ["3", "7"]}, max_turns=1)
    assert group.rewards[0].total == 0.0
    assert len(engine.asked) == 1


def test_several_turns_of_the_real_engine_equal_a_full_forward() -> None:
    """History is as it was sampled: one plain forward over the whole episode gives every action's log-probability."""
    model = shapes.model("llama")
    tokenizer = shapes.tokenizer()
    engine = NativeEngine(model, tokenizer)
    task = Guess()
    sampling = SamplingParams(num_generations=4, max_completion_length=30, stop=("e", "a", "t"))
    problems = [Problem("a", "hello", "x"), Problem("b", "good day", "x")]
    collector = Collector(engine, task, Renderer(tokenizer), sampling, Judge.of(task), max_turns=3, seed=5)
    groups = collector.collect(problems)
    turns = [r.parts["turns"] for g in groups for r in g.rewards]
    assert max(turns) > 1
    for group in groups:
        for completion in group.completions:
            expected = shapes.full_logp(model, group.prompt_tokens, completion.tokens, 1.0)
            action = torch.tensor(completion.action)
            got = torch.tensor(completion.sample_logp)
            torch.testing.assert_close(got[action], expected[action], atol=1e-4, rtol=0)
            assert (got[~action] == 0).all()
            assert len(completion.tokens) <= 30
    again = collector.collect(problems[1:])
    assert again[0].completions[0].tokens == groups[1].completions[0].tokens  # whatever else is in the batch


@pytest.mark.parametrize("how", ["raises", "number"])
def test_an_environment_that_fails_is_a_counted_failure(how: str) -> None:
    class Failing(Guessing):
        def step(self, text: str) -> Any:
            super().step(text)
            if text != "bad":
                return None
            if how == "raises":
                raise OSError("gone")
            return 3

    class Bad(Guess):
        def start(self, problem: Problem) -> Episode:
            return Failing(str(problem.answer))

    lines = {0: ["7", ""], 1: ["bad", ""]}
    task = Bad()
    with pytest.raises(KeelError, match=r"guess\.step on problem 'a', completion 1"):
        play(lines, task=task)
    judge = Judge.of(task, on_error="zero")
    group, _ = play(lines, task=task, judge=judge)
    assert [r.total for r in group.rewards] == [1.0, 0.0]
    assert judge.counts == {"guess.step": 1}


def test_skipped_groups_are_left_out_and_named_and_all_skipped_is_an_error() -> None:
    def picky(problem: Problem, text: str) -> Any:
        return None if problem.key == "a" else 1.0

    judge = Judge([wrap(picky)], on_error="skip_group")
    problems = [Problem("a", "?", "7"), Problem("b", "?", "7")]
    sampling = SamplingParams(num_generations=2)
    engine = Scripted({0: ["1"], 1: ["2"]})
    collector = Collector(engine, Guess(), Renderer(TOKENIZER), sampling, judge)
    groups = collector.collect(problems)
    assert [g.problem.key for g in groups] == ["b"]
    assert [f.problem for f in judge.drain()] == ["a"]
    with pytest.raises(KeelError, match="every group of step 4 was skipped"):
        collector.collect(problems[:1], step=4)


def test_cut_prompts_are_marked() -> None:
    sampling = SamplingParams(num_generations=1)
    problems = [Problem("a", "12345", "7"), Problem("b", "1", "7")]
    engine, task = Scripted({0: ["7"]}), Guess()
    cutting = {"max_prompt_length": 3, "truncation": "left"}
    groups = Collector(engine, task, Renderer(TOKENIZER), sampling, Judge.of(task), **cutting).collect(problems)
    assert TOKENIZER.decode(groups[0].prompt_tokens) == "345"
    assert groups[0].problem.info == {"prompt_tokens_cut": 2}
    assert groups[1].problem.info == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "at least 1"),
        ({"max_turns": 2, "task": arithmetic()}, "has one turn"),
        ({"chat_template": "nope"}, "chat_template"),
        ({"max_prompt_length": 0}, "more than data.max_prompt_length"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        play({0: ["7"]}, **options)


def test_two_problems_of_one_key_are_refused() -> None:
    problems = [Problem("a", "1", "7"), Problem("a", "2", "7")]
    collector = Collector(Scripted({}), Guess(), Renderer(TOKENIZER), SamplingParams(), Judge.of(Guess()))
    with pytest.raises(KeelError, match="the key 'a'"):
        collector.collect(problems)
