"""Fused steps on a state of fixed addresses equal plain steps; on a CPU a graph's work is simply done again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from keel.config import load_config
from keel.models import load_model
from keel.models.lora import low_rank
from keel.rollout import Request, SamplingParams
from keel.rollout.native import fused, graph
from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.fused import are_contiguous, join_projections
from keel.rollout.native.scheduler import DecodeBatch, bucket, buckets
from keel.rollout.native.state import KEY_BLOCK, PROMPT_PARTS, prompt_items
from keel.rollout.registry import build_engine

from . import shapes, torch_kernels
from .test_converse import assert_same, engine_of, in_step, talked

FUSED = (*shapes.LLAMA_STEP, "gpt2", "gemma")


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels in torch, and a replay does the work again."""
    monkeypatch.setitem(sys.modules, "keel.rollout.native.kernels", torch_kernels)
    monkeypatch.setattr("keel.rollout.native.kernels", torch_kernels, raising=False)
    for why in ("graph_obstacle", "fusion_obstacle"):
        monkeypatch.setattr(f"keel.rollout.native.choose.{why}", lambda model: None)
    monkeypatch.setattr(graph, "capture", lambda work, device: work)
    monkeypatch.setattr("keel.rollout.native.scheduler.JOIN_STEPS", 0.5)


def plain(name: str, kv_cache_bytes: int = 2**24) -> NativeEngine:
    """An engine that keeps its steps as they are."""
    return plain_of(shapes.model(name), kv_cache_bytes)


def plain_of(model: Any, kv_cache_bytes: int = 2**24) -> NativeEngine:
    made = NativeEngine(model, shapes.tokenizer(), kv_cache_bytes=kv_cache_bytes, graphs=False)
    made.eos_ids = frozenset(range(200, 257))
    return made


def assert_close(sampled: Any, expected: Any) -> None:
    for mine, theirs in zip(sampled, expected, strict=True):
        assert [c.tokens for c in mine] == [c.tokens for c in theirs]
        assert [c.stop_reason for c in mine] == [c.stop_reason for c in theirs]
        for one, other in zip(mine, theirs, strict=True):
            for field in ("sample_logp", "filtered_logp"):
                pair = (torch.tensor(getattr(c, field)) for c in (one, other))
                torch.testing.assert_close(*pair, atol=2e-5, rtol=0)


REQUESTS = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(5))]


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("max_batch", [None, 5])
def test_graphs_draw_what_plain_steps_draw(name: str, max_batch: int | None) -> None:
    sampling = SamplingParams(num_generations=6, max_completion_length=40, max_batch=max_batch)
    engine = engine_of(shapes.model(name))
    assert engine._new_decoder().traits.graphed
    assert_close(engine.generate(REQUESTS, sampling, seed=4), plain(name).generate(REQUESTS, sampling, seed=4))


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
def test_a_buffer_that_grows_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have joined others are given columns as they need them."""
    grown, grow = [], SharedPrefixCache.grow_if_full

    def noted(self: SharedPrefixCache) -> None:
        before = self.suffix_kv
        grow(self)
        grown.append(before is not self.suffix_kv)

    monkeypatch.setattr(SharedPrefixCache, "grow_if_full", noted)
    one, two, three = shapes.prompts(3)
    requests = [Request("a", one, (0, 1, 2), max_new=3), Request("b", two, (0,), max_new=75)]
    requests += [Request("c", three, (0, 1, 2), max_new=72)]
    sampling = SamplingParams(max_completion_length=75, max_batch=4, ignore_eos=True)
    sampled = engine_of(shapes.model("llama")).generate(requests, sampling, seed=4)
    assert any(grown)
    assert_close(sampled, plain("llama").generate(requests, sampling, seed=4))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.3},
    "top k": {"top_k": 5},
    "top k and p": {"top_k": 20, "top_p": 0.8},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.1},
    "all lengths": {"ignore_eos": True},
    "stop strings": {"stop": ("a", "Q")},
}


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_draw(way: str) -> None:
    sampling = SamplingParams(num_generations=4, max_completion_length=24, **WAYS[way])
    engine = engine_of(shapes.model("qwen2"))
    assert_close(engine.generate(REQUESTS, sampling, seed=4), plain("qwen2").generate(REQUESTS, sampling, seed=4))


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
def test_one_engine_draws_in_every_way_in_turn() -> None:
    """A graph of one way to draw is not used for another that differs in one number."""
    common = {"num_generations": 3, "max_completion_length": 6}
    engine, vocabulary = engine_of(shapes.model("llama")), len(shapes.tokenizer())
    ways = [{"top_k": 20}, {"top_k": 20, "top_p": 0.3}, {"top_k": 20, "min_p": 0.2}, {"top_k": 20, "temperature": 0.5}]
    for way in [*ways, {"top_k": 10 * vocabulary, "top_p": 0.3}]:
        sampling = SamplingParams(**common, **way)
        assert_close(engine.generate(REQUESTS, sampling, seed=4), plain("llama").generate(REQUESTS, sampling, seed=4))
    assert engine.notes == ()


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
def test_graphs_are_captured_once() -> None:
    """Those of all fewer rows with the first, none when rows leave, in later rollouts and with other lengths."""
    engine = engine_of(shapes.model("llama"))
    sampling = SamplingParams(num_generations=5, max_completion_length=30)
    before = engine.captured_graphs
    engine.generate(REQUESTS, sampling, seed=1)
    assert engine.captured_graphs - before == len(buckets(25)) == 3
    captured = engine.captured_graphs
    for seed in range(2, 5):
        requests = [replace(r, tokens=r.tokens * (1 + (i + seed) % 3)) for i, r in enumerate(REQUESTS[seed % 2 :])]
        rollout = replace(sampling, max_completion_length=10 + seed)
        engine.generate(requests, rollout, seed=seed)
        with torch.no_grad():  # weights move in place: the next rollout sees them
            next(engine.model.parameters()).mul_(1.01)
        engine.sync(engine.model)
    assert engine.captured_graphs == captured
    twin = plain("llama")
    twin.model.load_state_dict(engine.model.state_dict())
    assert_close(engine.generate(REQUESTS, sampling, seed=9), twin.generate(REQUESTS, sampling, seed=9))
    engine.generate(REQUESTS, replace(sampling, num_generations=20), seed=1)
    assert engine.captured_graphs == captured + len(buckets(100)), "more rows than there was room for"


@pytest.mark.usefixtures("graphed")
def test_weights_elsewhere_are_captured_anew() -> None:
    engine = engine_of(shapes.model("llama"))
    sampling = SamplingParams(num_generations=2, max_completion_length=12)
    engine.generate(REQUESTS, sampling)
    captured, other = engine.captured_graphs, shapes.model("llama", seed=1)
    for mine, theirs in zip(engine.model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data
    sampled = engine.generate(REQUESTS, sampling)
    assert engine.captured_graphs > captured
    twin = plain("llama")
    twin.model.load_state_dict(other.state_dict())
    assert_close(sampled, twin.generate(REQUESTS, sampling))


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_projections_side_by_side_are_one_product(name: str, tmp_path: Path) -> None:
    model = shapes.model(name)
    before, parameters = {n: p.clone() for n, p in model.state_dict().items()}, dict(model.named_parameters())
    join_projections(model)
    attention = model.model.layers[0].self_attn
    assert are_contiguous([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert all(p is parameters[n] for n, p in model.named_parameters())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) > 10
    assert all(torch.equal(saved[n], before[n]) for n in saved)
    sampling = SamplingParams(num_generations=2, max_completion_length=12)
    sampled = engine_of(model).generate(REQUESTS, sampling, seed=4)
    assert_close(sampled, plain(name).generate(REQUESTS, sampling, seed=4))


def adapted(name: str, *, targets: str | list[str] = "all-linear", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    model: Any = get_peft_model(shapes.model(name), config)
    return model.eval()


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3"])
def test_adapters_are_applied_inside_the_step_as_they_are_now(name: str, targets: Any) -> None:
    sampling = SamplingParams(num_generations=2, max_completion_length=12)
    engine = engine_of(adapted(name, targets=targets))
    captured = 0
    for seed in range(3):
        twin = plain_of(adapted(name, targets=targets, seed=seed))
        with torch.no_grad():  # an update, in place
            for mine, theirs in zip(engine.model.parameters(), twin.model.parameters(), strict=True):
                mine.copy_(theirs)
        assert_close(engine.generate(REQUESTS, sampling, seed=4), twin.generate(REQUESTS, sampling, seed=4))
        assert captured in (0, engine.captured_graphs), "adapters that move in place cost no graph"
        captured = engine.captured_graphs
    assert engine.notes == ()
    with engine.model.disable_adapter():
        assert_close(engine.generate(REQUESTS, sampling, seed=4), plain(name).generate(REQUESTS, sampling, seed=4))


@pytest.mark.usefixtures("graphed")
def test_a_step_without_its_adapters_is_refused_although_fresh_ones_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("llama")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert engine_of(model)._ungraphed is None

    def without(module: Any) -> Any:
        adapter = low_rank(module)
        return None if adapter is None else adapter._replace(scale=0.0)

    monkeypatch.setattr(fused, "low_rank", without)
    assert "its error is" in str(engine_of(model)._ungraphed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("max_batch", [None, 4])
def test_conversations_are_the_same(max_batch: int | None) -> None:
    sampling = SamplingParams(num_generations=3, max_completion_length=12, max_batch=max_batch)
    engine = engine_of(shapes.model("qwen3"))
    assert_same(talked(engine, sampling), in_step(plain("qwen3", 0), sampling))
    captured = engine.captured_graphs
    talked(engine, sampling)
    assert engine.captured_graphs == captured, "rows that join cost none"


@pytest.mark.usefixtures("graphed")
def test_rows_that_have_ended_are_carried_within_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    carried, step = [], DecodeBatch.step

    def noted(self: DecodeBatch) -> None:
        step(self)
        carried.append((self.live, len(self.rows)))

    monkeypatch.setattr(DecodeBatch, "step", noted)
    sampling = SamplingParams(num_generations=8, max_completion_length=40)
    engine_of(shapes.model("llama")).generate(REQUESTS, sampling, seed=4)
    assert any(live < rows for live, rows in carried)
    assert all(bucket(live) == bucket(rows) for live, rows in carried if live)


def test_buckets_are_few_and_near() -> None:
    assert buckets(128) == [128, 96, 64, 48, 32, 16, 8]
    assert buckets(1) == buckets(8) == [8]
    for rows in range(1, 1500):
        assert rows <= bucket(rows) <= max(8, 2 * rows - 1)
        assert bucket(bucket(rows)) == bucket(rows)
        assert rows < 33 or bucket(rows) <= 1.5 * rows


@pytest.mark.slow
@pytest.mark.parametrize("widths", [[8] * 16, [1], [3, 0, 20], [40]])
@pytest.mark.parametrize("longest", [1, 63, 64, 65, 2300])
@pytest.mark.parametrize(("repeats", "tile"), [(6, 64), (1, 16), (71, 64)])
def test_pieces_of_prompts_cover_every_key_of_every_query_once(
    widths: list[int], longest: int, repeats: int, tile: int
) -> None:
    lengths = [max(1, longest - 7 * i) for i in range(len(widths))]
    items = prompt_items(widths, lengths, repeats, 2, tile)
    seen = set()
    for group, first_row, width, first_query, start, stop, part, _ in items:
        assert first_row == sum(widths[:group])
        assert width == widths[group]
        assert start < stop <= lengths[group]
        assert start % KEY_BLOCK == 0
        assert part < PROMPT_PARTS
        for query in range(first_query, min(first_query + tile, width * repeats)):
            piece = {(group, query, key) for key in range(start, stop, 29)} | {(group, query, stop - 1)}
            assert piece.isdisjoint(seen)
            seen |= piece
    queries = {(group, query) for group, query, _ in seen}
    assert queries == {(g, q) for g, width in enumerate(widths) for q in range(width * repeats)}
    for group, query in queries:
        spans = sorted({(i[4], i[5]) for i in items if i[0] == group and i[3] <= query < i[3] + tile})
        assert spans[0][0] == 0
        assert spans[-1][1] == lengths[group]
        assert all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.usefixtures("graphed")
def test_the_option_reaches_the_engine() -> None:
    def graphed(*overrides: str) -> bool:
        config = load_config({}, ["model.name=tiny", *overrides])
        loaded = load_model("tiny")
        engine: Any = build_engine(config.rollout, loaded.model, loaded.tokenizer)
        return bool(engine._new_decoder().traits.graphed)

    assert graphed()
    assert not graphed("rollout.cuda_graphs=false")


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_only_a_gpu_and_fixed_rotations_are_graphed(kind: str) -> None:
    model = shapes.model("llama")
    model.model.rotary_emb.rope_type = kind
    assert "CUDA" in str(graph.graph_obstacle(model))

    class OnGpu:
        is_cuda = True

    model.parameters = lambda: iter([OnGpu()])
    assert (graph.graph_obstacle(model) is None) == (kind == "default")


@pytest.mark.usefixtures("graphed")
def test_a_graph_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(shapes.model("llama"))
    assert engine.notes == ()
    sampling = SamplingParams(num_generations=4, max_completion_length=30)

    def fails(work: Callable[[], None], device: torch.device) -> Any:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(graph, "capture", fails)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: CUDA out of memory$"):
        sampled = engine.generate(REQUESTS, sampling, seed=4)
    assert engine.notes == ("sampling without CUDA graphs: CUDA out of memory",)
    assert_close(sampled, plain("llama").generate(REQUESTS, sampling, seed=4))


@pytest.mark.usefixtures("graphed")
def test_a_model_that_fails_in_the_probe_is_never_graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Callable[[], None], device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "capture", fails)
    engine = engine_of(shapes.model("llama"))
    assert not engine._new_decoder().traits.graphed
    assert engine.fallback_reason is None
    assert "not permitted" in str(engine._ungraphed)


def test_a_model_that_decodes_in_the_plain_way_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="without shared prompts"):
        engine = NativeEngine(shapes.model("mamba"), shapes.tokenizer())
    assert engine.notes == (f"sampling without shared prompts: {engine.fallback_reason}",)
