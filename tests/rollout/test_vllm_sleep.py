"""A colocated vLLM sleeps after a rollout: a sync wakes the weights alone, the next rollout all the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.rollout.sampling import SamplingParams
from keel.rollout.vllm import colocated
from keel.rollout.vllm.colocated import ColocatedSampler
from keel.rollout.vllm.rows import Drawing, Row
from keel.rollout.vllm.transfer import Held
from trainer.small import small_model

ROWS = [Row("0", (5, 6), 4, 1, 0)]
DRAWING = Drawing.of(SamplingParams(), [0], stop_is_special=False, vocabulary=8)


class Sleeper:
    """vLLM's own rules: what sleeps can be woken once, weights are loaded awake, rows are taken by one fully awake."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.llm_engine = self.engine_core = self
        self.digests: dict[str, str] = {}
        self.log: list[str] = []

    def sleep(self, level: int) -> None:
        assert "weights" not in self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        assert self.asleep.issuperset(tags)
        self.asleep -= set(tags)
        self.log.append("wake " + " ".join(tags))

    def add_request(self, *_: Any, **__: Any) -> None:
        assert not self.asleep
        self.log.append("row")

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert "weights" not in self.asleep
        if method == "keel_load":
            assert dict(args[0])
            self.log.append("load")
        return [self.digests]

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self) -> None:
        assert not self.asleep
        self.log.append("end")


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ColocatedSampler, Sleeper, Any]:
    monkeypatch.setattr(colocated, "vllm_params", lambda row, drawing: None)
    model, _ = small_model()
    fake, sampler = Sleeper(), object.__new__(ColocatedSampler)
    held = Held([name for name, _ in model.named_parameters()], model)
    attributes = {"_llm": fake, "_sleeps": True, "_asleep": set(), "_held": held, "_dtype": torch.float32}
    for name, value in {**attributes, "_adapter": None}.items():
        setattr(sampler, name, value)
    sampler._folder = tmp_path / "model"
    parallel = SimpleNamespace(cleanup_dist_env_and_memory=lambda: None)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", parallel)
    fake.digests = held.digests
    monkeypatch.setattr(held, "reset", held.digests.clear)
    return sampler, fake, model


def test_a_step_wakes_weights_for_the_sync_and_keys_and_values_for_the_rollout(sleeper: Any) -> None:
    sampler, fake, model = sleeper
    sampler.start(ROWS, DRAWING)
    sampler.sleep()
    sampler.load(model, 1)
    sampler.start(ROWS, DRAWING)
    assert fake.log == ["row", "sleep 1", "wake weights", "load", "wake kv_cache", "row"]


def test_a_sync_without_a_rollout_may_sleep_again(sleeper: Any) -> None:
    sampler, fake, model = sleeper
    sampler.sleep()
    sampler.sleep()
    sampler.load(model, 1)
    sampler.sleep()
    sampler.start(ROWS, DRAWING)
    assert fake.log == ["sleep 1", "wake weights", "load", "sleep 1", "wake weights kv_cache", "row"]


def test_what_sleeps_is_woken_before_the_end(sleeper: Any) -> None:
    sampler, fake, model = sleeper
    sampler.sleep()
    sampler.load(model, 1)
    sampler.close()
    assert fake.log == ["sleep 1", "wake weights", "load", "wake kv_cache", "end"]
