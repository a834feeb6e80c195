"""The fingerprint changes with any element, and with nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keel.models import fingerprint, load_model
from keel.models.fingerprint import _BLOCK, _ROW, _groups, _joint_sums, _row_sums, _words, fingerprint_tensors

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_flipped_signs_never_cancel(dtype: torch.dtype) -> None:
    """A sum of wᵢxᵢ keeps its value when two top bits flip: any odd number times 2⁶³ is 2⁶³."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {fingerprint_tensors([("x", x)])}
    for step in (2, 4, 8):
        for first in range(step):
            changed = x.clone()
            changed[:, first::step] *= -1
            seen.add(fingerprint_tensors([("x", changed)]))
    pairs = [(i, j) for i in range(16) for j in range(i)]
    for i, j in pairs:
        changed = x.clone()
        changed[0, [i, j]] *= -1
        seen.add(fingerprint_tensors([("x", changed)]))
    assert len(seen) == 1 + 14 + len(pairs)


def test_any_one_bit_and_any_pair_of_like_bits_changes_it() -> None:
    words = torch.randint(-(2**62), 2**62, (6,), generator=torch.Generator().manual_seed(0))
    seen = {fingerprint_tensors([("x", words)])}
    for bit in range(64):
        mask = 1 << bit if bit < 63 else -(1 << 63)
        for places in ([0], [5], [0, 1], [2, 5]):
            changed = words.clone()
            changed[places] ^= mask
            seen.add(fingerprint_tensors([("x", changed)]))
    assert len(seen) == 1 + 64 * 4


def test_buffers_of_the_state_count_and_derived_ones_do_not() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("derived", torch.ones(2), persistent=False)
    before = fingerprint(model)
    model.derived += 1
    assert fingerprint(model) == before
    model.running_mean += 1  # type: ignore[operator]
    assert fingerprint(model) != before


def test_merging_an_adapter_changes_it_and_switching_a_merged_one_off_too() -> None:
    model: Any = load_model("tiny", device="cpu", lora=LORA).model  # B = 0: merging leaves the base as it is
    seen = {fingerprint(model)}
    model.merge_adapter()
    seen.add(fingerprint(model))
    with model.disable_adapter():
        seen.add(fingerprint(model))
    assert len(seen) == 3


def test_tensors_that_are_summed_together_have_the_sums_of_each():
    torch.manual_seed(0)
    sizes = (1, 0, 3, 2 * _ROW, 2 * _ROW + 1, 4 * _ROW, 5 * _ROW - 7, 2)  # of 32 bits: two make a word
    words = [*(_words(torch.randn(size)) for size in sizes), _words(torch.randn(301, 300).bfloat16())]
    for alone, together in zip(map(_row_sums, words), _joint_sums(words), strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_groups_keep_the_order_and_are_no_larger_than_a_block(monkeypatch):
    monkeypatch.setitem(_BLOCK, "cpu", 4 * _ROW)
    sizes = (3, 0, _ROW, 4 * _ROW, 5 * _ROW, 0, 2, 1, 4 * _ROW, 7)
    words = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    groups = [[len(part) for part in group] for group in _groups(words, lambda part: True)]
    assert groups == [[3, 0, _ROW], [4 * _ROW], [5 * _ROW], [0, 2, 1], [4 * _ROW], [7]]
    assert [len(part) for group in _groups(words, lambda part: False) for part in group] == list(sizes)
