"""The batch of one step: `[B, T]` tensors for the losses, and the microbatches that the model runs."""

from __future__ import annotations

import copy
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.base.errors import KeelError
from keel.base.types import Batch, Completion, Group, Problem
from keel.kl.exact import penalty_divergence
from keel.kl.measure import MaskIndex, occupied_bins, positions
from keel.models.fused_linear import cast_weights_once
from keel.models.head import Head, JoinedHeads, LogitsOf, body_of, frozen_head
from keel.models.pack import PackedBatch, microbatches, pack, right_pad, row_length, to_device
from keel.models.prefix_attention import uses_flash
from keel.models.scorer import FullScores, hidden_states, score_hidden, score_tokens, score_with
from keel.models.sharding import call_with_full_weights, is_sharded
from keel.reference import Reference, shortest_context
from keel.reference.base import RuleReference, knows_top_only
from keel.reference.server import KnownTokens, ServerTeacher
from keel.trainer.state import Anchor, TrainingRun


@dataclass(frozen=True)
class Microbatch:
    """A microbatch: the model's input, the rows of the batch that it scores, and the reference's hidden states."""

    packed: PackedBatch
    rows: slice
    minibatch: int = 0
    ref_hidden: Tensor | None = None

    @property
    def width(self) -> int:
        return self.packed.action_mask.shape[1]


@dataclass(frozen=True)
class Minibatch:
    """The part of a batch that one update uses: its rows, their width, and this process's microbatches.

    `dummy_passes` is the number of passes on dummy batches. Under FSDP they match the collectives of processes with
    more microbatches.
    """

    rows: slice
    width: int
    dummy_passes: int
    micros: tuple[Microbatch, ...]


@dataclass(frozen=True)
class StepBatch:
    """The data of one step. The losses read `rows`; B is group-major, in the order of `groups`.

    Rows and groups cover all processes. `micros` are the passes of this process. `spans` are the rows, width and dummy
    passes of each minibatch. `actions` indexes the true entries of the action mask. `scores` are the policy's scores
    under the rollout weights; they are None until computed.

    `kl` `[B, T]` is the detached KL estimate for a penalty in the reward. `penalty` `[B]` is added to the rewards.
    `others` holds one view of the batch for each further anchor, with the anchor's log-probabilities, penalties and
    scores. `rejected` `[B]` marks completions above `kl.collect_max`. `unreported` is the share of sampled tokens
    without a log-probability from the engine; these tokens get no importance weight. `reported` names the
    log-probabilities that the engine returned for every token. `depth_bins` are the depth ranges that contain sampled
    tokens (`keel.kl.measure`). `episode` `[B]` is the index of each row's episode, or None if each row is an episode.
    """

    groups: tuple[Group, ...]
    rows: Batch
    micros: tuple[Microbatch, ...]
    spans: tuple[tuple[slice, int, int], ...]
    actions: MaskIndex
    ref_head: LogitsOf | JoinedHeads | None = None
    scores: FullScores | None = None
    kl: Tensor | None = None
    penalty: Tensor | None = None
    rejected: Tensor | None = None
    unreported: float = 0.0
    reported: frozenset[str] = frozenset()
    depth_bins: tuple[int, ...] = ()
    episode: Tensor | None = None
    others: tuple[StepBatch, ...] = ()

    @property
    def views(self) -> tuple[StepBatch, ...]:
        """The view of the batch for each anchor, the reference first."""
        return (replace(self, others=()), *self.others)

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def width(self) -> int:
        return self.rows.action_mask.shape[1]

    @property
    def dummy_passes(self) -> int:
        """Dummy passes of this process over the whole batch."""
        return sum(dummy_passes for *_, dummy_passes in self.spans)

    @property
    def largest_pass(self) -> int:
        """Tokens of this process's largest microbatch, padding included."""
        return max((micro.packed.input_ids.numel() for micro in self.micros), default=0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest completion with its prompt, the minimum size of a pass."""
        return max(len(g.prompt_tokens) + len(c.tokens) for g in self.groups for c in g.completions)

    @property
    def minibatches(self) -> list[Minibatch]:
        """The minibatches, each with the microbatches of one update."""
        numbers = range(len(self.spans))
        by_update = [tuple(micro for micro in self.micros if micro.minibatch == number) for number in numbers]
        return [Minibatch(*span, micros) for span, micros in zip(self.spans, by_update, strict=True)]

    def view(self, part: Microbatch | Minibatch) -> Batch:
        """The rows of a part, cut to its width."""

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x[part.rows] if x.dim() == 1 else x[part.rows, : part.width]

        return Batch(**{f.name: cut(getattr(self.rows, f.name)) for f in fields(Batch)})

    def over_episodes(self, values: Tensor) -> Tensor:
        """The sum of values `[B]` over the rows of each episode."""
        if self.episode is None:
            return values
        return torch.zeros_like(values).index_add_(0, self.episode, values)[self.episode]

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values `[B]` over episodes."""
        weight = self.rows.weight
        return values.mean() if weight is None else (values * weight.to(values)).sum() / weight.to(values).sum()

    def with_rows(self, **changes: Any) -> StepBatch:
        """The batch with changed rows, in every anchor's view."""
        others = tuple(view.with_rows(**changes) for view in self.others)
        return replace(self, rows=replace(self.rows, **changes), others=others)


def each_anchor(batch: StepBatch, run: TrainingRun, change: Callable[[StepBatch, Anchor], StepBatch]) -> StepBatch:
    """Apply `change` to every anchor's view of the batch."""
    first, *others = (change(view, anchor) for view, anchor in zip(batch.views, run.anchors, strict=True))
    return replace(first, others=tuple(others))


def pack_step(groups: Sequence[Group], run: TrainingRun, *, stale: bool = False) -> StepBatch:
    """Pack groups into microbatches. If the model allows shared prompts, a group is one row with its prompt once.

    Each branch of an episode becomes a separate completion with the episode's reward and a share of its weight.

    The size of a microbatch is limited in tokens. A group is split only if it exceeds the limit. With flash attention
    a microbatch is a single row without padding. Each process packs its share of every minibatch. `stale` means that
    older weights may have sampled the completions.
    """
    device, shared, budget = run.policy.device, run.shared_prefix, run.microbatch_tokens
    episodes, groups = _episodes(groups), [_by_branch(group) for group in groups]
    with run.autocast():
        one_row = shared and uses_flash(body_of(run.policy.model))
    context = shortest_context(run.policy.context_length, *(anchor.reference for anchor in run.anchors))
    completions = [completion for group in groups for completion in group.completions]
    micros, spans, start = [], [], 0
    for number, members in enumerate(_minibatches(groups, run.optim.minibatches)):
        first = start
        for rank, share in enumerate(_rank_shares(members, run.world.size)):
            own = share if rank == run.world.rank else ()
            for part in split(own, budget, shared_prefix=shared, one_row=one_row, even=device.type == "cuda"):
                packed = pack(
                    part,
                    run.policy.pad_id,
                    shared_prefix=shared,
                    max_row_tokens=sys.maxsize if one_row else _row_budget(part, budget) if shared else None,
                    context_length=context,
                )
                stop = start + len(packed.tokens)
                micros.append(Microbatch(packed.to(device), slice(start, stop), number))
                start = stop
            if rank != run.world.rank:
                start += sum(len(group.completions) for group in share)
        passes = sum(micro.minibatch == number for micro in micros)
        dummy_passes = max(run.world.all_gather(passes)) - passes if is_sharded(run.policy.model) else 0
        spans.append((slice(first, start), max(len(c.tokens) for c in completions[first:start]), dummy_passes))
    actions = right_pad((c.action for c in completions), False, dtype=torch.bool)
    index, (rewards, group) = MaskIndex.of(actions), rewards_of(groups)
    sample = right_pad((c.sample_logp for c in completions), 0.0, dtype=torch.float32)
    filtered = None
    if run.rollout.filtered:
        filtered = right_pad((c.filtered_logp for c in completions), 0.0, dtype=torch.float32)
    unknown = {"sample_logp": sample.isnan() & actions}
    if filtered is not None:
        unknown["filtered_logp"] = filtered.isnan() & actions
    missing = torch.stack([unknown[name] for name in _required_logps(run)]).any(0)
    unreported = float(missing.sum() / actions.sum().clamp_min(1))
    if stale and unreported:
        raise KeelError(
            f"rollout.max_staleness={run.rollout.max_staleness} needs the sampler's log-probabilities to weigh stale "
            f"samples, and rollout.engine={run.rollout.named_engine.name} reports none for {100 * unreported:.3g} % of "
            "the tokens: use an engine that reports them, or set rollout.max_staleness=0"
        )
    rows = Batch(
        action_mask=to_device(actions, device),
        sample_logp=to_device(sample, device),
        filtered_logp=None if filtered is None else to_device(filtered, device),
        rewards=to_device(rewards.float(), device),
        group=to_device(group, device),
        weight=None if episodes is None else to_device(episodes[1], device),
        stale=stale,
    )
    reported = frozenset(name for name, tokens in unknown.items() if not bool(tokens.any()))
    prompts = [len(group.prompt_tokens) for group in groups for _ in group.completions]
    depth_bins = occupied_bins(positions(prompts, actions.shape[1]), actions)
    on_device = MaskIndex(to_device(index.tokens, device), to_device(index.rows, device))
    batch = StepBatch(
        tuple(groups),
        rows,
        tuple(micros),
        tuple(spans),
        on_device,
        unreported=unreported,
        reported=reported,
        depth_bins=depth_bins,
        episode=None if episodes is None else to_device(episodes[0], device),
    )
    return replace(batch, others=(batch,) * (len(run.anchors) - 1))


def _by_branch(group: Group) -> Group:
    """The group with each branch of its episodes as a separate completion."""
    pairs = list(zip(group.completions, group.rewards, strict=True)) if group.rewards else []
    rows = tuple(replace(branch, branches=()) for c in group.completions for branch in (c, *c.branches))
    return replace(group, completions=rows, rewards=tuple(r for c, r in pairs for _ in (c, *c.branches)))


def _episodes(groups: Sequence[Group]) -> tuple[Tensor, Tensor] | None:
    """Each row's episode and its share of that episode's sampled tokens, both `[B]`; None without branches."""
    rows = [[sum(branch.action) for branch in (c, *c.branches)] for group in groups for c in group.completions]
    if all(len(counts) == 1 for counts in rows):
        return None
    shares = [count / sum(counts) if any(counts) else 1 / len(counts) for counts in rows for count in counts]
    return torch.tensor([number for number, counts in enumerate(rows) for _ in counts]), torch.tensor(shares)


def _required_logps(run: TrainingRun) -> set[str]:
    """The sampler log-probabilities that the loss reads: filtered ones for token weights, unfiltered for sequences."""
    levels = {run.loss.mismatch.level}
    for kl in (anchor.kl for anchor in run.anchors if anchor.kl.penalizes):
        levels.add(kl.level if kl.placement == "loss" else "token")
    return {"filtered_logp" if run.rollout.filtered and level == "token" else "sample_logp" for level in levels}


def split(
    groups: Sequence[Group], budget: int, *, shared_prefix: bool, even: bool, one_row: bool = False
) -> list[list[Group]]:
    """Split groups with `microbatches`. `even` balances sizes without more parts or splits, to lower peak memory."""
    parts = microbatches(groups, budget, shared_prefix=shared_prefix, one_row=one_row)
    low, high = budget * (len(parts) - 1) // max(1, len(parts)), budget
    for _ in range(3 if even and len(parts) > 1 else 0):  # three bisections reach 7/8 of the possible gain
        middle = (low + high) // 2
        trial = microbatches(groups, max(middle, 1), shared_prefix=shared_prefix, one_row=one_row)
        if len(trial) > len(parts) or sum(map(len, trial)) > sum(map(len, parts)):
            low = middle
        else:
            parts, high = trial, middle
    return parts


def rewards_of(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Each completion's reward (fp64) and its group's index, both `[B]` on the CPU."""
    totals = [reward.total for group in groups for reward in group.rewards]
    numbers = [i for i, group in enumerate(groups) for _ in group.completions]
    return torch.tensor(totals, dtype=torch.float64), torch.tensor(numbers, dtype=torch.long)


def _minibatches(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Cut the groups into `count` consecutive parts of nearly equal size; at most one part per group."""
    count = min(count, len(groups))
    edges = [round(i * len(groups) / count) for i in range(count + 1)]
    return [groups[start:stop] for start, stop in pairwise(edges)]


def _rank_shares(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Consecutive groups for each process, balanced by tokens; a share may be empty."""
    tokens = [len(g.prompt_tokens) + sum(len(c.tokens) for c in g.completions) for g in groups]
    middles = [after - own / 2 for after, own in zip(accumulate(tokens), tokens, strict=True)]
    edges = [bisect(middles, sum(tokens) * i / count) for i in range(1, count)]
    return [groups[start:stop] for start, stop in pairwise([0, *edges, len(groups)])]


def _row_budget(groups: Sequence[Group], budget: int) -> int:
    """The row length, which is that of the longest group. Short groups share a row, which limits padding."""
    return min(max(map(row_length, groups)), budget)


def stitch(parts: Iterable[Tensor], width: int) -> Tensor:
    """Concatenate microbatches `[b, t]` to `[B, T]`, padded with zeros on the right."""
    return torch.cat([functional.pad(part.detach(), (0, width - part.shape[1])) for part in parts])


def assemble(batch: StepBatch, parts: Sequence[Tensor], run: TrainingRun) -> Tensor:
    """One `[B, T]` tensor from the microbatches of all processes."""
    if run.world.size == 1:
        return stitch(parts, batch.width)
    whole = torch.zeros(batch.rows.action_mask.shape, device=run.policy.device)
    for micro, part in zip(batch.micros, parts, strict=True):
        whole[micro.rows, : part.shape[1]] = part.detach()
    run.world.all_reduce_([whole])
    return whole


def score_reference(batch: StepBatch, run: TrainingRun, anchor: Anchor | None = None) -> StepBatch:
    """Compute `ref_logp` of every token. For exact KL, also keep the hidden states for all updates of the batch.

    `anchor` defaults to the reference. For another anchor, `batch` is that anchor's view.
    """
    anchor = anchor or run.anchors[0]
    assert anchor.reference is not None
    scored = [
        _score_model(batch, run, model, rows, exact=anchor.kl.needs_exact)
        if (server := _server_of(model)) is None
        else _score_server(batch, run, server, rows, topk=anchor.kl.topk if anchor.kl.needs_exact else None)
        for model, rows in _models_of(anchor.reference, batch, run)
    ]
    head: LogitsOf | JoinedHeads | None = scored[0].head
    logps, micros = scored[0].logps, scored[0].micros
    if len(scored) > 1:
        logps = [torch.stack(parts).sum(0) for parts in zip(*(each.logps for each in scored), strict=True)]
        head, micros = _joined(batch, scored) if head is not None else (None, batch.micros)
    return replace(
        batch,
        rows=replace(batch.rows, ref_logp=assemble(batch, logps, run)),
        micros=micros,
        ref_head=head,
    )


@dataclass(frozen=True)
class _ModelScores:
    """The scores of one model of a reference: log-probabilities of its rows (0 elsewhere).

    For the exact KL, also the model's head, and the microbatches with the model's hidden states.
    """

    rows: Tensor | None
    logps: list[Tensor]
    micros: tuple[Microbatch, ...]
    head: LogitsOf | None


def _models_of(reference: Reference, batch: StepBatch, run: TrainingRun) -> list[tuple[Reference, Tensor | None]]:
    """The models of a reference, each with a mask `[B]` of the rows of its tasks (None: all rows)."""
    by_task = reference.by_task if isinstance(reference, RuleReference) else {}
    if not by_task:
        return [(reference, None)]
    teachers = [by_task[run.task.label(group.problem)] for group in batch.groups for _ in group.completions]
    unique = {id(teacher): teacher for teacher in by_task.values()}
    device = run.policy.device
    return [
        (teacher, to_device(torch.tensor([mine is teacher for mine in teachers]), device))
        for teacher in unique.values()
    ]


def _score_model(
    batch: StepBatch, run: TrainingRun, model: Reference, rows: Tensor | None, *, exact: bool
) -> _ModelScores:
    logps: list[Tensor] = []
    micros: list[Microbatch] = []
    temperature = run.rollout.temperature
    with model.model() as reference, torch.no_grad(), run.autocast():
        elsewhere = model.device if isinstance(model, RuleReference) else None
        back = None if elsewhere is None else run.policy.device
        scorer = None if run.scorer is None else partial(score_with, run.scorer)
        head = call_with_full_weights(reference, _whole_head, back) if scorer is None else None
        for micro in cast_weights_once(batch.micros):
            packed = micro.packed if elsewhere is None else micro.packed.to(elsewhere)
            if scorer is not None:
                logp = call_with_full_weights(reference, scorer, packed, temperature=temperature).logp
                logps.append(logp.to(back))
                micros.append(micro)
                continue
            assert head is not None
            hidden = call_with_full_weights(reference, hidden_states, packed).to(back)
            logps.append(score_hidden(hidden, head, micro.packed, temperature=temperature).logp)
            micros.append(replace(micro, ref_hidden=hidden) if exact else micro)
        for _ in range(batch.dummy_passes):
            call_with_full_weights(reference, hidden_states, dummy_batch(run))
    return _ModelScores(rows, _of_rows(batch, logps, rows), tuple(micros), head if exact else None)


def _of_rows(batch: StepBatch, logps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
    if rows is None:
        return logps
    return [torch.where(rows[m.rows, None], logp, 0.0) for m, logp in zip(batch.micros, logps, strict=True)]


def _server_of(reference: Reference) -> ServerTeacher | None:
    return reference.server if isinstance(reference, RuleReference) else None


def _score_server(
    batch: StepBatch, run: TrainingRun, server: ServerTeacher, rows: Tensor | None, *, topk: int | None
) -> _ModelScores:
    """Score a server's rows. With `topk`, the microbatches' hidden states are the states of `KnownTokens`."""
    k, device = topk or 1, run.policy.device
    wanted = [True] * len(batch.completions) if rows is None else rows.tolist()
    sequences = [(group.prompt_tokens, c.tokens) for group in batch.groups for c in group.completions]
    mine = [index for micro in batch.micros for index in range(len(sequences))[micro.rows] if wanted[index]]
    states = dict(zip(mine, server.score([sequences[index] for index in mine], k), strict=True))
    logps: list[Tensor] = []
    micros: list[Microbatch] = []
    for micro in batch.micros:
        parts = [
            states[index] if index in states else torch.zeros(len(sequences[index][1]), 2 * (k + 1))
            for index in range(len(sequences))[micro.rows]
        ]
        known = to_device(torch.cat(parts), device)
        logps.append(micro.packed.scatter(known[:, -1]))
        micros.append(micro if topk is None else replace(micro, ref_hidden=known))
    head = None if topk is None else KnownTokens(server.vocabulary)
    return _ModelScores(rows, _of_rows(batch, logps, rows), tuple(micros), head)


def _joined(batch: StepBatch, scored: Sequence[_ModelScores]) -> tuple[JoinedHeads, tuple[Microbatch, ...]]:
    """Join the heads of several models. Each row has its own model's hidden states, followed by the model's index."""
    micros, widths = [], [0] * len(scored)
    for index, micro in enumerate(batch.micros):
        states = [hidden for each in scored if (hidden := each.micros[index].ref_hidden) is not None]
        widths = [hidden.shape[-1] for hidden in states]
        width, row_of = max(widths), micro.packed.existing // micro.width
        joined = states[0].new_zeros(len(row_of), width + 1)
        for number, (hidden, each) in enumerate(zip(states, scored, strict=True)):
            assert each.rows is not None
            own = functional.pad(functional.pad(hidden, (0, width - hidden.shape[-1])), (0, 1), value=float(number))
            joined = torch.where(each.rows[micro.rows][row_of, None], own.to(joined.dtype), joined)
        micros.append(replace(micro, ref_hidden=joined))
    heads = [each.head for each in scored if each.head is not None]
    return JoinedHeads(tuple(zip(heads, widths, strict=True))), tuple(micros)


def _whole_head(reference: nn.Module, device: torch.device | None) -> Head:
    """The reference's head. It is copied if it moves to `device` or is sharded: FSDP gathers it only during a pass."""
    head = frozen_head(reference)
    if device is None and not is_sharded(reference):
        return head
    return replace(head, module=copy.deepcopy(head.module).to(device))


def dummy_batch(run: TrainingRun) -> PackedBatch:
    """A batch of one token, to match FSDP's collectives."""
    token = (run.policy.pad_id,)
    group = Group(Problem("dummy", ""), token, (Completion(token, (False,), (0.0,), (0.0,), "", "length"),))
    return pack([group], run.policy.pad_id, shared_prefix=run.shared_prefix).to(run.policy.device)


def dummy_loss(run: TrainingRun) -> Tensor:
    """The loss of a dummy batch; its gradient is 0."""
    with run.autocast():
        return 0.0 * call_with_full_weights(run.policy.model, score_tokens, dummy_batch(run)).logp.sum()


def score_policy(batch: StepBatch, run: TrainingRun) -> StepBatch:
    """Compute `old_logp` in a separate pass, for terms that need it before the first update."""
    with torch.no_grad():
        passes = [score_micro(micro, batch, run) for micro in cast_weights_once(batch.micros)]
        for _ in range(batch.dummy_passes):
            dummy_loss(run)
        return store_old_scores(batch, passes, run)


def store_old_scores(batch: StepBatch, passes: Sequence[FullScores], run: TrainingRun) -> StepBatch:
    """Store the scores under the rollout weights and set `old_logp` from them."""
    own = {f.name for f in fields(FullScores) for scores in passes if isinstance(getattr(scores, f.name), Tensor)}
    names = sorted(set().union(*run.world.all_gather(own)))
    tensors: dict[str, Any] = {name: assemble(batch, [getattr(s, name) for s in passes], run) for name in names}
    others = tuple(store_old_scores(view, [s.others[i] for s in passes], run) for i, view in enumerate(batch.others))
    scores = FullScores(**tensors)
    return replace(batch, rows=replace(batch.rows, old_logp=scores.logp), scores=scores, others=others)


def detached(scores: FullScores) -> FullScores:
    """The scores without their autograd graph, for metrics after the update."""
    tensors = {f.name: getattr(scores, f.name) for f in fields(scores)}
    plain: dict[str, Any] = {name: x.detach() if isinstance(x, Tensor) else None for name, x in tensors.items()}
    return FullScores(**{**plain, "others": tuple(map(detached, scores.others))})


def score_micro(micro: Microbatch, batch: StepBatch, run: TrainingRun) -> FullScores:
    """The policy's scores of one microbatch: log-probability, entropy, and exact KL for anchors with hidden states."""
    first, *others = (
        _exact_options(view, micro.rows, anchor) for view, anchor in zip(batch.views, run.anchors, strict=True)
    )
    with run.autocast():
        if run.scorer is not None:
            scorer = partial(score_with, run.scorer)
            scores = call_with_full_weights(run.policy.model, scorer, micro.packed, temperature=run.rollout.temperature)
            return replace(scores, others=(scores,) * len(others))
        return call_with_full_weights(
            run.policy.model,
            score_tokens,
            micro.packed,
            temperature=run.rollout.temperature,
            entropy=True,
            others=others,
            **first,
        )


def _exact_options(view: StepBatch, rows: slice, anchor: Anchor) -> dict[str, Any]:
    """Scoring options for sums over the vocabulary against an anchor; empty if its hidden states were not kept."""
    hidden = next(micro.ref_hidden for micro in view.micros if micro.rows == rows)
    if hidden is None:
        return {}
    if knows_top_only(anchor.reference):
        divergence = penalty_divergence(anchor.kl, top_of="reference")
        return {"divergence": divergence, "ref_hidden": hidden, "ref_head": view.ref_head}
    return {
        "exact_kl": True,
        "ref_policy": True,
        "ref_policy_grad": anchor.kl.estimator == "exact_reverse",
        "divergence": penalty_divergence(anchor.kl),
        "ref_hidden": hidden,
        "ref_head": view.ref_head,
    }
