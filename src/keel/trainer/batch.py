"""The batch of one step: `[B, T]` tensors for the losses, and microbatches as `models/pack.py` cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from keel.base.types import Batch, Completion, Group
from keel.kl.measure import MaskIndex
from keel.models.head import Head, frozen_head
from keel.models.logprobs import FullScores, hidden_states, score_hidden, score_tokens
from keel.models.pack import PackedBatch, microbatches, pack, right_pad
from keel.models.scorer import score_with
from keel.models.segments import to_device
from keel.trainer.state import TrainingRun


@dataclass(frozen=True)
class Microbatch:
    """A microbatch: what the model reads, which rows of the batch it scores, the reference's hidden states for it."""

    packed: PackedBatch
    rows: slice
    minibatch: int = 0
    ref_hidden: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """One step's data. `rows` is what the losses read; B is group-major, in the order of `groups`.

    `actions` is where the action mask is true. `scores` are the rollout weights' own, one a microbatch, once there are
    any. `kl` `[B, T]` is the detached estimate of a penalty in the reward, `penalty` `[B]` what it adds to each reward.
    `rejected` `[B]` are the completions that `kl.collect_max` turned away.
    """

    groups: tuple[Group, ...]
    rows: Batch
    micros: tuple[Microbatch, ...]
    actions: MaskIndex
    ref_head: Head | None = None
    scores: tuple[FullScores, ...] = ()
    kl: Tensor | None = None
    penalty: Tensor | None = None
    rejected: Tensor | None = None

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def width(self) -> int:
        return self.rows.action_mask.shape[1]

    @property
    def largest(self) -> int:
        """Tokens of the largest microbatch, padding included."""
        return max(micro.packed.input_ids.numel() for micro in self.micros)

    @property
    def minibatches(self) -> list[list[Microbatch]]:
        """Microbatches by the update they belong to."""
        return [list(members) for _, members in groupby(self.micros, key=lambda micro: micro.minibatch)]

    def view(self, *micros: Microbatch) -> Batch:
        """The rows of neighbouring microbatches, cut to the widest of them."""
        rows = slice(micros[0].rows.start, micros[-1].rows.stop)
        width = max(micro.packed.action_mask.shape[1] for micro in micros)

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows] if x.dim() == 1 else x[rows, :width]

        return Batch(**{f.name: cut(getattr(self.rows, f.name)) for f in fields(Batch)})  # type: ignore[arg-type]

    def with_rows(self, **changes: Any) -> StepBatch:
        return replace(self, rows=replace(self.rows, **changes))


def pack_step(groups: Sequence[Group], run: TrainingRun) -> StepBatch:
    """One row a group where the model can, the prompt once; microbatches by tokens, groups whole where they fit."""
    device, shared, budget = run.policy.device, run.shared_prefix, run.microbatch_tokens
    completions = [completion for group in groups for completion in group.completions]
    micros, start = [], 0
    for number, members in enumerate(_parts(groups, run.optim.minibatches)):
        for part in split(members, budget, shared_prefix=shared, even=device.type == "cuda"):
            packed = pack(
                part,
                run.policy.pad_id,
                shared_prefix=shared,
                max_row_tokens=_row_budget(part, budget) if shared else None,
                context_length=run.policy.context_length,
            )
            stop = start + len(packed.tokens)
            micros.append(Microbatch(packed.to(device), slice(start, stop), number))
            start = stop
    actions = right_pad((c.action for c in completions), False, dtype=torch.bool)
    index, (rewards, group) = MaskIndex.of(actions), rewards_of(groups)
    rows = Batch(
        action_mask=to_device(actions, device),
        sample_logp=to_device(right_pad((c.sample_logp for c in completions), 0.0, dtype=torch.float32), device),
        rewards=to_device(rewards.float(), device),
        group=to_device(group, device),
    )
    on_device = MaskIndex(to_device(index.tokens, device), to_device(index.rows, device))
    return StepBatch(tuple(groups), rows, tuple(micros), on_device)


def split(groups: Sequence[Group], budget: int, *, shared_prefix: bool, even: bool) -> list[list[Group]]:
    """`microbatches`; with `even` as many, of nearly one size where that splits no group more: less memory for free."""
    parts = microbatches(groups, budget, shared_prefix=shared_prefix)
    low, high = budget * (len(parts) - 1) // len(parts), budget
    for _ in range(3 if even and len(parts) > 1 else 0):  # an eighth of what is to be gained is left
        middle = (low + high) // 2
        trial = microbatches(groups, max(middle, 1), shared_prefix=shared_prefix)
        if len(trial) > len(parts) or sum(map(len, trial)) > sum(map(len, parts)):
            low = middle
        else:
            parts, high = trial, middle
    return parts


def rewards_of(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Each completion's reward, in fp64, and the number of its group, both `[B]` and in main memory."""
    totals = [reward.total for group in groups for reward in group.rewards]
    numbers = [i for i, group in enumerate(groups) for _ in group.completions]
    return torch.tensor(totals, dtype=torch.float64), torch.tensor(numbers, dtype=torch.long)


def _parts(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """As many neighbouring parts as asked for, as equal as they can be; fewer where there are fewer groups."""
    count = min(count, len(groups))
    edges = [round(i * len(groups) / count) for i in range(count + 1)]
    return [groups[start:stop] for start, stop in pairwise(edges)]


def _row_budget(groups: Sequence[Group], budget: int) -> int:
    """Rows as long as the longest group's: short groups share a row, and padding stays small."""
    longest = max(len(g.prompt_tokens) + sum(max(len(c.tokens) - 1, 0) for c in g.completions) for g in groups)
    return min(longest, budget)


def stitch(parts: Iterable[Tensor], width: int) -> Tensor:
    """Microbatches `[b, t]` back to one `[B, T]`, zero where a microbatch was narrower."""
    return torch.cat([functional.pad(part.detach(), (0, width - part.shape[1])) for part in parts])


def score_reference(batch: StepBatch, run: TrainingRun) -> StepBatch:
    """`ref_logp` of every token; with exact KL also the hidden states, kept over all updates of the batch."""
    assert run.reference is not None
    logps, micros, head = [], [], None
    with run.reference.model() as reference, torch.no_grad(), run.autocast():
        for micro in batch.micros:
            if run.scorer is not None:
                logps.append(score_with(run.scorer, reference, micro.packed, temperature=run.rollout.temperature).logp)
                micros.append(micro)
                continue
            hidden = hidden_states(reference, micro.packed)
            head = head or frozen_head(reference)
            logps.append(score_hidden(hidden, head, micro.packed, temperature=run.rollout.temperature).logp)
            micros.append(replace(micro, ref_hidden=hidden) if run.kl.needs_exact else micro)
    ref_logp = stitch(logps, batch.width)
    return replace(
        batch.with_rows(ref_logp=ref_logp), micros=tuple(micros), ref_head=head if run.kl.needs_exact else None
    )


def score_policy(batch: StepBatch, run: TrainingRun) -> StepBatch:
    """`old_logp` by a pass of its own, for what needs it before the first update."""
    with torch.no_grad():
        return keep_scores(batch, [score_micro(micro, batch, run) for micro in batch.micros])


def keep_scores(batch: StepBatch, scores: Sequence[FullScores]) -> StepBatch:
    """The rollout weights' scores of all microbatches: from now on `old_logp` is theirs."""
    old_logp = stitch((s.logp for s in scores), batch.width)
    return replace(batch.with_rows(old_logp=old_logp), scores=tuple(scores))


def detached(scores: FullScores) -> FullScores:
    """The same numbers without the graph behind them, to be looked at after the update."""
    tensors = {f.name: getattr(scores, f.name) for f in fields(scores)}
    plain: dict[str, Any] = {name: None if x is None else x.detach() for name, x in tensors.items()}
    return FullScores(**plain)


def score_micro(micro: Microbatch, batch: StepBatch, run: TrainingRun) -> FullScores:
    """The policy's scores of one microbatch: log-probability, entropy, exact KL where the reference was kept."""
    exact = micro.ref_hidden is not None
    with run.autocast():
        if run.scorer is not None:
            return score_with(run.scorer, run.policy.model, micro.packed, temperature=run.rollout.temperature)
        return score_tokens(
            run.policy.model,
            micro.packed,
            temperature=run.rollout.temperature,
            entropy=True,
            exact_kl=exact,
            ref_policy=exact,
            ref_policy_grad=run.kl.estimator == "exact_reverse",
            ref_hidden=micro.ref_hidden,
            ref_head=batch.ref_head,
        )
