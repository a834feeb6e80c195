"""Adapters, tied embeddings and whole runs, by each engine. These start engines of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_engines import REQUESTS, SAMPLING, assert_same, native, tokens

from conftest import KINDS, Servers, engine_for, llama

pytestmark = pytest.mark.peers


CONFIG = {
    "run": {"name": "run", "max_steps": 3},
    "model": {"name": "letters:tied_model", "device": "cpu"},
    "task": {"name": "letters:letters"},
    "rewards": [{"name": "task"}],
    "rollout": {"prompts_per_step": 3, "num_generations": 4, "max_completion_length": 12},
    "kl": {"beta": 0.01},
    "optim": {"learning_rate": 1.0e-3},
    "eval": {"every": 0, "samples": 2, "k": [1]},
    "log": {"console": "none", "tensorboard": False},
}
UNLIKE = ("time/", "speed/", "memory/", "loss/kl_share")  # of the clock, and a share of what may be rounding


@pytest.fixture(scope="module")
def tied_server(servers: Servers) -> str:
    return servers.start(llama(tied=True), "--max-lora-rank", "8").url


@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind: str, request: pytest.FixtureRequest) -> None:
    """Ranks that differ from layer to layer, and a scaling that is no 1; the base stays as it is."""
    config = LoraConfig(r=4, lora_alpha=6, rank_pattern={"q_proj": 2}, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(llama(tied=True), config)
    engine = engine_for(kind, adapted, request.getfixturevalue("tied_server") if kind == "server" else None)
    drawn = []
    for version in (1, 2):
        torch.manual_seed(version)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        engine.sync(adapted, version)
        drawn.append(engine.generate(REQUESTS, SAMPLING, seed=3))
        assert_same(drawn[-1], native(adapted, seed=3))
    assert tokens(drawn[0]) != tokens(drawn[1])
    engine.close()


def run(folder: Path, *settings: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and rollouts of a training."""
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "keel.cli", "train", str(folder / "run.yaml"), f"run.dir={folder}", *settings]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics, rollouts = (
        [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "rollouts.jsonl")
    )
    return metrics, rollouts


def test_a_run_is_the_same_by_each_engine(tmp_path: Path, tied_server: str) -> None:
    """Three steps with tied embeddings: the same tokens, and metrics up to rounding."""
    expected_metrics, expected_rollouts = run(tmp_path / "native")
    assert len({record["kl/policy_ref/k3/mean"] for record in expected_metrics}) == 3, "something is learned"
    by_server = ("rollout.vllm.mode=server", f"rollout.vllm.url={tied_server}", "rollout.vllm.wait_s=300")
    for name, settings in (("process", ()), ("server", by_server)):
        metrics, rollouts = run(tmp_path / name, "rollout.engine=vllm", *settings)
        assert [r["tokens"] for r in rollouts] == [r["tokens"] for r in expected_rollouts], name
        assert {r["policy_version"] for r in rollouts} >= {0, 1, 2}, name
        for record, expected in zip(metrics, expected_metrics, strict=True):
            shared = {key for key in record.keys() & expected.keys() if not key.startswith(UNLIKE)}
            assert {"loss/total", "reward/mean", "kl/policy_ref/k3/mean"} <= shared
            for key in shared:
                assert record[key] == pytest.approx(expected[key], abs=1e-4, rel=1e-4, nan_ok=True), (name, key)
