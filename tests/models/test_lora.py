"""LoRA: a fresh adapter changes nothing, a continued one starts where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models import load_model
from keel.models.lora import adapter_is_zero

IDS = torch.tensor([[5, 40, 60, 7, 9]])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains() -> None:
    plain, model = load_model("tiny", device="cpu").model, load_model("tiny", device="cpu", lora={"r": 4}).model
    assert torch.equal(logits(model), logits(plain))
    assert adapter_is_zero(model)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    # 7 linear layers a block, the head left out
    assert len([name for name in trainable if "lora_A" in name]) == 4 * 7


def test_equal_seeds_give_equal_adapters() -> None:
    state = torch.get_rng_state()
    a, b, c = (load_model("tiny", device="cpu", lora={"r": 2}, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name, _ in a.named_parameters() if "lora_A" in name)
    assert torch.equal(a.get_parameter(name), b.get_parameter(name))
    assert not torch.equal(a.get_parameter(name), c.get_parameter(name))


def test_continuing_an_adapter(tmp_path: Path) -> None:
    first: Any = load_model(
        "tiny", device="cpu", lora={"r": 3, "alpha": 9, "dropout": 0.1, "targets": ["q_proj"]}
    ).model
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    first.eval()
    first.save_pretrained(tmp_path)
    again = load_model("tiny", device="cpu", lora={"adapter": str(tmp_path)})
    assert torch.equal(logits(again.model), logits(first))
    assert not adapter_is_zero(again.model)
    assert again.lora is not None
    assert (again.lora.r, again.lora.alpha, again.lora.targets) == (3, 9, ("q_proj",))
    assert [p.shape for p in again.model.parameters() if p.requires_grad] == [
        p.shape for p in first.parameters() if p.requires_grad
    ]
    # dropout that the adapter was trained with is off unless asked for again
    again.model.train()
    assert torch.equal(logits(again.model), logits(again.model))


def test_dropout_that_was_asked_for_is_there() -> None:
    model = load_model("tiny", device="cpu", lora={"r": 3, "dropout": 0.5}).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert model.training
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4}, "unknown option model.lora.rank"),
        ({"r": 0}, "lora.r is 0"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": ["no_such_layer"]}, "no_such_layer"),
        ({"adapter": "nowhere/adapter"}, "no adapter at"),
    ],
)
def test_bad_settings_are_one_line(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        load_model("tiny", device="cpu", lora=lora)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model: Any = load_model("tiny", device="cpu", lora={"r": 2}).model
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(KeelError, match="does not fit") as caught:
        load_model("tiny", device="cpu", lora={"adapter": str(tmp_path)})
    assert "\n" not in str(caught.value)
