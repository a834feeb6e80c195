"""Norms, gated activations and rotations of a model on a GPU as one kernel each, forward and backward.

Written out, an RMS norm is six passes over its input, a gated activation two and the rotation of queries and keys ten,
and nearly as many backward: in a training pass of a small or middle-sized model they take as long as the matrix
products. A module is replaced only where its numbers have been found to be the same on random input.

`fallback_notes` says what a model computes another way than the fastest, and why.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.models.chunked import why_not_one_kernel
from keel.models.flash_prefix import flash_attend, flash_dtype, has_triton, why_not_flash
from keel.models.head import body_of, head_of
from keel.models.prefix_attention import (
    RowStructure,
    active_structure,
    attends_by_flash,
    head_size,
    prefix_attention,
    refuse_variants,
    small_rows,
    why_not_by_structure,
)
from keel.models.products import joint_product

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def fuse_modules(model: nn.Module) -> int:
    """Replace the forward of modules that have a fused form, in place; how many. Weights and names stay."""
    if not next(model.parameters()).is_cuda:
        return 0
    count = 0
    agreeing: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        forward = fused_forward(module)
        if forward is None:
            continue
        parameter = next(module.parameters())
        kind: tuple[Any, ...] = (type(module), parameter.shape, parameter.dtype)
        if forward is attention:
            kind = (module,)  # layers of one kind may rotate or not
        if kind not in agreeing:
            agreeing[kind] = attention_agrees(module) if forward is attention else _agrees(module, forward)
        if agreeing[kind]:
            replace_forward(module, forward)
            count += 1
    return count


def replace_forward(module: Any, forward: Any) -> None:
    module.forward = MethodType(forward, module)


def fused_forward(module: nn.Module) -> Any:
    names = {name for name, _ in module.named_children()}
    if hasattr(module, "variance_epsilon") and not names and [n for n, _ in module.named_parameters()] == ["weight"]:
        one_input = len(inspect.signature(type(module).forward).parameters) == 2  # a gated norm takes its gate too
        return _rms_norm if one_input else None
    if names - {"q_norm", "k_norm"} == _ATTENTION:
        return attention
    silu = names == _GATED and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    double = any(parameter.dtype == torch.float64 for parameter in module.parameters())  # the kernel sums in fp32
    return _gated_mlp if silu and has_triton() and not double else None


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return functional.rms_norm(
        hidden_states, self.weight.shape, self.weight.to(hidden_states.dtype), self.variance_epsilon
    )


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    from keel.models.gated import gated_silu

    joint = joint_product(x, self.gate_proj, self.up_proj)
    if joint is not None:
        return _product(gated_silu(joint), self.down_proj)
    x = x.to(flash_dtype(x))  # once for both products
    return _product(gated_silu(self.gate_proj(x), self.up_proj(x)), self.down_proj)


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    y = joint_product(x, linear)
    return linear(x) if y is None else y


def attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Where rows are attended by structure and flash kernels take them, rotations beside them; else the class's own."""
    structure, rotation = active_structure(self.config), kwargs.get("position_embeddings")
    dropout = self.attention_dropout if self.training else 0.0
    flash = why_not_flash(hidden_states, self.head_dim, dropout) is None
    whole = rotation is not None and rotation[0].shape[-1] == self.head_dim  # not a part of each head
    if structure is None or rotation is None or not whole or args or not flash:
        result: tuple[Tensor, Any] = type(self).forward(self, hidden_states, *args, **kwargs)
        return result
    refuse_variants({name: value for name, value in kwargs.items() if name != "position_embeddings"})
    x, projections = hidden_states.flatten(0, 1), (self.q_proj, self.k_proj, self.v_proj)
    joint = joint_product(x, *projections)
    if joint is None:
        x = x.to(flash_dtype(x))  # once for three products
        parts = tuple(projection(x) for projection in projections)
    else:
        parts = joint.split([projection.out_features for projection in projections], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (part.expand(*hidden_states.shape[:2], -1).flatten(0, 1) for part in rotation)
    out = flash_attend(q, k, v, structure.segments, self.scaling, (cos, sin))
    return _product(out.view(*hidden_states.shape[:2], -1), self.o_proj), None


@torch.no_grad()
def _agrees(module: Any, forward: Any) -> bool:
    """Whether the fused form gives the module's own numbers, to what rounding allows."""
    parameter = next(module.parameters())
    width = parameter.shape[-1]
    generator = torch.Generator(parameter.device).manual_seed(0)
    x = torch.randn(64, width, generator=generator, device=parameter.device).to(parameter.dtype)
    try:
        expected, result = module(x).float(), forward(module, x).float()
    except Exception:  # whatever a foreign module raises here, its own forward still serves
        return False
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    error = (result - expected).norm() / expected.norm().clamp_min(1e-12)
    return bool(error < (1e-2 if half else 1e-5))


@torch.no_grad()
def attention_agrees(module: Any) -> bool:
    """The same of attention, on small shared-prefix rows in half precision."""
    forwards = (type(module).forward, attention)
    parameter = next(module.parameters())
    packed = small_rows().to(parameter.device)
    generator = torch.Generator(parameter.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*packed.input_ids.shape, *shape, generator=generator, device=parameter.device)

    try:
        x, angles = normal(module.q_proj.in_features).to(parameter.dtype), normal(module.head_dim // 2).repeat(1, 1, 2)
        # scores of size one: where a softmax is flat, a rotation more or less does not show
        x = x * (module.q_proj(x).std() * module.k_proj(x).std() * module.head_dim**0.5 * module.scaling).rsqrt()
        inputs = {"hidden_states": x, "position_embeddings": (angles.cos().to(x.dtype), angles.sin().to(x.dtype))}
        half = torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.float32)
        with half, prefix_attention(module.config, RowStructure(packed)):  # which refuses windows, soft caps and so on
            own, mine = (forward(module, **inputs, attention_mask=None)[0].float() for forward in forwards)
    except Exception:  # whatever a foreign module raises here, its own forward still serves
        return False
    return bool((mine - own).norm() < 5e-2 * own.norm())


def fallback_notes(model: nn.Module, amp_dtype: torch.dtype | None = None, *, planned: bool = False) -> tuple[str, ...]:
    """A line for each: attention, the vocabulary's statistics, norms and MLPs.

    `planned`: it will be on a GPU, which is taken for a new one.
    """
    body: Any = body_of(model)
    like = next(body.parameters())
    with torch.autocast(like.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        reason = why_not_flash(like, head_size(body), planned=planned) or why_not_by_structure(body)
        if reason is None and like.is_cuda and not attends_by_flash(body):
            reason = "a trial showed that it is not plain attention"
    attention = () if reason is None else (f"attention of the training passes is not by flash kernels: {reason}",)
    reason = why_not_one_kernel(like, head_of(model), planned=planned)
    statistics = () if reason is None else (f"statistics of the vocabulary are not by one kernel: {reason}",)
    written_out = sorted({type(module).__name__ for module in body.modules() if _is_written_out(module)})
    modules = (f"{', '.join(written_out)} have no fused form and are computed by single operations",)
    return (*attention, *statistics, *(modules if written_out else ()))


def _is_written_out(module: nn.Module) -> bool:
    """Whether it is an RMS norm or an MLP with the forward of its class; torch's own norms are one kernel anyway."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in vars(module)
