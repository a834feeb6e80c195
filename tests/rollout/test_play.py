"""Episodes that call the engine through the endpoint: groups as of ordinary rollouts, whatever the timing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward
from keel.envs import Task
from keel.envs.episode import PlayedEpisode
from keel.envs.judge import Judge
from keel.rollout import Engine, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.play import EpisodeCalls, PlayCollector
from keel.rollout.render import Renderer
from keel.rollout.request import Request
from keel.rollout.serving import Call
from rollout import shapes

PROBLEMS = [Problem(f"p{i}", "abcdefgh"[: 2 + i]) for i in range(3)]
SAMPLING = SamplingParams(num_generations=3, max_completion_length=60)
REPLY = tuple(b" again: ")
Ask = Callable[..., Any]


class Refused(Exception):
    """The endpoint did not answer."""


@dataclass(frozen=True)
class Programs(Task):
    """Plays a program: a coroutine of (problem, sample, prompt, ask), where `ask(tokens)` gives the engine's answer."""

    program: Any
    renderer: Renderer
    name: str = "programs"
    plays = True

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Task.reward(self, problem, turns)

    def start(self, problem: Problem) -> Any:
        raise AssertionError("an episode that plays itself is not stepped")

    @asynccontextmanager
    async def playing(self, model: Any) -> AsyncIterator[Any]:
        headers = {"authorization": f"Bearer {model.secret}"}
        async with httpx2.AsyncClient(base_url=model.url, headers=headers, timeout=60) as client:

            async def play(problem: Problem, sample: int) -> PlayedEpisode:
                async def ask(tokens: Sequence[int], **changes: Any) -> tuple[int, ...]:
                    noise = {**model.noise, "problem": problem.key, "sample": sample}
                    sampling = {**model.sampling, "keel": noise, **changes}
                    content = {"token_ids": list(tokens), "sampling_params": sampling}
                    answer = await client.post("/inference/v1/generate", json=content)
                    if answer.status_code != 200:
                        raise Refused(answer.json()["error"])
                    return tuple(answer.json()["choices"][0]["token_ids"])

                played: PlayedEpisode = await self.program(problem, sample, self.renderer.prompt(problem), ask)
                return played

            yield play


def episode(*branches: Sequence[tuple[Sequence[int], bool]], **more: Any) -> PlayedEpisode:
    """An episode of branches, each of stretches of tokens that were sampled or not."""
    joined = [
        ([token for tokens, _ in branch for token in tokens], [sampled for tokens, sampled in branch for _ in tokens])
        for branch in branches
    ]
    return PlayedEpisode(joined, **{"earned": Reward(float(len(joined[-1][0]) % 5)), "turns": ("a turn",), **more})


async def once(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    return episode([(prompt, False), (await ask(prompt), True)])


async def turns(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    """Up to three turns, and tools that take whatever time they take."""
    stretches = [(prompt, False)]
    for _ in range(3):
        await asyncio.sleep(random.random() / 50)
        stretches.append((await ask([t for part, _ in stretches for t in part], max_tokens=9), True))
        stretches.append((REPLY, False))
    return episode(stretches[:-1])


async def forked(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    """Two turns, then a third after a rewritten history: the first turn is in both branches."""
    first = await ask(prompt, max_tokens=6)
    second = await ask([*prompt, *first, *REPLY], max_tokens=6)
    other = await ask([*prompt, *first, *REPLY[:3]], max_tokens=6)
    shared = [(prompt, False), (first, True)]
    return episode([*shared, (REPLY, False), (second, True)], [*shared, (REPLY[:3], False), (other, True)])


def collect(program: Any, engine: Any = None, *, judge: Any = None, **options: Any) -> list[Group]:
    engine = engine or NativeEngine(shapes.model("llama"), shapes.tokenizer())
    renderer = Renderer(shapes.tokenizer())
    task = Programs(program, renderer)
    options = {"sampling": SAMPLING, "seed": 7, "max_turns": 3, **options}
    collector = PlayCollector(engine, task, renderer, judge=judge or Judge.of(task, timeout_s=20.0), **options)
    return collector.collect(PROBLEMS, step=2)


@dataclass(frozen=True)
class Ordinary(Task):
    """The same problems in an ordinary rollout."""

    name: str = "ordinary"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(0.0)


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(shapes.model("llama"), shapes.tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 30, "top_p": 0.9}, {"temperature": 0.0}, {"stop": ("e",)}, {"max_batch": 2}], ids=str
)
def test_episodes_of_one_turn_are_those_of_an_ordinary_rollout(changes: Any, engine: NativeEngine) -> None:
    sampling = replace(SAMPLING, **changes)
    ordinary = Collector(engine, Ordinary(), Renderer(shapes.tokenizer()), sampling, Judge.of(Ordinary()), seed=7)
    expected, played = ordinary.collect(PROBLEMS, step=2), collect(once, engine, sampling=sampling)
    assert [group.prompt_tokens for group in played] == [group.prompt_tokens for group in expected]
    for group, other in zip(played, expected, strict=True):
        for completion, same in zip(group.completions, other.completions, strict=True):
            assert (completion.tokens, completion.action, completion.stop_reason) == (
                same.tokens,
                same.action,
                same.stop_reason,
            )
            assert completion.sample_logp == pytest.approx(same.sample_logp, abs=1e-5)
            assert completion.filtered_logp == pytest.approx(same.filtered_logp, abs=1e-5)
            assert completion.branches == ()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_once", [256, 4])
def test_rollouts_repeat_to_the_last_digit_whatever_the_tools_take(
    overlap: bool, at_once: int, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a resume: the calls that share a pass do not depend on their time of arrival."""
    monkeypatch.setattr("keel.rollout.play.AT_ONCE", at_once)
    first = collect(turns, engine, overlap_tools=overlap)
    for _ in range(3):
        again = collect(turns, NativeEngine(shapes.model("llama"), shapes.tokenizer()), overlap_tools=overlap)
        assert [group.completions for group in first] == [group.completions for group in again]
    assert len({completion.tokens for group in first for completion in group.completions}) == 9


@pytest.mark.parametrize("options", [{"join_turns": False}, {"overlap_tools": True}], ids=str)
def test_tokens_do_not_depend_on_how_turns_are_joined(options: Any, engine: NativeEngine) -> None:
    tokens = [[c.tokens for c in group.completions] for group in collect(turns, engine)]
    assert [[c.tokens for c in group.completions] for group in collect(turns, engine, **options)] == tokens


def test_replies_are_not_trained_and_sampled_tokens_have_the_engines_log_probabilities(engine: NativeEngine) -> None:
    for group in collect(turns, engine):
        for completion in group.completions:
            text, reply = bytes(t for t in completion.tokens if t < 256), bytes(REPLY)
            assert text.count(reply) == 2
            assert completion.action.count(False) == 2 * len(REPLY)
            logp = shapes.full_logp(engine.model, group.prompt_tokens, completion.tokens, 1.0).tolist()
            for action, reported, own in zip(completion.action, completion.sample_logp, logp, strict=True):
                assert reported == (pytest.approx(own, abs=1e-4) if action else 0.0)


def test_each_sampled_token_is_trained_in_one_branch(engine: NativeEngine) -> None:
    for group in collect(forked, engine):
        assert len(group.completions) == len(group.rewards) == SAMPLING.num_generations
        for completion in group.completions:
            (other,) = completion.branches
            trained = [sum(branch.action) for branch in (completion, other)]
            assert completion.action[0]
            assert not other.action[0]
            assert trained[1] <= 6 < sum(trained) <= 18
            for branch in (completion, other):
                logp = shapes.full_logp(engine.model, group.prompt_tokens, branch.tokens, 1.0).tolist()
                assert [x for x, a in zip(branch.sample_logp, branch.action, strict=True) if a] == pytest.approx(
                    [x for x, a in zip(logp, branch.action, strict=True) if a], abs=1e-4
                )


def test_groups_whose_contexts_begin_differently_share_what_is_common(engine: NativeEngine) -> None:
    async def dated(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        context = (*prompt, 70 + sample)
        return episode([(context, False), (await ask(context), True)])

    for group, problem in zip(collect(dated, engine), PROBLEMS, strict=True):
        assert group.prompt_tokens == Renderer(shapes.tokenizer()).prompt(problem)
        for sample, completion in enumerate(group.completions):
            assert (completion.tokens[0], completion.action[0]) == (70 + sample, False)
            assert all(completion.action[1:])


def test_contexts_with_nothing_in_common_are_refused(engine: NativeEngine) -> None:
    async def apart(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        context = (70 + sample, *prompt)
        return episode([(context, False), (await ask(context), True)])

    with pytest.raises(KeelError, match="p0"):
        collect(apart, engine)


def test_a_context_is_as_long_as_max_completion_length_allows(engine: NativeEngine) -> None:
    async def endless(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        stretches = [(prompt, False)]

        async def play_on() -> None:
            while True:
                stretches.append((await ask([t for part, _ in stretches for t in part]), True))
                stretches.append((REPLY, False))

        with pytest.raises(Refused, match="maximum context length"):
            await play_on()
        return episode(stretches[:-1])

    for group in collect(endless, engine, sampling=replace(SAMPLING, max_completion_length=30), max_turn_length=7):
        for completion in group.completions:
            assert 30 - len(REPLY) <= len(completion.tokens) <= 30
            assert completion.stop_reason == "length"
            stretches = "".join("x" if action else " " for action in completion.action).split()
            assert max(map(len, stretches)) <= 7


async def failing(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    played = await once(problem, sample, prompt, ask)
    return replace(played, failure="raised ValueError: no such tool") if (problem.key, sample) == ("p1", 2) else played


async def hanging(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    if (problem.key, sample) == ("p1", 2):
        await asyncio.sleep(60)
    return await once(problem, sample, prompt, ask)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "cause"), [(failing, "no such tool"), (hanging, "reward.timeout_s")])
@pytest.mark.parametrize("on_error", ["zero", "skip_group", "stop"])
def test_an_episode_that_fails_or_hangs_is_recorded(
    program: Any, cause: str, on_error: str, engine: NativeEngine
) -> None:
    judge = Judge.of(Ordinary(), on_error=on_error, timeout_s=2.0)
    if on_error == "stop":
        with pytest.raises(KeelError, match=cause):
            collect(program, engine, judge=judge)
        return
    groups = collect(program, engine, judge=judge)
    (failure,) = judge.drain()
    assert (failure.problem, failure.sample) == ("p1", 2)
    assert cause in failure.cause
    assert [group.problem.key for group in groups] == (["p0", "p2"] if on_error == "skip_group" else ["p0", "p1", "p2"])
    assert all(len(group.completions) == 3 for group in groups)
    if program is hanging and on_error == "zero":
        assert groups[1].completions[2].action == (False,)


async def first_never(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    """Every episode of p0 fails before its first call of the model."""
    return (
        PlayedEpisode(failure="raised OSError: no server")
        if problem.key == "p0"
        else await once(problem, sample, prompt, ask)
    )


async def first_silent(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
    """The episodes of p0 end well without a call of the model, one of them with a context that has no sampled token."""
    branches = [(prompt, [False] * len(prompt))] * (sample == 1)
    silent = PlayedEpisode(branches, earned=Reward(1.0 + sample))
    return silent if problem.key == "p0" else await once(problem, sample, prompt, ask)


@pytest.mark.parametrize(("program", "rewards"), [(first_never, [0.0] * 3), (first_silent, [1.0, 2.0, 3.0])])
def test_episodes_without_a_call_of_the_model_keep_their_place_and_reward(
    program: Any, rewards: list[float], engine: NativeEngine
) -> None:
    judge = Judge.of(Ordinary(), on_error="zero", timeout_s=20.0)
    judge = judge if program is first_never else Judge.of(Programs(once, Renderer(shapes.tokenizer())))
    first, *others = collect(program, engine, judge=judge)
    assert [first.problem.key, *(group.problem.key for group in others)] == ["p0", "p1", "p2"]
    assert [reward.total for reward in first.rewards] == rewards
    assert not any(any(completion.action) for completion in first.completions)
    expected = collect(once, engine)[1:]
    tokens = [[[c.tokens for c in group.completions] for group in groups] for groups in (others, expected)]
    assert tokens[0] == tokens[1]
    assert len(judge.drain()) == (3 if program is first_never else 0)


def test_a_rollout_without_any_call_of_the_model_is_refused(engine: NativeEngine) -> None:
    async def silent(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        return PlayedEpisode(earned=Reward(1.0))

    with pytest.raises(KeelError, match="programs"):
        collect(silent, engine)


def test_a_call_with_other_parameters_or_of_no_episode_is_refused(engine: NativeEngine) -> None:
    said: dict[tuple[str, int], list[str]] = {}

    async def colder(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        for changes in ({"temperature": 0.5}, {"keel": None}, {"keel": {"problem": "p9"}}):
            with pytest.raises(Refused) as refused:
                await ask(prompt, **changes)
            said.setdefault((problem.key, sample), []).append(str(refused.value))
        return await once(problem, sample, prompt, ask)

    collect(colder, engine)
    for colder_one, *unnamed in said.values():
        assert "rollout.temperature=1.0" in colder_one
        assert ["sampling_params.keel" in line for line in unnamed] == [True, True]


def test_tokens_that_the_engine_did_not_draw_are_refused(engine: NativeEngine) -> None:
    async def edited(problem: Problem, sample: int, prompt: Any, ask: Ask) -> PlayedEpisode:
        return episode([(prompt, False), ((*(await ask(prompt))[:-1], 99), True)])

    with pytest.raises(KeelError, match="other sampled tokens"):
        collect(edited, engine)


def test_a_prompt_without_room_stops_the_run_as_in_every_rollout(engine: NativeEngine) -> None:
    with pytest.raises(KeelError, match=r"rollout\.max_completion_length"):
        collect(once, engine, sampling=replace(SAMPLING, max_completion_length=95))
    with pytest.raises(KeelError, match=r"data\.max_prompt_length"):
        collect(once, engine, max_prompt_length=2)


def test_an_engine_that_fails_ends_the_rollout_and_the_next_one_is_sound(engine: NativeEngine) -> None:
    class Failing(Engine):
        context = 96

        def generate(self, *arguments: Any, **noise: int) -> list[list[Completion]]:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        collect(once, Failing())
    assert len(collect(once, engine)) == 3


def test_an_environment_that_fails_as_a_whole_is_raised(engine: NativeEngine) -> None:
    class Broken(Programs):
        @asynccontextmanager
        async def playing(self, model: Any) -> AsyncIterator[Any]:
            raise KeelError("no server")
            yield

    renderer = Renderer(shapes.tokenizer())
    task = Broken(once, renderer)
    with pytest.raises(KeelError, match="no server"):
        PlayCollector(engine, task, renderer, SAMPLING, Judge.of(task)).collect(PROBLEMS)


def test_an_episode_that_ends_while_its_call_is_sampled_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program raced the call against something else. Episodes beyond those played at once follow it."""
    monkeypatch.setattr("keel.rollout.play.AT_ONCE", 1)
    first, second = ("a", 0), ("b", 0)
    calls, sampling = EpisodeCalls([first, second], 5.0, at_once=1, share=1), SamplingParams()
    assert calls.begin_next(None) == first
    calls.submit(Call(Request("a", (1,)), sampling, first))
    (taken,) = calls.take(sampling)
    assert calls.begin_next(first) == second
    calls.submit(Call(Request("b", (1,)), sampling, second))
    calls.finish(taken, Completion((2,), (True,), (-0.5,), (-0.5,), "x", "eos"))
    assert [call.owner for call in calls.take(sampling)] == [second]
