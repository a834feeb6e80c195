"""A copied engine knows when it is stale, and sampling from it is sampling from the policy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.errors import KeelError
from keel.models.lora import merge
from keel.rollout import Request, SamplingParams
from keel.rollout.native import weights
from keel.rollout.native.engine import NativeEngine

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


@pytest.mark.parametrize(
    ("kind", "name"), [("full", "llama"), ("lora", "llama"), ("lora", "gpt2"), ("lora+head", "llama")]
)
def test_a_copy_is_stale_after_a_step_and_fresh_after_sync(kind: str, name: str) -> None:
    model = policy(kind, name)
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    assert hasattr(engine.model, "peft_config") == (kind != "full")
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


def test_a_half_precision_copy_is_compared_bit_by_bit_with_the_cast() -> None:
    model = policy("full")
    engine = NativeEngine(model, shapes.tokenizer(), dtype=torch.bfloat16)
    weight, copied = next(model.parameters()), next(engine.model.parameters())
    with torch.no_grad():
        weight.view(-1)[5] = float("nan")  # equal to itself here
        engine.sync(model)
        assert not engine.is_stale(model)
        copied.view(torch.int16).view(-1)[3] ^= 1
        assert engine.is_stale(model)
        engine.sync(model)
        assert not engine.is_stale(model)
        weight.view(-1)[3] *= 2
    assert engine.is_stale(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_sync_that_leaves_a_weight_out_is_refused(
    kind: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy(kind)
    engine = NativeEngine(model, shapes.tokenizer(), copy=True, dtype=dtype)
    learn(model)
    moved = dict(model.named_parameters())
    copied = engine.model.named_parameters()
    left_out = next(p.data_ptr() for name, p in copied if not torch.equal(p, moved[name].to(p.dtype)))
    real = torch.Tensor.copy_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda t, other: t if t.data_ptr() == left_out else real(t, other))
        with pytest.raises(KeelError, match="does not equal the policy after sync"):
            engine.sync(model)
    assert engine.is_stale(model)
    engine.sync(model)
    assert not engine.is_stale(model)


def test_a_copy_whose_adapter_acts_otherwise_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are the policy's all the while."""
    model = policy("lora")
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    layer = next(module for module in engine.model.modules() if hasattr(module, "lora_A"))
    layer.scaling["default"] *= 2
    assert engine.is_stale(model)
    engine.sync(model)
    assert not engine.is_stale(model)
    with engine.model.disable_adapter():
        assert engine.is_stale(model)
    assert not engine.is_stale(model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 2
    monkeypatch.setattr(weights, "_copy_adapter_state", lambda twin, policy: None)
    with pytest.raises(KeelError, match="does not equal the policy after sync"):
        engine.sync(model)
    assert engine.is_stale(model)


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


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits


@pytest.mark.parametrize("kind", ["lora", "lora+head"])
def test_a_policy_that_is_merged_or_off_is_copied_as_it_acts(kind: str) -> None:
    model = policy(kind)
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)

    def agree() -> None:
        engine.sync(model)
        assert not engine.is_stale(model)
        torch.testing.assert_close(logits(engine.model), logits(model), atol=1e-4, rtol=1e-4)

    before = logits(model)
    model.merge_adapter()
    assert engine.is_stale(model)
    agree()
    torch.testing.assert_close(logits(engine.model), before, atol=1e-3, rtol=1e-3)
    model.unmerge_adapter()
    assert engine.is_stale(model)
    agree()
    with model.disable_adapter():
        assert engine.is_stale(model)
        agree()
        assert (logits(engine.model) - before).abs().max() > 0.1
    assert engine.is_stale(model)
    agree()
    assert_samples_from(engine, model)


def test_a_new_copy_of_a_policy_whose_adapters_are_off_is_off() -> None:
    model = policy("lora")
    with model.disable_adapter():
        engine = NativeEngine(model, shapes.tokenizer(), copy=True)
        torch.testing.assert_close(logits(engine.model), logits(model))


def test_merged_and_switched_off_at_once_is_refused() -> None:
    model = policy("lora")
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(KeelError, match="unmerge_adapter"):
        engine.sync(model)


def test_another_scaling_is_taken_over() -> None:
    model = policy("lora")
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    for _, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] = 0.5
    assert engine.is_stale(model)
    engine.sync(model)
    torch.testing.assert_close(logits(engine.model), logits(model))


def tied(targets: list[str], **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**shapes.GROUPED, "tie_word_embeddings": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=targets, **options))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3)
    return made


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens"], ["q_proj"]])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_merging_into_tied_weights(targets: list[str]) -> None:
    model = tied(targets)
    expected = logits(model)
    merged = merge(model)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    both = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert (both[0] is both[1]) == (targets == ["q_proj"])


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_dora": True}])
def test_other_kinds_of_adapters_are_copied_whole(options: dict[str, Any]) -> None:
    model = tied(["q_proj"], **options)
    engine = NativeEngine(model, shapes.tokenizer(), copy=True)
    torch.testing.assert_close(logits(engine.model), logits(model))


def test_a_half_precision_copy_keeps_its_rotary_frequencies() -> None:
    """Frequencies rounded to bf16 are off by most of a radian at position 512."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shapes.GROUPED, "max_position_embeddings": 2048}))
    engine = NativeEngine(model, shapes.tokenizer(), dtype=torch.bfloat16)
    copied = engine.model.model.rotary_emb
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert copied.inv_freq.dtype == torch.float32
    assert torch.equal(copied.inv_freq, model.model.rotary_emb.inv_freq)
    positions = torch.arange(1900, 2000)[None]
    for mine, true in zip(copied(torch.ones(1), positions), model.model.rotary_emb(torch.ones(1), positions)):  # noqa: B905
        assert torch.equal(mine, true)
    engine.sync(model, 1)
    assert not engine.is_stale(model)
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = torch.randint(0, 256, (1, 1200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = torch.log_softmax(engine.model(input_ids=ids).logits.float(), -1)
        apart = (apart - torch.log_softmax(model(input_ids=ids).logits, -1)).abs()[0]
    assert apart[1000:].max() < 2 * apart[:200].max()
