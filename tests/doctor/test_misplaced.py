"""Weights in the wrong place, found by putting them back; weights in the right one stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, MistralConfig, Qwen2Config

from doctor.schooled import fresh_model, schooled_config
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, golds
from keel.doctor.probes.misplaced import _tells_apart, changes, misplaced_weights
from keel.doctor.setup import build_setup
from keel.doctor.thresholds import load_thresholds
from keel.models.head import causal_lm


def exchanged_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def keys_for_values(model: Any) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.weight.data, attention.v_proj.weight.data = (
            attention.v_proj.weight.data,
            attention.k_proj.weight.data,
        )


def transposed_outputs(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.t().contiguous()


def transposed_squares(model: Any) -> None:
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            module.weight.data = module.weight.data.t().contiguous()


def split_as_if_queries_came_first(model: Any) -> None:
    """Of two heads of keys: their queries, keys and values lay behind each other in one matrix."""
    for layer in model.model.layers:
        parts = [getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
        rows = torch.cat([torch.cat([p.data[i * len(p) // 2 : (i + 1) * len(p) // 2] for p in parts]) for i in (0, 1)])
        for parameter, part in zip(parts, rows.split([len(p) for p in parts]), strict=True):
            parameter.data = part.contiguous()


def another_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sigmoid()


def wider_heads(model: Any) -> None:
    next(change for change in changes(model) if change.what == "heads of 12 in place of 6 dimensions").apply()


FAULTS: dict[Callable[[Any], None], str] = {
    exchanged_layers: "layers 0 and 1 exchanged",
    keys_for_values: "k_proj.weight and self_attn.v_proj.weight of all layers exchanged",
    transposed_outputs: "o_proj.weight of all layers transposed",
    transposed_squares: "q_proj.weight and self_attn.o_proj.weight of all layers transposed",
    split_as_if_queries_came_first: "from one matrix group by group",
}


SETTINGS: dict[Callable[[Any], None], str] = {
    another_activation: "silu for the activation",
    wider_heads: "heads of 6 in place of 12 dimensions",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_change_that_mends_it_is_named(fault: Callable[[Any], None]) -> None:
    setup = build_setup(schooled_config())
    with closing(setup.run):
        fault(setup.policy.model)
        evidence, _ = misplaced_weights(setup, load_thresholds()) or ("", "")
        assert FAULTS[fault] in evidence


@pytest.mark.parametrize("lora", ["null", "{r: 4, alpha: 8}"])
def test_weights_in_their_place_are_left_there(lora: str) -> None:
    setup = build_setup(schooled_config(f"model.lora={lora}"))
    with closing(setup.run):
        assert misplaced_weights(setup, load_thresholds()) is None


def granite() -> nn.Module:
    """A model whose attention is scaled by a number of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return GraniteForCausalLM(GraniteConfig(vocab_size=40, num_key_value_heads=2, attention_multiplier=0.01, **sizes))


@pytest.mark.parametrize("build", [lambda: fresh_model()[0], granite], ids=["llama", "granite"])
def test_every_change_changes_something_and_is_undone(build: Callable[[], Any]) -> None:
    model = build().eval()
    tokens = torch.arange(3, 15)[None]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens).logits

    before, names = logits(), set()
    with torch.no_grad():
        for change in changes(model):
            change.apply()
            assert not torch.equal(logits(), before) or "base 10000" in change.what or "layernorm" in change.what
            change.undo()
            assert torch.equal(logits(), before), change.what
            names.add(change.what)
    assert len(names) > 8


def test_a_model_without_layers_has_nothing_to_exchange() -> None:
    assert not list(changes(nn.Linear(2, 2)))


@pytest.mark.parametrize("fault", SETTINGS, ids=lambda fault: fault.__name__)
def test_the_setting_that_a_model_was_trained_with_is_tried(fault: Callable[[Any], None]) -> None:
    model, _ = fresh_model()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.arange(3, 15)[None]).logits

    right = logits()
    fault(model)
    assert not torch.allclose(logits(), right)
    change = next(change for change in changes(model) if change.what == SETTINGS[fault])
    with torch.no_grad():
        change.apply()
    assert torch.allclose(logits(), right, atol=1e-5)
    assert "settings" in change.cause


@pytest.mark.parametrize("build", [MistralConfig, Qwen2Config], ids=["mistral", "qwen2"])
def test_a_window_is_left_out(build: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    window = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
    config = build(vocab_size=40, num_key_value_heads=2, max_position_embeddings=64, **sizes, **window)
    torch.manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(config).eval()
    whole = AutoModelForCausalLM.from_config(build(vocab_size=40, num_key_value_heads=2, **sizes)).eval()
    whole.load_state_dict(narrow.state_dict())
    tokens = torch.arange(3, 15)[None]
    (change,) = (change for change in changes(narrow) if "window of 3" in change.what)
    with torch.no_grad():
        before = narrow(input_ids=tokens).logits
        change.apply()
        assert torch.allclose(narrow(input_ids=tokens).logits, whole(input_ids=tokens).logits, atol=1e-5)
        change.undo()
        assert torch.equal(narrow(input_ids=tokens).logits, before)


def test_an_adapter_is_switched_off_once_it_does_something_and_has_to_earn() -> None:
    setup = build_setup(schooled_config("model.lora={r: 4, alpha: 8}"))
    with closing(setup.run):
        model = causal_lm(setup.policy.model)
        assert not any("adapter" in change.what for change in changes(model))
        before = answer_logp(setup, golds(setup))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        spoilt = answer_logp(setup, golds(setup))
        (change,) = (change for change in changes(model) if "adapter" in change.what)
        assert change.has_to_earn
        change.apply()
        assert answer_logp(setup, golds(setup)) == before != spoilt
        change.undo()
        assert answer_logp(setup, golds(setup)) == spoilt


def test_answers_that_nothing_stands_before_have_a_likelihood() -> None:
    setup = build_setup(schooled_config())
    with closing(setup.run):
        gold = golds(setup)[0]
        padded = Gold((setup.policy.pad_id,), gold.answer)
        assert answer_logp(setup, [Gold((), gold.answer), gold]) == answer_logp(setup, [padded, gold])


def test_one_answer_for_all_questions_says_nothing_of_weights() -> None:
    """A model that writes the commonest answer whatever it is asked finds these likelier than one that reads."""
    same, others = [Gold((1,), (5,))] * 9, [Gold((1,), (n,)) for n in range(9)]
    assert not _tells_apart([*same, *others[:1]], [-0.4] * 10)
    assert _tells_apart([*same, *others[:1]], [-0.1] * 10)
    assert _tells_apart(others, [-5.0] * 9)


def test_what_was_split_is_put_back_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fresh_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    (change,) = (change for change in changes(model) if "group by group" in change.what)
    joined, cat = iter(range(9)), torch.cat

    def at_the_second(*rows: Any, **options: Any) -> torch.Tensor:
        if next(joined):
            raise torch.OutOfMemoryError("no memory")
        return cat(*rows, **options)

    monkeypatch.setattr(torch, "cat", at_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        change.apply()
    monkeypatch.undo()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
