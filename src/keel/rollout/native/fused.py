"""A fused decode step on a GPU for the architectures of Llama (Llama, Qwen2, Qwen3, Mistral, Gemma) and GPT-2.

Outside of matrix products, kernel launches take most of the time. So norms, rotations, attention and activations are
one kernel each (`kernels.py`). This gives nine launches per layer instead of fifty, and two more for the adapters of
each product. The step reads the modules' weights, and copies of their adapters (`refresh`). It is used only if a
numerical probe finds it as close to fp32 as the model's own forward.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keel.models.head import is_plain_linear
from keel.models.lora import LowRank, low_rank
from keel.rollout.native.llama import is_llama_shaped
from keel.rollout.native.state import DecodeState, beside
from keel.rollout.sampling import SamplingParams

_ACTIVATIONS = {  # keys: class names of the modules
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


class FusedStep:
    """Computes the next logits of each row from the model's weights and a `DecodeState`."""

    def __init__(self, inner: Any) -> None:
        self.blocks: _Llama | _GPT2Blocks = _Llama(inner) if is_llama_shaped(inner) else _GPT2Blocks(inner)
        self.repeats = self.blocks.heads // self.blocks.kv_heads
        linears = [part for layer in self.blocks.layers for part in vars(layer).values() if type(part) is _Linears]
        self._adapters = [part.adapters for part in linears if part.adapters is not None]

    def refresh(self) -> None:
        """Copy the current adapters. Other weights are read at every step."""
        for adapters in self._adapters:
            adapters.refresh()

    def __call__(self, state: DecodeState, rows: int, tile: int) -> None:
        """Compute the next logits of the first `rows` rows. `tile` queries share one read of a prompt's keys."""
        from keel.rollout.native import kernels  # needs Triton

        blocks = self.blocks
        positions = (state.offsets[:rows] + state.lengths[:rows] - 1).clamp(min=0)
        residual = blocks.embed(state.tokens[:rows], positions)
        tables, x = blocks.rotations(residual, positions), None
        for index, layer in enumerate(blocks.layers):
            residual, normed = kernels.norm(x, residual, *layer.first_norm)
            qkv = layer.qkv(normed)
            attended = kernels.attend(
                qkv, tables, layer.head_norms, state, index, layer.scaling, blocks.heads, blocks.kv_heads, tile
            )
            residual, normed = kernels.norm(layer.out(attended), residual, *layer.second_norm)
            x = layer.mlp(normed)
        _, normed = kernels.norm(x, residual, *blocks.last_norm)
        _project(blocks.lm_head, normed, state.logits[:rows])


def draw(state: DecodeState, rows: int, sampling: SamplingParams) -> None:
    """Draw a token for each of the first `rows` rows: with kernels, or with torch if greedy or filtered."""
    if sampling.greedy or sampling.filtered:
        state.draw(rows, sampling)
        return
    from keel.rollout.native import kernels

    kernels.draw(state, rows, sampling.temperature)


_Norm = tuple[Tensor, Tensor | None, float, float, bool]  # weight, bias, eps, offset added to the weight, centred


def _norm(module: Any) -> _Norm:
    if isinstance(module, nn.LayerNorm):
        return module.weight, module.bias, module.eps, 0.0, True
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return module.weight, None, eps, 1.0 if "Gemma" in type(module).__name__ else 0.0, False


class _Llama:
    def __init__(self, inner: Any) -> None:
        base = inner.model
        self._base, self.lm_head = base, inner.lm_head
        self.heads, self.kv_heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.size = base.layers[0].self_attn.head_dim
        dtype = base.embed_tokens.weight.dtype
        self.layers: list[Any] = [_LlamaLayer(layer, dtype) for layer in base.layers]
        self.last_norm = _norm(base.norm)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self._base.embed_tokens(tokens)
        return hidden

    def rotations(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._base.rotary_emb(hidden, position_ids=positions.unsqueeze(0))
        return cos[0].contiguous(), sin[0].contiguous()


class _LlamaLayer:
    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Linears(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _Linears(dtype, mlp.gate_proj, mlp.up_proj)
        self.out, self._down = _Linears(dtype, attention.o_proj), _Linears(dtype, mlp.down_proj)
        self.first_norm, self.second_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.scaling = attention.scaling
        self.head_norms: tuple[Tensor, Tensor, float, float] | None = None
        if hasattr(attention, "q_norm"):
            (q_weight, _, eps, offset, _), k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
            self.head_norms = (q_weight, k_norm[0], eps, offset)
        self._activation = _activation(mlp.act_fn)

    def mlp(self, x: Tensor) -> Tensor:
        from keel.rollout.native import kernels

        both = self._gate_up(x)
        width = both.shape[1] // 2
        return self._down(kernels.activate(both[:, :width], both[:, width:], self._activation))


class _GPT2Blocks:
    def __init__(self, inner: Any) -> None:
        base = inner.transformer
        self._base, self.lm_head = base, inner.lm_head
        self.heads = self.kv_heads = inner.config.n_head
        self.size = inner.config.n_embd // inner.config.n_head
        self.layers: list[Any] = [_GPT2Layer(layer) for layer in base.h]
        self.last_norm = _norm(base.ln_f)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self._base.wte(tokens) + self._base.wpe(positions)
        return hidden

    def rotations(self, hidden: Tensor, positions: Tensor) -> None:
        """Return None, because GPT-2 adds positions to the embedding."""


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


class _Linears:
    """Linear layers of the same input, computed as one product if their weights are contiguous in memory."""

    def __init__(self, dtype: torch.dtype, *modules: Any) -> None:
        adapters = [low_rank(module) for module in modules]
        self.modules: list[Any] = [m if a is None else a.base for m, a in zip(modules, adapters, strict=True)]
        self.joined = all(map(is_plain_linear, self.modules)) and are_contiguous([m.weight for m in self.modules])
        biases = [module.bias for module in self.modules if self.joined and module.bias is not None]
        self.joined = self.joined and len(biases) in (0, len(modules)) and (not biases or are_contiguous(biases))
        self.sizes = [module.out_features for module in modules]
        self.adapters = _Adapters(adapters, self.sizes, dtype) if any(adapters) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.adapters is None:
            return self._base(x)
        with beside(x.device) as joined:
            inner = x @ self.adapters.down.t()
        y = self._base(x)
        joined()
        return y.addmm_(inner, self.adapters.up.t())

    def _base(self, x: Tensor) -> Tensor:
        if self.joined:
            weight, bias = self.modules[0].weight, self.modules[0].bias
            weight = weight.detach().as_strided((sum(self.sizes), weight.shape[1]), weight.stride())
            bias = None if bias is None else bias.detach().as_strided((sum(self.sizes),), (1,))
            return nn.functional.linear(x, weight, bias)
        out = x.new_empty(len(x), sum(self.sizes))
        for module, part in zip(self.modules, out.split(self.sizes, dim=1), strict=True):
            _project(module, x, part)
        return out


class _Adapters:
    """The LoRA adapters of layers with the same input, computed as two products: stacked A, block-diagonal s · B.

    They are copies in the dtype of the step, because peft keeps adapters in fp32.
    """

    def __init__(self, adapters: Sequence[LowRank | None], sizes: Sequence[int], dtype: torch.dtype) -> None:
        ranks = [0 if adapter is None else len(adapter.down) for adapter in adapters]
        like = next(adapter.down for adapter in adapters if adapter is not None)
        self.down = like.new_zeros(sum(ranks), like.shape[1], dtype=dtype)
        self.up = like.new_zeros(sum(sizes), sum(ranks), dtype=dtype)
        self._copies: list[tuple[Tensor, Tensor, float]] = []
        rows = zip(adapters, self.down.split(ranks), self.up.split(list(sizes)), strict=True)
        for index, (adapter, down, up) in enumerate(rows):
            if adapter is not None:
                self._copies.append((down, adapter.down, 1.0))
                self._copies.append((up.split(ranks, dim=1)[index], adapter.up, adapter.scale))

    @torch.no_grad()
    def refresh(self) -> None:
        for mine, weight, scale in self._copies:
            torch.mul(weight, scale, out=mine)


def _project(module: Any, x: Tensor, out: Tensor) -> None:
    """Write module(x) into `out`, without a copy for a plain linear layer."""
    if not is_plain_linear(module):
        out.copy_(module(x))
    elif module.bias is None:
        torch.mm(x, module.weight.detach().t(), out=out)
    else:
        torch.addmm(module.bias.detach(), x, module.weight.detach().t(), out=out)


def are_contiguous(weights: Sequence[Tensor]) -> bool:
    """Whether matrices are contiguous in one storage."""
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    same = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return same and all(w.data_ptr() == end for w, end in zip(weights[1:], ends, strict=False))


def join_projections(model: nn.Module) -> None:
    """Move the weights of projections with the same input into one storage, so that a step reads them as one matrix.

    The parameters stay the same objects. They train and are saved as before.
    """
    joined = False
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parts = [getattr(module, name, None) for name in names]
            parts = [getattr(part, "base_layer", part) for part in parts]  # under an adapter
            if not all(type(part) is nn.Linear for part in parts):
                continue
            for tensors in ([part.weight for part in parts], [part.bias for part in parts]):  # type: ignore[union-attr]
                if _can_be_joined(tensors):
                    whole = torch.cat([tensor.detach() for tensor in tensors])
                    for tensor, view in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
                        tensor.data = view
                    joined = True
    if joined and torch.cuda.is_available():
        torch.cuda.empty_cache()  # joined weights cannot reuse the smaller freed blocks


def _can_be_joined(tensors: Sequence[Tensor | None]) -> bool:
    if any(tensor is None or not tensor.is_contiguous() for tensor in tensors):
        return False
    there = [tensor for tensor in tensors if tensor is not None]
    return len({(tensor.dtype, tensor.device) for tensor in there}) == 1 and not are_contiguous(there)


def _activation(module: nn.Module) -> str:
    name = type(module).__name__
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation {name}")
    return _ACTIVATIONS[name]


def fusion_obstacle(inner: Any) -> str | None:
    """Why the fused step does not support this model, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    base = getattr(inner, "transformer", None)
    gpt2 = isinstance(base, nn.Module) and {name for name, _ in base.named_children()} == _GPT2
    return (
        None if gpt2 or is_llama_shaped(inner) else f"{type(inner).__name__} is neither Llama-shaped nor GPT-2-shaped"
    )
