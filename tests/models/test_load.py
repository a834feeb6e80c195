"""Loading: one path for every source, dropout off, and bad input refused in one line."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from keel.base.errors import KeelError
from keel.models import fingerprint, load_model
from keel.models.dropout import disable_dropout
from keel.models.head import body_of
from keel.models.load import cast_parameters, resolve_dtype
from keel.models.pack import pack
from keel.models.scorer import score_tokens
from keel.models.tiny import tiny_model, tiny_tokenizer

from .packing_cases import make_groups, naive_logp

IDS = torch.tensor([[5, 40, 60, 7, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    model, tokenizer = tiny_model(seed=5)
    model.save_pretrained(path)  # type: ignore[operator]
    tokenizer.save_pretrained(path)
    return path


def altered(folder: Path, into: Path, **values: Any) -> Path:
    """A copy of the folder whose tokenizer config has other values (None removes one)."""
    shutil.copytree(folder, into)
    path = into / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return into


def gpt2(seed: int) -> tuple[nn.Module, Any]:
    """A user's own loader, with all of GPT-2's dropouts on."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=130, n_embd=16, n_layer=2, n_head=2, n_positions=77, resid_pdrop=0.3, attn_pdrop=0.3)
    return GPT2LMHeadModel(config), tiny_tokenizer()


def mistral(seed: int) -> tuple[nn.Module, Any]:
    """A window of 16 tokens, which transformers forgets under a 4-D mask."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        **shape, num_key_value_heads=2, vocab_size=130, max_position_embeddings=128, sliding_window=16
    )
    return MistralForCausalLM(config), tiny_tokenizer()


SLIDING = ("mistral", "local attention of 16")
EAGER = ("tiny", "computes shared-prefix rows wrongly")


@pytest.mark.parametrize(("name", "message"), [SLIDING, EAGER], ids=["window", "eager"])
def test_a_model_that_packs_wrongly_is_found_out_at_load(
    name: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"attn_implementation": "eager"} if name == "tiny" else {}
    with caplog.at_level(logging.WARNING, logger="keel"):
        loaded = load_model(name if name == "tiny" else f"{__name__}:{name}", device="cpu", **options)
    assert not loaded.shared_prefix
    assert loaded.packing_note is not None
    assert message in loaded.packing_note
    assert "\n" not in loaded.packing_note
    assert loaded.notes[-1] == loaded.packing_note
    assert [record.message for record in caplog.records].count(loaded.packing_note) == 1
    groups = make_groups([(30, (5, 4))])
    packed = pack(groups, loaded.pad_id, shared_prefix=loaded.shared_prefix)
    with torch.no_grad():
        found = score_tokens(loaded.model, packed).logp[packed.completion_mask]
        assert (found - naive_logp(loaded.model, groups)).abs().max() < 1e-4


def test_a_window_that_the_job_stays_within_packs() -> None:
    assert load_model(f"{__name__}:mistral", device="cpu", longest=16).shared_prefix


def test_without_the_probe_rows_are_not_shared() -> None:
    loaded = load_model("tiny", device="cpu", probe=False)
    assert (loaded.shared_prefix, loaded.notes) == (False, ())
    assert "without the packing probe" in str(loaded.packing_note)


def floating_buffers(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def test_half_precision_leaves_the_rotary_frequencies_alone(folder: Path) -> None:
    exact = body_of(load_model("tiny", device="cpu").model)
    for name in ("tiny", str(folder)):
        loaded = load_model(name, device="cpu", dtype="bf16")
        assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
        assert set(floating_buffers(loaded.model).values()) == {torch.float32}
        positions = torch.arange(2048)[None]
        rotated = body_of(loaded.model).rotary_emb(torch.zeros(1), positions)  # type: ignore[operator]
        expected = exact.rotary_emb(torch.zeros(1), positions)  # type: ignore[operator]
        assert all(torch.equal(a, b) for a, b in zip(rotated, expected, strict=True))


def test_half_precision_scores_stay_close_far_from_the_start() -> None:
    """Weights that bf16 holds exactly, computed in fp32: what is left is the error of the positions."""
    model, _ = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0).copy_(parameter.bfloat16())
    groups = make_groups([(1500, (20,))])
    expected = naive_logp(model, groups)
    again = cast_parameters(cast_parameters(model, torch.bfloat16), torch.float32)
    assert (naive_logp(again, groups) - expected).abs().max() == 0


def test_casting_keeps_ties_gradients_and_whole_numbers() -> None:
    model, _ = tiny_model()
    model.register_buffer("steps", torch.arange(3))
    model(input_ids=IDS).logits.sum().backward()
    same = list(model.parameters())
    assert cast_parameters(model, torch.bfloat16, "cpu") is model
    assert all(a is b for a, b in zip(same, model.parameters(), strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert model.steps.dtype == torch.int64
    moved = cast_parameters(model, None, "meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert next(moved.parameters()).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_compile_reaches_the_part_that_scoring_calls(lora: Any) -> None:
    model = load_model("tiny", device="cpu", compile=True, lora=lora).model
    assert body_of(model)._compiled_call_impl is not None
    assert body_of(load_model("tiny", device="cpu").model)._compiled_call_impl is None


def test_without_eos_the_weights_are_not_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(KeelError, match="no EOS token"):
        load_model(no_eos(folder, tmp_path), device="cpu")


def test_a_folder_and_its_dtype(folder: Path) -> None:
    source, _ = tiny_model(seed=5)
    loaded = load_model(str(folder), device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=IDS).logits, source(input_ids=IDS).logits)
    assert load_model(str(folder), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_a_users_loader_goes_through_the_same_code() -> None:
    loaded = load_model(f"{__name__}:gpt2", device="cpu", seed=3, lora={"r": 2, "targets": ["c_attn"]})
    assert loaded.context_length == 77
    assert any("lora_A" in name for name, _ in loaded.model.named_parameters())


def test_dropout_is_off_unless_asked_for() -> None:
    quiet = load_model(f"{__name__}:gpt2", device="cpu").model.train()
    noisy = load_model(f"{__name__}:gpt2", device="cpu", dropout=True).model
    assert noisy.training
    with torch.no_grad():
        assert torch.equal(quiet(input_ids=IDS).logits, quiet(input_ids=IDS).logits)
        assert not torch.equal(noisy(input_ids=IDS).logits, noisy(input_ids=IDS).logits)
    assert quiet.config.attn_pdrop == quiet.config.resid_pdrop == 0.0  # type: ignore[union-attr]


def test_dropout_inside_attention_functions_is_off() -> None:
    """Llama keeps its attention dropout as a number, not as a module."""
    model, _ = tiny_model()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.5
    disable_dropout(model)
    model.train()
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_gradient_checkpointing_gives_the_same_gradients_under_lora() -> None:
    grads = []
    for flag in (False, True):
        model = load_model("tiny", device="cpu", lora={"r": 2}, gradient_checkpointing=flag).model
        model(input_ids=IDS).logits.square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
        assert model.training == flag
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_no_pad_becomes_eos_with_a_note(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(altered(folder, tmp_path / "m", pad_token=None)), device="cpu")
    assert loaded.pad_id == loaded.tokenizer.eos_token_id
    assert "no pad token" in loaded.notes[0]


def test_more_eos_tokens_come_from_the_generation_config(folder: Path, tmp_path: Path) -> None:
    path = altered(folder, tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 2]}))
    assert load_model(str(path), device="cpu").eos_ids == (2, 6)


def no_eos(folder: Path, tmp_path: Path) -> str:
    return str(altered(folder, tmp_path / "m", eos_token=None))


def misspelt_in_a_real_folder(folder: Path, tmp_path: Path) -> str:
    return os.path.relpath(folder.parent / "smal")


def no_config(folder: Path, tmp_path: Path) -> str:
    (tmp_path / "m").mkdir()
    return str(tmp_path / "m")


def no_weights(folder: Path, tmp_path: Path) -> str:
    path = altered(folder, tmp_path / "m")
    (path / "model.safetensors").unlink()
    return str(path)


def cut_weights(folder: Path, tmp_path: Path) -> str:
    path = altered(folder, tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    return str(path)


def too_many_tokens(folder: Path, tmp_path: Path) -> str:
    path = altered(folder, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_eos, "no EOS token"),
        (misspelt_in_a_real_folder, "no model folder at"),
        (no_config, "no config.json"),
        (no_weights, "cannot load a model from the folder"),
        (cut_weights, "cannot load a model from the folder"),
        (too_many_tokens, "159 tokens but the model embeds 119"),
        (lambda *_: "./no/such/folder", "no model folder at"),
        (lambda *_: "a/b/c", "no model folder at"),
        (lambda *_: "nothing.gguf", "no GGUF file at"),
        (lambda *_: "no_such_module:load", "cannot import model loader"),
        (lambda *_: f"{__name__}:IDS", "must be a function"),
        (lambda *_: f"{__name__}:tiny_tokenizer", "must return"),
    ],
)
def test_bad_input_is_one_line(make: Any, message: str, folder: Path, tmp_path: Path) -> None:
    name = make(folder, tmp_path)
    with pytest.raises(KeelError, match=message) as caught:
        load_model(name, device="cpu")
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_is_refused_before_loading() -> None:
    with pytest.raises(KeelError, match="did you mean bf16"):
        load_model("./no/such/folder", device="cpu", dtype="b16")


def test_weights_from_a_file_lie_where_computed_ones_do(tmp_path: Path) -> None:
    """Alignment moves the last bit of matrix products on some CPUs, and with it the exactness of a resumed run."""
    first = load_model("tiny")
    first.model.save_pretrained(tmp_path)  # type: ignore[operator]
    first.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    assert {p.data_ptr() % 64 for p in again.model.parameters()} == {0}
    assert fingerprint(again.model) == fingerprint(first.model)


def test_a_gpu_without_bfloat16_gets_float32_weights_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_dtype("auto", gpu) == ("auto", ())
    assert resolve_dtype("bfloat16", gpu) == (torch.bfloat16, ())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    dtype, (note,) = resolve_dtype("auto", gpu)
    assert dtype == torch.float32
    assert "no bfloat16" in note
    assert "optim.precision=float16" in note
    assert resolve_dtype("float16", gpu) == (torch.float16, ())
    assert resolve_dtype("auto", torch.device("cpu")) == (torch.float32, ())
    with pytest.raises(KeelError, match=r"model\.dtype=bfloat16: this GPU has no bfloat16 .* model\.dtype=float32"):
        resolve_dtype("bf16", gpu)
