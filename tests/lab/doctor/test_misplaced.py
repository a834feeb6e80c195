"""Weights in the wrong place, found by putting them back; weights in the right one stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from keel.base.thresholds import load_thresholds
from keel.lab.doctor.probes.misplaced import changes, misplaced_weights
from keel.lab.doctor.setup import build_setup
from lab.doctor.schooled import fresh_model, schooled_config


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


FAULTS: dict[Callable[[Any], None], str] = {
    exchanged_layers: "layers 0 and 1 exchanged",
    keys_for_values: "k_proj.weight and self_attn.v_proj.weight of all layers exchanged",
    transposed_outputs: "o_proj.weight of all layers transposed",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_change_that_mends_it_is_named(fault: Callable[[Any], None]) -> None:
    setup = build_setup(schooled_config())
    with closing(setup.run):
        fault(setup.policy.model)
        assert FAULTS[fault] in (misplaced_weights(setup, load_thresholds()) or "")


@pytest.mark.parametrize("lora", ["null", "{r: 4, alpha: 8}"])
def test_weights_in_their_place_are_left_there(lora: str) -> None:
    setup = build_setup(schooled_config(f"model.lora={lora}"))
    with closing(setup.run):
        assert misplaced_weights(setup, load_thresholds()) is None


def test_every_change_changes_something_and_is_undone() -> None:
    model, _ = fresh_model()
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
