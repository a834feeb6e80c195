"""The decode step on a GPU, for models of Llama's shape (Llama, Qwen2, Qwen3, Mistral, Gemma) and GPT-2's.

Past the matrix products of a step there is little to compute and much to launch: norms, rotations, attention and
activations are one kernel each (`kernels.py`), ten launches a layer in place of fifty. It reads the modules' live
weights and is used only where a numerical probe has found it equal to the model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keel.rollout.native.cache import SharedPrefixCache
from keel.rollout.native.llama import is_llama_shaped

_ACTIVATIONS = {  # by the name of its module's class
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "ReLU": "relu",
}
_GPT2 = {"wte", "wpe", "drop", "h", "ln_f"}


class FusedWindow:
    """A KV cache as the kernels see it: which rows read which prompt, and each row's columns, on the device."""

    def __init__(self, cache: SharedPrefixCache) -> None:
        device = cache.suffix_kv.device
        self.cache, self.rows, self.columns = cache, len(cache.group_of), cache.suffix_kv.shape[4]
        rows_of: list[list[int]] = [[] for _ in cache.prefix.tokens]
        for row, group in enumerate(cache.group_of):
            rows_of[group].append(row)
        width = max(map(len, rows_of))
        table = [[*rows, *[-1] * (width - len(rows))] for rows in rows_of]
        self.slots = torch.tensor(table, dtype=torch.int32, device=device)
        self.prompt_lengths = cache.prefix.lengths.int()
        self.starts = torch.tensor(cache.left_pad, dtype=torch.int32, device=device)
        self.lengths = torch.full((self.rows,), cache.length, dtype=torch.int32, device=device)

    def begin_step(self) -> None:
        """Nothing is masked: the kernels read each row's columns from its own length."""

    def end_step(self) -> None:
        """The next column is the newest."""
        self.lengths.add_(1)

    @property
    def next_positions(self) -> Tensor:
        return self.cache.positions + self.lengths


class FusedStep:
    """Runs tokens `[B]` through the model's weights and a cache; returns logits `[B, V]`."""

    def __init__(self, inner: Any) -> None:
        from keel.rollout.native import kernels  # needs Triton

        self.blocks: _Llama | _GPT2Blocks = _Llama(inner) if is_llama_shaped(inner) else _GPT2Blocks(inner)
        self.masses = kernels.log_masses

    def __call__(self, tokens: Tensor, cache: SharedPrefixCache | FusedWindow) -> Tensor:
        from keel.rollout.native import kernels

        window = cache if isinstance(cache, FusedWindow) else FusedWindow(cache)
        blocks, store = self.blocks, window.cache
        positions = window.next_positions
        residual = blocks.embed(tokens, positions)
        tables, x = blocks.rotations(residual, positions), None
        for index, layer in enumerate(blocks.layers):
            qkv = layer.qkv(kernels.norm(x, residual, *layer.first_norm))
            suffix = store.suffix_kv[index, :, : window.rows]
            kernels.rotate_and_store(
                qkv, tables, layer.head_norms, suffix, window.lengths, blocks.heads, blocks.kv_heads, blocks.size
            )
            attended = kernels.attend(
                qkv,
                store.prefix.keys[index],
                store.prefix.values[index],
                window.slots,
                window.prompt_lengths,
                suffix,
                window.starts,
                window.lengths,
                layer.scaling,
                blocks.heads,
            )
            x = layer.out(attended)
            x = layer.mlp(kernels.norm(x, residual, *layer.second_norm))
        return blocks.head(kernels.norm(x, residual, *blocks.last_norm))


_Norm = tuple[Tensor, Tensor | None, float, float, bool]  # weight, bias, eps, what is added to the weight, centred


def _norm(module: Any) -> _Norm:
    if isinstance(module, nn.LayerNorm):
        return module.weight, module.bias, module.eps, 0.0, True
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return module.weight, None, eps, 1.0 if "Gemma" in type(module).__name__ else 0.0, False


class _Llama:
    def __init__(self, inner: Any) -> None:
        base = inner.model
        self._base, self._head = base, inner.lm_head
        self.heads, self.kv_heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.size = base.layers[0].self_attn.head_dim
        self.layers: list[Any] = [_LlamaLayer(layer) for layer in base.layers]
        self.last_norm = _norm(base.norm)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self._base.embed_tokens(tokens)
        return hidden

    def rotations(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._base.rotary_emb(hidden, position_ids=positions.unsqueeze(0))
        return cos[0].contiguous(), sin[0].contiguous()

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits


class _LlamaLayer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = _Together((attention.q_proj, attention.k_proj, attention.v_proj))
        self._gate_up = _Together((mlp.gate_proj, mlp.up_proj))
        self.out, self._down = attention.o_proj, mlp.down_proj
        self.first_norm, self.second_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.scaling = attention.scaling
        self.head_norms: tuple[Tensor, Tensor, float, float] | None = None
        if hasattr(attention, "q_norm"):
            (q_weight, _, eps, offset, _), k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
            self.head_norms = (q_weight, k_norm[0], eps, offset)
        self._activation = _activation(mlp.act_fn)

    def qkv(self, x: Tensor) -> Tensor:
        return self._qkv(x)

    def mlp(self, x: Tensor) -> Tensor:
        from keel.rollout.native import kernels

        both = self._gate_up(x)
        width = both.shape[1] // 2
        y: Tensor = self._down(kernels.activate(both[:, :width], both[:, width:], self._activation))
        return y


class _GPT2Blocks:
    def __init__(self, inner: Any) -> None:
        base = inner.transformer
        self._base, self._head = base, inner.lm_head
        self.heads = self.kv_heads = inner.config.n_head
        self.size = inner.config.n_embd // inner.config.n_head
        self.layers: list[Any] = [_GPT2Layer(layer) for layer in base.h]
        self.last_norm = _norm(base.ln_f)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self._base.wte(tokens) + self._base.wpe(positions)
        return hidden

    def rotations(self, hidden: Tensor, positions: Tensor) -> None:
        """Positions are in the embedding."""

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits


class _GPT2Layer:
    head_norms = None

    def __init__(self, layer: Any) -> None:
        self.qkv, self.out, self.scaling = layer.attn.c_attn, layer.attn.c_proj, layer.attn.scaling
        self.first_norm, self.second_norm = _norm(layer.ln_1), _norm(layer.ln_2)
        self._up, self._down, self._activation = layer.mlp.c_fc, layer.mlp.c_proj, _activation(layer.mlp.act)

    def mlp(self, x: Tensor) -> Tensor:
        from keel.rollout.native import kernels

        y: Tensor = self._down(kernels.activate(self._up(x), None, self._activation))
        return y


class _Together:
    """Projections of one input, side by side: one product where their weights are neighbours in memory."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = modules
        self.plain = all(type(module) is nn.Linear for module in modules)
        self.joined = self.plain and are_neighbours([module.weight for module in modules])
        self.bias = None
        if self.joined and modules[0].bias is not None:
            self.bias = torch.cat([module.bias for module in modules])  # a copy: graphs do not outlive a sync

    def __call__(self, x: Tensor) -> Tensor:
        if self.joined:
            first = self.modules[0].weight
            rows = sum(len(module.weight) for module in self.modules)
            weight = first.detach().as_strided((rows, first.shape[1]), first.stride())
            return nn.functional.linear(x, weight, self.bias)
        return torch.cat([module(x) for module in self.modules], dim=1)


def are_neighbours(weights: Sequence[Tensor]) -> bool:
    """Whether matrices follow each other in one storage."""
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    same = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return same and all(w.data_ptr() == end for w, end in zip(weights[1:], ends, strict=False))


def join_projections(model: nn.Module) -> None:
    """Let the weights of projections with one input share a storage, in place: for a model that nobody saves."""
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parts = [getattr(module, name, None) for name in names]
            if not all(type(part) is nn.Linear for part in parts):
                continue
            weights = [part.weight for part in parts]  # type: ignore[union-attr]
            joined = torch.cat([weight.detach() for weight in weights])
            for weight, view in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
                weight.data = view


def _activation(module: nn.Module) -> str:
    name = type(module).__name__
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation {name}")
    return _ACTIVATIONS[name]


def can_be_fused(inner: Any) -> bool:
    """Whether the modules have a shape that is known here, on a GPU with Triton; the probe tells the rest."""
    if not next(inner.parameters()).is_cuda or importlib.util.find_spec("triton") is None:
        return False
    base = getattr(inner, "transformer", None)
    gpt2 = isinstance(base, nn.Module) and {name for name, _ in base.named_children()} == _GPT2
    return gpt2 or is_llama_shaped(inner)
