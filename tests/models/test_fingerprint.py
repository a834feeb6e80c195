"""The fingerprint changes with any element, and with nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keel.models import fingerprint, load_model
from keel.models.fingerprint import _ROW, fingerprint_tensors

LORA = {"r": 2, "alpha": 4}


class Odd(nn.Module):
    """Sizes that do not fill words, rows or blocks, and dtypes of 1, 2, 4 and 8 bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(7))
        self.b = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.randn(2 * _ROW + 11, dtype=torch.float32))
        self.d = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.e = nn.Parameter(torch.randint(-9, 9, (13,), dtype=torch.int8), requires_grad=False)
        self.f = nn.Parameter(torch.zeros(0))
        self.g = nn.Parameter(torch.randn(6, 4).t())  # not contiguous


def test_any_one_element_changes_it() -> None:
    model = Odd()
    before = fingerprint(model)
    seen = {before}
    for parameter in model.parameters():
        for index in {0, parameter.numel() // 2, parameter.numel() - 1, min(_ROW, parameter.numel() - 1)}:
            if parameter.numel() == 0:
                continue
            changed = copy.deepcopy(model)
            target = dict(zip(map(id, model.parameters()), changed.parameters(), strict=True))[id(parameter)]
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
            flat = target.data.contiguous().reshape(-1)
            flat.view(bits)[index] ^= 1  # the least significant bit of one element
            target.data = flat.reshape(target.shape)
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 3 + 3 + 4 + 1 + 3 + 3
    assert fingerprint(copy.deepcopy(model)) == before


@pytest.mark.parametrize("swap", [(0, 1), (0, 2), (1, _ROW), (3, 2 * _ROW + 10)])
def test_swapping_two_elements_changes_it(swap: tuple[int, int]) -> None:
    model = Odd()
    before = fingerprint(model)
    with torch.no_grad():
        model.c[list(swap)] = model.c[list(swap[::-1])].clone()
    assert fingerprint(model) != before


def test_it_does_not_depend_on_layout_or_order() -> None:
    x, y = torch.randn(6, 4), torch.randn(9)
    first = fingerprint_tensors([("x", x), ("y", y[1:])])
    assert fingerprint_tensors([("y", y[1:].clone()), ("x", x.t().contiguous().t())]) == first
    assert fingerprint_tensors([("x", x.reshape(4, 6)), ("y", y[1:])]) != first


def test_a_copy_in_another_dtype_is_compared_through_the_cast() -> None:
    policy = load_model("tiny", device="cpu").model
    engine = copy.deepcopy(policy).to(torch.bfloat16)
    assert fingerprint(engine) == fingerprint(policy, dtype=torch.bfloat16)
    assert fingerprint(engine) != fingerprint(policy)
    with torch.no_grad():
        next(policy.parameters())[3, 4] += 0.5
    assert fingerprint(engine) != fingerprint(policy, dtype=torch.bfloat16)


def test_of_lora_only_what_is_in_effect_counts() -> None:
    plain = load_model("tiny", device="cpu").model
    model: Any = load_model("tiny", device="cpu", lora=LORA).model
    active = fingerprint(model)
    assert active != fingerprint(plain)
    with model.disable_adapter():
        assert fingerprint(model) == fingerprint(plain)

    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    assert fingerprint(model) == active
    model.load_state_dict(
        {key.replace(".default.", ".other."): value for key, value in model.state_dict().items() if ".default." in key},
        strict=False,
    )
    model.set_adapter("other")
    assert fingerprint(model) == active  # the same adapter under another name

    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B.other" in n)[0, 0] = 1e-30
    assert fingerprint(model) != active


def test_the_scaling_of_an_adapter_counts() -> None:
    models = [load_model("tiny", device="cpu", lora={"r": 2, "alpha": alpha}).model for alpha in (4, 8)]
    assert fingerprint(models[0]) != fingerprint(models[1])


def test_an_optimizer_step_on_the_adapter_changes_it() -> None:
    model = load_model("tiny", device="cpu", lora=LORA).model
    before = fingerprint(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.square().sum().backward()
    optimizer.step()
    assert fingerprint(model) != before
