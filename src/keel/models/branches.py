"""Attention over shared-prefix rows by their structure: the prompt once, causally; each completion over both.

A mask of the whole row makes an attention kernel compute every pair of tokens, L² of them, and throw most away. By
structure, a prompt of P tokens and n completions of T cost P²/2 + nT(P + T) pairs: for P = 2300, n = 8, T = 128 less
than half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from keel.models.pack import PackedBatch

ATTENTION = "keel_branches"
LONG_ROW = 1024  # below this a mask costs little, and the pieces cost more calls
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "return_dict"}
_BENIGN = {"position_ids", "use_cache", "is_causal"} | _OUTPUTS  # nothing of it changes what is attended to


@dataclass(frozen=True)
class Piece:
    """One group in a row: its prompt's columns from `start` to `stop`, and its completions', if they have any.

    `branches` `[n, T]` are those columns, padded with `start`; `real` says which of them, flattened, are no padding,
    and `visible` `[T, P + T]` what a completion sees of the prompt and itself.
    """

    row: int
    start: int
    stop: int
    branches: Tensor | None = None
    real: Tensor | None = None
    visible: Tensor | None = None


def pieces_of(packed: PackedBatch) -> list[Piece]:
    """The groups of all rows; padding belongs to none, and nothing reads what it computes."""
    pieces = []
    device = packed.input_ids.device
    for row, (prefixes, branches) in enumerate(zip(packed.prefix.tolist(), packed.branch.tolist(), strict=True)):
        for prefix in sorted(set(prefixes) - {-1}):
            columns: dict[int, list[int]] = {}
            for column, (mine, branch) in enumerate(zip(prefixes, branches, strict=True)):
                if mine == prefix:
                    columns.setdefault(branch, []).append(column)
            prompt = columns.pop(0)
            start, stop = prompt[0], prompt[-1] + 1
            if not columns:
                pieces.append(Piece(row, start, stop))
                continue
            width = max(map(len, columns.values()))
            table = [own + [start] * (width - len(own)) for own in columns.values()]
            real = [i * width + t for i, own in enumerate(columns.values()) for t in range(len(own))]
            visible = torch.ones(width, stop - start + width, dtype=torch.bool, device=device).tril(stop - start)
            pieces.append(
                Piece(row, start, stop, torch.tensor(table, device=device), torch.tensor(real, device=device), visible)
            )
    return pieces


def attend(
    query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention of rows `[R, H, L, D]` over `[R, K, L, D]`, as `[R, L, H, D]`; differentiable, zero at padding."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and (query.is_cuda or _like_cuda):  # no fused kernel there takes a mask and grouped heads together
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        grouped = False
    out = torch.zeros_like(query.transpose(1, 2))
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": grouped}
    for piece in pieces:
        q, k, v = (x[piece.row : piece.row + 1] for x in (query, key, value))
        pk, pv = k[:, :, piece.start : piece.stop], v[:, :, piece.start : piece.stop]
        prompt = scaled_dot_product_attention(q[:, :, piece.start : piece.stop], pk, pv, is_causal=True, **options)
        out[piece.row, piece.start : piece.stop] = prompt[0].transpose(0, 1)
        if piece.branches is None or piece.real is None:
            continue
        count = len(piece.branches)

        def own(x: Tensor, where: Tensor = piece.branches) -> Tensor:
            return x[0][:, where].transpose(0, 1)  # [n, heads, T, D]

        keys = torch.cat((pk.expand(count, -1, -1, -1), own(k)), dim=2)
        values = torch.cat((pv.expand(count, -1, -1, -1), own(v)), dim=2)
        told = scaled_dot_product_attention(own(q), keys, values, attn_mask=piece.visible, **options)
        out[piece.row, piece.branches.flatten()[piece.real]] = told.transpose(1, 2).flatten(0, 1)[piece.real]
    return out


_active: list[list[Piece]] = []
_like_cuda: list[bool] = []


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """For a rehearsal elsewhere: attention takes the memory that it takes on CUDA, grouped heads written out."""
    _like_cuda.append(True)
    try:
        yield
    finally:
        _like_cuda.pop()


def refuse_variants(given: Mapping[str, Any]) -> None:
    """An attention of our own computes the plain one: what asks for another is refused, and the caller falls back."""
    unusual = sorted(name for name, value in given.items() if value is not None and name not in _BENIGN)
    if unusual:
        raise NotImplementedError(f"attention with {', '.join(unusual)}")


def _branch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model calls while structured rows are scored; refuses what it does not compute."""
    refuse_variants(kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, _active[-1], scale, dropout), None


AttentionInterface.register(ATTENTION, _branch_attention)


@contextmanager
def branch_attention(config: Any, pieces: list[Piece]) -> Iterator[None]:
    """Let the model of this config attend by a batch's pieces; its own attention is put back afterwards."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    _active.append(pieces)
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before


_exact: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def by_structure(body: Any, packed: PackedBatch) -> bool:
    """Whether this batch is to be attended by its structure: long rows, a model for which that is exact.

    What a model computes is tried out once, on rows of its own against the mask, since one with another kind of
    attention gives other numbers unasked.
    """
    if not may_branch(body, packed):
        return False
    if body not in _exact:
        _exact[body] = _agrees(body)
    return _exact[body]


def may_branch(body: Any, packed: PackedBatch) -> bool:
    """Whether rows are long enough and nothing about the model is known to forbid their structure.

    Gradient checkpointing does: its second forward runs outside the context.
    """
    if not packed.shared_prefix or packed.input_ids.shape[1] < LONG_ROW:
        return False
    if body.training and getattr(body, "is_gradient_checkpointing", False):
        return False
    sdpa = getattr(body.config, "_attn_implementation", None) == "sdpa"
    return sdpa and not getattr(body, "_compiled_call_impl", None)


def _agrees(body: Any) -> bool:
    """Hidden states of two small groups in a row, by structure and by mask."""
    from keel.base.types import Completion, Group, Problem
    from keel.models.head import evaluating
    from keel.models.pack import pack

    vocabulary = body.get_input_embeddings().num_embeddings
    numbers = torch.randint(0, vocabulary, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def said(start: int, stop: int) -> Completion:
        zeros = (0.0,) * (stop - start)
        return Completion(tuple(numbers[start:stop]), (True,) * (stop - start), zeros, zeros, "", "length")

    groups = [
        Group(Problem("a", ""), tuple(numbers[:9]), (said(9, 14), said(14, 22), said(22, 23))),
        Group(Problem("b", ""), tuple(numbers[23:28]), (said(28, 40), said(40, 47))),
    ]
    packed = pack(groups, 0, max_row_tokens=64).to(next(body.parameters()).device)
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False}
    try:
        with evaluating(body):
            expected = body(**inputs, attention_mask=packed.mask_4d())[0].float()
            with branch_attention(body.config, pieces_of(packed)):
                found = body(**inputs, attention_mask=None)[0].float()
    except Exception:  # whatever a foreign model raises here, the mask still serves it
        return False
    real = packed.prefix >= 0
    apart = (found - expected)[real].abs().max() / expected[real].std().clamp(min=1e-6)
    half = next(body.parameters()).dtype in (torch.float16, torch.bfloat16)
    return bool(apart < (0.2 if half else 1e-3))
