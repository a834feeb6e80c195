"""What is saved has the model's own dropout in its config, however it is saved; what runs has none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keel.api import supervise, train
from keel.config import load_config
from keel.lab.publish import export
from keel.models.dropout import disable_dropout, original_dropout
from keel.models.load import load_model
from keel.recipes.chess.models import GPT2_DROPOUT, gpt2
from keel.trainer.checkpoint import save_weights
from trainer.small import BASE

IDS = torch.tensor([[5, 40, 60, 7, 9]])
NAMES = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def small_gpt2(seed: int = 0) -> tuple[nn.Module, Any]:
    """GPT-2 with the dropouts of its shape, small enough for a test."""
    return gpt2(layers=1, width=16, heads=2, positions=64, seed=seed)


def settings(folder: Path, *overrides: str) -> Any:
    here = [f"model.name={__name__}:small_gpt2", f"run.dir={folder}", "run.max_steps=1", "checkpoint.every=1"]
    return load_config(BASE, [*here, *overrides])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run without dropout, so that its live model had 0 everywhere."""
    return train(settings(tmp_path_factory.mktemp("run"))).directory / "checkpoints" / "step-1"


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(tmp_path_factory.mktemp("adapter"), "model.lora.r=2", "optim.learning_rate=0.1")).directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def dropouts(config: Path) -> list[float]:
    settings = json.loads(config.read_text())
    return [settings[name] for name in NAMES]


def is_noisy(model: Any) -> bool:
    return not torch.equal(logits(model), logits(model))


def test_a_checkpoint_keeps_the_models_own_dropout(checkpoint: Path) -> None:
    assert dropouts(checkpoint / "config.json") == [GPT2_DROPOUT] * 3
    assert is_noisy(load_model(str(checkpoint), device="cpu", dropout=True).model)


def test_without_dropout_it_computes_what_it_did(checkpoint: Path) -> None:
    quiet = load_model(str(checkpoint), device="cpu").model
    assert [getattr(quiet.config, name) for name in NAMES] == [0.0] * 3
    still = logits(quiet)
    assert torch.equal(logits(quiet.train()), still)
    assert torch.equal(logits(load_model(str(checkpoint), device="cpu", dropout=True).model.eval()), still)


def test_saving_a_second_time_keeps_it_and_the_live_model_stays_quiet(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load_model(str(checkpoint), device="cpu")
    before = logits(loaded.model.train())
    save_weights(tmp_path / "again", loaded.model, loaded.tokenizer)
    assert dropouts(tmp_path / "again" / "config.json") == [GPT2_DROPOUT] * 3
    assert torch.equal(logits(loaded.model), before)
    assert [getattr(loaded.model.config, name) for name in NAMES] == [0.0] * 3  # type: ignore[union-attr]
    assert torch.equal(logits(load_model(str(tmp_path / "again"), device="cpu").model), before)


@pytest.mark.slow
def test_the_kl_starts_at_0_without_dropout_and_above_with_it(checkpoint: Path, tmp_path: Path) -> None:
    first: dict[str, float] = {}
    for flag in ("false", "true"):
        overrides = [f"model.name={checkpoint}", f"model.dropout={flag}", f"run.dir={tmp_path / flag}"]
        run = train(load_config(settings(tmp_path), overrides)).directory
        first[flag] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["kl/policy_ref/k3/max"]
    assert first["false"] == 0.0
    assert first["true"] > 0.0


def test_supervised_training_keeps_it(tmp_path: Path) -> None:
    run = supervise(settings(tmp_path, "warmstart.steps=1", "warmstart.batch_size=2")).directory
    assert dropouts(run / "checkpoints" / "step-1" / "config.json") == [GPT2_DROPOUT] * 3


def test_an_adapter_merged_for_export_keeps_it(adapter_run: Path, tmp_path: Path) -> None:
    folder = export(str(adapter_run), tmp_path / "whole", merged=True)
    assert dropouts(folder / "config.json") == [GPT2_DROPOUT] * 3
    assert is_noisy(load_model(str(folder), device="cpu", dropout=True).model)


def test_a_copy_of_a_quiet_model_knows_its_own_values() -> None:
    """As a reference or an engine holds one: values come back in the copy's config, not in the original's."""
    model, _ = small_gpt2()
    disable_dropout(model)
    twin: Any = copy.deepcopy(model)
    with original_dropout(twin):
        assert twin.config.attn_pdrop == GPT2_DROPOUT
        assert model.config.attn_pdrop == 0.0  # type: ignore[union-attr]
    assert twin.config.attn_pdrop == 0.0


def test_values_come_back_to_0_when_saving_fails() -> None:
    model, _ = small_gpt2()
    disable_dropout(model)
    disable_dropout(model)  # a second time forgets nothing
    seen: list[float] = []

    def fail() -> None:
        with original_dropout(model):
            seen.append(model.config.resid_pdrop)  # type: ignore[union-attr, arg-type]
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert seen == [GPT2_DROPOUT]
    assert model.config.resid_pdrop == 0.0  # type: ignore[union-attr]


def no_dropout(seed: int = 0) -> tuple[nn.Module, Any]:
    model, tokenizer = small_gpt2(seed)
    for name in NAMES:
        setattr(model.config, name, 0.0)
    return type(model)(model.config), tokenizer
