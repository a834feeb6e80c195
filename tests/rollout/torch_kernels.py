"""The kernels of a fused decode step in plain torch: they stand in for Triton's on a CPU, and are their oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.rollout.native.state import DecodeState
from keel.rollout.sampling import SamplingParams


def norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    total = residual if x is None else residual + x
    value = total.float()
    if centred:
        value = value - value.mean(-1, keepdim=True)
    value = value * (value.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)
    return total, (value if bias is None else value + bias.float()).to(residual.dtype)


def activate(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    gelu = torch.nn.functional.gelu
    kinds = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
        "gelu": gelu,
        "relu": torch.relu,
    }
    value = kinds[kind](gate.float())
    return (value if up is None else value * up.float()).to(gate.dtype)


def attend(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float, float] | None,
    state: DecodeState,
    layer: int,
    scale: float,
    heads: int,
    kv_heads: int,
    tile: int,
) -> Tensor:
    rows, size = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    if not bool((state.lengths[:rows] > 0).any()):
        return torch.zeros(rows, heads * size, dtype=qkv.dtype)
    q, k, v = (part.view(rows, -1, size) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1))
    if norms is not None:
        q_weight, k_weight, eps, offset = norms
        q, k = (norm(None, x, w, None, eps, offset)[1] for x, w in ((q, q_weight), (k, k_weight)))
    if tables is not None:
        q, k = (_turned(x, *tables) for x in (q, k))
    suffix, prompt_keys, prompt_values = state.buffers[0][layer], *state.buffers[1 + 2 * layer : 3 + 2 * layer]
    group_of = {}
    for group, first_row, width, *_ in state.items[: int(state.geometry[7])].tolist():
        group_of |= dict.fromkeys(state.members[first_row : first_row + width].tolist(), group)
    lengths = _prompt_lengths(state)
    out = torch.zeros(rows, heads, size, dtype=qkv.dtype)
    for row in range(rows):
        newest, start = int(state.lengths[row]) - 1, int(state.starts[row])
        if newest < 0:
            continue
        suffix[0, row, :, newest], suffix[1, row, :, newest] = k[row], v[row]
        group = group_of[row]
        own = suffix[:, row, :, start : newest + 1]
        keys = torch.cat((prompt_keys[group, :, : lengths[group]], own[0]), dim=1)
        values = torch.cat((prompt_values[group, :, : lengths[group]], own[1]), dim=1)
        query = q[row].view(kv_heads, -1, size).float()
        weights = (query @ keys.float().transpose(1, 2) * scale).softmax(-1)
        out[row] = (weights @ values.float()).reshape(heads, size).to(qkv.dtype)
    return out.view(rows, -1)


def draw(state: DecodeState, rows: int, temperature: float) -> None:
    state.draw(rows, SamplingParams(temperature=temperature))


def _prompt_lengths(state: DecodeState) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for group, _, _, _, _, stop, *_ in state.items[: int(state.geometry[7])].tolist():
        lengths[group] = max(lengths.get(group, 0), stop)
    return lengths


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1)
