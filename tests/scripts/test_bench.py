"""The benchmarks compare fairly: turns, one reward, one TRL, the lower floor."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    step, order = bench("step", monkeypatch), []
    monkeypatch.setattr(step, "measure_apart", lambda side, _: order.append(side) or {"total": 1.0})
    turns = step.take_turns(["keel", "trl"], argparse.Namespace(repeats=3))
    assert order == ["keel", "trl", "trl", "keel", "keel", "trl"]
    assert {side: len(taken) for side, taken in turns.items()} == {"keel": 3, "trl": 3}


def test_the_ratio_is_within_turns_and_trl_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bench("step", monkeypatch)
    phases = {"rollout": 0.1, "reference": 0.1, "update": 0.1, "peak_gib": 1.0}
    slowing = {"keel": [1.0, 2.0, 4.0], "trl": [3.0, 6.0, 12.0]}  # a machine that slows down under both
    turns = {side: [{**phases, "total": total} for total in totals] for side, totals in slowing.items()}
    step.show("tiny", "cpu", step.JOBS["tiny"], turns)
    out = capsys.readouterr().out
    assert '"ratio": 3.0' in out
    assert out.count(step.TRL_VERSION) == 2
    assert '"device": "cpu"' in out


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench("step", monkeypatch)
    step.check_trl()
    monkeypatch.setattr(step.importlib.metadata, "version", lambda _: "0.1.0")
    with pytest.raises(SystemExit, match=r"0\.1\.0 is installed"):
        step.check_trl()


def test_the_reward_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hash` of a string is salted anew in each process, so the sides would have trained on other rewards."""
    texts = [f"completion {i}" for i in range(12)]
    here = bench("step", monkeypatch).checksum_reward(texts)
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import step; print(step.checksum_reward({texts!r}))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)
    assert len(set(here)) > 1


def test_the_default_model_is_the_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path))
    step = bench("step", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["step.py"])
    assert step.default_folder() == tmp_path / "smollm2-135m-instruct"
    with pytest.raises(SystemExit):
        step.main()


def test_the_floor_is_the_faster_product(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = bench("decode", monkeypatch)
    assert decode.summarise({"keel": [3.0], "rows": [2.0, 2.0], "columns": [1.0, 1.5, 9.0]})["floor"] == 1.5
    assert decode.summarise({"keel": [3.0], "rows": [1.0], "columns": [2.0]}) == {"keel": 3.0, "floor": 1.0}
