"""Trainable weights: almost none, or as many as parameter-efficient methods have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.doctor.probes.objective import weighed_by
from keel.doctor.probes.reach import frozen_findings
from keel.doctor.thresholds import load_thresholds
from keel.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("trained", "named"),
    [
        (lambda name: name.endswith("model.norm.weight"), True),
        (lambda name: name.endswith("layers.0.input_layernorm.weight"), True),
        (lambda name: "norm" in name, False),
        (lambda name: "layers.1" in name, False),
        (lambda name: True, False),
    ],
    ids=["the last norm", "a norm of one layer", "all norms", "the last layer", "everything"],
)
def test_a_model_of_which_next_to_nothing_is_trained_is_named(trained: Any, named: bool) -> None:
    model, _ = tiny_model()
    parameters = [p for name, p in model.named_parameters() if trained(name)]
    setup: Any = SimpleNamespace(
        policy=SimpleNamespace(model=model, lora=None),
        run=SimpleNamespace(optimizer=SimpleNamespace(parameters=parameters)),
    )
    assert [f.code for f in frozen_findings(setup)] == ["optim/no-update"] * named


MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
ADVANTAGE = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)[:, None].expand(4, 4)
LENGTHS, PLACES = MASK.sum(-1, keepdim=True).double().expand(4, 4), (MASK.cumsum(-1) - 1).double()


@pytest.mark.parametrize(
    ("push", "by"),
    [
        (torch.ones(4, 4).double(), ""),
        ((ADVANTAGE - 0.25) / ADVANTAGE, "size of the advantage"),
        (torch.where(ADVANTAGE > 0, 1.0, 0.5).double(), ""),
        (LENGTHS, "grows with the length"),
        (0.5 / LENGTHS, "falls with the length"),
        (0.3 ** (LENGTHS - 1 - PLACES), "distance to the end"),
        (0.3**PLACES, "the position"),
        (0.99**PLACES, ""),
        (1 + torch.arange(16).view(4, 4).double() ** 2 % 7, ""),
    ],
    ids=[
        "even",
        "centred",
        "less for what is bad",
        "a sum for a mean",
        "a mean twice",
        "discounted",
        "fading",
        "hardly discounted",
        "weights of one's own",
    ],
)
def test_what_a_tokens_weight_depends_on(push: torch.Tensor, by: str) -> None:
    found = weighed_by(MASK, push[MASK], ADVANTAGE[MASK], load_thresholds())
    assert by in found
    assert bool(found) == bool(by)
