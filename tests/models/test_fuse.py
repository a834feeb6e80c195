"""Attention with rotations beside the flash calls equals the class's own; the flash kernels are stand-ins in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import models as zoo

from keel.models import fuse
from keel.models.flash_prefix import Kernels, flash_attend
from keel.models.head import body_of
from keel.models.prefix_attention import RowStructure, small_rows
from keel.models.scorer import hidden_states_in_one_pass

from .test_flash_prefix import backward, forward

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 48}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, **SIZES}
CONFIGS = {
    "llama": zoo.llama.LlamaConfig(**GROUPED),
    "qwen2": zoo.qwen2.Qwen2Config(**GROUPED),
    "qwen3": zoo.qwen3.Qwen3Config(**GROUPED),
    "gemma": zoo.gemma.GemmaConfig(**GROUPED),
    "mistral": zoo.mistral.MistralConfig(sliding_window=None, **GROUPED),
    "smollm3": zoo.smollm3.SmolLM3Config(pad_token_id=0, **GROUPED),
}


@pytest.fixture(autouse=True)
def flash_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "flash_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(fuse, "flash_attend", partial(flash_attend, kernels=Kernels(forward, backward)))


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that are all alike would hide a wrong one
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def fuse_attention(model: Any) -> list[bool]:
    """Which layers take the fused form."""
    taken = []
    for layer in body_of(model).layers:
        assert fuse.fused_forward(layer.self_attn) is fuse.attention
        taken.append(fuse.attention_matches(layer.self_attn))
        if taken[-1]:
            fuse.replace_forward(layer.self_attn, fuse.attention)
    return taken


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_the_models_own(name: str) -> None:
    model, packed, results = model_of(name), small_rows(50), []
    for fused in (False, True):
        if fused:  # every fourth layer of SmolLM3 does not rotate
            assert fuse_attention(model) == [True, True, True, name != "smollm3"]
        model.zero_grad()
        structure = RowStructure(packed)
        hidden = hidden_states_in_one_pass(model, packed, structure)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append([hidden.detach(), *(p.grad.clone() for p in body_of(model).parameters())])
    for mine, own in zip(*results, strict=True):
        torch.testing.assert_close(mine, own, atol=1e-5, rtol=1e-5)  # transformers' rotary tables are fp32


def test_masks_are_left_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of prefix attention the replaced forward is the class's own."""
    model, packed = model_of("llama"), small_rows(50)
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "attention_mask": packed.mask_4d()}
    expected = model(**inputs).logits
    assert fuse_attention(model) == [True] * 4
    monkeypatch.setattr(fuse, "flash_attend", lambda *_: pytest.fail("the class's own attention was asked for"))
    assert torch.equal(model(**inputs).logits, expected)


def test_an_attention_with_a_window_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "window", zoo.mistral.MistralConfig(sliding_window=64, **GROUPED))
    assert fuse_attention(model_of("window")) == [False] * 4


def test_a_norm_that_takes_a_gate_keeps_its_own_forward() -> None:
    from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

    norm = BambaRMSNormGated(8)
    assert fuse.fused_forward(norm) is None
    assert norm(torch.ones(2, 8), torch.ones(2, 8)).shape == (2, 8)


def test_heads_that_are_rotated_in_part_keep_their_own_attention() -> None:
    torch.manual_seed(0)
    config = zoo.nemotron.NemotronConfig(partial_rotary_factor=0.5, **GROUPED)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    packed = small_rows()
    with torch.no_grad():
        expected = hidden_states_in_one_pass(model, packed, RowStructure(packed))
        for layer in body_of(model).layers:
            fuse.replace_forward(layer.self_attn, fuse.attention)
        torch.testing.assert_close(hidden_states_in_one_pass(model, packed, RowStructure(packed)), expected)
