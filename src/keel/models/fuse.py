"""Fused norms, gated activations and rotary attention of a model on a GPU, forward and backward.

Unfused, an RMS norm is six passes over its input, a gated activation two and the rotation of queries and keys ten, and
nearly as many in the backward: in small and middle-sized models they take as long as the matmuls. A module is replaced
only if the fused form is as near to fp32 as its own forward.

`fallback_notes` lists what does not run on the fastest path, and why.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.models.chunked import fused_stats_unsupported_reason
from keel.models.flash_prefix import flash_attend, flash_dtype, flash_unsupported_reason, has_triton
from keel.models.fused_linear import fused_linears
from keel.models.head import at_least_fp32, body_of, head_of
from keel.models.noise import Errors, errors_of, judge
from keel.models.prefix_attention import (
    RowStructure,
    active_structure,
    head_size,
    prefix_attention,
    refuse_unsupported_attention,
    small_rows,
    structured_unsupported_reason,
    uses_flash,
)

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def fuse_modules(model: nn.Module) -> int:
    """Replace the forward of modules with a fused form in place; return how many. Weights and names stay."""
    if not next(model.parameters()).is_cuda:
        return 0
    count = 0
    matching: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        forward = fused_forward(module)
        if forward is None:
            continue
        parameter = next(module.parameters())
        kind: tuple[Any, ...] = (type(module), parameter.shape, parameter.dtype)
        if forward is attention:
            kind = (module,)  # layers of one class may or may not rotate
        if kind not in matching:
            matching[kind] = attention_matches(module) if forward is attention else _matches(module, forward)
        if matching[kind]:
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
    from keel.models.gated_kernels import gated_silu

    joint = fused_linears(x, self.gate_proj, self.up_proj)
    if joint is not None:
        return _product(gated_silu(joint), self.down_proj)
    x = x.to(flash_dtype(x))  # one cast for both matmuls
    return _product(gated_silu(self.gate_proj(x), self.up_proj(x)), self.down_proj)


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    y = fused_linears(x, linear)
    return linear(x) if y is None else y


def attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Shared-prefix attention with flash kernels and fused rotation if supported, else the class's own forward."""
    structure, rotation = active_structure(self.config), kwargs.get("position_embeddings")
    dropout = self.attention_dropout if self.training else 0.0
    flash = flash_unsupported_reason(hidden_states, self.head_dim, dropout) is None
    whole = rotation is not None and rotation[0].shape[-1] == self.head_dim  # not a partial rotation
    if structure is None or rotation is None or not whole or args or not flash:
        result: tuple[Tensor, Any] = type(self).forward(self, hidden_states, *args, **kwargs)
        return result
    refuse_unsupported_attention({name: value for name, value in kwargs.items() if name != "position_embeddings"})
    x, projections = hidden_states.flatten(0, 1), (self.q_proj, self.k_proj, self.v_proj)
    joint = fused_linears(x, *projections)
    if joint is None:
        x = x.to(flash_dtype(x))  # one cast for three matmuls
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
def _matches(module: Any, forward: Any) -> bool:
    """Whether the fused form is as near to fp32 as the module's own forward."""
    parameter = next(module.parameters())

    def draw(seed: int) -> Errors:
        generator = torch.Generator(parameter.device).manual_seed(seed)
        x = torch.randn(64, parameter.shape[-1], generator=generator, device=parameter.device).to(parameter.dtype)
        return errors_of(module, forward(module, x), module(x), lambda: module(at_least_fp32(x)))

    try:
        return judge(draw, exact=1e-4) is None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # third-party modules may raise anything: keep their own forward
        return False


@torch.no_grad()
def attention_matches(module: Any) -> bool:
    """The same for attention, on small shared-prefix rows in half precision."""
    own, parameter = type(module).forward, next(module.parameters())
    packed = small_rows().to(parameter.device)

    def draw(seed: int) -> Errors:
        generator = torch.Generator(parameter.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*packed.input_ids.shape, *shape, generator=generator, device=parameter.device)

        def run(forward: Any, dtype: torch.dtype | None = None) -> Tensor:
            tensors = [part if dtype is None else part.to(dtype) for part in (x, angles.cos(), angles.sin())]
            with prefix_attention(module.config, RowStructure(packed)):  # which refuses windows, soft caps and so on
                out = forward(module, tensors[0], position_embeddings=tuple(tensors[1:]), attention_mask=None)[0]
            flat: Tensor = out.flatten(0, 1)
            return flat

        x, angles = normal(module.q_proj.in_features).to(parameter.dtype), normal(module.head_dim // 2).repeat(1, 1, 2)
        angles = angles.to(x.dtype)
        # scores of size one: a flat softmax would hide a wrong rotation
        x = x * (module.q_proj(x).std() * module.k_proj(x).std() * module.head_dim**0.5 * module.scaling).rsqrt()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.float32):
            return errors_of(module, run(attention), run(own), lambda: run(own, at_least_fp32(x).dtype))

    try:
        return judge(draw, exact=1e-4) is None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # third-party modules may raise anything: keep their own forward
        return False


def fallback_notes(model: nn.Module, amp_dtype: torch.dtype | None = None, *, planned: bool = False) -> tuple[str, ...]:
    """One line each for attention, vocabulary statistics, norms and MLPs off the fast path.

    `planned`: assume a recent GPU.
    """
    body: Any = body_of(model)
    like = next(body.parameters())
    with torch.autocast(like.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        reason = flash_unsupported_reason(like, head_size(body), planned=planned) or structured_unsupported_reason(body)
        if reason is None and like.is_cuda and not uses_flash(body):
            reason = "its attention failed the comparison with plain attention"
    attention = () if reason is None else (f"training passes do not use flash attention: {reason}",)
    reason = fused_stats_unsupported_reason(like, head_of(model), planned=planned)
    statistics = () if reason is None else (f"vocabulary statistics are not fused: {reason}",)
    unfused = sorted({type(module).__name__ for module in body.modules() if _is_unfused(module)})
    modules = (f"{', '.join(unfused)} have no fused form",)
    return (*attention, *statistics, *(modules if unfused else ()))


def _is_unfused(module: nn.Module) -> bool:
    """Whether a module is an RMS norm or MLP with its class's forward; torch's own norms are fused already."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in vars(module)
