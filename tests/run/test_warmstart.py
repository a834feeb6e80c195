"""Warm starts from the cache: equal to the last bit, for the same one only, never damaged, bounded, optional."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keel
from keel.config import load_config
from keel.doctor.keel_subject import build_subject
from keel.models.fingerprint import fingerprint
from keel.models.options import LoadedModel
from keel.run import warmstart
from keel.run.build import build_policy, build_warmstart
from keel.run.warmstart import CACHE_SWITCH, WarmstartResult, cached_sft
from trainer.small import BASE, small_config

START = ("warmstart.steps=3", "warmstart.batch_size=4")
TIMES = ("time/", "speed/", "memory/")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(CACHE_SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "keel" / "warmstarts"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def started(*overrides: str) -> tuple[WarmstartResult, LoadedModel]:
    config = small_config(*START, *overrides)
    loaded = build_policy(config)
    return cached_sft(loaded, build_warmstart(config, loaded)), loaded


@pytest.mark.slow
def test_a_run_from_the_cache_is_the_run_that_made_it(tmp_path: Path) -> None:
    def run(name: str) -> tuple[list[Any], bytes, list[str]]:
        overrides = [f"run.dir={tmp_path / name}", "run.max_steps=2", *START]
        path = keel.train(BASE, overrides=overrides).directory
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        numbers = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]
        events = [json.loads(line).get("message", "") for line in (path / "events.jsonl").read_text().splitlines()]
        [weights] = path.glob("warmstart/*/model.safetensors")
        last = (path / "checkpoints" / "step-2" / "model.safetensors").read_bytes()
        return [numbers, (path / "eval.jsonl").read_text(), last], weights.read_bytes(), events

    made, weights, events = run("made")
    assert not any("taken from" in message for message in events)
    taken, same_weights, events = run("taken")
    assert any("taken from" in message for message in events)
    assert taken == made
    assert same_weights == weights


def test_the_doctor_and_a_run_share_it(tmp_path: Path) -> None:
    config = load_config(BASE, [f"run.dir={tmp_path}", "run.max_steps=1", *START])
    setup = build_subject(config, problems=2, generations=2)
    setup.run.close()
    start = fingerprint(setup.policy.model)
    path = keel.train(config).directory
    assert "taken from" in (path / "events.jsonl").read_text()
    [saved] = path.glob("warmstart/*")
    assert fingerprint(build_policy(config, saved).model) == start


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "warmstart.warmup_steps=2",
        "warmstart.learning_rate=0.002",
        "warmstart.schedule=linear",
        "warmstart.entropy_coef=0.01",
        "warmstart.task=[{name: arithmetic, skill: copy}]",
        "run.seed=1",
        "data.system_prompt=Sort.",
        "model.lora={r: 2}",
        "optim.microbatch_tokens=16",
        "model.dtype=bfloat16",
    ],
)
def test_another_warm_start_is_made(change: str) -> None:
    assert started()[0].cache_file is None
    assert started(change)[0].cache_file is None
    assert started()[0].cache_file is not None
    assert started(change)[0].cache_file is not None


def test_what_only_the_run_reads_changes_nothing() -> None:
    started()
    others = ("optim.learning_rate=0.1", "kl.beta=0.5", "rollout.num_generations=3", "run.name=other")
    assert started(*others)[0].cache_file is not None


def test_examples_count_by_what_they_hold(tmp_path: Path) -> None:
    """A file of the same name, size and time of change."""
    path = tmp_path / "examples.jsonl"
    results = []
    for text in ("b", "c", "b"):
        path.write_text(json.dumps({"prompt": "a", "completion": text}) + "\n")
        results.append(started(f"warmstart.path={path}")[0].cache_file)
    assert [taken is not None for taken in results] == [False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch: monkeypatch.setattr(warmstart, "_source", lambda: "edited"),
        lambda monkeypatch: monkeypatch.setattr(warmstart, "package_versions", lambda: {"torch": "0"}),
        lambda monkeypatch: monkeypatch.setattr(torch, "get_num_threads", lambda: 99),
        lambda monkeypatch: monkeypatch.setenv("MKL_CBWR", "COMPATIBLE"),
    ],
    ids=["source", "versions", "threads", "settings"],
)
def test_other_code_or_another_machine_makes_its_own(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started()
    change(monkeypatch)
    assert started()[0].cache_file is None


def test_a_first_step_that_differs_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: here a forward pass that nobody declared to be another one."""
    started()
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * (1 + 1e-6))
    assert started()[0].cache_file is None


@pytest.mark.parametrize("where", [0, 70, -1])
def test_a_damaged_entry_is_made_again(folder: Path, where: int) -> None:
    weights = fingerprint(started()[1].model)
    [entry] = entries(folder)
    whole = entry.read_bytes()
    damaged = bytearray(whole)
    damaged[where] ^= 1
    for content in (bytes(damaged), whole[: len(whole) // 2], b""):
        entry.write_bytes(content)
        again, loaded = started()
        assert again.cache_file is None
        assert fingerprint(loaded.model) == weights
        assert entry.read_bytes()[:64] == whole[:64]
    assert started()[0].cache_file == entry


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_SWITCH, "0")
    assert started()[0].cache_file is started()[0].cache_file is None
    assert entries(folder) == []


def test_dropout_keeps_nothing(folder: Path) -> None:
    assert started("model.lora={r: 2, dropout: 0.5}")[0].cache_file is None
    assert entries(folder) == []


def test_a_module_of_ones_own_keeps_nothing(folder: Path) -> None:
    class Own(nn.Linear):
        pass

    config = small_config(*START)
    loaded = build_policy(config)
    loaded.model.get_submodule("model.layers.0.mlp.up_proj").__class__ = Own
    assert cached_sft(loaded, build_warmstart(config, loaded)).cache_file is None
    assert entries(folder) == []


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert started()[0].cache_file is None


def test_the_least_recently_used_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started()
    [first] = entries(folder)
    monkeypatch.setattr(warmstart, "MAX_CACHE_BYTES", int(2.5 * first.stat().st_size))
    started("run.seed=1")
    [second] = [path for path in entries(folder) if path != first]
    assert started()[0].cache_file == first  # used again: the second is older now
    started("run.seed=2")
    assert second not in entries(folder)
    assert first in entries(folder)
    assert len(entries(folder)) == 2


def test_many_at_once_leave_one_whole_entry(folder: Path) -> None:
    config = small_config(*START)
    models = [build_policy(config) for _ in range(4)]
    starts = [build_warmstart(config, loaded) for loaded in models]
    work = [threading.Thread(target=cached_sft, args=pair) for pair in zip(models, starts, strict=True)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len({fingerprint(loaded.model) for loaded in models}) == 1
    assert len(entries(folder)) == 1
    assert started()[0].cache_file is not None
