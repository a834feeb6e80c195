"""A fingerprint of the weights that take effect: it tells a stale copy from a fresh one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_ROW = 1 << 15  # 64-bit words a row; one weighted sum is kept for each row
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}  # words hashed at a time: fits the cache of the one, fills the other


def fingerprint(model: nn.Module, *, dtype: torch.dtype | None = None) -> str:
    """A digest of every parameter in effect: equal weights give equal digests, a change to any element another one.

    Each row of 64-bit words x is reduced on its own device to Σ wᵢ xᵢ mod 2⁶⁴ with fixed odd wᵢ. An odd number is
    invertible mod 2⁶⁴, so changing one word always changes the sum; changes to several cancel with probability
    about 2⁻⁶⁴. The sums are hashed with names, shapes and dtypes. CPU and CUDA give the same digest.

    In effect means: of a peft model, the base weights with the active adapters and their scaling; idle adapters and
    those switched off are left out, and the adapter's name does not matter, so that the same adapter under another
    name has the same fingerprint.

    A copy in another dtype is compared through `dtype`: `fingerprint(copy) == fingerprint(policy, dtype=bfloat16)`.
    A merged copy has no A and B to compare, and merging rounds: who merges records `fingerprint(policy)` at the sync
    as the source, and is stale when the policy's fingerprint no longer equals it.
    """
    return fingerprint_tensors(effective_weights(model), dtype=dtype, extra=_scalings(model))


def fingerprint_tensors(
    named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None, extra: Iterable[str] = ()
) -> str:
    """The digest of named tensors, whatever their order; floating ones are cast to `dtype` first if it is given."""
    parts = [(name, _cast(tensor.detach(), dtype)) for name, tensor in named]
    # All sums are queued before any is read, so that a GPU is waited for once.
    sums = [(name, str(x.dtype), tuple(x.shape), _row_sums(x)) for name, x in parts]
    digest = hashlib.sha256()
    for name, kind, shape, rows in sorted(sums, key=lambda part: part[0]):
        digest.update(f"{name}|{kind}|{shape}|".encode())
        digest.update(rows.cpu().numpy().tobytes())
    for line in sorted(extra):
        digest.update(line.encode())
    return digest.hexdigest()[:32]


def effective_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The named parameters that the next forward pass would use, without adapters that are idle or switched off."""
    idle, active = _adapter_keys(model)
    for name, parameter in model.named_parameters():
        pieces = name.split(".")
        if any(".".join(pieces[:end]) in idle for end in range(1, len(pieces) + 1)):
            continue
        owner = next((k for k in range(1, len(pieces) + 1) if ".".join(pieces[:k]) in active), None)
        if owner is not None:
            pieces[owner - 1] = "*"
        yield _plain(".".join(pieces)), parameter


def _plain(name: str) -> str:
    """The name without peft's wrapping, so that a model with its adapters off equals the model it was made from."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapter_keys(model: nn.Module) -> tuple[set[str], set[str]]:
    """Name prefixes `layer.lora_A.<adapter>` of a peft model's idle and active adapters (empty for other models)."""
    idle: set[str] = set()
    active: set[str] = set()
    for prefix, layer in _adapter_layers(model):
        in_use = set() if layer.disable_adapters else set(layer.active_adapters)
        for kind in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            holder = getattr(layer, kind, None)
            if isinstance(holder, nn.ModuleDict | nn.ParameterDict):
                for adapter in holder:
                    (active if adapter in in_use else idle).add(f"{prefix}.{kind}.{adapter}")
    return idle, active


def _adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that carry adapters, without importing peft: they are the ones that name their adapter tensors."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters"):
            yield name, module


def _scalings(model: nn.Module) -> Iterator[str]:
    """α/r is part of the effective update sBA but is not a parameter."""
    for name, layer in _adapter_layers(model):
        if not layer.disable_adapters:
            scaling = getattr(layer, "scaling", {})
            yield from (
                f"{_plain(name)}|scaling|{float(scaling[key])!r}" for key in layer.active_adapters if key in scaling
            )


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@lru_cache(maxsize=8)
def _odd_weights(device: torch.device) -> Tensor:
    """Fixed odd 64-bit numbers: Knuth's multiplicative sequence, passed through one xor-shift."""
    index = torch.arange(1, _ROW + 1, dtype=torch.int64)
    mixed = index * 6364136223846793005 + 1442695040888963407
    mixed = (mixed ^ (mixed >> 29)) * 2862933555777941757
    return (mixed | 1).to(device)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as 64-bit words; a tail shorter than a word is filled up with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    # A view that does not start on a word boundary cannot be reinterpreted in place.
    head = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
    if whole == data.numel():
        return head.view(torch.int64)
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - whole] = data[whole:]
    return torch.cat([head.view(torch.int64), tail.view(torch.int64)])


@torch.no_grad()
def _row_sums(tensor: Tensor) -> Tensor:
    """Σ wᵢ xᵢ mod 2⁶⁴ of each row of words, `[rows]`; the last row may be short."""
    words = _words(tensor)
    weights = _odd_weights(words.device)
    block = _BLOCK.get(words.device.type, 1 << 20)
    whole = words.numel() // _ROW * _ROW
    sums = [
        (words[start : min(start + block, whole)].view(-1, _ROW) * weights).sum(1) for start in range(0, whole, block)
    ]
    tail = words[whole:]
    if tail.numel():
        sums.append((tail * weights[: tail.numel()]).sum(0, keepdim=True))
    return torch.cat(sums) if sums else words.new_zeros(0)
