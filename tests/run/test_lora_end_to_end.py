"""LoRA from the first step to the exported model: what peft reads, what the reference holds, what the sampler uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from keel.api import train
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.config.checks import advice
from keel.lab.publish import export
from keel.models import load_model
from keel.models.fingerprint import fingerprint
from keel.reference.kinds import build_reference
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.run.build import build_policy, build_run
from keel.trainer.checkpoint import load_checkpoint, save_checkpoint
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step
from trainer.small import BASE, small_config, small_model

IDS = torch.arange(5, 13)[None]
LORA = ("model.lora.r=2", "optim.learning_rate=0.05")


def make(*overrides: str, weights: Path | None = None) -> tuple[TrainingRun, State]:
    config = small_config(*LORA, *overrides)
    run = build_run(config, build_policy(config, weights)).run
    return run, State(kl=run.controller.init())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def reference_logits(run: TrainingRun) -> Tensor:
    assert run.reference is not None
    with run.reference.model() as held:
        return logits(held)


def perturb(model: Any, size: float = 0.3) -> None:
    """Move B, so that the adapter says something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "speed/", "memory/"))}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter with a past, as peft saved it."""
    loaded = load_model("trainer.small:small_model", device="cpu", lora={"r": 2}, probe=False)
    perturb(loaded.model)
    loaded.model.save_pretrained(str(tmp_path / "adapter"))  # type: ignore[operator]
    return tmp_path / "adapter"


def test_peft_loads_what_a_step_saved(tmp_path: Path) -> None:
    base, tokenizer = small_model()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run, state = make(f"model.name={tmp_path / 'base'}")
    state = train_step(run, state).state
    folder = save_checkpoint(tmp_path / "run", run, state)
    expected = logits(run.policy.model)
    assert not torch.allclose(expected, logits(base), atol=1e-3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.allclose(logits(PeftModel.from_pretrained(loaded, str(folder)).eval()), expected, atol=1e-6)


def test_the_reference_of_a_fresh_adapter_is_the_base() -> None:
    run, state = make()
    _, metrics, _ = train_step(run, state)
    assert metrics["kl/policy_ref/k3/max"] < 1e-9
    base, _ = small_model()
    assert torch.equal(reference_logits(run), logits(base.eval()))
    assert not torch.equal(logits(run.policy.model), logits(base))


@pytest.mark.parametrize("kind", ["auto", "frozen", "adapter_off"])
def test_the_reference_of_a_continued_adapter_is_the_starting_adapter(kind: str, adapter: Path) -> None:
    run, state = make(f"model.lora.adapter={adapter}", f"reference.kind={kind}")
    state, metrics, _ = train_step(run, state)
    assert metrics["kl/policy_ref/k3/max"] < 1e-9
    state, metrics, _ = train_step(run, state)
    assert metrics["kl/policy_ref/k3/mean"] > 1e-6
    start = PeftModel.from_pretrained(small_model()[0], str(adapter)).eval()
    assert torch.allclose(reference_logits(run), logits(start), atol=1e-6)
    assert not torch.allclose(reference_logits(run), logits(small_model()[0].eval()), atol=1e-2)


def test_an_ema_over_adapters_is_the_average_of_the_effective_weights() -> None:
    """After one move with alpha 0.25: W + 0.25 (alpha/r) B A, and not the product of averaged factors."""
    run, state = make("reference.kind=ema", "reference.every=2", "reference.alpha=0.25")
    for _ in range(2):
        state = train_step(run, state).state
    policy: Any = run.policy.model
    whole, _ = small_model()
    with torch.no_grad():
        for name, layer in policy.named_modules():
            if hasattr(layer, "lora_A"):
                update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                whole.get_submodule(name.removeprefix("base_model.model.")).weight += 0.25 * update
    assert torch.allclose(reference_logits(run), logits(whole.eval()), atol=1e-5)
    assert not torch.allclose(reference_logits(run), logits(policy), atol=1e-3)


def test_a_snapshot_of_an_adapter_is_taken_on_its_step_and_stays() -> None:
    run, state = make("reference.kind=snapshot", "reference.every=2")
    for _ in range(2):
        state = train_step(run, state).state
    taken = logits(run.policy.model)
    assert torch.allclose(reference_logits(run), taken, atol=1e-6)
    state = train_step(run, state).state
    assert torch.allclose(reference_logits(run), taken, atol=1e-6)
    assert not torch.allclose(logits(run.policy.model), taken, atol=1e-3)


def test_a_kl_triggered_reference_moves_when_the_adapter_has_gone_far() -> None:
    run, state = make("reference.kind=kl_triggered", "reference.threshold=0.0001")
    moved = []
    for _ in range(3):
        state = train_step(run, state).state
        moved.append(torch.allclose(reference_logits(run), logits(run.policy.model), atol=1e-6))
    assert moved[0] is False  # the measured KL of the first step is 0
    assert any(moved)


@pytest.mark.parametrize("copy", [False, True])
def test_the_sampler_uses_the_adapter_as_it_is_now(copy: bool) -> None:
    """B is moved: the engine's log-probabilities are the policy's, at once where shared, after a sync where copied."""
    loaded = load_model("trainer.small:small_model", device="cpu", lora={"r": 2}, probe=False)
    engine = NativeEngine(loaded.model, loaded.tokenizer, copy=copy)
    request, sampling = Request("a", (5, 6, 7)), SamplingParams(num_generations=2, max_completion_length=6)

    def gap() -> float:
        """Largest difference of the engine's log-probabilities from a full forward of the policy."""
        (group,) = engine.generate([request], sampling, seed=1)
        worst = 0.0
        for completion in group:
            with torch.no_grad():
                ids = torch.tensor([[*request.tokens, *completion.tokens]])
                logp = loaded.model(input_ids=ids).logits[0].log_softmax(-1)[len(request.tokens) - 1 : -1]
            expected = logp.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(completion.sample_logp)).abs().max()))
        return worst

    assert gap() < 1e-4
    perturb(loaded.model)
    if copy:
        assert engine.is_stale(loaded.model)
        assert gap() > 1e-2
    engine.sync(loaded.model, 1)
    assert not engine.is_stale(loaded.model)
    assert gap() < 1e-4


@pytest.mark.parametrize("overrides", [(), ("reference.kind=ema", "reference.every=1", "reference.alpha=0.3")])
def test_a_continued_adapters_run_is_resumed_exactly(overrides: tuple[str, ...], adapter: Path, tmp_path: Path) -> None:
    """The reference comes back as the adapter of the start, though the run's weights are the checkpoint's."""
    overrides = (f"model.lora.adapter={adapter}", *overrides)
    run, state = make(*overrides)
    for _ in range(2):
        state = train_step(run, state).state
    folder = save_checkpoint(tmp_path / "run", run, state)
    other, _ = make(*overrides, weights=folder)
    loaded = load_checkpoint(folder, other)
    assert torch.equal(reference_logits(other), reference_logits(run))
    for _ in range(2):
        state, there, _ = train_step(run, state)
        loaded, here, _ = train_step(other, loaded)
        assert comparable(here) == comparable(there)
    assert fingerprint(other.policy.model) == fingerprint(run.policy.model)


def test_adapter_dropout_makes_the_first_kl_nonzero_and_the_notes_say_so(adapter: Path) -> None:
    continued = f"model.lora.adapter={adapter}"
    run, state = make(continued, "model.lora.dropout=0.05")
    _, metrics, _ = train_step(run, state)
    assert metrics["kl/policy_ref/k3/mean"] > 1e-6
    noted = [note for note in advice(small_config(*LORA, "model.lora.dropout=0.05")) if "dropout" in note]
    assert noted
    assert "does not start at 0" in noted[0]
    assert not [note for note in advice(small_config(*LORA)) if "dropout" in note]


@pytest.mark.parametrize("kind", ["frozen", "adapter_off", "ema", "snapshot"])
def test_a_merged_policy_is_refused(kind: str) -> None:
    """Scoring a reference would unmerge it for good, with rounding left in the base."""
    loaded = load_model("trainer.small:small_model", device="cpu", lora={"r": 2}, probe=False)
    model: Any = loaded.model
    reference = build_reference(kind, loaded)
    perturb(model)
    model.merge_adapter()
    before = fingerprint(model)
    with pytest.raises(KeelError, match="unmerge_adapter") as caught, reference.model():
        pass
    assert "\n" not in str(caught.value)
    with pytest.raises(KeelError, match="unmerge_adapter"):
        build_reference(kind, loaded)
    assert fingerprint(model) == before
    model.unmerge_adapter()
    with reference.model():
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two finished LoRA runs on a base that lies in a folder: on all layers, and on the tied head too."""
    home = tmp_path_factory.mktemp("runs")
    base, tokenizer = small_model()
    base.save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    made = {}
    for name, targets in (("plain", "all-linear"), ("head", "[q_proj, lm_head]")):
        settings = [
            f"model.name={home / 'base'}",
            f"model.lora.targets={targets}",
            f"run.dir={home / name}",
            "run.max_steps=2",
        ]
        made[name] = train(load_config(BASE, [*LORA, *settings])).directory
    return made


@pytest.mark.parametrize("name", ["plain", "head"])
def test_a_merged_export_computes_what_the_adapter_does(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    alone = export(str(runs[name]), tmp_path / "alone")
    assert not (alone / "trainer").exists()
    whole = export(str(runs[name]), tmp_path / "whole", merged=True)
    assert not (whole / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    untouched = logits(base.eval())
    adapted = logits(PeftModel.from_pretrained(base, str(alone)).eval())
    merged = logits(AutoModelForCausalLM.from_pretrained(whole).eval())
    assert torch.allclose(merged, adapted, atol=1e-5)
    assert not torch.allclose(merged, untouched, atol=1e-3)


def test_export_from_the_command_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(runs["plain"]), str(tmp_path / "out"), "--merged"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    capsys.readouterr()
    for arguments, message in (
        ([str(runs["plain"]), str(tmp_path / "out")], "not empty"),
        ([str(tmp_path / "out"), str(tmp_path / "again"), "--merged"], "has full weights"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "again")], "there is no folder"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
