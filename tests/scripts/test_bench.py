"""The benchmarks compare fairly: turns, one reward, one TRL, the lower floor."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from keel.rollout import registry

BENCH = Path(__file__).resolve().parents[2] / "bench"


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    step, order = bench("step", monkeypatch), []
    turns = step.take_turns(["keel", "trl"], 3, lambda side: order.append(side) or {"total": 1.0})
    assert order == ["keel", "trl", "trl", "keel", "keel", "trl"]
    assert {side: len(taken) for side, taken in turns.items()} == {"keel": 3, "trl": 3}


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (60, 22)])
def test_the_bridges_interval_holds_the_median(count: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost ranks that are wrong on a side in at most 1 of 40 draws, counted out."""
    bridge = bench("trl_bridge", monkeypatch)
    assert bridge.median_interval(list(range(count, 0, -1))) == (rank, count + 1 - rank)

    def beyond(ranks: int) -> float:
        return sum(math.comb(count, below) for below in range(ranks)) / 2**count

    assert beyond(rank) <= 0.025 < beyond(rank + 1)


def test_the_bridges_sides_never_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each step is one side's alone, pairs begin with either in turn, and what follows a last step is not counted."""
    bridge, order = bench("trl_bridge", monkeypatch), []

    class Trainer:
        def __init__(self, side: str, steps: int, turns: Any) -> None:
            self.side, self.steps, self.turns = side, steps, turns

        def train(self) -> None:
            for _ in range(self.steps):
                order.append(self.side)
                self.turns.wait(self.side)
            order.append(f"{self.side} ended")

    monkeypatch.setattr(bridge, "save_random_llama", lambda *_: None)
    monkeypatch.setattr(bridge, "build", lambda side, model, out, steps, turns, exact: Trainer(side, steps, turns))
    times = bridge.timed(tmp_path, 2, exact=False)
    assert order == ["trl", "keel", "keel", "trl", "trl", "keel", "keel", "trl", "trl ended", "keel ended"]
    assert {side: len(taken) for side, taken in times.items()} == {"trl": 2, "keel": 2}


def turn(tokens: float = 64.0, **figures: float) -> dict[str, float]:
    shown = ("rollout", "reference", "update", "rest", "total", "first", "second", "start", "token_us", "peak_gib")
    return {**dict.fromkeys(shown, 1.0), "tokens": tokens, **figures}


def test_the_ratio_is_within_turns_and_trl_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bench("step", monkeypatch)
    slowing = {"keel": [1.0, 2.0, 4.0], "trl": [3.0, 6.0, 12.0]}  # a machine that slows down under both
    turns = {side: [turn(total=total, update=total**2) for total in totals] for side, totals in slowing.items()}
    step.show(step.Work("tiny", step.JOBS["tiny"], "", 2, "cpu"), turns)
    out = capsys.readouterr().out
    assert '"ratio": 3.0, "update_ratio": 9.0' in out
    assert out.count(step.TRL_VERSION) == 2
    assert '"device": "cpu"' in out


def test_sides_with_different_work_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench("step", monkeypatch)
    work = step.Work("tiny", step.JOBS["tiny"], "", 2, "cpu")
    with pytest.raises(SystemExit, match=r"\[64\.0, 65\.0\] tokens"):
        step.show(work, {"keel": [turn()], "trl": [turn(tokens=65.0)]})


@pytest.fixture
def tiny_ragged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Any]:
    step = bench("step", monkeypatch)
    monkeypatch.setattr(registry, "ENGINES", {**registry.ENGINES})  # a side registers an engine of its own
    step.save_random_llama(tmp_path, step.WORDS, step.TINY)
    return step, step.Work("tiny-ragged", step.JOBS["tiny-ragged"], str(tmp_path), 2, "cpu")


@pytest.mark.parametrize("side", ["keel", "trl", "keel-exact-kl"])
def test_all_sides_draw_the_same_ragged_lengths(tiny_ragged: tuple[Any, Any], side: str) -> None:
    step, work = tiny_ragged
    lengths = [work.job.lengths(number) for number in range(2)]
    assert len(set(lengths[0])) > 2
    taken = step.SIDES[side](work)
    assert [line["tokens"] for line in taken] == [sum(row) for row in lengths]
    assert all(line["rollout"] > 0 and line["reference"] > 0 and line["update"] > 0 for line in taken)


def test_the_supervised_start_learns_texts_of_these_lengths(tiny_ragged: tuple[Any, Any]) -> None:
    step, work = tiny_ragged
    work = replace(work, job=replace(work.job, group=1))
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    texts = [problem.answer for problem in step.keel_task(work.job, tokenizer).sample(2, seed=0, step=1)]
    assert [len(tokenizer(text)["input_ids"]) + 1 for text in texts] == work.job.lengths(1)  # 1 for the end
    assert [line["tokens"] for line in step.run_keel_sft(work)] == [sum(work.job.lengths(i)) for i in range(2)]


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench("step", monkeypatch)
    step.check_trl()
    monkeypatch.setattr(step.importlib.metadata, "version", lambda _: "0.1.0")
    with pytest.raises(SystemExit, match=r"0\.1\.0 is installed"):
        step.check_trl()


def test_the_reward_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hash` of a string is salted anew in each process, so the sides would train on other rewards."""
    step = bench("step", monkeypatch)
    assert [step.checksum(f"completion {i}") for i in range(6)] == [4.0, 1.0, 6.0, 5.0, 0.0, 5.0]
