"""Finite differences of functions with known derivatives, against correct and wrong gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from keel.doctor.gradient import wrong_derivatives


class Bowl(nn.Module):
    """f = a·a + sin b·c, with ∂f/∂a = 2a and so on; f does not depend on `blind`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in ("a", "b", "c", "blind"):
            self.register_parameter(name, nn.Parameter(torch.randn(4, 5, generator=generator)))

    def forward(self) -> Tensor:
        return self.a.square().sum() + (self.b.sin() * self.c).sum()


def wrong(change: dict[str, float | Tensor]) -> list[str]:
    bowl = Bowl()
    by_hand = {"a": 2 * bowl.a, "b": bowl.b.cos() * bowl.c, "c": bowl.b.sin(), "blind": torch.zeros(4, 5)}
    named = list(bowl.named_parameters())
    before = [parameter.detach().clone() for _, parameter in named]
    gradients = [by_hand[name].detach() * change.get(name, 1.0) for name, _ in named]
    found = wrong_derivatives(named, gradients, lambda: float(bowl()))
    assert all(torch.equal(now, then) for (_, now), then in zip(named, before, strict=True))
    return [name for name, *_ in found]


def test_right_gradients_pass() -> None:
    assert wrong({}) == []


@pytest.mark.parametrize("factor", [-1.0, 0.0, 3.0])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_tensor_with_another_gradient_is_named(name: str, factor: float) -> None:
    assert name in wrong({name: factor})


def test_all_of_them_reversed_are_one_finding_first() -> None:
    assert wrong(dict.fromkeys("abc", -1.0)) == ["all weights together", "a", "b", "c"]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_part_of_a_tensor_without_its_gradient_is_named(name: str) -> None:
    """The slope along the remaining gradient is correct."""
    half = (torch.arange(4) < 2).float()[:, None]
    assert wrong({name: half}) == [f"entries without gradient of {name}"]
    assert wrong({"blind": half}) == []


@pytest.mark.parametrize("padding", [2, None])
def test_a_row_that_torch_never_trains_is_no_fault(padding: int | None) -> None:
    """The end token is often the padding token too and occurs in prompts."""
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 8, padding_idx=padding)
    nn.init.normal_(embedding.weight)
    ids = torch.tensor([0, 2, 1, 2])
    (gradient,) = torch.autograd.grad(embedding(ids).square().sum(), embedding.weight)
    named, value = [("e.weight", embedding.weight)], lambda: float(embedding(ids).square().sum())
    assert wrong_derivatives(named, [gradient], value, {"e.weight": 2}) == []
    assert bool(wrong_derivatives(named, [gradient], value)) == (padding == 2)
