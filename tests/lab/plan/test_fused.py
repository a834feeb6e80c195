"""What a plan counts for the fused modules of a GPU is what their kernels keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from keel.lab.plan.shapes import fuse_as_on_cuda

SHAPE = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
TOKENS = 10


def llama(dtype: torch.dtype) -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **SHAPE)).to(dtype)


def kept(module: Any, x: Tensor) -> int:
    """Bytes that the backward pass of `module` reads, weights and `x` apart."""
    held: dict[int, Tensor] = {}
    apart = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in apart:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def rows() -> Tensor:
    return torch.randn(TOKENS, 32).bfloat16().requires_grad_()


def test_a_norm_keeps_its_input_and_a_number_a_row() -> None:
    model = llama(torch.bfloat16)
    fuse_as_on_cuda(model)
    assert kept(model.model.norm, rows()) == TOKENS * 4


@pytest.mark.parametrize("lora", [False, True])
def test_an_mlp_keeps_gate_up_and_their_product(lora: bool) -> None:
    model = llama(torch.bfloat16)
    adapters = 0
    if lora:  # A x of three layers, and the adapters in the dtype of the pass
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"]))
        adapters = 3 * TOKENS * 4 * 2
    fuse_as_on_cuda(model)
    mlp = next(module for name, module in model.named_modules() if name.endswith("mlp"))
    assert kept(mlp, rows()) == 3 * TOKENS * 96 * 2 + adapters


def test_layers_in_fp32_stay_as_they_are() -> None:
    model = llama(torch.float32)
    fuse_as_on_cuda(model)
    assert all("forward" not in vars(module) for module in model.modules())
