"""The scheduler alone, and against what the engine really does with it: prompts read and rows of every step."""

from __future__ import annotations

import math
import random
from itertools import groupby
from typing import Any

import pytest

from keel.rollout import Request, SamplingParams
from keel.rollout.native import scheduler
from keel.rollout.native.decode import SharedPrefixDecoder
from keel.rollout.native.engine import NativeEngine
from keel.rollout.native.scheduler import RolloutPasses, Scheduler, Traits, prefill_chunks, resume_columns, simulate

from . import shapes

CPU = Traits("cpu", joins=True)


def test_what_a_join_costs_depends_on_the_device_and_the_way_to_decode() -> None:
    for graphed in (False, True):
        assert Traits("cuda", joins=True, graphed=graphed).join_steps(1000) == scheduler.JOIN_STEPS
    assert CPU.join_steps(scheduler.CPU_ROWS) == scheduler.JOIN_STEPS
    assert CPU.join_steps(scheduler.CPU_ROWS + 1) == math.inf
    assert Traits("cuda").join_steps(1) == math.inf


def test_a_requests_rows_join_together_where_there_are_slots_for_them() -> None:
    made = Scheduler(100, 10, CPU)
    assert made.admit([4, 4, 4]) == 8
    assert made.admit([4]) == 0
    assert made.admit([2, 4]) == 2
    assert (made.live, made.rows) == (10, 10)
    assert Scheduler(100, 3, CPU).admit([8]) == 3, "more rows than slots: as many as there are"


def test_empty_slots_cost_until_a_join_is_worth_it() -> None:
    made = Scheduler(8, 4, CPU)
    made.admit([2, 2, 2, 2])
    made.finish(2)
    steps = 0
    while not made.has_room:
        made.step()
        steps += 1
    assert steps == scheduler.JOIN_STEPS / 0.5, "half of the slots are empty"
    assert made.admit([2, 2]) == 2
    assert not made.has_room


def test_rows_that_end_are_carried_along_where_steps_are_graphs() -> None:
    graphed, plain = Scheduler(50, None, Traits("cuda", True, True)), Scheduler(50, None, Traits("cuda", True))
    for made in (graphed, plain):
        made.admit([50])
    assert graphed.rows == 64
    assert [graphed.finish(1) for _ in range(3)] == [False, True, False]
    assert (graphed.live, graphed.rows) == (47, 48)
    assert not graphed.finish(14)
    assert graphed.finish(33)
    assert (graphed.live, graphed.rows) == (0, 0)
    assert plain.finish(1)
    assert plain.rows == 49


def test_chunks_of_a_prefill_cover_all_prompts() -> None:
    assert prefill_chunks(5, scheduler.PREFILL_TOKENS // 2) == [2, 2, 1]
    assert prefill_chunks(3, 2 * scheduler.PREFILL_TOKENS) == [1, 1, 1]
    assert resume_columns(2, 4, scheduler.RESUME_SCORES // 16) == 2
    assert resume_columns(2, 4, scheduler.RESUME_SCORES) == 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every prefill and every step of a decoder."""
    passes: list[tuple[str, Any]] = []
    prefill, step = SharedPrefixDecoder.prefill, SharedPrefixDecoder.step

    def prefilled(self: SharedPrefixDecoder, prompts: Any, prompt_of: Any, length: int) -> Any:
        passes.append(("prefill", (len(prompts), len(prompt_of))))
        return prefill(self, prompts, prompt_of, length)

    def steps(self: SharedPrefixDecoder, tokens: Any) -> Any:
        passes.append(("step", len(tokens)))
        return step(self, tokens)

    monkeypatch.setattr(SharedPrefixDecoder, "prefill", prefilled)
    monkeypatch.setattr(SharedPrefixDecoder, "step", steps)
    return passes


def done(passes: list[tuple[str, Any]]) -> RolloutPasses:
    return RolloutPasses(*(tuple(what for kind, what in passes if kind == wanted) for wanted in ("prefill", "step")))


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [None, 3, 6, 8, 11, 40])
@pytest.mark.parametrize("lengths", [[6], [3, 9, 20, 5], [12, 2, 2, 2, 2]])
def test_the_engine_does_what_is_simulated(
    max_batch: int | None, lengths: list[int], counted: list[tuple[str, Any]]
) -> None:
    engine = NativeEngine(shapes.model("llama"), shapes.tokenizer())
    counted.clear()  # the probe's
    requests = [Request(f"p{i}", (i, 3, 4), max_new=lengths[i % len(lengths)]) for i in range(7)]
    sampling = SamplingParams(num_generations=4, max_completion_length=20, max_batch=max_batch, ignore_eos=True)
    engine.generate(requests, sampling)
    simulated = simulate([(4, request.limit(sampling)) for request in requests], max_batch, CPU)
    assert done(counted) == simulated
    assert max_batch is not None or len(simulated.prefills) == 1


def row_by_row(requests: list[tuple[int, int]], max_batch: int | None, traits: Traits) -> RolloutPasses:
    """The oracle of `simulate`: every row is looked at in every step."""
    waiting = [(request, length) for request, (rows, length) in enumerate(requests) for _ in range(rows)]
    made = Scheduler(len(waiting), max_batch, traits)
    running: list[tuple[int, int]] = []
    prefills, steps = [], []
    while waiting or running:
        if made.has_room:
            sizes = [len(list(rows)) for _, rows in groupby(waiting, key=lambda row: row[0])]
            joining = waiting[: made.admit(sizes)]
            if joining:
                prefills.append((len({request for request, _ in joining}), len(joining)))
            running, waiting = running + joining, waiting[len(joining) :]
        left = [(request, length - 1) for request, length in running if length > 1]
        made.finish(len(running) - len(left))
        running = left
        if running:
            steps.append(made.rows)
            made.step()
    return RolloutPasses(tuple(prefills), tuple(steps))


@pytest.mark.parametrize("traits", [CPU, Traits("cuda", True), Traits("cuda", True, True), Traits("cuda")])
def test_what_is_simulated_is_what_happens_to_each_row(traits: Traits) -> None:
    rng = random.Random(7)
    for _ in range(150):
        requests = [(rng.randint(0, 6), rng.randint(1, 40)) for _ in range(rng.randint(0, 9))]
        for max_batch in (None, rng.randint(1, 12)):
            assert simulate(requests, max_batch, traits) == row_by_row(requests, max_batch, traits)


def test_rows_joined_in_the_midst_of_the_above() -> None:
    """More prefills than one after the other would need, and fewer steps: the join is simulated too."""
    lengths = [(4, length) for length in (3, 9, 20, 5, 3, 9, 20)]
    joined, apart = (simulate(lengths, 8, Traits("cpu", joins)) for joins in (True, False))
    assert sum(joined.steps) <= sum(apart.steps)
    assert len(joined.steps) < len(apart.steps)
    assert max(joined.steps) == 8
