"""What adapter_off holds is said where it is not the base model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.config import load_config
from keel.run.build import build_policy, build_run


@pytest.mark.parametrize(
    ("kind", "past", "said"),
    [("adapter_off", True, True), ("adapter_off", False, False), ("auto", True, False), ("frozen", True, False)],
)
def test_an_adapter_with_a_past_is_held_as_it_is_and_said(kind: str, past: bool, said: bool) -> None:
    config = load_config({}, ["model.name=tiny", "model.lora.r=2", f"reference.kind={kind}", "kl.beta=0.01"])
    loaded = build_policy(config)
    if past:
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.1)
    built = build_run(config, loaded)
    assert any("not the base model" in note for note in built.notes) == said
    reference: Any = built.run.reference
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        policy = loaded.model(input_ids=tokens).logits
        with reference.model() as model:
            assert torch.allclose(model(input_ids=tokens).logits, policy)  # the KL begins at 0, whatever it is called
