"""A fingerprint of the effective weights, to compare two models or one model over time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keel.models.head import adapter_layers, adapter_prefixes, effective_adapters
from keel.models.sharding import full_tensor
from keel.models.splitmix import GOLDEN, mix

_ROW = 1 << 15  # 64-bit words per row; each row has one sum
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # words hashed at a time: fits a CPU cache, fills a GPU


def fingerprint(model: nn.Module) -> str:
    """A digest of every effective weight: equal weights have equal digests, any changed element changes the digest.

    Each row of 64-bit words x is reduced on its own device to Σ mix(xᵢ + i·golden) mod 2⁶⁴. The mixing is a bijection,
    so changing one word always changes the sum. It is not linear, so changes to several words cancel with a probability
    of about 2⁻⁶⁴. In a weighted sum, two flipped signs could always cancel. The sums are hashed with names, shapes
    and dtypes. CPU and CUDA give the same digest.

    Effective weights are parameters and persistent buffers. Other buffers are computed and may differ by device. In a
    peft model, the effective weights are the base weights and the active adapters with their scaling. Inactive,
    disabled and merged adapters are left out. Adapter names do not matter.
    """
    return fingerprint_tensors(effective_weights(model), extra=adapter_state(model))


def fingerprint_tensors(named: Iterable[tuple[str, Tensor]], *, extra: Iterable[str] = ()) -> str:
    """The digest of named tensors, in any order."""
    listed = list(named)
    sums = _read(_sums(full_tensor(x.detach()) for _, x in listed))
    digest = hashlib.sha256()
    for (name, x), rows in sorted(zip(listed, sums, strict=True), key=lambda part: part[0][0]):
        digest.update(f"{name}|{x.dtype}|{tuple(x.shape)}|".encode())
        digest.update(rows.numpy().tobytes())
    for line in sorted(extra):
        digest.update(line.encode())
    return digest.hexdigest()[:32]


def effective_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The named weights of the next forward pass, without inactive, disabled or merged adapters."""
    inactive, active = adapter_prefixes(model)
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        pieces = name.split(".")
        if any(".".join(pieces[:end]) in inactive for end in range(1, len(pieces) + 1)):
            continue
        owner = next((k for k in range(1, len(pieces) + 1) if ".".join(pieces[:k]) in active), None)
        if owner is not None:
            pieces[owner - 1] = "*"
        yield _base_name(".".join(pieces)), tensor


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers; other buffers are computed from the config."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}" if prefix else leaf, buffer


def _base_name(name: str) -> str:
    """The name without peft's wrappers, so that a model with disabled adapters has the digest of its base model."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def adapter_state(model: nn.Module) -> Iterator[str]:
    """The effective settings of adapters: the scaling α/r of BA, and whether BA is merged into the base weights."""
    for name, layer in adapter_layers(model):
        scaling = getattr(layer, "scaling", {})
        yield from (
            f"{_base_name(name)}|scaling|{float(scaling[key])!r}" for key in effective_adapters(layer) if key in scaling
        )
        if getattr(layer, "merged_adapters", ()):
            yield f"{_base_name(name)}|merged|{'off' if layer.disable_adapters else 'on'}"


@lru_cache(maxsize=8)
def _offsets(device: torch.device) -> Tensor:
    """i·golden for each index of a row, so that equal words at different indices give different numbers."""
    return torch.arange(1, _ROW + 1, dtype=torch.int64, device=device) * GOLDEN


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as 64-bit words; the last word is padded with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    full = data.numel() // 8 * 8
    # A view that does not start on a word boundary cannot be reinterpreted in place.
    head = data[:full] if data.storage_offset() % 8 == 0 else data[:full].clone()
    if full == data.numel():
        return head.view(torch.int64)
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - full] = data[full:]
    return torch.cat([head.view(torch.int64), tail.view(torch.int64)])


@torch.no_grad()
def _sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The row sums `[rows]` of each tensor, on its device. Tensors on a GPU are summed in batches."""
    sums: list[Tensor] = []
    for words in _groups(map(_words, tensors)):
        sums += _joint_sums(words) if len(words) > 1 else [_row_sums(words[0])]
    return sums


def _is_on_gpu(words: Tensor) -> bool:
    return words.is_cuda


def _groups(tensors: Iterable[Tensor], joins: Callable[[Tensor], bool] = _is_on_gpu) -> Iterator[list[Tensor]]:
    """Batches of consecutive tensors on one device, of up to a block of whole rows.

    A tensor for which `joins` is false is a separate batch.
    """
    together: list[Tensor] = []
    for words in tensors:
        fits = joins(words) and sum(map(_rows, (*together, words))) * _ROW <= _block(words.device)
        if together and not (fits and words.device == together[0].device):
            yield together
            together = []
        together.append(words)
        if not joins(words):
            yield together
            together = []
    if together:
        yield together


def _rows(words: Tensor) -> int:
    return -(-len(words) // _ROW)


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, 1 << 20)


def _row_sums(words: Tensor) -> Tensor:
    """Σ mix(xᵢ + i·golden) mod 2⁶⁴ of each row of words, `[rows]`; the last row may be short."""
    offsets, block = _offsets(words.device), _block(words.device)
    full = words.numel() // _ROW * _ROW
    sums = [
        mix(words[start : min(start + block, full)].view(-1, _ROW) + offsets).sum(1) for start in range(0, full, block)
    ]
    tail = words[full:]
    if tail.numel():
        sums.append(mix(tail + offsets[: tail.numel()]).sum(0, keepdim=True))
    return torch.cat(sums) if sums else words.new_zeros(0)


def _joint_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`_row_sums` of several tensors of one device, in one batch of kernel launches."""
    device, lengths = tensors[0].device, [_rows(words) for words in tensors]
    padded = [F.pad(words, (0, rows * _ROW - len(words))) for words, rows in zip(tensors, lengths, strict=True)]
    mixed = mix(torch.cat(padded).view(-1, _ROW) + _offsets(device))
    ends = [end - 1 for end in accumulate(lengths)]
    short = [(end, len(words) % _ROW) for end, words in zip(ends, tensors, strict=True) if len(words) % _ROW]
    if short:  # exclude the padding of rows
        at, kept = torch.tensor(short, device=device).unbind(1)
        mixed[at] *= torch.arange(_ROW, device=device) < kept[:, None]
    return list(mixed.sum(1).split(lengths))


def _read(sums: Sequence[Tensor]) -> list[Tensor]:
    """Move the sums to the CPU with one synchronisation."""
    if len({part.device for part in sums}) > 1:
        return [part.cpu() for part in sums]
    return list(torch.cat(list(sums)).cpu().split([len(part) for part in sums])) if sums else []
