"""A model as it is: its own forward without padding or packing, and its weights changed for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from keel.models.head import causal_lm, evaluating
from keel.models.loaded import LoadedModel

_MAX_ELEMENTS = 50_000_000  # tokens × vocabulary held at once
SPARE_TIMES = 4  # a probe holds copies, gradients and moments of the weights beside a pass
_MAX_LOGITS = 1 << 23  # numbers that a forward of several completions may give at once; 32 times as many on a GPU
_BYTES_A_LOGIT = 64  # in itself, as float32, and what is computed from it
Text = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and completion


def each_logits(model: nn.Module, texts: Sequence[Text], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Number of a completion and the model's own logits `[t, V]` for it, fp32, temperature 1, in evaluation mode.

    Rows of equal length go together as long as their logits are small, and equal rows are one. One at a time, since a
    batch of them need not fit into memory.
    """
    most = most_logits(device)
    rows: dict[tuple[tuple[int, ...], int], list[int]] = {}  # text and length of its prompt: numbers
    for number, (prompt, tokens) in enumerate(texts):
        rows.setdefault(((*prompt, *tokens), len(prompt)), []).append(number)
    for width, alike in groupby(sorted(rows, key=lambda row: len(row[0])), key=lambda row: len(row[0])):
        same = list(alike)
        at_once = min(32, max(1, most // (width * vocabulary_size(model))))
        for part in (same[i : i + at_once] for i in range(0, len(same), at_once)):
            ids = torch.tensor([text for text, _ in part], device=device)
            with evaluating(model):
                out = model(input_ids=ids, use_cache=False).logits
            for (text, given), logits in zip(part, out, strict=True):
                yield from ((number, logits[given - 1 : -1].float()) for number in rows[text, given])


def row_logits(policy: LoadedModel, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The model's own logits `[t, V]` of each row of tokens, fp32; rows are padded on the right, which nobody sees."""
    at_once = max(1, _MAX_ELEMENTS // (vocabulary_size(policy.model) * max(map(len, rows), default=1)))
    for part in (rows[i : i + at_once] for i in range(0, len(rows), at_once)):
        width = max(map(len, part))
        padded = [[*row, *(policy.pad_id,) * (width - len(row))] for row in part]
        ids = torch.tensor(padded, device=policy.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part], device=ids.device)
        with evaluating(policy.model):
            logits = policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        yield from (logits[i, : len(row)].float() for i, row in enumerate(part))


def most_logits(device: torch.device) -> int:
    """A GPU takes rows together in the time of one; a processor gains nothing by it."""
    if device.type != "cuda":
        return _MAX_LOGITS
    free, _ = torch.cuda.mem_get_info(device)
    return max(_MAX_LOGITS, min(32 * _MAX_LOGITS, free // _BYTES_A_LOGIT))


def vocabulary_size(model: nn.Module) -> int:
    """How many tokens the model can choose from."""
    return int(causal_lm(model).get_output_embeddings().weight.shape[0])


def backup(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies to restore from, in main memory where the device has little room beside them."""
    devices, size = {tensor.device for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)
    free = min((torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"), default=None)
    if free is not None and SPARE_TIMES * size > free:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    return [tensor.detach().clone() for tensor in tensors]


@contextmanager
def perturbed_weights(weights: Sequence[Tensor], relative: float, seed: int = 0) -> Iterator[None]:
    """Seeded noise of `relative` each weight's RMS, of `relative` itself where that is 0; afterwards the very bits."""
    originals = backup(weights)
    generators = {weight.device: torch.Generator(weight.device).manual_seed(seed) for weight in weights}
    try:
        with torch.no_grad():
            for weight in weights:
                size = float(weight.float().square().mean().sqrt()) or 1.0
                noise = torch.randn(weight.shape, generator=generators[weight.device], device=weight.device)
                weight.add_((noise * (relative * size)).to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, originals, strict=True):
                weight.copy_(before)


__all__ = ["Text", "backup", "each_logits", "perturbed_weights", "row_logits", "vocabulary_size"]
