"""What the engine says of its samples is what scoring says of them: one policy, two programs, the same numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from keel.base.types import Group, Problem
from keel.models.pack import pack, right_pad
from keel.models.probe import probe_packing
from keel.models.scorer import score_tokens
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

from . import shapes

SHARED = ("llama", "gpt2", "qwen2", "qwen3")
ALONE = ("mistral", "llama-eager")


def model_of(name: str) -> Any:
    model = shapes.model(name.removesuffix("-eager"))
    if name.endswith("-eager"):
        model.set_attn_implementation("eager")
    return model.eval()


def sampled(model: Any, temperature: float) -> list[Group]:
    """Groups as the engine returns them; prompts and completions run past Mistral's window of 8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the fallback says so
        engine = NativeEngine(model, shapes.tokenizer())
    requests = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts())]
    sampling = SamplingParams(temperature=temperature, num_generations=3, max_completion_length=20)
    answers = engine.generate(requests, sampling, seed=5)
    return [Group(Problem(r.key, ""), r.tokens, tuple(found)) for r, found in zip(requests, answers, strict=True)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("name", [*SHARED, *ALONE])
def test_sample_logp_equals_old_logp(name: str, temperature: float) -> None:
    model = model_of(name)
    shared_prefix = probe_packing(model).ok
    assert shared_prefix == (name in SHARED)
    groups = sampled(model, temperature)
    packed = pack(groups, 258, shared_prefix=shared_prefix)
    with torch.no_grad():
        old_logp = score_tokens(model, packed, temperature=temperature).logp
    completions = [completion for group in groups for completion in group.completions]
    sample_logp = right_pad((c.sample_logp for c in completions), 0.0, dtype=torch.float32)
    assert packed.action_mask.sum() > 100
    torch.testing.assert_close(old_logp, sample_logp, atol=1e-4, rtol=0)
