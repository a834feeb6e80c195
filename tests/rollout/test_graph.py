"""Steps in a window of fixed size equal plain steps; on a CPU the graph's work is simply done again at each replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.config import load_config
from keel.models import load_model
from keel.rollout import NativeEngine, Request, SamplingParams, build_engine
from keel.rollout.native import graph
from keel.rollout.native.batch import DecodeBatch, DecodeRow

from . import shapes
from .test_converse import assert_same, engine_of, in_step, talked

MADE: list[int] = []


def replayed(work: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """In the place of a recording: `work` runs at once and its window is set back, then anew at each replay."""
    window = work.__self__._window  # type: ignore[attr-defined]
    MADE.append(window.columns)
    result = work()
    window.newest.sub_(1)

    def run() -> None:
        result.copy_(work())

    return run, result


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    monkeypatch.setattr("keel.rollout.native.choose.can_be_graphed", lambda model: True)
    monkeypatch.setattr(graph, "capture", replayed)
    monkeypatch.setattr(graph, "_warm", {torch.device("cpu")})
    monkeypatch.setattr("keel.rollout.native.scheduler.JOIN_STEPS_GRAPHED", 0.5)
    monkeypatch.setattr(graph, "_WINDOW", 8)
    monkeypatch.setattr(graph, "_MIN_STEPS", 2)


def plain(name: str, kept_bytes: int = 2**24) -> NativeEngine:
    """An engine that keeps its steps as they are; made before `graphed` is asked for, or with graphs=False."""
    made = NativeEngine(shapes.model(name), shapes.tokenizer(), kept_bytes=kept_bytes, graphs=False)
    made.eos_ids = frozenset(range(200, 257))
    return made


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("name", shapes.LLAMA_STEP)
@pytest.mark.parametrize("max_batch", [None, 5])
def test_a_window_draws_what_plain_steps_draw(name: str, max_batch: int | None) -> None:
    sampling = SamplingParams(num_generations=6, max_completion_length=40, max_batch=max_batch)
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(5))]
    sampled = engine_of(shapes.model(name)).generate(requests, sampling, seed=4)
    assert len(MADE) > 3
    assert set(MADE) >= {8, 16}
    made = len(MADE)
    expected = plain(name).generate(requests, sampling, seed=4)
    assert len(MADE) == made
    for mine, theirs in zip(sampled, expected, strict=True):
        assert [c.tokens for c in mine] == [c.tokens for c in theirs]
        assert [c.stop_reason for c in mine] == [c.stop_reason for c in theirs]
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.sample_logp), torch.tensor(other.sample_logp), atol=2e-5, rtol=0
            )


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("max_batch", [None, 4])
def test_conversations_are_the_same(max_batch: int | None) -> None:
    sampling = SamplingParams(num_generations=3, max_completion_length=12, max_batch=max_batch)
    sampled = talked(engine_of(shapes.model("qwen3")), sampling)
    assert len(MADE) > 3
    assert_same(sampled, in_step(plain("qwen3", 0), sampling))


@pytest.mark.usefixtures("graphed")
def test_rows_that_have_ended_are_carried_up_to_a_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    carried, step = [], DecodeBatch.step

    def noted(self: DecodeBatch) -> list[DecodeRow]:
        ended = step(self)
        carried.append((len(self.rows) - self.live, len(self.rows)))
        return ended

    monkeypatch.setattr(DecodeBatch, "step", noted)
    sampling = SamplingParams(num_generations=8, max_completion_length=40)
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(4))]
    engine_of(shapes.model("llama")).generate(requests, sampling, seed=4)
    assert max(idle for idle, _ in carried) > 0
    assert all(4 * idle <= rows for idle, rows in carried)


@pytest.mark.usefixtures("graphed")
def test_short_completions_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_MIN_STEPS", 16)
    engine = engine_of(shapes.model("llama"))
    MADE.clear()
    sampling = SamplingParams(num_generations=4, max_completion_length=12)
    engine.generate([Request("p", (1, 2, 3))], sampling)
    assert not MADE
    engine.generate([Request("p", (1, 2, 3))], replace(sampling, max_completion_length=40, ignore_eos=True))
    assert MADE


@pytest.mark.usefixtures("graphed")
def test_the_option_reaches_the_engine() -> None:
    def carries(*overrides: str) -> float:
        config = load_config({}, ["model.name=tiny", *overrides])
        loaded = load_model("tiny")
        engine: Any = build_engine(config.rollout, loaded.model, loaded.tokenizer)
        return float(engine._new_decoder().traits.max_finished)

    assert carries() > 0.0
    assert carries("rollout.cuda_graphs=false") == 0.0


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_only_a_gpu_and_fixed_rotations_are_graphed(kind: str) -> None:
    model = shapes.model("llama")
    model.model.rotary_emb.rope_type = kind
    assert not graph.can_be_graphed(model)  # on a CPU

    class OnGpu:
        is_cuda = True

    model.parameters = lambda: iter([OnGpu()])
    assert graph.can_be_graphed(model) == (kind == "default")


@pytest.mark.usefixtures("graphed")
def test_a_graph_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(shapes.model("llama"))
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(4))]
    sampling = SamplingParams(num_generations=4, max_completion_length=30)

    def fails(work: Callable[[], Tensor], device: torch.device) -> Any:
        work()  # as far as it comes
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(graph, "capture", fails)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: CUDA out of memory$"):
        sampled = engine.generate(requests, sampling, seed=4)
    expected = plain("llama").generate(requests, sampling, seed=4)
    assert [[c.tokens for c in group] for group in sampled] == [[c.tokens for c in group] for group in expected]


@pytest.mark.usefixtures("graphed")
def test_a_model_that_fails_in_the_probe_is_never_graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Callable[[], Tensor], device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "capture", fails)
    engine = engine_of(shapes.model("llama"))
    assert engine._new_decoder().traits.max_finished == 0.0
    assert engine.fallback_reason is None
