"""Misplaced weights are found by restoring them, and correct weights are not reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM

from doctor.schooled import fresh_model, schooled_config
from keel.base.types import Problem
from keel.doctor.decide import Hypothesis, Likelier, _tells_apart, swap
from keel.doctor.keel_subject import build_subject
from keel.doctor.loading import adapters, changes, measure_loading, set_for_a_while
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


def transposed_squares(model: Any) -> None:
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            module.weight.data = module.weight.data.t().contiguous()


def wider_heads(model: Any) -> None:
    settings = next(settings for what, _, settings in changes(model) if what == "heads of 12 instead of 6 dimensions")
    for owner, name, value in settings():
        setattr(owner, name, value)


def another_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sigmoid()


FAULTS: dict[Callable[[Any], None], str] = {
    exchanged_layers: "layers 0 and 1 exchanged",
    keys_for_values: "k_proj.weight and self_attn.v_proj.weight of all layers exchanged",
    transposed_squares: "q_proj.weight and self_attn.o_proj.weight of all layers transposed",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_change_that_mends_it_is_named(fault: Callable[[Any], None]) -> None:
    subject = build_subject(schooled_config())
    with closing(subject.run):
        fault(subject.policy.model)
        (finding,) = measure_loading(subject).findings
        assert (finding.code, finding.severity) == ("model/missing-weights", "error")
        assert FAULTS[fault] in finding.evidence


@pytest.mark.parametrize("lora", ["null", "{r: 4, alpha: 8}"])
def test_weights_in_their_place_are_left_there(lora: str) -> None:
    subject = build_subject(schooled_config(f"model.lora={lora}"))
    with closing(subject.run):
        assert measure_loading(subject).findings == ()


def granite() -> nn.Module:
    """A model with its own scale of attention."""
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
        for what, _, settings in changes(model):
            with set_for_a_while(settings):
                assert not torch.equal(logits(), before) or "base of 10000" in what or "layernorm" in what
            assert torch.equal(logits(), before), what
            names.add(what)
    assert len(names) > 8


def test_a_model_without_layers_has_nothing_to_exchange() -> None:
    assert not list(changes(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("fault", "fix"),
    [(another_activation, "silu as the activation"), (wider_heads, "heads of 6 instead of 12 dimensions")],
)
def test_the_setting_that_a_model_was_trained_with_is_tried(fault: Callable[[Any], None], fix: str) -> None:
    model, _ = fresh_model()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.arange(3, 15)[None]).logits

    right = logits()
    fault(model)
    assert not torch.allclose(logits(), right)
    settings = next(settings for what, _, settings in changes(model) if what == fix)
    with set_for_a_while(settings):
        assert torch.allclose(logits(), right, atol=1e-5)


def test_an_adapter_is_switched_off_once_it_does_something() -> None:
    subject = build_subject(schooled_config("model.lora={r: 4, alpha: 8}"))
    with closing(subject.run):
        problems = subject.problems(4)

        def likely() -> list[float]:
            return [float(logp.sum()) for logp in subject.answer_logp(problems)]

        assert not list(adapters(subject))
        before = likely()
        for name, parameter in causal_lm(subject.policy.model).named_parameters():
            if ".lora_B." in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        spoilt = likely()
        (hypothesis,) = adapters(subject)
        with hypothesis.apply(subject):
            assert likely() == before != spoilt
        assert likely() == spoilt


def test_answers_that_nothing_stands_before_have_a_likelihood() -> None:
    subject = build_subject(schooled_config())
    with closing(subject.run):
        problems, pad = subject.problems(2), (subject.policy.pad_id,)
        ways = (subject.swapped(prompt=lambda problem, prompt=prompt: prompt) for prompt in ((), pad))
        bare, padded = ([float(logp.sum()) for logp in way.answer_logp(problems)] for way in ways)
        assert bare == padded


def test_one_answer_for_all_questions_says_nothing_of_weights() -> None:
    """A model that ignores the question may still assign a high probability to the most common answer."""

    def tells(answers: list[int], logp: float) -> bool:
        problems = [Problem(str(i), "", answer) for i, answer in enumerate(answers)]
        subject = SimpleNamespace(answer=lambda problem: (problem.answer,))
        by = Hypothesis("", "", "", "", swap())
        return _tells_apart(subject, Likelier(by, problems, [logp] * len(answers), [logp] * len(answers)))

    assert not tells([5] * 9 + [0], -0.4)
    assert tells([5] * 9 + [0], -0.1)
    assert tells([*range(9)], -5.0)


def test_what_was_set_is_put_back_where_memory_ends() -> None:
    model, _ = fresh_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = next(settings for what, _, settings in changes(model) if "exchanged" in what)
    *chosen, (owner, name, _) = settings()
    with pytest.raises(TypeError), set_for_a_while(lambda: [*chosen, (owner, name, "no tensor")]):
        pass
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
