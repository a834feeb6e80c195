"""Pack groups of completions into rows of tokens: each group's prompt once, then its completions.

A shared-prefix row holds `prompt, completion 1, completion 2, …`. A completion attends to the prompt and to itself. Its
positions continue from the prompt's length. The prompt's last position scores the first token of every completion. The
results equal those of one row per completion, but the prompt is computed once. The last token of a completion is left
out of the row, because it scores no token and no token attends to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group

Numbers = NDArray[np.int64]

PADDING = -1  # the prompt index of padding


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to the device; from the CPU through pinned memory, asynchronously."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Segments:
    """Segments of the flattened rows `[R·L]`, as cumulative lengths (int32).

    Each prompt, each completion and each row's padding is a segment of `cu_seqlens`. In the attention of completions
    to prompts, segment i of `cu_seqlens_q` attends to segment i of `cu_seqlens_k`. A group's completions attend to its
    prompt, and all other tokens to an empty segment. `in_completion` `[R·L]` is true on completion tokens.
    """

    cu_seqlens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    in_completion: Tensor
    max_seqlen: int
    max_seqlen_q: int
    max_seqlen_k: int
    has_completions: bool

    @staticmethod
    def of(prefix: Tensor, branch: Tensor) -> Segments:
        """Segments from a packed batch's `prefix` and `branch` `[R, L]` on the CPU."""
        rows, length = prefix.shape
        row = torch.arange(rows).repeat_interleave(length)
        prefix, branch = prefix.flatten(), branch.flatten()
        group = _numbered(_changes(row) | _changes(prefix))  # one number per group and per row's padding
        run = _numbered(_changes(group) | _changes(branch))
        in_completion = branch > 0
        totals = torch.bincount(group)
        completions = torch.bincount(group[in_completion], minlength=len(totals))
        prompts, nothing = totals - completions, torch.zeros_like(totals)
        cu_seqlens, max_seqlen = _bounds(torch.bincount(run))
        cu_seqlens_q, max_seqlen_q = _bounds(torch.stack((prompts, completions, nothing), dim=1).flatten())
        cu_seqlens_k, max_seqlen_k = _bounds(torch.stack((nothing, prompts, completions), dim=1).flatten())
        return Segments(
            cu_seqlens,
            cu_seqlens_q,
            cu_seqlens_k,
            in_completion,
            max_seqlen,
            max_seqlen_q,
            max_seqlen_k,
            bool(in_completion.any()),
        )

    def to(self, device: torch.device | str) -> Segments:
        """The same segments on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(x, device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _changes(values: Tensor) -> Tensor:
    """True at each value that differs from the previous one; false for the first."""
    return torch.cat((torch.zeros(1, dtype=torch.bool), values[1:] != values[:-1]))


def _numbered(changes: Tensor) -> Tensor:
    return changes.cumsum(0)


def _bounds(lengths: Tensor) -> tuple[Tensor, int]:
    """Cumulative lengths, starting from 0, and the longest length."""
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0


@dataclass(frozen=True)
class PackedBatch:
    """R rows of L tokens that score B completions of up to T tokens; B is group-major.

    Two numbers per token describe the mask. `prefix` is the index of the token's prompt (−1: padding). `branch` is the
    index of its completion (0: the prompt itself). `segments` are runs of equal `prefix` and `branch`. `gather` indexes
    the flattened `[R·L]` positions. `host` is the same batch on the CPU, for reads without device synchronisation.
    """

    input_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L]
    prefix: Tensor  # [R, L]
    branch: Tensor  # [R, L]
    gather: Tensor  # [B, T]: the position whose hidden state scores token t of completion b
    tokens: Tensor  # [B, T]
    action_mask: Tensor  # [B, T] bool: tokens that the policy sampled
    completion_mask: Tensor  # [B, T] bool: tokens that exist
    existing: Tensor  # [N]: the tokens that exist, in the flattened [B·T]
    group: Tensor  # [B]
    segments: Segments
    shared_prefix: bool
    host: PackedBatch | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: to_device(x, device) for k, x in tensors.items() if isinstance(x, Tensor)}
        return replace(self, **moved, segments=self.segments.to(device), host=self if self.host is None else self.host)

    def attention_mask(self) -> Tensor:
        """The mask for the model: boolean `[R, 1, L, L]` for shared-prefix rows, `[R, L]` for one row per completion.

        With the 2-D mask, the model's own sliding windows and hybrid layers still apply.
        """
        if not self.shared_prefix:
            return (self.prefix != PADDING).long()
        return self.mask_4d()

    def mask_4d(self) -> Tensor:
        """visible(q, k) = k ≤ q, same prompt, and k is in the prompt or in q's completion.

        Every token attends to itself, padding included, because a softmax over no keys would be NaN.
        """
        visible = self.branch[:, :, None] == self.branch[:, None, :]
        visible |= (self.branch == 0)[:, None, :]
        visible &= self.prefix[:, :, None] == self.prefix[:, None, :]
        order = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        visible &= order[:, None] >= order[None, :]
        return visible[:, None]

    def scored(self) -> tuple[Tensor, Tensor]:
        """The N existing tokens in the order of `[B, T]`: the positions that score them, and the tokens."""
        return self.gather.flatten()[self.existing], self.tokens.flatten()[self.existing]

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter N values to `[B, T]`, with zeros outside the completions; differentiable."""
        flat = values.new_zeros(self.completion_mask.numel()).index_copy(0, self.existing, values)
        return flat.view(self.completion_mask.shape)


def pack(
    groups: Sequence[Group],
    pad_token_id: int,
    *,
    shared_prefix: bool = True,
    max_row_tokens: int | None = None,
    context_length: int | None = None,
) -> PackedBatch:
    """Pack all completions of `groups` into rows.

    With `shared_prefix`, a row holds whole groups, up to `max_row_tokens` (None: one row per group). Without it, each
    completion is one right-padded row.
    """
    check_groups(groups, context_length)
    completions = [completion for group in groups for completion in group.completions]
    if shared_prefix:
        units = [(group.prompt_tokens, group.completions) for group in groups]
        bins = _bins([row_length(group) for group in groups], max_row_tokens)
    else:
        units = [(group.prompt_tokens, (completion,)) for group in groups for completion in group.completions]
        bins = [[index] for index in range(len(units))]
    runs = _Runs.of(units, bins)
    shape = (len(bins), runs.row_length)
    in_run = _ramp(runs.counts)
    cells = runs.starts.repeat(runs.counts) + in_run

    def rows(values: Numbers, fill: int) -> Tensor:
        """One value per token of the rows, `fill` on padding."""
        filled = np.full(shape[0] * shape[1], fill, dtype=np.int64)
        filled[cells] = values
        return torch.from_numpy(filled).view(shape)

    positions = rows(runs.positions.repeat(runs.counts) + in_run, 0)
    if not shared_prefix:
        # Positions continue over padding, because transformers treats a jump as the start of a second sequence.
        positions = torch.arange(shape[1]).expand(shape).contiguous()
    prefix, branch = rows(runs.prefixes.repeat(runs.counts), PADDING), rows(runs.branches.repeat(runs.counts), 0)
    counts = _lengths(completion.tokens for completion in completions)
    width, token = int(counts.max()), _ramp(counts)
    existing = _right_padded_index(counts, width)
    gather, mask = np.zeros(len(counts) * width, np.int64), np.zeros(len(counts) * width, np.bool_)
    # The prompt's last token scores the completion's first token; each token of a completion scores the next.
    gather[existing] = np.where(token == 0, runs.last_of_prompt.repeat(counts), runs.first.repeat(counts) + token - 1)
    mask[existing] = True
    return PackedBatch(
        input_ids=rows(_flat(runs.tokens, np.int64), pad_token_id),
        position_ids=positions,
        prefix=prefix,
        branch=branch,
        gather=torch.from_numpy(gather).view(len(counts), width),
        tokens=right_pad((c.tokens for c in completions), 0),
        action_mask=right_pad((c.action for c in completions), False, dtype=torch.bool),
        completion_mask=torch.from_numpy(mask).view(len(counts), width),
        existing=torch.from_numpy(existing),
        group=torch.tensor([i for i, group in enumerate(groups) for _ in group.completions]),
        segments=Segments.of(prefix, branch),
        shared_prefix=shared_prefix,
    )


def right_pad(rows: Iterable[Sequence[float]], fill: float, *, dtype: torch.dtype = torch.long) -> Tensor:
    """One tensor of ragged rows, right-padded to the longest."""
    listed = list(rows)
    counts = _lengths(listed)
    width = int(counts.max(initial=0))
    padded = np.full(len(listed) * width, fill, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    padded[_right_padded_index(counts, width)] = _flat(listed, padded.dtype)
    return torch.from_numpy(padded).view(len(listed), width)


def _flat(rows: Sequence[Sequence[float]], dtype: Any) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))


def _lengths(rows: Iterable[Sized]) -> Numbers:
    return np.fromiter(map(len, rows), np.int64)


def _ramp(counts: Numbers) -> Numbers:
    """0, 1, … within each run of these lengths."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)


def _right_padded_index(counts: Numbers, width: int) -> Numbers:
    """Indices of ragged rows' values in the flattened `[rows, width]`."""
    return np.arange(len(counts)).repeat(counts) * width + _ramp(counts)


@dataclass(frozen=True)
class _Runs:
    """Runs of tokens (prompts and completions) in the order of their rows.

    The first six fields have one entry per run; `positions` are the first position ids. `first` and `last_of_prompt`
    have one entry per completion: the index of its first token and of its prompt's last token. These two and `starts`
    index the flattened rows. `first` is unused for completions of one token, which are not in the row.
    """

    tokens: list[Sequence[int]]
    starts: Numbers
    counts: Numbers
    positions: Numbers
    prefixes: Numbers
    branches: Numbers
    first: Numbers
    last_of_prompt: Numbers
    row_length: int

    @staticmethod
    def of(units: Sequence[tuple[Sequence[int], Sequence[Completion]]], bins: Sequence[Sequence[int]]) -> _Runs:
        """Runs of prompts with their completions; a bin lists the units of a row."""
        tokens: list[Sequence[int]] = []
        placed: list[tuple[int, int, int, int, int]] = []  # row, column, position, prefix, branch
        prompt_runs, row_length = np.zeros(len(units), np.int64), 0
        for row, members in enumerate(bins):
            column = 0
            for prefix, index in enumerate(members):
                prompt, completions = units[index]
                prompt_runs[index] = len(tokens)
                for branch, ids in enumerate((prompt, *(completion.tokens[:-1] for completion in completions))):
                    tokens.append(ids)
                    placed.append((row, column, len(prompt) if branch else 0, prefix, branch))
                    column += len(ids)
            row_length = max(row_length, column)
        numbers, columns, positions, prefixes, branches = np.array(placed, np.int64).T
        starts, counts = numbers * row_length + columns, _lengths(tokens)
        completions_each = _lengths(completions for _, completions in units)
        prompts = prompt_runs.repeat(completions_each)
        first = starts[prompts + 1 + _ramp(completions_each)]
        last_of_prompt = starts[prompts] + counts[prompts] - 1
        return _Runs(tokens, starts, counts, positions, prefixes, branches, first, last_of_prompt, row_length)


def check_groups(groups: Sequence[Group], context_length: int | None = None) -> None:
    """Refuse groups that cannot be scored."""
    if not groups:
        raise KeelError("nothing to score: no groups were given")
    for group in groups:
        name = f"problem {group.problem.key!r}"
        if not group.prompt_tokens:
            raise KeelError(
                f"{name} has an empty prompt: the first token needs at least one token before it, such as BOS"
            )
        if not group.completions:
            raise KeelError(f"{name} has a group with zero completions: give at least one, or leave the group out")
        if group.rewards and len(group.rewards) != len(group.completions):
            raise KeelError(
                f"{name} has {len(group.completions)} completions with {len(group.rewards)} rewards: "
                "give one reward per completion, or none before judging"
            )
        for completion in group.completions:
            if len(completion.action) != len(completion.tokens):
                raise KeelError(
                    f"{name} has a completion of {len(completion.tokens)} tokens with {len(completion.action)} "
                    "action flags: give one flag per token"
                )
        longest = _longest_sequence(group)
        if context_length is not None and longest > context_length:
            raise KeelError(
                f"{name} needs {longest} tokens (prompt {len(group.prompt_tokens)} + completion "
                f"{longest - len(group.prompt_tokens)}), more than the model's context of {context_length}: "
                "lower data.max_prompt_length or rollout.max_completion_length"
            )


def microbatches(
    groups: Sequence[Group], max_tokens: int, *, shared_prefix: bool = True, one_row: bool = False
) -> list[list[Group]]:
    """Split groups into microbatches of at most `max_tokens` computed tokens (rows × longest row), in order.

    With `one_row`, a microbatch becomes one row. A group above the budget is split into sub-groups that repeat the
    prompt. A single completion above the budget is a separate microbatch. The order of completions is kept.
    """
    if max_tokens < 1:
        raise KeelError(f"microbatch_tokens must be at least 1, got {max_tokens}")
    batches: list[list[Group]] = []
    size = _Size()
    for part in (part for group in groups for part in _split(group, max_tokens, shared_prefix)):
        other = _size(part, shared_prefix)
        grown = _Size(1, size.longest + other.longest) if one_row else size.plus(other)
        if batches and grown.area <= max_tokens:
            batches[-1].append(part)
            size = grown
        else:
            batches.append([part])
            size = other
    return batches


@dataclass(frozen=True)
class _Size:
    """The number of rows and the length of the longest row."""

    rows: int = 0
    longest: int = 0

    def plus(self, other: _Size) -> _Size:
        return _Size(self.rows + other.rows, max(self.longest, other.longest))

    @property
    def area(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.rows * self.longest


def _size(group: Group, shared_prefix: bool) -> _Size:
    if shared_prefix:
        return _Size(1, row_length(group))
    return _Size(len(group.completions), _longest_sequence(group) - 1)


def _split(group: Group, max_tokens: int, shared_prefix: bool) -> list[Group]:
    """The group itself if it fits, otherwise consecutive parts that fit."""
    runs: list[range] = []
    size, prompt = _Size(), len(group.prompt_tokens)
    for index, completion in enumerate(group.completions):
        alone = _Size(1, prompt + (_input_length(completion) if shared_prefix else len(completion.tokens) - 1))
        grown = _Size(1, size.longest + alone.longest - prompt) if shared_prefix else size.plus(alone)
        if runs and grown.area <= max_tokens:
            runs[-1] = range(runs[-1].start, index + 1)
            size = grown
        else:
            runs.append(range(index, index + 1))
            size = alone
    return [group] if len(runs) <= 1 else [_part(group, run) for run in runs]


def _part(group: Group, run: range) -> Group:
    """A sub-group of consecutive completions, with their rewards."""
    return replace(
        group, completions=group.completions[run.start : run.stop], rewards=group.rewards[run.start : run.stop]
    )


def _input_length(completion: Completion) -> int:
    """Tokens of a completion that enter a row: all but the last."""
    return max(len(completion.tokens) - 1, 0)


def row_length(group: Group) -> int:
    """Tokens of the group's row: the prompt once, and each completion's input tokens."""
    return len(group.prompt_tokens) + sum(_input_length(completion) for completion in group.completions)


def _longest_sequence(group: Group) -> int:
    """Prompt plus the longest completion."""
    return len(group.prompt_tokens) + max((len(c.tokens) for c in group.completions), default=0)


def _bins(lengths: Sequence[int], capacity: int | None) -> list[list[int]]:
    """First-fit decreasing. An item above the capacity gets its own bin; without a capacity, every item does."""
    if capacity is None:
        return [[index] for index in range(len(lengths))]
    bins: list[list[int]] = []
    free: list[int] = []  # of each bin
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = next((slot for slot, room in enumerate(free) if room >= lengths[index]), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(capacity)
        bins[slot].append(index)
        free[slot] -= lengths[index]
    return bins
