"""Shared-prefix attention: the prompt attends causally to itself, and each completion to the prompt and itself.

With a dense mask, an attention kernel computes all L² pairs of a row and discards most of them. Structured attention
computes P²/2 + nT(P + T) pairs for a prompt of P tokens and n completions of T tokens. For P = 2300, n = 8 and T = 128
this is less than half. On a GPU in half precision it takes two flash calls per layer, otherwise a loop over groups.
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
from keel.models.flash_prefix import flash_attend, flash_dtype, flash_unsupported_reason
from keel.models.head import evaluating
from keel.models.pack import PackedBatch, Segments, pack, to_device
from keel.models.precision import Errors, accepted, errors_of, has_experts

ATTENTION = "keel_prefix_scoring"  # for scoring; the engine registers another for decoding
LONG_ROW = 1024  # tokens; for shorter rows a mask is faster than one call per group
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "return_dict"}
_BENIGN = {"position_ids", "use_cache", "is_causal"} | _OUTPUTS  # arguments that do not change the attention pattern


@dataclass(frozen=True)
class PrefixGroup:
    """One group in a row: the columns `start` to `stop` of its prompt, and the columns of its completions, if any.

    `completions` `[n, T]` are columns, padded with `start`. `valid` are the flattened indices without padding. `mask`
    `[T, P + T]` lets a completion attend to the prompt and causally to itself.
    """

    row: int
    start: int
    stop: int
    completions: Tensor | None = None
    valid: Tensor | None = None
    mask: Tensor | None = None


class RowStructure:
    """The attention structure of a batch's rows: segments for flash kernels, groups for the loop over groups."""

    def __init__(self, packed: PackedBatch) -> None:
        self.segments: Segments = packed.segments
        self._packed = packed

    @cached_property
    def groups(self) -> list[PrefixGroup]:
        """The groups; computed on first use."""
        return prefix_groups(self._packed)


def prefix_groups(packed: PackedBatch) -> list[PrefixGroup]:
    """The groups of all rows, without padding."""
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
    """Attention of queries `[R, H, L, D]` over keys `[R, K, L, D]`; returns `[R, L, H, D]`; differentiable."""
    if flash_unsupported_reason(query, query.shape[-1], dropout, planned=bool(_like_cuda)) is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return flash_attend(q, k, v, structure.segments, scale).unflatten(0, (len(query), -1))
    return attend_by_group(query, key, value, structure.groups, scale, dropout)


def attend_by_group(
    query: Tensor, key: Tensor, value: Tensor, groups: list[PrefixGroup], scale: float, dropout: float = 0.0
) -> Tensor:
    """`attend` by a loop over groups; zero at padding."""
    gqa = query.shape[1] != key.shape[1]
    if gqa and (query.is_cuda or _like_cuda):  # CUDA has no fused kernel for a mask with grouped heads
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


_active: list[tuple[Any, RowStructure]] = []  # the model's config and the rows' structure
_like_cuda: list[bool] = []


@contextmanager
def simulate_cuda_memory() -> Iterator[None]:
    """Within this context, attention allocates as on CUDA (flash kernels, or repeated heads), to plan memory."""
    _like_cuda.append(True)
    try:
        yield
    finally:
        _like_cuda.pop()


def refuse_unsupported_attention(kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments that change the attention pattern, so that the caller uses the model's own attention."""
    unusual = sorted(name for name, value in kwargs.items() if value is not None and name not in _BENIGN)
    if unusual:
        raise NotImplementedError(f"attention with {', '.join(unusual)} is not supported")


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
    refuse_unsupported_attention(kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, _active[-1][1], scale, dropout), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def prefix_attention(config: Any, structure: RowStructure) -> Iterator[None]:
    """Within this context, the model of this config uses structured attention; its own is restored afterwards."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    _active.append((config, structure))
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before


def active_structure(config: Any) -> RowStructure | None:
    """The active row structure of this config's model; None outside `prefix_attention`."""
    return _active[-1][1] if config._attn_implementation == ATTENTION else None


@dataclass(frozen=True)
class RecomputeContext:
    """The `context_fn` of gradient checkpointing: recompute with the first forward's attention, inside `within`."""

    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self._second(_active[-1] if _active else None)

    @contextmanager
    def _second(self, active: tuple[Any, RowStructure] | None) -> Iterator[None]:
        with prefix_attention(*active) if active else nullcontext(), self.within():
            yield


_exact: WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = WeakKeyDictionary()  # keys: model, compute dtype


def use_prefix_attention(body: Any, packed: PackedBatch) -> bool:
    """Whether prefix attention is faster for this batch's rows and exact for this model.

    Each model is compared once with masked attention on small rows. Without that check, a model with another kind of
    attention would silently give wrong numbers.
    """
    return may_use_prefix_attention(body, packed) and try_prefix_attention(body)


def uses_flash(body: Any) -> bool:
    """Whether flash kernels score this model's rows. If so, one row may hold any number of groups."""
    like = next(body.parameters())
    return (
        flash_unsupported_reason(like, head_size(body)) is None
        and structured_unsupported_reason(body) is None
        and try_prefix_attention(body)
    )


def head_size(body: Any) -> int | None:
    """The size of an attention head, or None if the config does not state it."""
    size, heads = getattr(body.config, "head_dim", None), getattr(body.config, "num_attention_heads", None)
    return size if size or not heads else body.config.hidden_size // heads


def try_prefix_attention(body: Any) -> bool:
    """Whether structured attention is exact for this model; checked once per dtype."""
    exact, dtype = _exact.setdefault(body, {}), flash_dtype(next(body.parameters()))
    if dtype not in exact:
        exact[dtype] = _matches_masked(body)
    return exact[dtype]


def may_use_prefix_attention(body: Any, packed: PackedBatch) -> bool:
    """Whether structured attention may be used and is faster: with flash kernels always, otherwise for long rows."""
    flash = flash_unsupported_reason(next(body.parameters()), planned=bool(_like_cuda)) is None
    if not packed.shared_prefix or (packed.input_ids.shape[1] < LONG_ROW and not flash):
        return False
    return structured_unsupported_reason(body) is None


def structured_unsupported_reason(body: Any) -> str | None:
    """Why a model cannot use structured attention; None if a comparison must decide."""
    implementation = getattr(body.config, "_attn_implementation", None)
    if implementation != "sdpa":
        return f"its attention is {implementation}"
    if getattr(body, "_compiled_call_impl", None):
        return "it is compiled"
    if body.training and any(not isinstance(context, RecomputeContext) for context in _recompute_contexts(body)):
        return "its gradient checkpointing does not use Keel's RecomputeContext"
    return None


def _recompute_contexts(body: Any) -> Iterator[Any]:
    for module in body.modules():
        if getattr(module, "gradient_checkpointing", False):
            yield getattr(module._gradient_checkpointing_func, "keywords", {}).get("context_fn")


def _matches_masked(body: Any) -> bool:
    """Whether prefix attention gives the hidden states of masked attention on two small groups in a row."""

    def draw(seed: int) -> Errors:
        packed = small_rows(body.get_input_embeddings().num_embeddings, seed).to(next(body.parameters()).device)
        inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "use_cache": False}
        mask, valid = packed.mask_4d(), packed.prefix >= 0

        def masked() -> Tensor:
            hidden: Tensor = body(**inputs, attention_mask=mask)[0][valid]
            return hidden

        with prefix_attention(body.config, RowStructure(packed)):
            hidden = body(**inputs, attention_mask=None)[0][valid]
        return errors_of(body, hidden, masked(), masked)

    with evaluating(body):
        return accepted(draw, routed=has_experts(body))


def small_rows(vocabulary: int = 2, seed: int = 0) -> PackedBatch:
    """Two small groups of random tokens in a row, to check an attention implementation."""
    tokens = torch.randint(0, vocabulary, (64,), generator=torch.Generator().manual_seed(seed)).tolist()

    def completion(start: int, stop: int) -> Completion:
        zeros = (0.0,) * (stop - start)
        return Completion(tuple(tokens[start:stop]), (True,) * (stop - start), zeros, zeros, "", "length")

    groups = [
        Group(Problem("a", ""), tuple(tokens[:9]), (completion(9, 14), completion(14, 22), completion(22, 23))),
        Group(Problem("b", ""), tuple(tokens[23:28]), (completion(28, 40), completion(40, 47))),
    ]
    return pack(groups, 0, max_row_tokens=64)
