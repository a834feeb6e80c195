"""Prefix attention equals attention by the mask of the row, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers import models as zoo

from keel.base.types import Completion, Group, Problem
from keel.models import prefix_attention
from keel.models.head import body_of
from keel.models.pack import PackedBatch, pack
from keel.models.scorer import score_tokens

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, **SIZES}
EXACT = {
    "llama": zoo.llama.LlamaConfig(**GROUPED),
    "qwen3": zoo.qwen3.Qwen3Config(**GROUPED),
    "gpt_neox": zoo.gpt_neox.GPTNeoXConfig(rotary_pct=0.5, **SIZES),
}
BY_MASK = {"mistral": zoo.mistral.MistralConfig(sliding_window=64, **GROUPED)}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def batch(max_row_tokens: int | None) -> PackedBatch:
    """Three groups with ragged completions, one of a single token and one of none."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 50, (count,), generator=generator).tolist())

    def completion(count: int) -> Completion:
        zeros = (0.0,) * count
        return Completion(tokens(count), (True,) * count, zeros, zeros, "", "length")

    shapes = [(12, (5, 9, 1)), (3, (7, 7)), (6, (1, 0, 4))]
    groups = [Group(Problem(str(p), ""), tokens(p), tuple(completion(n) for n in ns)) for p, ns in shapes]
    return pack(groups, 0, max_row_tokens=max_row_tokens)


def scored(model: Any, packed: PackedBatch) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logp = score_tokens(model, packed).logp
    (logp * torch.arange(1, logp.numel() + 1).view_as(logp)).sum().backward()
    return logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("max_row_tokens", [None, 60])
@pytest.mark.parametrize("name", [*EXACT, *BY_MASK])
def test_values_and_gradients_equal_the_masks(
    name: str, max_row_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, packed = model_of({**EXACT, **BY_MASK}[name]), batch(max_row_tokens)
    expected, gradients = scored(model, packed)
    monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    assert prefix_attention.use_prefix_attention(body_of(model), packed) == (name in EXACT)
    logp, others = scored(model, packed)
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)
    for gradient, expected_gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-3, rtol=1e-4)
    with prefix_attention.simulate_cuda_memory():  # grouped heads written out
        torch.testing.assert_close(scored(model, packed)[0], expected, atol=1e-5, rtol=0)
    assert model.config._attn_implementation == "sdpa"


def test_short_rows_keep_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = model_of(EXACT["llama"]), batch(None)
    assert not prefix_attention.use_prefix_attention(body_of(model), packed)
    monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    assert prefix_attention.use_prefix_attention(body_of(model), packed)


@pytest.mark.parametrize("by_structure", [True, False])
def test_recomputed_activations_attend_as_the_first_ones(by_structure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second forward of gradient checkpointing runs after the context of prefix attention has been left."""
    model, packed = model_of(EXACT["llama"]), batch(None)
    expected, gradients = scored(model, packed)
    calls = []
    monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    attend = prefix_attention.attend
    monkeypatch.setattr(prefix_attention, "attend", lambda *args: calls.append(1) or attend(*args))
    context = {"context_fn": prefix_attention.RecomputeContext()} if by_structure else {}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **context})
    model.train()
    reason = prefix_attention.structured_unsupported_reason(body_of(model))
    assert (reason is None) == by_structure
    assert prefix_attention.use_prefix_attention(body_of(model), packed) == by_structure
    calls.clear()
    logp, others = scored(model, packed)
    assert len(calls) == (2 * model.config.num_hidden_layers if by_structure else 0)
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)
    for gradient, expected_gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-3, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_disagrees_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    monkeypatch.setattr(prefix_attention, "attend", lambda query, *_: torch.zeros_like(query.transpose(1, 2)))
    assert not prefix_attention.use_prefix_attention(body_of(model_of(EXACT["llama"])), batch(None))
