"""Fused norms, gated activations, rotary attention and LoRA layers of a model on a GPU, forward and backward.

Unfused, an RMS norm takes six passes over its input, a gated activation two, the rotation of queries and keys ten and
an adapter six. The backward takes nearly as many. In small and medium models these passes take as long as the matmuls.
A module is replaced only if the fused forward is as close to fp32 as the module's own forward.

`fallback_notes` lists the modules that do not use the fastest path, and why.
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
from keel.models.lora import is_lora_linear, lora_forward, trial_adapters
from keel.models.precision import Errors, accepted, errors_of, estimated
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
    """Replace forwards by fused ones in place; return the number of modules. Weights and names do not change."""
    if not next(model.parameters()).is_cuda:
        return 0
    count = 0
    matching: dict[tuple[Any, ...], bool] = {}
    with trial_adapters(model):
        for module in model.modules():
            forward = fused_forward(module)
            if forward is None:
                continue
            kind: tuple[Any, ...] = (type(module), *((p.shape, p.dtype) for p in module.parameters()))
            if forward is attention:
                kind = (module,)  # per module: layers of one class may differ in rotation
            if kind not in matching:
                matching[kind] = attention_matches(module) if forward is attention else _matches(module, forward)
            if matching[kind]:
                replace_forward(module, forward)
                count += 1
    return count


def replace_forward(module: Any, forward: Any) -> None:
    module.forward = MethodType(forward, module)


def fused_kind(module: nn.Module) -> str | None:
    """Whether a module is a norm, an attention, a gated MLP or a LoRA layer that has a fused form."""
    if is_lora_linear(module):
        return "lora"
    names = {name for name, _ in module.named_children()}
    if hasattr(module, "variance_epsilon") and not names and [n for n, _ in module.named_parameters()] == ["weight"]:
        one_input = len(inspect.signature(type(module).forward).parameters) == 2  # a gated norm takes its gate too
        return "norm" if one_input else None
    if names - {"q_norm", "k_norm"} == _ATTENTION:
        return "attention"
    silu = names == _GATED and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    double = any(parameter.dtype == torch.float64 for parameter in module.parameters())  # the kernel sums in fp32
    return "mlp" if silu and not double else None


def fused_forward(module: nn.Module) -> Any:
    """The fused form of a module, or None."""
    kind = fused_kind(module)
    if kind is None or (kind == "mlp" and not has_triton()):
        return None
    return {"lora": lora_forward, "norm": _rms_norm, "attention": attention, "mlp": _gated_mlp}[kind]


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return functional.rms_norm(
        hidden_states, self.weight.shape, self.weight.to(hidden_states.dtype), self.variance_epsilon
    )


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    from keel.models.layer_kernels import gated_silu

    joint = fused_linears(x, self.gate_proj, self.up_proj)
    if joint is not None:
        return _product(gated_silu(joint), self.down_proj)
    x = x.to(flash_dtype(x))  # one cast for both matmuls
    return _product(gated_silu(self.gate_proj(x), self.up_proj(x)), self.down_proj)


def _product(x: Tensor, linear: nn.Module) -> Tensor:
    y = fused_linears(x, linear)
    return linear(x) if y is None else y


def attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Shared-prefix attention with flash kernels and fused rotation; the class's own forward if unsupported."""
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
    """Whether the fused forward is as close to fp32 as the module's own."""
    parameter = next(module.parameters())
    width = getattr(module, "in_features", parameter.shape[-1])
    dtype = parameter.dtype if parameter.is_floating_point() else torch.bfloat16  # of quantised weights
    in_half = forward is lora_forward and dtype == torch.float32

    def draw(seed: int) -> Errors:
        generator = torch.Generator(parameter.device).manual_seed(seed)
        x = torch.randn(64, width, generator=generator, device=parameter.device).to(dtype)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=in_half):
            fast, plain = forward(module, x), module(x)
            if not parameter.is_floating_point():  # no pass of such a layer is in fp32
                return estimated(fast, plain, torch.finfo(dtype).eps)
            return errors_of(module, fast, plain, lambda: module(at_least_fp32(x)))

    return accepted(draw, exact=1e-4)


@torch.no_grad()
def attention_matches(module: Any) -> bool:
    """Whether fused attention is as close to fp32 as the module's own, on small half-precision shared-prefix rows."""
    own, parameter = type(module).forward, next(module.parameters())
    packed = small_rows().to(parameter.device)

    def draw(seed: int) -> Errors:
        generator = torch.Generator(parameter.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*packed.input_ids.shape, *shape, generator=generator, device=parameter.device)

        def run(forward: Any, dtype: torch.dtype | None = None) -> Tensor:
            tensors = [part if dtype is None else part.to(dtype) for part in (x, angles.cos(), angles.sin())]
            with prefix_attention(module.config, RowStructure(packed)):  # raises for windows, soft caps and the like
                out = forward(module, tensors[0], position_embeddings=tuple(tensors[1:]), attention_mask=None)[0]
            flat: Tensor = out.flatten(0, 1)
            return flat

        x, angles = normal(module.q_proj.in_features).to(parameter.dtype), normal(module.head_dim // 2).repeat(1, 1, 2)
        angles = angles.to(x.dtype)
        # Scale the scores to size 1: a flat softmax would hide a wrong rotation.
        x = x * (module.q_proj(x).std() * module.k_proj(x).std() * module.head_dim**0.5 * module.scaling).rsqrt()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.float32):
            return errors_of(module, run(attention), run(own), lambda: run(own, at_least_fp32(x).dtype))

    return accepted(draw, exact=1e-4)


def fallback_notes(model: nn.Module, amp_dtype: torch.dtype | None = None, *, planned: bool = False) -> tuple[str, ...]:
    """One line for each of attention, vocabulary statistics, norms and MLPs that does not use the fast path.

    `planned` assumes a recent GPU.
    """
    body: Any = body_of(model)
    like = next(body.parameters())
    with torch.autocast(like.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        reason = flash_unsupported_reason(like, head_size(body), planned=planned) or structured_unsupported_reason(body)
        if reason is None and like.is_cuda and not uses_flash(body):
            reason = "its result differs from that of plain attention"
    attention = () if reason is None else (f"training passes do not use flash attention: {reason}",)
    reason = fused_stats_unsupported_reason(like, head_of(model), planned=planned)
    statistics = () if reason is None else (f"vocabulary statistics are not fused: {reason}",)
    unfused = sorted({type(module).__name__ for module in body.modules() if _is_unfused(module)})
    modules = (f"{', '.join(unfused)} have no fused form",)
    return (*attention, *statistics, *(modules if unfused else ()))


def _is_unfused(module: nn.Module) -> bool:
    """Whether a module is an unfused RMS norm or MLP; torch's own norms are already fused."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in vars(module)
