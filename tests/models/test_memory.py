"""The size of a pass: what one takes is counted on small ones, and what fits follows from what is free."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from keel.base.types import Completion, Group, Problem
from keel.models.chunked import LOGIT_BYTES, default_chunk
from keel.models.memory import LiveBytes, PassBytes, fitting_tokens, measure_pass_bytes
from keel.models.pack import pack
from keel.models.scorer import hidden_states

GIB = 2**30


def llama(**values: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"vocab_size": 64, **values}
    return LlamaForCausalLM(LlamaConfig(attn_implementation="sdpa", **shape)).eval()


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4)).eval()


def recomputing() -> LlamaForCausalLM:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def in_bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def group(prompt: int, *lengths: int) -> Group:
    completions = tuple(Completion((1,) * n, (True,) * n, (0.0,) * n, (0.0,) * n, "", "length") for n in lengths)
    return Group(Problem("", ""), (1,) * prompt, completions)


CASES = {
    "llama": (llama, nullcontext, True),
    "one row per completion": (llama, nullcontext, False),
    "mixed precision": (llama, in_bfloat16, True),
    "gpt2": (gpt2, nullcontext, True),
    "recomputed": (recomputing, nullcontext, True),
    "gradients larger than small passes": (partial(llama, vocab_size=40_000), nullcontext, True),
}


@pytest.mark.parametrize("case", CASES)
def test_small_passes_foretell_large_ones(case: str) -> None:
    make, autocast, shared = CASES[case]
    model = make()
    counted = measure_pass_bytes(model, autocast, shared_prefix=shared)
    times = 2 if autocast is in_bfloat16 else 6  # many CPUs have no fast bfloat16
    packed = pack([group(40, 50, 45, 30), group(30, 60, 41), group(50, 33, 33)] * times, 0, shared_prefix=shared)
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        for _ in range(2):  # from the second microbatch on gradients are there beside the activations
            with autocast():
                hidden = hidden_states(model, packed)
            hidden.sum().backward()
            del hidden
    foretold = counted.fixed + counted.per_token * packed.input_ids.numel()
    assert foretold == pytest.approx(live.peak, rel=0.15)


def test_counting_leaves_gradients_and_random_numbers_alone() -> None:
    model = llama()
    gradient = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = gradient
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_pass_bytes(model, nullcontext, shared_prefix=True)
    assert model.lm_head.weight.grad is gradient
    assert all(p.grad is None for p in model.model.layers.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fits_by_hand() -> None:
    passes = PassBytes(fixed=2 * GIB, per_token=2**20)
    assert fitting_tokens(20 * GIB, passes, later=4 * GIB) == 10 * 1024  # 16 of 20 are used, 6 are taken
    assert fitting_tokens(20 * GIB + 2**27, passes, later=4 * GIB) == 10 * 1024  # a little more changes nothing
    assert fitting_tokens(GIB, passes) == 256


def test_a_chunk_of_logits_is_as_large_as_the_device_allows() -> None:
    gpu, vocabulary = torch.device("cuda"), 2**15
    assert default_chunk(vocabulary, gpu, 139 * GIB) == 2**12
    small = default_chunk(vocabulary, gpu, 8 * GIB)
    assert small < 2**12
    assert 0.9 * 8 * GIB / 20 < small * vocabulary * LOGIT_BYTES <= 8 * GIB / 20
    assert default_chunk(vocabulary, torch.device("cpu")) == 2**8
