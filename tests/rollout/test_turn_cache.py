"""Turns that resume from the KV cache equal turns that prefill everything again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from keel.base.types import Completion
from keel.config import load_config
from keel.models import load_model
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.registry import build_engine

from . import shapes

SAMPLING = SamplingParams(num_generations=3, max_completion_length=14)
ROOM = 2**24


def engine_of(model: Any, kv_cache_bytes: int) -> NativeEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return NativeEngine(model, shapes.tokenizer(), kv_cache_bytes=kv_cache_bytes)


def play(
    engine: NativeEngine, *, turns: int = 3, between: Callable[[], None] = lambda: None, **noise: int
) -> list[list[Completion]]:
    """Groups of three on four ragged prompts; after each turn the environment says one to five tokens."""
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(4))]
    by_turn = []
    live = [Request(request.key, request.tokens, samples=(sample,)) for request in requests for sample in range(3)]
    first = engine.generate(requests, SAMPLING, **noise)
    completions = [[completion] for group in first for completion in group]
    by_turn.append([completion for (completion,) in completions])
    for turn in range(1, turns):
        between()
        live = [
            replace(
                request,
                tokens=(*request.tokens, *completion.tokens, *range(40, 41 + (index + turn) % 5)),
                start=request.start + len(completion.tokens) + 1 + (index + turn) % 5,
                max_new=4 + turn,
            )
            for index, (request, (completion,)) in enumerate(zip(live, completions, strict=True))
        ]
        completions = engine.generate(live, SAMPLING, **noise)
        by_turn.append([completion for (completion,) in completions])
    return by_turn


def assert_same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    for one, other in zip(a, b, strict=True):
        assert [c.tokens for c in one] == [c.tokens for c in other]
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.sample_logp), torch.tensor(theirs.sample_logp), atol=2e-5, rtol=0
            )


def tokens_read(model: Any, play_it: Callable[[], Any]) -> int:
    """How many tokens the model's embedding was asked for."""
    count = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: count.append(args[0].numel()))
    play_it()
    handle.remove()
    return sum(count)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*shapes.SHARED, *shapes.PLAIN])
def test_turns_that_resume_equal_turns_that_prefill_again(name: str) -> None:
    model = shapes.model(name)
    assert_same(play(engine_of(model, ROOM), seed=5), play(engine_of(model, 0), seed=5))


@pytest.mark.parametrize("max_batch", [1, 5])
def test_at_any_batch_size(max_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.model("llama")
    expected = play(engine_of(model, 0), seed=5)
    monkeypatch.setattr("tests.rollout.test_turn_cache.SAMPLING", replace(SAMPLING, max_batch=max_batch))
    assert_same(play(engine_of(model, ROOM), seed=5), expected)


def test_new_parts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.model("qwen3")
    expected = play(engine_of(model, 0), seed=5)
    monkeypatch.setattr("keel.rollout.native.scheduler.RESUME_SCORES", 2000)
    assert_same(play(engine_of(model, ROOM), seed=5), expected)


def test_only_what_is_new_is_read() -> None:
    """A prompt of 60 tokens, 3 rows, a second turn of 2 tokens each: 6 tokens are read where 3 × 65 would be."""
    model = shapes.model("llama")
    sampling = replace(SAMPLING, max_completion_length=4, ignore_eos=True)
    first = Request("long", tuple(range(60)))

    def second(engine: NativeEngine) -> Callable[[], Any]:
        (group,) = engine.generate([first], sampling)
        more = [
            Request("long", (*first.tokens, *c.tokens, 7), samples=(i,), start=5, max_new=1)
            for i, c in enumerate(group)
        ]
        return lambda: engine.generate(more, sampling)

    assert tokens_read(model, second(engine_of(model, ROOM))) == 3 * 2  # the last token drawn, and the answer
    assert tokens_read(model, second(engine_of(model, 0))) == 3 * 65


@pytest.mark.parametrize("limit", [1, 6000, 20000])
def test_memory_is_bounded_and_what_found_no_room_is_read_again(limit: int) -> None:
    model = shapes.model("llama")
    engine, sizes = engine_of(model, limit), []
    turns = play(engine, seed=5, between=lambda: sizes.append(engine.turn_cache.bytes))
    assert max(sizes) <= limit
    assert (max(sizes) > 0) == (limit > 1)
    assert_same(turns, play(engine_of(model, 0), seed=5))


def test_the_bytes_are_those_of_the_prompt_once_and_of_each_row() -> None:
    engine = engine_of(shapes.model("llama"), ROOM)
    sampling = replace(SAMPLING, max_completion_length=4, ignore_eos=True)
    engine.generate([Request("a", tuple(range(10)))], sampling)
    a_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, their size, bytes
    assert engine.turn_cache.bytes == (10 + 3 * 3) * a_token  # the last token of each row was never read
    engine.release()
    assert engine.turn_cache.bytes == 0


def test_written_weights_are_noticed() -> None:
    """The second turn is sampled by the weights of the second turn, with nothing of the first left."""

    def turns(kv_cache_bytes: int) -> list[list[Completion]]:
        model = shapes.model("llama")

        def write() -> None:
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)

        return play(engine_of(model, kv_cache_bytes), seed=5, turns=2, between=write)

    assert_same(turns(ROOM), turns(0))


def test_a_switched_adapter_is_noticed() -> None:
    loaded = load_model("tiny", device="cpu", lora={"r": 4})
    model: Any = loaded.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    engine = NativeEngine(model, loaded.tokenizer, kv_cache_bytes=ROOM)
    sampling = replace(SAMPLING, max_completion_length=4, ignore_eos=True)
    (group,) = engine.generate([Request("a", (5, 6, 7))], sampling)
    more = [Request("a", (5, 6, 7, *c.tokens), samples=(i,), start=4, max_new=4) for i, c in enumerate(group)]
    with model.disable_adapter():
        resumed = engine.generate(more, sampling)
        fresh = NativeEngine(model, loaded.tokenizer).generate(more, sampling)
    assert_same([[c for (c,) in resumed]], [[c for (c,) in fresh]])


@pytest.mark.parametrize("other", [{"seed": 6}, {"attempt": 1}, {"step": 1}])
def test_another_step_starts_with_nothing(other: dict[str, int]) -> None:
    engine = engine_of(shapes.model("llama"), ROOM)
    play(engine, seed=5)
    full = engine.turn_cache.bytes
    engine.generate([Request("a", (1, 2))], replace(SAMPLING, max_completion_length=2), **{"seed": 5, **other})
    assert 0 < engine.turn_cache.bytes < full / 4


def test_sync_frees_the_cache() -> None:
    model = shapes.model("llama")
    engine = engine_of(model, ROOM)
    play(engine)
    engine.sync(model)
    assert engine.turn_cache.bytes == 0


def test_a_context_that_was_changed_is_read_again() -> None:
    """The same row with other tokens than the cached ones: nothing of these may be used."""
    model = shapes.model("llama")
    sampling = replace(SAMPLING, num_generations=1, max_completion_length=4, ignore_eos=True)
    answers = []
    for room in (ROOM, 0):
        engine = engine_of(model, room)
        ((first,),) = engine.generate([Request("a", (1, 2, 3))], sampling)
        changed = Request("a", (1, 9, 3, *first.tokens), samples=(0,), start=4, max_new=4)
        answers.append([c for (c,) in engine.generate([changed], sampling)])
    assert_same(answers[:1], answers[1:])


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        (["rollout.max_turns=3"], 2**30),
        (["rollout.max_turns=3", "rollout.kv_cache_gib=0.25"], 2**28),
        (["rollout.max_turns=3", "rollout.kv_cache_gib=0"], 0),
        (["rollout.max_turns=1", "rollout.kv_cache_gib=4"], 0),
    ],
)
def test_the_memory_is_an_option(overrides: list[str], limit: int) -> None:
    config = load_config({}, ["task.name=arithmetic", *overrides])
    loaded = load_model(config.model.name, device="cpu")
    engine: Any = build_engine(config.rollout, loaded.model, loaded.tokenizer)
    assert engine.turn_cache.limit == limit
