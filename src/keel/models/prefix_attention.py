"""Shared-prefix attention: the prompt attends to itself once, causally; each completion to the prompt and itself.

With a mask over the row, an attention kernel computes all L² pairs of tokens and throws most away. By structure, a
prompt of P tokens and n completions of T cost P²/2 + nT(P + T) pairs: for P = 2300, n = 8, T = 128 less than half. On a
GPU in half precision flash kernels do it in two calls a layer; elsewhere it is done group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from keel.base.types import Completion, Group, Problem
from keel.models.flash_prefix import flash_attend, flash_dtype, why_not_flash
from keel.models.head import evaluating
from keel.models.pack import PackedBatch, pack
from keel.models.segments import Segments, to_device

ATTENTION = "keel_prefix_scoring"  # the engine registers one for decoding
LONG_ROW = 1024  # below this a mask costs little, and a call a group costs more
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "return_dict"}
_BENIGN = {"position_ids", "use_cache", "is_causal"} | _OUTPUTS  # none changes what is attended to


@dataclass(frozen=True)
class PrefixGroup:
    """One group in a row: the columns of its prompt, from `start` to `stop`, and those of its completions, if any.

    `completions` `[n, T]` are columns, padded with `start`; `valid` indexes those that are no padding, flattened;
    `mask` `[T, P + T]` is what a completion attends to: the prompt, and itself causally.
    """

    row: int
    start: int
    stop: int
    completions: Tensor | None = None
    valid: Tensor | None = None
    mask: Tensor | None = None


class RowStructure:
    """How the rows of a batch attend: runs of tokens for flash kernels, groups for the others."""

    def __init__(self, packed: PackedBatch) -> None:
        self.segments: Segments = packed.segments
        self._packed = packed

    @cached_property
    def groups(self) -> list[PrefixGroup]:
        """The groups, found at first use: it takes a look at every token."""
        return prefix_groups(self._packed)


def prefix_groups(packed: PackedBatch) -> list[PrefixGroup]:
    """The groups of all rows; padding belongs to none."""
    groups = []
    host, device = packed.host or packed, packed.input_ids.device
    for row, (prefixes, branches) in enumerate(zip(host.prefix.tolist(), host.branch.tolist(), strict=True)):
        for prefix in sorted(set(prefixes) - {-1}):
            columns: dict[int, list[int]] = {}
            for column, (column_prefix, branch) in enumerate(zip(prefixes, branches, strict=True)):
                if column_prefix == prefix:
                    columns.setdefault(branch, []).append(column)
            prompt = columns.pop(0)
            start, stop = prompt[0], prompt[-1] + 1
            if not columns:
                groups.append(PrefixGroup(row, start, stop))
                continue
            width = max(map(len, columns.values()))
            padded = [completion + [start] * (width - len(completion)) for completion in columns.values()]
            valid = [i * width + t for i, completion in enumerate(columns.values()) for t in range(len(completion))]
            mask = torch.ones(width, stop - start + width, dtype=torch.bool, device=device).tril(stop - start)
            indices = [to_device(torch.tensor(index), device) for index in (padded, valid)]
            groups.append(PrefixGroup(row, start, stop, indices[0], indices[1], mask))
    return groups


def attend(
    query: Tensor, key: Tensor, value: Tensor, structure: RowStructure, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention of rows `[R, H, L, D]` over `[R, K, L, D]`, as `[R, L, H, D]`; differentiable."""
    if why_not_flash(query, query.shape[-1], dropout, planned=bool(_like_cuda)) is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return flash_attend(q, k, v, structure.segments, scale).unflatten(0, (len(query), -1))
    return attend_by_group(query, key, value, structure.groups, scale, dropout)


def attend_by_group(
    query: Tensor, key: Tensor, value: Tensor, groups: list[PrefixGroup], scale: float, dropout: float = 0.0
) -> Tensor:
    """The same, a prompt or a group's completions at a time; zero at padding."""
    gqa = query.shape[1] != key.shape[1]
    if gqa and (query.is_cuda or _like_cuda):  # no fused kernel there takes a mask and grouped heads together
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        gqa = False
    out = torch.zeros_like(query.transpose(1, 2))
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": gqa}
    for group in groups:
        q, k, v = (x[group.row : group.row + 1] for x in (query, key, value))
        prompt_k, prompt_v = k[:, :, group.start : group.stop], v[:, :, group.start : group.stop]
        prompt_q = q[:, :, group.start : group.stop]
        prompt = scaled_dot_product_attention(prompt_q, prompt_k, prompt_v, is_causal=True, **options)
        out[group.row, group.start : group.stop] = prompt[0].transpose(0, 1)
        if group.completions is None or group.valid is None:
            continue
        count = len(group.completions)

        def of_completions(x: Tensor, columns: Tensor = group.completions) -> Tensor:
            return x[0][:, columns].transpose(0, 1)  # [n, heads, T, D]

        keys = torch.cat((prompt_k.expand(count, -1, -1, -1), of_completions(k)), dim=2)
        values = torch.cat((prompt_v.expand(count, -1, -1, -1), of_completions(v)), dim=2)
        attended = scaled_dot_product_attention(of_completions(q), keys, values, attn_mask=group.mask, **options)
        columns = group.completions.flatten()[group.valid]
        out[group.row, columns] = attended.transpose(1, 2).flatten(0, 1)[group.valid]
    return out


_active: list[tuple[Any, RowStructure]] = []  # the model's config, and how its rows attend
_like_cuda: list[bool] = []


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Attention takes the memory that it takes on CUDA: by flash kernels, or with repeated heads; for plans."""
    _like_cuda.append(True)
    try:
        yield
    finally:
        _like_cuda.pop()


def refuse_variants(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention other than the plain one, so that the caller falls back to the model's own."""
    unusual = sorted(name for name, value in kwargs.items() if value is not None and name not in _BENIGN)
    if unusual:
        raise NotImplementedError(f"attention with {', '.join(unusual)}")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls inside `prefix_attention`."""
    refuse_variants(kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, _active[-1][1], scale, dropout), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def prefix_attention(config: Any, structure: RowStructure) -> Iterator[None]:
    """Inside, the model of this config attends by structure; its own attention is put back afterwards."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    _active.append((config, structure))
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before


def active_structure(config: Any) -> RowStructure | None:
    """How rows attend in the model of this config; None outside of `prefix_attention`."""
    return _active[-1][1] if config._attn_implementation == ATTENTION else None


@dataclass(frozen=True)
class AttendAgain:
    """The `context_fn` of gradient checkpointing: the second forward attends as the first did, inside `within` too."""

    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self._second(_active[-1] if _active else None)

    @contextmanager
    def _second(self, active: tuple[Any, RowStructure] | None) -> Iterator[None]:
        with prefix_attention(*active) if active else nullcontext(), self.within():
            yield


_exact: WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = WeakKeyDictionary()  # by the dtype it computes in


def use_prefix_attention(body: Any, packed: PackedBatch) -> bool:
    """Whether to score this batch by prefix attention: it is fast for such rows, and exact for this model.

    The model is tried once, on small rows against the mask: one with another kind of attention would silently give
    other numbers.
    """
    return may_use_prefix_attention(body, packed) and try_prefix_attention(body)


def attends_by_flash(body: Any) -> bool:
    """Whether flash kernels score this model's rows: then one row may hold any number of groups, without padding."""
    like = next(body.parameters())
    return (
        why_not_flash(like, head_size(body)) is None
        and why_not_by_structure(body) is None
        and try_prefix_attention(body)
    )


def head_size(body: Any) -> int | None:
    """The size of a head of the model's attention, where its config tells."""
    size, heads = getattr(body.config, "head_dim", None), getattr(body.config, "num_attention_heads", None)
    return size if size or not heads else body.config.hidden_size // heads


def try_prefix_attention(body: Any) -> bool:
    """Whether attention by structure is exact for this model: tried at the first call for each dtype."""
    exact, dtype = _exact.setdefault(body, {}), flash_dtype(next(body.parameters()))
    if dtype not in exact:
        exact[dtype] = _agrees(body)
    return exact[dtype]


def may_use_prefix_attention(body: Any, packed: PackedBatch) -> bool:
    """Whether it is fast for such rows (long ones, or any where flash kernels run) and nothing known forbids it."""
    flash = why_not_flash(next(body.parameters()), planned=bool(_like_cuda)) is None
    if not packed.shared_prefix or (packed.input_ids.shape[1] < LONG_ROW and not flash):
        return False
    return why_not_by_structure(body) is None


def why_not_by_structure(body: Any) -> str | None:
    """Why a model attends by mask however its rows are; None where a trial has to tell."""
    implementation = getattr(body.config, "_attn_implementation", None)
    if implementation != "sdpa":
        return f"its attention is {implementation}"
    if getattr(body, "_compiled_call_impl", None):
        return "it is compiled"
    if body.training and any(not isinstance(context, AttendAgain) for context in _recompute_contexts(body)):
        return "its activations are recomputed, outside the context that says how rows attend"
    return None


def _recompute_contexts(body: Any) -> Iterator[Any]:
    for module in body.modules():
        if getattr(module, "gradient_checkpointing", False):
            yield getattr(module._gradient_checkpointing_func, "keywords", {}).get("context_fn")


def _agrees(body: Any) -> bool:
    """Whether hidden states of two small groups in a row are the same by prefix attention and by mask."""
    packed = small_rows(body.get_input_embeddings().num_embeddings).to(next(body.parameters()).device)
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False}
    try:
        with evaluating(body):
            expected = body(**inputs, attention_mask=packed.mask_4d())[0].float()
            with prefix_attention(body.config, RowStructure(packed)):
                hidden = body(**inputs, attention_mask=None)[0].float()
    except Exception:  # whatever a foreign model raises here, the mask still serves it
        return False
    valid = packed.prefix >= 0
    error = (hidden - expected)[valid].abs().max() / expected[valid].std().clamp(min=1e-6)
    half_precision = flash_dtype(next(body.parameters())) in (torch.float16, torch.bfloat16)
    return bool(error < (0.2 if half_precision else 1e-3))


def small_rows(vocabulary: int = 2) -> PackedBatch:
    """Two small groups in a row, of random tokens: enough to see whether a way of attention is right."""
    tokens = torch.randint(0, vocabulary, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def completion(start: int, stop: int) -> Completion:
        zeros = (0.0,) * (stop - start)
        return Completion(tuple(tokens[start:stop]), (True,) * (stop - start), zeros, zeros, "", "length")

    groups = [
        Group(Problem("a", ""), tuple(tokens[:9]), (completion(9, 14), completion(14, 22), completion(22, 23))),
        Group(Problem("b", ""), tuple(tokens[23:28]), (completion(28, 40), completion(40, 47))),
    ]
    return pack(groups, 0, max_row_tokens=64)
