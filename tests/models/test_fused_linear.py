"""Several products of one input as one: the numbers of each alone, with gradients in fp32 and casts made once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keel.models import fused_linear
from keel.models.fused_linear import cast_weights_once, fused_linears
from keel.trainer.optim import Optimizer
from keel.trainer.options import OptimOptions


def linears_of(bias: bool, *sizes: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias) for size in sizes]


@pytest.mark.parametrize("half_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_each_alone(bias: bool, half_input: bool) -> None:
    linears = linears_of(bias, 16, 8, 8)
    x = torch.randn(3, 5, 24).to(torch.bfloat16 if half_input else torch.float32).requires_grad_()
    weight = torch.randn(3, 5, 32).bfloat16().float()  # exact in half precision, as upstream gradients are
    parameters = [x, *(p for linear in linears for p in linear.parameters())]
    with torch.autocast("cpu", torch.bfloat16):
        joint = fused_linears(x, *linears)
        alone = torch.cat([linear(x) for linear in linears], dim=-1)
    assert joint is not None
    torch.testing.assert_close(joint, alone, atol=2e-2, rtol=2e-2)
    mine = torch.autograd.grad((joint.float() * weight).sum(), parameters)
    rounded = torch.cat([linear.weight for linear in linears]).bfloat16().float()
    d_weights = (weight.flatten(0, 1).t() @ x.detach().bfloat16().float().flatten(0, 1)).split([16, 8, 8])
    d_biases = weight.sum((0, 1)).split([16, 8, 8])
    truths = [weight @ rounded, *(d for pair in zip(d_weights, d_biases, strict=True) for d in pair[: 1 + bias])]
    for gradient, truth, parameter in zip(mine, truths, parameters, strict=True):
        assert gradient.dtype == parameter.dtype
        allowed = 1e-2 if gradient.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(gradient.float(), truth, atol=allowed, rtol=allowed)


def test_weights_are_cast_once_a_pass_or_update() -> None:
    linears, x, results = linears_of(False, 4, 4), torch.randn(2, 24), []
    for number in cast_weights_once(range(3)):
        if number == 1:  # behind torch's back: that the old cast is used shows that there is only one
            linears[0].weight.data.zero_()
        if number == 2:
            with torch.no_grad():
                linears[1].weight.fill_(1.0)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(fused_linears(x, *linears))
    assert torch.equal(results[0], results[1])
    assert not results[2][:, :4].any()
    assert torch.equal(results[2][:, 4], results[2][:, 5])
    assert fused_linear._passes == []


@pytest.mark.parametrize("changed", ["bias", "layers", "dtype"])
def test_a_cast_is_used_only_for_its_own_layers_dtype_and_values(changed: str) -> None:
    """Shapes of Qwen2.5-0.5B's key and value projections, which have biases."""
    torch.manual_seed(0)
    key, value, other = (nn.Linear(896, 128) for _ in range(3))
    x = torch.randn(2, 896)
    for number in cast_weights_once(range(2)):
        dtype = torch.float16 if number and changed == "dtype" else torch.bfloat16
        layers = (key, other) if number and changed == "layers" else (key, value)
        if number and changed == "bias":
            with torch.no_grad():
                value.bias.add_(3.0)
        with torch.autocast("cpu", dtype), torch.no_grad():
            joint = fused_linears(x, *layers)
            assert joint is not None
            torch.testing.assert_close(joint, torch.cat([layer(x) for layer in layers], dim=-1), atol=2e-2, rtol=2e-2)


def test_an_update_by_a_fused_optimizer_is_seen() -> None:
    """torch's fused AdamW does not count its writes; Keel's optimizer does it."""
    linears, x, results = linears_of(False, 4), torch.randn(2, 24), []
    optimizer = Optimizer(linears[0], OptimOptions(learning_rate=0.5))
    for number in cast_weights_once(range(2)):
        if number == 1:
            linears[0](x).sum().backward()
            optimizer.step()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            results.append(fused_linears(x, *linears))
            truth = linears[0](x)
        torch.testing.assert_close(results[-1], truth)
    assert not torch.allclose(results[0], results[1])


def test_frozen_weights_get_no_gradient() -> None:
    (linear,) = linears_of(True, 8)
    linear.requires_grad_(False)
    x = torch.randn(2, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = fused_linears(x, linear)
    assert y is not None
    y.sum().backward()
    assert linear.weight.grad is None
    assert x.grad is not None


def test_what_is_no_plain_product_is_left_to_its_module() -> None:
    plain, other = linears_of(False, 8, 8)
    x = torch.randn(2, 24)
    assert fused_linears(x, plain) is None  # no autocast
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_linears(x, plain) is not None
        assert fused_linears(x, plain, *linears_of(True, 8)) is None  # one has a bias
        assert fused_linears(x, plain, nn.Sequential(other)) is None  # an adapter, say
        other.register_forward_hook(lambda *_: None)
        assert fused_linears(x, plain, other) is None
        assert fused_linears(x, plain.bfloat16()) is None  # nothing to cast
