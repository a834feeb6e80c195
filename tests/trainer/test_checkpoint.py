"""Checkpoints: whole or not there, exact when loaded, readable by transformers and peft."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.rollout.native.fused import join_projections
from keel.run.build import build_policy, build_run
from keel.trainer import checkpoint as module
from keel.trainer.checkpoint import (
    checkpoints,
    clean,
    load_checkpoint,
    newest,
    newest_intact,
    save_checkpoint,
    saved_state,
    state_dict_on_cpu,
    step_of,
)
from keel.trainer.state import State, TrainingRun
from keel.trainer.step import train_step
from trainer.small import small_config


def make(*overrides: str, weights: Path | None = None) -> tuple[TrainingRun, State]:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config, weights)).run
    return run, State(kl=run.controller.init())


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "speed/", "memory/"))}


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.schedule=cosine",),
        ("model.lora.r=2",),
        ("reference.kind=ema", "reference.every=1", "reference.alpha=0.3"),
        ("kl.controller.name=pid", "kl.controller.target=0.001", "loss.num_iterations=2"),
        ("kl.beta=0", "kl.measure_every=0"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_loaded_run_goes_on_exactly(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run, state = make(*overrides)
    for _ in range(2):
        state = train_step(run, state).state
    folder = save_checkpoint(tmp_path, run, state)
    other, _ = make(*overrides, weights=folder)
    loaded = load_checkpoint(folder, other)
    assert loaded == state
    for _ in range(2):
        state, there, _ = train_step(run, state)
        loaded, here, _ = train_step(other, loaded)
        assert comparable(here) == comparable(there)


def test_transformers_loads_a_saved_model(tmp_path: Path) -> None:
    run, state = make()
    folder = save_checkpoint(tmp_path, run, state)
    tokens = torch.arange(5)[None]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert torch.equal(model(tokens).logits, run.policy.model(tokens).logits)
    assert tokenizer.decode(tokenizer.encode("12+3=")) == "12+3="
    card = (folder / "README.md").read_text()
    assert "AutoModelForCausalLM" in card
    assert "step 0" in card


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_one_storage_are_saved_from_main_memory_as_otherwise(tied: bool, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, tie_word_embeddings=tied, **shape))
    model.save_pretrained(tmp_path / "apart")
    join_projections(model)
    weights = state_dict_on_cpu(model)
    assert (weights["lm_head.weight"] is weights["model.embed_tokens.weight"]) == tied
    model.save_pretrained(tmp_path / "joined", state_dict=weights)
    apart, joined = (load_file(tmp_path / name / "model.safetensors") for name in ("apart", "joined"))
    assert apart.keys() == joined.keys()
    assert all(torch.equal(apart[name], joined[name]) for name in apart)


def test_an_adapter_is_saved_in_pefts_format(tmp_path: Path) -> None:
    from peft import PeftModel

    run, state = make("model.lora.r=2")
    state = train_step(run, state).state
    folder = save_checkpoint(tmp_path, run, state)
    assert (folder / "adapter_model.safetensors").is_file()
    base = build_policy(small_config()).model
    with torch.no_grad():
        expected = run.policy.model(torch.arange(5)[None]).logits
        logits = PeftModel.from_pretrained(base, str(folder)).eval()(torch.arange(5)[None]).logits
    assert torch.allclose(logits, expected, atol=1e-6)


def test_keep_never_removes_the_last_good_one_nor_the_best(tmp_path: Path) -> None:
    run, state = make()
    for _ in range(5):
        state = train_step(run, state).state
        save_checkpoint(tmp_path, run, state)
    clean(tmp_path, keep=1, also=(2, None))
    assert [step_of(path) for path in checkpoints(tmp_path)] == [2, 5]
    (tmp_path / "step-5" / "trainer" / "optimizer.pt").write_bytes(b"torn")
    clean(tmp_path, keep=1)
    assert newest(tmp_path) == tmp_path / "step-2"


def test_leftovers_of_a_kill_are_passed_over_and_removed(tmp_path: Path) -> None:
    run, state = make()
    save_checkpoint(tmp_path, run, state)
    (tmp_path / ".writing-step-9" / "trainer").mkdir(parents=True)
    (tmp_path / "step-7").mkdir()
    assert newest(tmp_path) == tmp_path / "step-0"
    clean(tmp_path)
    assert not (tmp_path / ".writing-step-9").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(5))
def test_a_kill_while_a_step_is_saved_again_leaves_a_whole_checkpoint(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call that changes the folder, the process may be killed; the last call of the range is none."""
    run, state = make()
    old = replace(state, tokens=1)
    save_checkpoint(tmp_path, run, old)
    calls = 0

    def dying(inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if not Path(path).name.startswith(".writing-") or inner is rename:
                calls += 1
                if calls > call:
                    raise Killed
            return inner(path, *args, **kwargs)

        return wrapped

    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(rename))
        patch.setattr(module.shutil, "rmtree", dying(module.shutil.rmtree))
        with suppress(Killed):
            save_checkpoint(tmp_path, run, replace(state, tokens=2))
    clean(tmp_path)
    saved, damaged = newest_intact(tmp_path)
    assert not damaged
    assert saved is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    found = saved_state(saved)
    assert found is not None
    assert found.tokens == (1 if call < 3 else 2)


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = make()
    save_checkpoint(tmp_path, run, state)
    state = train_step(run, state).state

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(KeelError, match=r"step-1: No space left on device; earlier checkpoints are intact") as caught:
        save_checkpoint(tmp_path, run, state)
    assert "\n" not in str(caught.value)
    assert newest(tmp_path) == tmp_path / "step-0"
    assert not list(tmp_path.glob(".writing-*"))


def test_a_reference_that_does_not_match_is_refused(tmp_path: Path) -> None:
    run, state = make()
    state = train_step(run, state).state
    folder = save_checkpoint(tmp_path, run, state)
    path = folder / "trainer" / "reference.pt"
    held = torch.load(path, weights_only=True)
    name = next(iter(held["weights"]))
    held["weights"][name] = held["weights"][name] + 1e-3
    torch.save(held, path)
    record = json.loads((folder / "trainer" / "state.json").read_text())
    record["files"]["trainer/reference.pt"] = path.stat().st_size
    (folder / "trainer" / "state.json").write_text(json.dumps(record))
    other, _ = make(weights=folder)
    with pytest.raises(KeelError, match="fingerprint"):
        load_checkpoint(folder, other)


def test_a_resting_reference_is_stored_once(tmp_path: Path) -> None:
    run, state = make()
    first = save_checkpoint(tmp_path, run, state)
    state = train_step(run, state).state
    second = save_checkpoint(tmp_path, run, state)
    assert (first / "trainer" / "reference.pt").samefile(second / "trainer" / "reference.pt")


def test_weights_that_cannot_be_written_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has an exception of its own for a full disk."""
    from safetensors import SafetensorError

    from keel.models import load_model
    from keel.trainer.checkpoint import atomic_folder, save_weights

    loaded = load_model("tiny")

    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(type(loaded.model), "save_pretrained", full)
    with pytest.raises(KeelError, match="No space left") as caught, atomic_folder(tmp_path / "place") as temporary:
        save_weights(temporary, loaded.model, loaded.tokenizer)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
