"""All passes of an update: the scores of all microbatches and processes, their measurements, and their records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from keel.base.metrics import Number, Share, python_numbers
from keel.base.types import Batch, Scores
from keel.base.world import World
from keel.kl import importance_ratio, k3, log_ratio
from keel.kl.measure import MaskIndex, depth_metrics, kl_statistics, occupied_bins, positions
from keel.losses.mismatch import behaviour_logp, kl_behaviour_logp
from keel.trainer.guards import row_values
from keel.trainer.records import token_texts

T = TypeVar("T", Batch, Scores, "Pass")


@dataclass(frozen=True)
class Generated:
    """TRL's log of a batch of rollouts, with the completions of all processes in order.

    Those of the main process, which writes the files, come first. `rows` is the number of rows of this process.
    `number` is the index of the batch, from 0.
    """

    prompts: Sequence[Any] = ()
    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    weights: Sequence[float] = ()
    advantages: Sequence[float] = ()
    group_size: int = 1
    rows: int = 0
    number: int = 0

    def total(self, row: int) -> float:
        """The weighted sum of a row's rewards. A missing reward counts as 0."""
        parts = zip(self.rewards.values(), self.weights, strict=True)
        return sum(weight * values[row] for values, weight in parts if values[row] == values[row])


@dataclass(frozen=True)
class Pass:
    """One microbatch: its rows and scores, the lengths `[B]` of its prompts, TRL's loss and the KL's part of the loss.

    It also has the completions and their batch of rollouts. `again` means that an earlier pass scored the same rows.
    """

    batch: Batch
    scores: Scores
    prompt_lengths: Tensor
    policy_loss: Tensor
    kl_loss: Number
    inputs: Mapping[str, Any]
    generated: Generated
    again: bool = False


@dataclass(frozen=True)
class Window:
    """The passes of an update over all processes, as tensors `[B, T]` padded to one length."""

    batch: Batch
    scores: Scores
    prompt_lengths: Tensor
    policy_loss: float
    kl_loss: float

    @property
    def loss(self) -> float:
        return self.policy_loss + self.kl_loss

    @property
    def tokens(self) -> int:
        return int(self.batch.action_mask.sum())


@dataclass(frozen=True)
class Update:
    """The measurements of an update, and whether it is applied. It exists from the last pass to the end of the step.

    Only the first process has a `window`; it measures for all processes.
    """

    window: Window | None
    line: dict[str, float]
    applied: bool
    tokens: int


def detached(scores: Scores) -> Scores:
    """The scores without their autograd graph."""
    return _each(scores, Tensor.detach)


def on_host(part: Pass) -> Pass:
    """The pass in main memory without its completions, to be measured later."""
    batch, scores = _each(part.batch, Tensor.cpu), _each(part.scores, Tensor.cpu)
    return replace(_each(part, Tensor.cpu), batch=batch, scores=scores, inputs={})


def _each(part: T, function: Callable[[Tensor], Tensor]) -> T:
    """Apply a function to each tensor among the fields."""
    tensors: dict[str, Any] = {
        f.name: function(x) for f in fields(part) if isinstance(x := getattr(part, f.name), Tensor)
    }
    return replace(part, **tensors)


def shares(passes: Sequence[Pass]) -> list[Pass]:
    """Divide the losses of passes over separate batches by their number, so that their sum is the mean."""
    count = len(passes)
    return [replace(part, policy_loss=part.policy_loss / count, kl_loss=part.kl_loss / count) for part in passes]


def gather(passes: Sequence[Pass], world: World) -> Window | None:
    """Gather all passes of an update on the first process; None on the others. All processes must call it.

    The update's loss is the mean of the processes' losses.
    """
    own = (
        _joined([part.batch for part in passes]),
        _joined([part.scores for part in passes]),
        torch.cat([part.prompt_lengths for part in passes]),
        *python_numbers([sum(part.policy_loss.detach().double() for part in passes)]),
        *python_numbers([sum(part.kl_loss for part in passes)]),
    )
    if world.size == 1:
        return Window(*own)
    batch, scores, lengths, *losses = own
    everybody = world.gather_to_main((_each(batch, Tensor.cpu), _each(scores, Tensor.cpu), lengths.cpu(), *losses))
    if everybody is None:
        return None
    batch, scores, lengths, policy, kl = zip(*everybody, strict=True)
    return Window(_joined(batch), _joined(scores), torch.cat(lengths), sum(policy) / world.size, sum(kl) / world.size)


def _joined(parts: Sequence[T]) -> T:
    """Concatenate the rows of several batches or scores. A tensor that one of them lacks is dropped."""
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(parts[0])}
    whole: dict[str, Any] = {
        name: _stacked(rows) for name, rows in columns.items() if all(isinstance(x, Tensor) for x in rows)
    }
    return type(parts[0])(**whole)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors `[B]`, or `[B, T]` padded to the longest."""
    if parts[0].dim() == 1:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])


def measure(window: Window, clamp: float | None) -> dict[str, float]:
    """Measure policy, reference and sampler like Keel's own step, with the same metric names and units.

    On a batch's first update, the policy drew the samples. On later updates, an older policy μ drew them (with filters:
    the filtered distribution), and each token is weighted by ρ = π/μ. If every token is masked, only losses are
    measured.
    """
    rows, scores = window.batch, window.scores
    losses = {"loss/total": window.loss, "loss/policy": window.policy_loss, "loss/kl": window.kl_loss}
    losses["loss/kl_share"] = Share(window.kl_loss, window.policy_loss).value
    if not window.tokens:
        return losses
    mask, logp, index = rows.action_mask, scores.logp, MaskIndex.of(rows.action_mask)
    metrics: dict[str, Number] = {"logp/policy_mean": index.mean(logp)}
    if rows.ref_logp is not None:
        behaviour = kl_behaviour_logp(rows, logp)
        weights = None if behaviour is None else importance_ratio(logp, behaviour, mask)
        metrics |= kl_statistics(
            logp, rows.ref_logp, mask, index, exact_kl=scores.exact_kl, clamp=clamp, weights=weights
        )
        metrics["logp/ref_mean"] = index.mean(rows.ref_logp)
        if scores.ref_policy_kl is not None:
            metrics["kl/ref_policy/exact/mean"] = index.mean(scores.ref_policy_kl)
    if rows.old_logp is not None:
        metrics["kl/old_policy/k3/mean"] = index.mean(k3(log_ratio(rows.old_logp, logp, mask).d))
        drawn = None if rows.sample_logp is None else behaviour_logp(rows, rows.old_logp)
        if drawn is not None:
            d = log_ratio(drawn, rows.old_logp, mask).d
            metrics["kl/sampler_policy/k1/mean"] = index.mean(-d)
            metrics["kl/sampler_policy/k3/mean"] = index.mean(k3(d))
            metrics["logp/sampler_gap_max"] = d.abs().max() if d.numel() else 0.0
            where = positions(window.prompt_lengths, mask.shape[1], mask.device)
            metrics |= depth_metrics(k3(d), mask, where, occupied_bins(where, mask))
    return {**dict(zip(metrics, python_numbers(metrics.values()), strict=True)), **losses}


GROUPS = 2  # groups per update in rollouts.jsonl


def rollout_records(passes: Sequence[Pass], tokenizer: Any, eos_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Records of the first groups that these passes have scored, one per completion.

    Groups are numbered over all batches of the update. There are several batches if TRL generates more often than it
    updates.
    """
    records = []
    before = _groups_before(passes)
    for part in passes:
        generated = part.generated
        for index, row in enumerate(part.inputs["keel_row"].tolist()):
            tokens, group = _tokens(part, index), before[id(generated)] + row // generated.group_size
            if group >= GROUPS or row >= len(generated.prompts) or not tokens:
                continue
            prompt = generated.prompts[row]
            records.append(
                {
                    "problem": problem_key(prompt),
                    "group": group,
                    "tracked": False,
                    "prompt": tokenizer.decode(_prompt_tokens(part, index)),
                    "prompt_tokens_cut": 0,
                    "messages": messages_of(prompt),
                    "completion": tokenizer.decode(tokens, skip_special_tokens=True),
                    "tokens": token_texts(tokenizer, tokens),
                    "action": part.batch.action_mask[index, : len(tokens)].tolist(),
                    "kl": _token_kl(part, index, len(tokens)),
                    "reward": generated.total(row),
                    "parts": {name: values[row] for name, values in generated.rewards.items()},
                    "advantage": float(generated.advantages[row]),
                    "stop_reason": "eos" if tokens[-1] in eos_ids else "length",
                }
            )
    return sorted(records, key=lambda record: record["group"])


def _groups_before(passes: Sequence[Pass]) -> dict[int, int]:
    """The number of groups in the update before each of its batches, by the batch's identity."""
    before, count = dict[int, int](), 0
    for part in passes:
        if id(part.generated) not in before:
            before[id(part.generated)] = count
            count += math.ceil(part.generated.rows / part.generated.group_size)
    return before


def skipped_record(passes: Sequence[Pass], tokenizer: Any) -> list[dict[str, Any]]:
    """Every completion of an update, with the numbers that its loss was computed from."""
    return [
        {
            "prompt_tokens": _prompt_tokens(part, index),
            "tokens": (tokens := _tokens(part, index)),
            "action": part.batch.action_mask[index, : len(tokens)].tolist(),
            "text": tokenizer.decode(tokens),
            "advantage": row_values(part.batch.advantages, index, len(tokens)),
            "sample_logp": row_values(part.inputs.get("sampling_per_token_logps"), index, len(tokens)),
            "old_logp": row_values(part.batch.old_logp, index, len(tokens)),
            "logp": row_values(part.scores.logp, index, len(tokens)),
            "ref_logp": row_values(part.batch.ref_logp, index, len(tokens)),
        }
        for part in passes
        for index in range(len(part.batch.action_mask))
    ]


def problem_key(prompt: Any) -> str:
    """A key for a prompt. Equal prompts have equal keys."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:12]


def messages_of(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": str(m.get("role", "user")), "content": _text(m.get("content"))} for m in prompt]


def _text(content: Any) -> str:
    """The text of a message, without pictures."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    return "" if content is None else str(content)


def _prompt_tokens(part: Pass, index: int) -> list[int]:
    tokens: list[int] = part.inputs["prompt_ids"][index][part.inputs["prompt_mask"][index].bool()].tolist()
    return tokens


def _tokens(part: Pass, index: int) -> list[int]:
    """All tokens after the prompt, without padding; empty if TRL has masked a truncated completion."""
    tokens: list[int] = part.inputs["completion_ids"][index][part.inputs["completion_mask"][index].bool()].tolist()
    return tokens


def _token_kl(part: Pass, index: int, length: int) -> list[float] | None:
    if part.batch.ref_logp is None:
        return None
    values = (part.scores.logp - part.batch.ref_logp).where(part.batch.action_mask, 0.0)
    return [round(value, 5) for value in values[index, :length].tolist()]
