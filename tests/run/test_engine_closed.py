"""Every command closes the engine that it has built, however it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.cli import main
from keel.recipes.chess.__main__ import app
from keel.rollout import EngineWrapper, Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from trainer.small import small_config

HERE = "run.test_engine_closed"


class Counted(EngineWrapper):
    """The native engine; counts those that were built and not closed, and those that were closed."""

    open: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(NativeEngine(model, tokenizer))
        assert Counted.open == 0, "two samplers at a time"
        Counted.open += 1

    def close(self) -> None:
        Counted.open -= 1
        Counted.closed += 1


class Breaking(Counted):
    """Breaks when it is to sample."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        raise KeelError("the sampler broke")


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Counted, "open", 0)
    monkeypatch.setattr(Counted, "closed", 0)
    monkeypatch.chdir(tmp_path)


CONFIGURED = {
    "train": ["train"],
    "a dry run": ["train", "--dry-run"],
    "sft": ["sft", "warmstart.steps=1"],
    "eval": ["eval", "--json"],
    "doctor": ["doctor", "--json"],
}


def command(name: str, path: Path, engine: str, *options: str) -> int:
    words = CONFIGURED[name]
    config = small_config("run.max_steps=1", f"rollout.engine={HERE}:{engine}", *options).to_dict()
    path.write_text(json.dumps(config))
    return main([words[0], str(path), *words[1:]])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURED)
def test_closed_at_the_end(name: str, tmp_path: Path) -> None:
    assert command(name, tmp_path / "c.yaml", "Counted") in (0, 1)  # the doctor of random weights finds something
    assert Counted.open == 0
    assert Counted.closed >= 1


@pytest.mark.parametrize("name", CONFIGURED)
def test_closed_after_an_error(name: str, tmp_path: Path) -> None:
    assert command(name, tmp_path / "c.yaml", "Breaking") == 2
    assert (Counted.open, Counted.closed) == (0, 1)


def test_closed_where_the_rest_of_the_run_cannot_be_built(tmp_path: Path) -> None:
    """One that shares the policy's weights cannot sample ahead, which is known once it is built."""
    assert command("train", tmp_path / "c.yaml", "Counted", "rollout.max_staleness=1") == 2
    assert (Counted.open, Counted.closed) == (0, 1)


@pytest.mark.parametrize(("engine", "status"), [("Counted", 0), ("Breaking", 2)])
def test_kl_closes_the_sampler_of_each_side(engine: str, status: int, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n')
    words = ["kl", "trainer.small:small_model", "tiny", "--prompts", str(prompts), "--max-tokens", "3", "--json"]
    assert main([*words, "--engine", f"{HERE}:{engine}"]) == status
    assert Counted.open == 0
    assert Counted.closed == (2 if status == 0 else 1)


@pytest.mark.parametrize(("engine", "status"), [("Counted", 0), ("Breaking", 2)])
def test_a_match_closes_its_player(engine: str, status: int) -> None:
    words = ["play", "tiny", f"rollout.engine={HERE}:{engine}", "--games", "1", "--max-tokens", "2", "--json"]
    assert main(words, app) == status
    assert (Counted.open, Counted.closed) == (0, 1)
