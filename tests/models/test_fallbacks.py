"""What cannot take a GPU's fast passes is told by name, before there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import models as zoo

from keel.models import fallback_notes

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
LLAMA = {"num_key_value_heads": 2, "head_dim": 8, **SIZES}
BF16 = torch.bfloat16
ATTENTION = "slower on this GPU: rows are attended without flash kernels, because "
STATISTICS = "slower on this GPU: the vocabulary's statistics are computed without a kernel of their own, because "
CASES: dict[str, tuple[Any, torch.dtype, tuple[str, ...]]] = {
    "fast": (lambda: zoo.llama.LlamaConfig(**LLAMA), BF16, ()),
    "fp32": (lambda: zoo.llama.LlamaConfig(**LLAMA), torch.float32, (ATTENTION + "it computes in float32",)),
    "head size": (
        lambda: zoo.llama.LlamaConfig(**{**LLAMA, "head_dim": 12}),
        BF16,
        (ATTENTION + "its heads have size 12",),
    ),
    "gpt2": (lambda: zoo.gpt2.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4), BF16, ()),
    "soft caps": (
        lambda: zoo.gemma2.Gemma2Config(**LLAMA, final_logit_softcapping=2.0, attn_implementation="eager"),
        BF16,
        (ATTENTION + "its attention is eager", STATISTICS + "its logits have a soft cap"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_reason_is_named(case: str) -> None:
    config, dtype, notes = CASES[case]
    model = AutoModelForCausalLM.from_config(config()).eval()
    assert fallback_notes(model, torch.device("cuda"), dtype) == notes
    assert fallback_notes(model, torch.device("cpu"), dtype) == ()
