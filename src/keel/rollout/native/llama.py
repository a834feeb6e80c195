"""The decode step of a model with Llama's architecture (Llama, Qwen2, Qwen3), without the model's own forward.

transformers' modules spend a third of a small model's step outside matrix products. Here activations are columns
`[features, rows]`, so every projection is `W @ X`. With few rows this is up to 1.8 times as fast on a CPU as `X @ W.T`,
and the result has the layout of the next product. The step reads the modules' live weights. It is used only if a
numerical probe finds it equal to the model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Cache(Protocol):
    """The KV cache interface of a step."""

    @property
    def next_positions(self) -> Tensor: ...

    def store(self, layer: int, pair: Tensor) -> None: ...

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor: ...


_MODEL = {"model", "lm_head"}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def is_llama_shaped(inner: Any) -> bool:
    """Whether the modules have exactly Llama's names. The probe verifies their computation."""
    if _children(inner) != _MODEL or _children(inner.model) != _BASE:
        return False
    for layer in inner.model.layers:
        if _children(layer) != _LAYER or _children(layer.mlp) != _MLP:
            return False
        if _children(layer.self_attn) not in (_ATTENTION, _ATTENTION | _NORMS):
            return False
    return True


def _project(module: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply `module` to columns; for a peft layer, by calling it."""
    if type(module) is not nn.Linear:
        y = module(x.t()).t()
        return y if out is None else out.copy_(y)
    y = torch.mm(module.weight, x) if out is None else torch.mm(module.weight, x, out=out)
    return y if module.bias is None else y.add_(module.bias.unsqueeze(1))


def _add_projection(module: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual + module(x); for a plain linear layer, by one fused product and sum."""
    if type(module) is nn.Linear and module.bias is None:
        return residual.addmm_(module.weight, x)
    return residual.add_(_project(module, x))


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    """RMS norm over the second-to-last dimension, in fp32 as in the models.

    The mean square is a product with a row of ones, because a reduction over columns is slow on a CPU.
    """
    x32 = x.float()
    mean = torch.matmul(x32.new_full((1, x.shape[-2]), 1 / x.shape[-2]), x32.square())
    return (x32 * mean.add_(module.variance_epsilon).rsqrt_()).to(x.dtype).mul_(module.weight.unsqueeze(1))


class LlamaStep:
    """Runs tokens `[B]` at `positions` through the model's weights and a cache; returns logits `[B, V]`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        attention = inner.model.layers[0].self_attn
        self.size = attention.head_dim
        self.heads = inner.config.num_attention_heads
        self.kv_heads = inner.config.num_key_value_heads

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        base = self.inner.model
        hidden = base.embed_tokens(tokens).t().clone(memory_format=torch.contiguous_format)
        positions = cache.next_positions.unsqueeze(0)
        cos, sin = (table[0].t().contiguous() for table in base.rotary_emb(hidden, position_ids=positions))
        rows, size = len(tokens), self.size
        unrotated = hidden.new_empty(self.heads + self.kv_heads, size, rows)
        rotated = hidden.new_empty(self.heads + 2 * self.kv_heads, size, rows)
        for index, layer in enumerate(base.layers):
            x = _rms_norm(layer.input_layernorm, hidden)
            attended = self._attention(layer.self_attn, x, (cos, sin), unrotated, rotated, cache, index)
            hidden = _add_projection(layer.self_attn.o_proj, attended, hidden)
            x = _rms_norm(layer.post_attention_layernorm, hidden)
            gate = layer.mlp.act_fn(_project(layer.mlp.gate_proj, x)).mul_(_project(layer.mlp.up_proj, x))
            hidden = _add_projection(layer.mlp.down_proj, gate, hidden)
        logits: Tensor = self.inner.lm_head(_rms_norm(base.norm, hidden).t())
        return logits

    def _attention(
        self,
        module: Any,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        unrotated: Tensor,
        rotated: Tensor,
        cache: Cache,
        index: int,
    ) -> Tensor:
        """The attention output as columns `[heads·D, rows]`. Queries and keys are rotated together."""
        heads, size, rows = self.heads, self.size, x.shape[1]
        rotated_heads = heads + self.kv_heads
        _project(module.q_proj, x, unrotated[:heads].view(-1, rows))
        _project(module.k_proj, x, unrotated[heads:].view(-1, rows))
        _project(module.v_proj, x, rotated[rotated_heads:].view(-1, rows))
        if hasattr(module, "q_norm"):
            unrotated = torch.cat(
                (_rms_norm(module.q_norm, unrotated[:heads]), _rms_norm(module.k_norm, unrotated[heads:]))
            )
        cos, sin = tables
        half = size // 2
        torch.mul(unrotated, cos, out=rotated[:rotated_heads])
        rotated[:rotated_heads, :half].addcmul_(unrotated[:, half:], sin[:half], value=-1)
        rotated[:rotated_heads, half:].addcmul_(unrotated[:, :half], sin[half:])
        cache.store(index, rotated[heads:].view(2, self.kv_heads, size, rows).permute(0, 3, 1, 2).unsqueeze(3))
        query = rotated[:heads].permute(2, 0, 1).reshape(rows, self.kv_heads, -1, size)
        return cache.attend(index, query, module.scaling).reshape(rows, -1).t()
