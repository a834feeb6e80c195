"""The notes on training passes: each thing that is not computed the fastest way, with its reason."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from keel.models.fuse import fallback_notes


def llama(**values: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **{**shape, **values}))
    for module in model.modules():  # as fusing leaves them
        if type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP"):
            module.forward = MethodType(type(module).forward, module)
    return model


def test_nothing_is_said_of_what_is_fast() -> None:
    assert fallback_notes(llama(), torch.bfloat16, planned=True) == ()


def recomputing() -> LlamaForCausalLM:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


REASONS = {
    "float32": (llama, None, "it computes in float32"),
    "a head that flash does not take": (lambda: llama(head_dim=20), torch.bfloat16, "its heads have size 20"),
    "recomputed": (recomputing, torch.bfloat16, "its gradient checkpointing"),
    "eager": (lambda: llama(attn_implementation="eager"), torch.float16, "its attention is eager"),
}


@pytest.mark.parametrize("case", REASONS)
def test_attention_that_is_not_by_flash_kernels_is_named_with_the_reason(case: str) -> None:
    make, amp_dtype, reason = REASONS[case]
    (note,) = fallback_notes(make(), amp_dtype, planned=True)
    assert note.startswith("training passes do not use flash attention: ")
    assert reason in note


def test_a_soft_cap_on_the_logits_is_named() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=64, num_key_value_heads=2, head_dim=8, **shape))
    reason = "vocabulary statistics are not fused: its logits have a soft cap"
    assert reason in fallback_notes(model.eval(), torch.bfloat16, planned=True)


def test_modules_without_a_fused_form_are_named_once() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    assert fallback_notes(model, torch.bfloat16, planned=True) == ("GPT2MLP have no fused form",)


def test_without_a_gpu_that_is_the_reason() -> None:
    assert "there is no CUDA device" in fallback_notes(llama(), torch.bfloat16)[0]
