"""A training run whose engines are killed: nothing changes but a counter."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.cli import main
from keel.recipes.chess.engine import StockfishOptions, pool_of

from .fake_engine import fake_engine

STEPS = 4
OF_THE_MACHINE = ("time/", "speed/", "memory/")
FAULTS = ("task/engine/crashed", "task/engine/timed_out", "task/engine/unavailable")


def trained(folder: Path, engine: str, name: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run of `keel train`, without its times and machine."""
    config: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder), "max_steps": STEPS},
        "model": {"name": "keel.recipes.chess.models:chess_tiny", "device": "cpu"},
        "task": {"name": "chess", "environment": 0.5, "pieces": 3, "padding": "none", "history": 1},
        "rollout": {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 4},
        "eval": {"every": 0, "samples": 2, "k": [1]},
        "log": {"console": "none", "tensorboard": False},
    }
    config["task"]["engine"] = {"path": engine, "cache": f"{folder / name}.sqlite", "workers": 1}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / f"{name}.yaml")]) == 0
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(OF_THE_MACHINE)} for line in lines]


@pytest.mark.slow
def test_killing_engines_during_a_run_changes_nothing_but_a_counter(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path)
    calm = trained(tmp_path, engine, "calm")
    pool = pool_of(StockfishOptions(path=engine, cache=f"{tmp_path / 'troubled'}.sqlite", workers=1))
    metrics, done = tmp_path / "troubled" / "metrics.jsonl", threading.Event()
    killed: set[int] = set()

    def kill() -> None:
        """One engine at the beginning and one after the first step: a position is tried three times."""
        while not done.is_set() and len(killed) < 2:
            ready = not killed or (metrics.exists() and metrics.read_text().count("\n") >= 1)
            for pid in set(pool.pids) - killed if ready else ():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        troubled = trained(tmp_path, engine, "troubled")
    finally:
        done.set()
        killer.join()
    assert len(calm) == len(troubled) == STEPS
    assert len(killed) == 2
    assert pool.counts["crashed"] >= 1
    assert pool.counts["unavailable"] == 0
    counted = [[line.pop(name) for name in FAULTS] for line in troubled]
    assert [[line.pop(name) for name in FAULTS] for line in calm] == [[0.0, 0.0, 0.0]] * STEPS
    assert calm == troubled
    assert sum(crashed for crashed, _, _ in counted) >= 1
    said = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("calm", "troubled")]
    assert said[0] == said[1]
