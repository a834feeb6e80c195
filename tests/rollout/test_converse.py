"""Turns that join a running batch say what the same turns say when all wait for each other."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs import Episode, Task
from keel.envs.judge import Judge
from keel.rollout import Request, SamplingParams, Turn
from keel.rollout.collect import Collector
from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.scheduler import DecodeBatch
from keel.rollout.render import Renderer
from keel.rollout.request import OpenRow

from . import shapes

SAMPLING = SamplingParams(num_generations=3, max_completion_length=12)
LAST_TURN = 2
ROOM = 2**24


def engine_of(model: Any, kv_cache_bytes: int = ROOM) -> NativeEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        engine = NativeEngine(model, shapes.tokenizer(), kv_cache_bytes=kv_cache_bytes)
    engine.eos_ids = frozenset(range(200, 257))  # turns of many lengths
    return engine


class Talk:
    """Conversations of three turns; the environment says one to five tokens after each."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, int], list[Turn]] = {}
        self.answered: list[int] = []  # how many at a time

    def requests(self) -> list[Request]:
        return [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(4))]

    def answer(self, turns: Sequence[Turn]) -> list[Request]:
        self.answered.append(len(turns))
        return [request for turn in turns if (request := self._next(turn)) is not None]

    def _next(self, turn: Turn) -> Request | None:
        turns = self.turns.setdefault((turn.request.key, turn.sample), [])
        turns.append(turn)
        if len(turns) > LAST_TURN:
            return None
        reply = tuple(range(40, 41 + (turn.sample + len(turns)) % 5))
        request, tokens = turn.request, turn.completion.tokens
        return Request(
            request.key,
            (*request.tokens, *tokens, *reply),
            samples=(turn.sample,),
            start=request.start + len(tokens) + len(reply),
            max_new=8 - len(turns),
        )

    def turn_by_turn(self, engine: NativeEngine, sampling: SamplingParams) -> None:
        requests: Sequence[Request] = self.requests()
        while requests:
            groups = engine.generate(requests, sampling, seed=3)
            pairs = [(r, s, c) for r, group in zip(requests, groups, strict=True) for s, c in enumerate(group)]
            requests = self.answer([Turn(r, s if r.samples is None else r.samples[s], c) for r, s, c in pairs])


def assert_same(one: Talk, other: Talk) -> None:
    assert one.turns.keys() == other.turns.keys()
    for key, turns in one.turns.items():
        for mine, theirs in zip(turns, other.turns[key], strict=True):
            assert mine.request == theirs.request
            assert mine.completion.tokens == theirs.completion.tokens
            assert mine.completion.stop_reason == theirs.completion.stop_reason
            torch.testing.assert_close(
                torch.tensor(mine.completion.sample_logp),
                torch.tensor(theirs.completion.sample_logp),
                atol=2e-5,
                rtol=0,
            )


def talked(engine: NativeEngine, sampling: SamplingParams = SAMPLING) -> Talk:
    talk = Talk()
    engine.converse(talk.requests(), sampling, talk.answer, seed=3)
    return talk


def in_step(engine: NativeEngine, sampling: SamplingParams = SAMPLING) -> Talk:
    talk = Talk()
    talk.turn_by_turn(engine, sampling)
    return talk


@pytest.fixture(autouse=True)
def cheap_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join soon: turns are short here."""
    monkeypatch.setattr("keel.rollout.native.scheduler.JOIN_STEPS", 0.5)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many rows each step drew a token."""
    rows: list[int] = []
    step = DecodeBatch.step

    def noted(self: DecodeBatch) -> list[OpenRow]:
        rows.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(DecodeBatch, "step", noted)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_cache_bytes"),
    [*((name, ROOM) for name in (*shapes.SHARED, *shapes.PLAIN)), ("llama", 0), ("gpt2", 0), (shapes.PLAIN[0], 0)],
)
def test_the_same_is_said_as_turn_by_turn(name: str, kv_cache_bytes: int) -> None:
    model = shapes.model(name)
    talk = talked(engine_of(model, kv_cache_bytes))
    assert_same(talk, in_step(engine_of(model, 0)))
    lengths = {len(turn.completion.tokens) for turns in talk.turns.values() for turn in turns}
    assert len(lengths) > 4
    # some went on while others were still in an earlier turn, except where each would be read by a forward of its own
    assert (len(talk.answered) > LAST_TURN + 1) == (name in shapes.SHARED)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_log_probabilities_are_those_of_a_plain_forward(name: str) -> None:
    model = shapes.model(name)
    for turns in talked(engine_of(model)).turns.values():
        for turn in turns:
            expected = shapes.full_logp(model, turn.request.tokens, turn.completion.tokens, 1.0)
            torch.testing.assert_close(torch.tensor(turn.completion.sample_logp), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_batch", [1, 2, 4, 7])
def test_at_any_batch_size(max_batch: int) -> None:
    model = shapes.model("llama")
    assert_same(talked(engine_of(model), replace(SAMPLING, max_batch=max_batch)), in_step(engine_of(model, 0)))


@pytest.mark.parametrize("cost", [0.5, 3.0])
def test_no_slot_stays_empty_for_long_while_anything_waits(
    cost: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six groups of two and four slots: between two joins the empty slots cost at most a step more than a join."""
    begun, admit = [], DecodeBatch.admit

    def noted(self: DecodeBatch, waiting: list[OpenRow]) -> list[OpenRow]:
        left = admit(self, waiting)
        if len(left) < len(waiting):
            begun.append(len(sizes))
        return left

    monkeypatch.setattr(DecodeBatch, "admit", noted)
    monkeypatch.setattr("keel.rollout.native.scheduler.JOIN_STEPS", cost)
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(6))]
    sampling = SamplingParams(num_generations=2, max_completion_length=40, max_batch=4)
    engine_of(shapes.model("llama")).generate(requests, sampling, seed=3)
    assert len(begun) > 3  # three waves of four would be three
    assert max(sizes) == 4
    for first, last in pairwise(begun):
        # one free slot is not enough for a group of two
        waited = [1 - size / 4 for size in sizes[first:last] if size < 3]
        assert sum(waited) <= cost + 1


def test_fewer_steps_than_turn_by_turn(sizes: list[int]) -> None:
    model = shapes.model("llama")
    talked(engine_of(model))
    joined = len(sizes)
    in_step(engine_of(model))
    assert joined < len(sizes) - joined


def test_a_prompt_is_held_once_however_its_rows_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[tuple[tuple[int, ...], ...]] = []
    join = SharedPrefixCache.joined

    def noted(self: SharedPrefixCache, other: SharedPrefixCache, length: int) -> SharedPrefixCache:
        made = join(self, other, length)
        prefixes.append(made.prefix.tokens)
        return made

    monkeypatch.setattr(SharedPrefixCache, "joined", noted)
    talked(engine_of(shapes.model("llama")))
    assert prefixes
    for tokens in prefixes:
        assert len(set(tokens)) == len(tokens) <= 4


class Guess(Task):
    """Says a few words until the third turn."""

    name = "guess"

    def start(self, problem: Problem) -> Episode:
        return Guessing()


class Guessing(Episode):
    turns = 0

    def step(self, text: str) -> str | None:
        self.turns += 1
        return None if self.turns == 3 else "no" * (1 + len(text) % 3)

    def reward(self) -> Reward:
        return Reward(float(self.turns))


class Asked(NativeEngine):
    """Inherits `converse`, and has a `generate` of its own."""

    times = 0

    def generate(self, *args: Any, **options: Any) -> Any:
        type(self).times += 1
        return super().generate(*args, **options)


def groups(engine: Any, task: Any, **options: Any) -> Any:
    problems = [Problem(f"p{i}", "abcdefgh"[: 2 + i]) for i in range(4)]
    sampling = SamplingParams(num_generations=3, max_completion_length=60, max_batch=options.pop("max_batch", None))
    options = {"seed": 7, "max_turns": 3, "max_turn_length": 16, **options}
    return Collector(engine, task, Renderer(engine.tokenizer), sampling, Judge.of(task), **options).collect(problems)


def tokens_of(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group.completions] for group in groups]


def test_episodes_are_those_of_an_engine_asked_turn_by_turn() -> None:
    model = shapes.model("llama")
    flowing, by_turns = engine_of(model), Asked(model, shapes.tokenizer())
    by_turns.eos_ids = flowing.eos_ids
    expected = groups(flowing, Guess())
    assert Asked.times == 0
    collected = groups(by_turns, Guess())
    assert Asked.times == 3, "an engine with a generate of its own is asked by it, once a turn"
    assert tokens_of(collected) == tokens_of(expected)
    assert len({len(completion.tokens) for group in expected for completion in group.completions}) > 3


class SlowGuess(Task):
    """Guess, where a reply takes any time."""

    name = "guess"

    def start(self, problem: Problem) -> Episode:
        return SlowGuessing()


class SlowGuessing(Guessing):
    async def step(self, text: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(random.choice((0.0, 0.001, 0.03)))
        return super().step(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rows"), [({}, 6), ({"join_turns": False}, 6), ({"max_batch": 4}, 4), ({"max_batch": 8}, 6)], ids=str
)
def test_sampling_beside_tools_repeats_to_the_last_digit_however_long_they_take(
    options: dict[str, Any], rows: int, sizes: list[int]
) -> None:
    """Half of the episodes are sampled at a time. Which ones share a pass follows from the order of their turns."""
    model = shapes.model("llama")
    expected = tokens_of(groups(engine_of(model), Guess()))
    collected, passes = [], []
    for task in (Guess(), SlowGuess(), SlowGuess(), SlowGuess()):
        sizes.clear()
        collected.append([group.completions for group in groups(engine_of(model), task, overlap_tools=True, **options)])
        passes.append(list(sizes))
    assert [[completion.tokens for completion in group] for group in collected[0]] == expected
    assert all(other == collected[0] for other in collected), "log-probabilities too"
    assert all(other == passes[0] for other in passes)
    assert max(passes[0]) == rows


def test_an_engine_that_returns_too_few_is_named() -> None:
    class Short(Asked):
        def generate(self, *args: Any, **options: Any) -> Any:
            return [group[:-1] for group in super().generate(*args, **options)]

    with pytest.raises(KeelError, match=r"engine Short was asked for 12 completions of 4 requests and returned 8 of 4"):
        groups(Short(shapes.model("llama"), shapes.tokenizer()), Guess())


def test_without_joining_all_are_answered_together() -> None:
    class NeverJoins(NativeEngine):
        def converse(self, *args: Any, **options: Any) -> None:
            raise AssertionError("asked to join")

    model = shapes.model("llama")
    engine = NeverJoins(model, shapes.tokenizer())
    engine.eos_ids = frozenset(range(200, 257))
    collected = groups(engine, Guess(), join_turns=False)
    assert tokens_of(collected) == tokens_of(groups(engine_of(model), Guess()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order", [1, -1])
def test_rows_of_one_key_each_go_on_from_their_own_past(temperature: float, order: int) -> None:
    """A context that merely has the key of one that was kept is read for itself."""
    model = shapes.model("llama")
    engine = engine_of(model)
    sampling = SamplingParams(num_generations=1, max_completion_length=6, temperature=temperature, ignore_eos=True)
    ((first,),) = engine.generate([Request("p", (1, 2, 3))], sampling)
    goes_on = Request("p", (1, 2, 3, *first.tokens, 9), samples=(0,), start=7)
    unrelated = Request("p", tuple(range(50, 62)), samples=(0,), start=50)
    requests = [goes_on, unrelated][::order]
    for request, (completion,) in zip(requests, engine.generate(requests, sampling), strict=True):
        expected = shapes.full_logp(model, request.tokens, completion.tokens, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(completion.sample_logp), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_buffers_of_rows_that_join_are_not_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row near its end beside one that begins: columns for what is there and a little more, not for both in full."""
    columns, made = [], SharedPrefixCache.__init__

    def noted(self: SharedPrefixCache, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        columns.append(self.suffix_kv.shape[4])

    monkeypatch.setattr(SharedPrefixCache, "__init__", noted)
    monkeypatch.setattr("keel.rollout.native.cache._GROWTH", 4)
    model = shapes.model("llama")
    requests = [Request(f"p{i}", (5, 6, i), max_new=10 + 5 * (i % 8)) for i in range(24)]
    sampling = SamplingParams(num_generations=1, max_completion_length=45, ignore_eos=True, max_batch=4)
    completions = engine_of(model).generate(requests, sampling)
    assert len(columns) > 12
    assert max(columns) <= 45 + 2 * 4
    monkeypatch.undo()
    expected = engine_of(model).generate(requests, replace(sampling, max_batch=None))
    assert [c.tokens for (c,) in completions] == [c.tokens for (c,) in expected]


def test_what_answers_sees_the_model_as_it_was_and_may_be_lazy() -> None:
    model = shapes.model("llama").train()
    engine, talk, seen = engine_of(model), Talk(), []

    def lazily(turns: Sequence[Turn]) -> Any:
        seen.append((model.training, torch.is_grad_enabled()))
        return (request for request in talk.answer(turns))

    engine.converse(talk.requests(), SAMPLING, lazily, seed=3)
    assert set(seen) == {(True, True)}
    assert {len(turns) for turns in talk.turns.values()} == {LAST_TURN + 1}


def test_noise_that_was_drawn_in_an_earlier_turn_is_refused() -> None:
    def forgets_where(turns: Sequence[Turn]) -> list[Request]:
        return [replace(turn.request, samples=(turn.sample,)) for turn in turns]

    with pytest.raises(KeelError, match="same noise"):
        engine_of(shapes.model("llama")).converse(Talk().requests(), SAMPLING, forgets_where)


def test_tokens_may_be_a_list() -> None:
    engine = engine_of(shapes.model("llama"))
    assert engine.generate([Request("p", [1, 2, 3])], SAMPLING) == engine.generate([Request("p", (1, 2, 3))], SAMPLING)  # type: ignore[arg-type]
