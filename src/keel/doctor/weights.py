"""A model's own forward without padding or packing, and temporary changes of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from keel.models.head import causal_lm, evaluating
from keel.models.options import LoadedModel
from keel.models.scorer import padded_mask, padding_columns

_MAX_ELEMENTS = 50_000_000  # limit of tokens × vocabulary in memory
SPARE_TIMES = 4  # memory for copies, gradients and moments, in multiples of the weights
_MAX_LOGITS = 1 << 23  # logits of one batched forward; up to 32 times as many on a GPU
_BYTES_A_LOGIT = 64  # a logit, its fp32 copy and intermediate results
Text = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of prompt and completion


def each_logits(model: nn.Module, texts: Sequence[Text], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """(index of a text, the model's logits `[t, V]` for its completion), in fp32 and evaluation mode, temperature 1.

    Rows of equal length are batched while their logits are small, and equal rows are computed once. Results are yielded
    one by one, since the whole batch may not fit into memory.
    """
    most = most_logits(device)
    rows: dict[tuple[tuple[int, ...], int], list[int]] = {}  # (tokens, prompt length): indices of texts
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
    """The model's logits `[t, V]` of each row of tokens, in fp32. Right padding has no effect on them."""
    at_once = max(1, _MAX_ELEMENTS // (vocabulary_size(policy.model) * max(map(len, rows), default=1)))
    for part in (rows[i : i + at_once] for i in range(0, len(rows), at_once)):
        width = max(map(len, part))
        padded = [[*row, *(policy.pad_id,) * (width - len(row))] for row in part]
        ids = torch.tensor(padded, device=policy.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part], device=ids.device)
        columns = padding_columns(ids)
        ids, mask = nn.functional.pad(ids, (0, columns)), padded_mask(mask, columns)
        with evaluating(policy.model):
            logits = policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        yield from (logits[i, : len(row)].float() for i, row in enumerate(part))


def most_logits(device: torch.device) -> int:
    """The number of logits per forward. Larger batches are faster on a GPU but not on a CPU."""
    if device.type != "cuda":
        return _MAX_LOGITS
    free, _ = torch.cuda.mem_get_info(device)
    return max(_MAX_LOGITS, min(32 * _MAX_LOGITS, free // _BYTES_A_LOGIT))


def vocabulary_size(model: nn.Module) -> int:
    """The size of the model's output vocabulary."""
    return int(causal_lm(model).get_output_embeddings().weight.shape[0])


def backup(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies to restore from, in main memory if the device has too little room."""
    devices, size = {tensor.device for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)
    free = min((torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"), default=None)
    if free is not None and SPARE_TIMES * size > free:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    return [tensor.detach().clone() for tensor in tensors]


@contextmanager
def perturbed_weights(weights: Sequence[Tensor], relative: float, seed: int = 0) -> Iterator[None]:
    """Add seeded noise of `relative` × RMS to each weight, or of size `relative` if it is 0; restore exactly."""
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
