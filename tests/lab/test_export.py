"""A checkpoint's model and its card as a folder for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keel.api import train
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.lab.publish import export
from keel.models.load import load_model
from keel.models.tiny import tiny_model
from keel.run.model_ref import resolve_model
from trainer.small import BASE


def a_run(folder: Path, *overrides: str) -> Path:
    settings = ["run.max_steps=2", "checkpoint.every=1", f"run.dir={folder}", *overrides]
    return train(load_config(BASE, settings)).directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("pushed"))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("adapter"), "model.lora.r=2", "optim.learning_rate=0.1")


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_a_checkpoint_has_its_card_and_not_the_trainers_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = export(str(run), "me/letters")
    assert not (folder / "trainer").exists()
    step = run / "checkpoints" / "step-2"
    assert (folder / "model.safetensors").read_bytes() == (step / "model.safetensors").read_bytes()
    card = (folder / "README.md").read_text()
    about = front_matter(card)
    assert (about["library_name"], about["license"]) == ("transformers", "unknown")
    assert "base_model" not in about  # a loader in Python has no name on a hub
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['kl/policy_ref/k3/mean']:.5f} ± {last['kl/policy_ref/k3/se']:.5f} nats per token (k3)" in card
    assert f"{last['kl/policy_ref/k1/mean']:.5f}" in card
    assert "β = 0.01, k3 in the loss" in card
    evaluated = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert f"| letters (trained) | {100 * lines(run)[0]['pass@1']:.1f} [" in card
    assert f"{100 * evaluated['pass@1']:.1f} [{100 * evaluated['ci95'][0]:.1f}" in card
    assert 'from_pretrained("me/letters")' in card
    assert "trainer/" not in card
    there = load_model(str(folder), device="cpu")
    here = resolve_model(str(run), ["model.device=cpu"]).load()
    assert all(map(torch.equal, there.model.parameters(), here.model.parameters()))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


def test_another_checkpoint_by_step(run: Path, tmp_path: Path) -> None:
    folder = export(str(run), tmp_path / "first", checkpoint="1")
    assert (folder / "model.safetensors").read_bytes() == (run / "checkpoints/step-1/model.safetensors").read_bytes()
    assert ", step 1" in (folder / "README.md").read_text()


def test_an_adapter_alone_or_merged_into_whole_weights(lora_run: Path, tmp_path: Path) -> None:
    alone = export(str(lora_run), tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in alone.iterdir()}
    assert front_matter((alone / "README.md").read_text())["library_name"] == "peft"
    whole = export(str(lora_run), tmp_path / "whole", merged=True)
    assert not (whole / "adapter_config.json").exists()
    card = (whole / "README.md").read_text()
    assert front_matter(card)["library_name"] == "transformers"
    assert "PeftModel" not in card
    merged = load_model(str(whole), device="cpu", probe=False).model
    adapted = resolve_model(str(lora_run), ["model.device=cpu"]).load().model
    with torch.no_grad():
        tokens = torch.arange(8).reshape(1, -1)
        ours, theirs = adapted(tokens).logits, merged(tokens).logits
        with adapted.disable_adapter():  # type: ignore[operator]
            base = adapted(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, base, atol=1e-3)


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (run, {"merged": True}, "full weights"),
        (run, {"checkpoint": "9"}, "step 9"),
        (tmp_path, {}, "adapter_config.json"),
        (tmp_path / "none", {}, "not found|no folder|does not exist"),
        (run / "checkpoints/step-2", {"checkpoint": "best"}, "needs the folder of a run"),
    ]
    for source, options, says in cases:
        with pytest.raises(KeelError, match=says):
            export(str(source), tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "custom"
    for part in tiny_model():
        part.save_pretrained(folder)
    return folder


def test_what_a_download_keeps_for_itself_is_not_exported(model: Path, tmp_path: Path) -> None:
    files = {path.name for path in model.iterdir()}
    (model / ".cache").mkdir()
    (model / ".cache" / "kept-here").write_text("x")
    assert {path.name for path in export(str(model), tmp_path / "again").iterdir()} == files


def test_code_that_a_model_brings_is_refused_until_it_is_trusted(
    model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "custom_keel_test", "auto_map": {"AutoConfig": "code.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "was_run"
    (model / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise ImportError('was run')\n")
    assert main(["eval", str(model), "--task", "arithmetic"]) == 2
    error = capsys.readouterr().err
    assert "model.trust_remote_code=true" in error
    assert len(error.strip().splitlines()) == 1
    assert not mark.exists()
    assert main(["eval", str(model), "--task", "arithmetic", "model.trust_remote_code=true"]) == 2
    assert "was run" in capsys.readouterr().err
    assert mark.exists()  # the option is not a dead one
