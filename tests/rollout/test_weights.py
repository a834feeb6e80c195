"""A copied engine knows when it is stale, and sampling from it is sampling from the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from keel.errors import KeelError
from keel.rollout import NativeEngine, Request, SamplingParams

from . import shapes

REQUESTS = [Request(f"p{i}", tokens) for i, tokens in enumerate(shapes.prompts(3))]
SAMPLING = SamplingParams(num_generations=2, max_completion_length=8, ignore_eos=True)


def policy(kind: str, name: str = "llama") -> Any:
    model = shapes.model(name)
    if kind == "full":
        return model
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "down_proj"]
    save = ["lm_head"] if kind == "lora+head" else None
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=save, fan_in_fan_out=name == "gpt2")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.2)
    return adapted


def learn(model: Any) -> None:
    """One optimizer step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def assert_samples_from(engine: NativeEngine, model: Any) -> None:
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, SAMPLING, seed=1), strict=True):
        for c in group:
            expected = shapes.full_logp(model, request.tokens, c.tokens, 1.0)
            torch.testing.assert_close(torch.tensor(c.sample_logp), expected, atol=1e-4, rtol=0)


CASES = [
    ("full", "llama", False),
    ("lora", "llama", False),
    ("lora", "llama", True),
    ("lora", "gpt2", True),
    ("lora+head", "llama", False),
    ("lora+head", "llama", True),
]


@pytest.mark.parametrize(("kind", "name", "merge"), CASES)
def test_a_copy_is_stale_after_a_step_and_fresh_after_sync(kind: str, name: str, merge: bool) -> None:
    model = policy(kind, name)
    engine = NativeEngine(model, shapes.tokenizer(), copy=True, merge=merge)
    assert hasattr(engine.model, "peft_config") == (kind != "full" and not merge)
    assert not engine.is_stale(model)
    assert_samples_from(engine, model)
    learn(model)
    assert engine.is_stale(model)
    copied = engine.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine.sync(model, version=7)
    assert engine.model is copied
    assert engine.version == 7
    assert not engine.is_stale(model)
    assert_samples_from(engine, model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    with torch.no_grad():
        next(engine.model.parameters()).view(-1)[3] += 1e-3
    assert engine.is_stale(model)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_shared_weights_are_never_stale(kind: str) -> None:
    model = policy(kind)
    engine = NativeEngine(model, shapes.tokenizer())
    learn(model)
    assert not engine.is_stale(model)
    engine.sync(model, 1)
    assert_samples_from(engine, model)
    other = policy(kind)
    assert engine.is_stale(other)
    with pytest.raises(KeelError, match="another model"):
        engine.sync(other)


def test_a_copy_may_have_another_dtype() -> None:
    model = policy("full")
    engine = NativeEngine(model, shapes.tokenizer(), dtype=torch.bfloat16)
    assert next(engine.model.parameters()).dtype == torch.bfloat16
    assert engine.fallback_reason is None
    learn(model)
    assert engine.is_stale(model)
    engine.sync(model, 1)
    assert not engine.is_stale(model)
    (group,) = engine.generate(REQUESTS[1:2], SAMPLING)
    assert all(len(c.tokens) == 8 for c in group)


def test_the_active_adapter_samples() -> None:
    model = policy("lora")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    engine = NativeEngine(model, shapes.tokenizer())
    copied = NativeEngine(model, shapes.tokenizer(), copy=True)
    first = engine.generate(REQUESTS, SAMPLING)
    model.set_adapter("other")
    assert copied.is_stale(model)
    second = engine.generate(REQUESTS, SAMPLING)
    assert first != second
    assert_samples_from(engine, model)
    copied.sync(model)
    assert not copied.is_stale(model)
    assert_samples_from(copied, model)


def test_an_adapter_added_later_is_taken_over() -> None:
    model = policy("lora")
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("late")
    assert engine.is_stale(model)
    engine.sync(model)
    assert not engine.is_stale(model)
    assert_samples_from(engine, model)
