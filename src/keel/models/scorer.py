"""Scores of a packed batch: log-probability, entropy and exact KL.

Keel's own pass (`score_tokens`) runs the body once and the head in chunks. `model.scorer: module:attr` names a function
that replaces it for the policy (with gradient) and for the reference (without gradient):

    scorer(model, rows: ScoreRows, *, temperature: float) -> Tensor [B, T] | Scores
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from keel.base.errors import KeelError
from keel.base.parts import import_object, is_import_path
from keel.base.types import Scores
from keel.models.chunked import Divergence, StatsOptions, default_chunk, token_stats
from keel.models.head import Head, JoinedHeads, LogitsOf, at_least_fp32, body_of, head_of, takes_positions
from keel.models.pack import PackedBatch
from keel.models.prefix_attention import RowStructure, prefix_attention, use_prefix_attention
from keel.models.rope import length_regimes, reset_rope, split_by_regime


@dataclass(frozen=True)
class FullScores(Scores):
    """Scores, and the reference's log-probabilities of the tokens, `ref_logp` `[B, T]`, without gradient.

    `others` are the scores of the same pass against other references.
    """

    ref_logp: Tensor | None = None
    others: tuple[FullScores, ...] = ()


def hidden_states(model: nn.Module, packed: PackedBatch) -> Tensor:
    """The hidden states `[N, H]` that score the batch's tokens, after the final norm, in the order of `[B, T]`.

    For a reference, the hidden states instead of the logits are kept for all updates on a batch. A model whose rotary
    tables depend on the context length runs once per length regime.
    """
    body = body_of(model)
    regimes = length_regimes(body)
    parts = [] if regimes is None else split_by_regime(packed, regimes)
    if not parts:
        return hidden_states_in_one_pass(model, packed)
    hidden = []
    for part in parts:
        reset_rope(body)
        hidden.append(_body_states(body, part.rows).flatten(0, 1).index_select(0, part.positions))
    return torch.cat(hidden).index_select(0, torch.cat([part.scored for part in parts]).argsort())


def hidden_states_in_one_pass(model: nn.Module, packed: PackedBatch, structure: RowStructure | None = None) -> Tensor:
    """`hidden_states` by one forward of the batch. With `structure`, prefix attention is used without a check."""
    positions, _ = packed.scored()
    return _body_states(body_of(model), packed, structure).flatten(0, 1).index_select(0, positions)


def _body_states(body: Any, packed: PackedBatch, structure: RowStructure | None = None) -> Tensor:
    """The hidden states `[R, L, H]` of the body at every position of the rows."""
    inputs: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
    if takes_positions(body):
        inputs["position_ids"] = packed.position_ids
    elif packed.shared_prefix:
        raise KeelError(f"{type(body).__name__} takes no position ids: pack with shared_prefix=False")
    hidden: Tensor
    if structure is not None or use_prefix_attention(body, packed):
        with prefix_attention(body.config, structure or RowStructure(packed)):
            hidden = body(**inputs, attention_mask=None)[0]
    else:
        length = packed.input_ids.shape[1]
        columns = padding_columns(packed.input_ids)
        mask = padded_mask(packed.attention_mask(), columns)
        inputs |= {name: pad(inputs[name], (0, columns)) for name in ("input_ids", "position_ids") if name in inputs}
        hidden = body(**inputs, attention_mask=mask)[0][:, :length]
    return hidden


def padding_columns(ids: Tensor) -> int:
    """Columns of padding that rows `[R, L]` need on a GPU before they are scored with a mask: 1 or 0.

    With a mask, heads that share one KV head, and a length of 1 more than a multiple of 32, torch's memory-efficient
    attention gives the last query a wrong output (pytorch issue 191937, seen with torch 2.11).
    """
    return int(ids.is_cuda and ids.shape[1] % 32 == 1)


def padded_mask(mask: Tensor, columns: int) -> Tensor:
    """Add columns of padding to a mask `[R, L]` or `[R, 1, L, L]`. Padding attends to itself."""
    if not columns:
        return mask
    if mask.dim() == 2:
        return pad(mask, (0, columns))
    wide = pad(mask, (0, columns, 0, columns))
    return wide | torch.eye(wide.shape[-1], dtype=torch.bool, device=mask.device)


def score_hidden(
    hidden: Tensor,
    head: Head,
    packed: PackedBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    exact_kl: bool = False,
    ref_policy: bool = False,
    ref_policy_grad: bool = False,
    divergence: Divergence | None = None,
    ref_hidden: Tensor | None = None,
    ref_head: LogitsOf | JoinedHeads | None = None,
    chunk_tokens: int | None = None,
) -> FullScores:
    """log softmax(logits / temperature) from hidden states `[N, H]`, in chunks.

    All results are `[B, T]` in fp32 and zero outside completions. `exact_kl` adds Σ_v π_v (log π_v − log p_v) against
    the reference. The reference is given by `ref_hidden`, its `hidden_states` for this batch, and `ref_head`, its
    `head_of` or any function from hidden states to logits. `ref_policy` adds the other direction, which is
    differentiable only with `ref_policy_grad`. `divergence` adds another divergence.
    """
    _, tokens = packed.scored()
    exact_kl = exact_kl or ref_policy
    compared = exact_kl or divergence is not None
    if compared and (ref_hidden is None or ref_head is None):
        raise KeelError("exact KL needs the reference's hidden states and head: pass ref_hidden and ref_head")
    if temperature <= 0:
        raise KeelError(f"temperature must be positive for scoring, got {temperature}")
    if compared and ref_hidden is not None and len(ref_hidden) != len(tokens):
        raise KeelError(
            f"ref_hidden has states for {len(ref_hidden)} tokens, this batch has {len(tokens)}: pack both in the same "
            "way"
        )
    if chunk_tokens is None:
        weight = getattr(head.module, "weight", None)
        chunk_tokens = default_chunk(len(weight) if weight is not None else 2**17, hidden.device)
    options = StatsOptions(
        temperature, entropy, ref_policy, ref_head, chunk_tokens, ref_policy_grad, divergence=divergence
    )
    stats = token_stats(hidden, head, tokens, options, ref_hidden if compared else None)

    def scatter(values: Tensor | None) -> Tensor | None:
        return None if values is None else packed.scatter(values)

    return FullScores(
        logp=packed.scatter(stats.logp),
        entropy=scatter(stats.entropy),
        exact_kl=scatter(stats.kl) if exact_kl else None,
        ref_logp=scatter(stats.ref_logp),
        ref_policy_kl=scatter(stats.ref_policy_kl),
        divergence=scatter(stats.divergence),
    )


def score_tokens(
    model: nn.Module, packed: PackedBatch, *, others: Sequence[Mapping[str, Any]] = (), **options: Any
) -> FullScores:
    """Run the body once and score its hidden states; `options` are those of `score_hidden`.

    `others` are the options for other references. Each applies the head once more; empty options are skipped.
    """
    hidden, head = hidden_states(model, packed), head_of(model)
    scores = score_hidden(hidden, head, packed, **options)
    shared = {"temperature": options.get("temperature", 1.0)}
    return replace(
        scores,
        others=tuple(
            replace(score_hidden(hidden, head, packed, **shared, **own), logp=scores.logp)
            if own
            else FullScores(scores.logp)
            for own in others
        ),
    )


@dataclass(frozen=True)
class ScoreRows:
    """One row per completion: the prompt, then the completion of up to T tokens, right-padded to L.

    `attention_mask` is 1 on all tokens except padding: prompt, sampled tokens, tool output. `action_mask` is true on
    tokens that the policy sampled. Use it for the loss only.
    """

    tokens: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L]: 1 on real tokens
    position_ids: Tensor  # [B, L]
    prompt_lengths: Tensor  # [B]
    completion_mask: Tensor  # [B, T] bool: tokens that exist
    action_mask: Tensor  # [B, T] bool: tokens that the policy sampled

    def completion(self, next_token: Tensor) -> Tensor:
        """The values `[B, T]` of completion tokens, from `[B, L − 1]` with entry i for token i + 1; 0 elsewhere."""
        rows, width = self.tokens.shape
        if next_token.shape != (rows, width - 1):
            raise KeelError(f"expected values of shape {(rows, width - 1)}, got {tuple(next_token.shape)}")
        columns = self.prompt_lengths[:, None] - 1 + torch.arange(self.action_mask.shape[1], device=self.tokens.device)
        values = next_token.gather(1, columns.clamp(0, width - 2))
        return torch.where(self.completion_mask, values, values.new_zeros(()))


Scorer = Callable[..., Tensor | Scores]


def score_rows(packed: PackedBatch) -> ScoreRows:
    """The rows of a batch that was packed without shared prompts. The last token, which packing omits, is added."""
    if packed.shared_prefix:
        raise KeelError("a user's scorer needs one row per completion: pack with shared_prefix=False")
    rows, length = packed.input_ids.shape
    counts = packed.completion_mask.sum(1)
    row_lengths = (packed.prefix >= 0).sum(1)
    prompts = torch.where(counts > 0, row_lengths - counts + 1, row_lengths)
    tokens = torch.cat((packed.input_ids, packed.input_ids.new_zeros(rows, 1)), dim=1)
    tokens[:, -1] = packed.input_ids[:, -1]
    if packed.tokens.shape[1]:
        last = packed.tokens.gather(1, (counts - 1).clamp_min(0)[:, None])
        ends = (prompts + counts - 1)[:, None]
        tokens = torch.where(counts[:, None] > 0, tokens.scatter(1, ends, last), tokens)
    positions = torch.arange(length + 1, device=tokens.device).expand(rows, -1)
    return ScoreRows(
        tokens=tokens,
        attention_mask=(positions < (prompts + counts)[:, None]).long(),
        position_ids=positions.contiguous(),
        prompt_lengths=prompts,
        completion_mask=packed.completion_mask,
        action_mask=packed.action_mask,
    )


def build_scorer(name: str) -> Scorer | None:
    """The user's scorer; None for `native`, Keel's own pass."""
    if name == "native":
        return None
    if not is_import_path(name):
        raise KeelError(f"model.scorer is {name!r}: it must be native or a module:attr")
    scorer: Scorer = import_object(name, "scorer")
    try:
        inspect.signature(scorer).bind(None, None, temperature=1.0)
    except TypeError as error:
        raise KeelError(f"scorer {name!r} cannot be called as scorer(model, rows, temperature=…): {error}") from None
    return scorer


def score_with(scorer: Scorer, model: nn.Module, packed: PackedBatch, *, temperature: float) -> FullScores:
    """The checked scores of a user's scorer: `[B, T]`, at least fp32, zero outside the completions."""
    result = scorer(model, score_rows(packed), temperature=temperature)
    scores = result if isinstance(result, Scores) else Scores(result)
    checked: dict[str, Tensor | None] = {"logp": scores.logp, "entropy": scores.entropy}
    for name, value in checked.items():
        if value is None and name == "entropy":
            continue
        if not isinstance(value, Tensor) or value.shape != packed.action_mask.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise KeelError(
                f"the scorer returned {name} of {shape}: return {tuple(packed.action_mask.shape)}, one value per "
                "token of the completion (rows.completion selects them)"
            )
        value = at_least_fp32(value)
        checked[name] = torch.where(packed.completion_mask, value, value.new_zeros(()))
    assert checked["logp"] is not None
    return FullScores(logp=checked["logp"], entropy=checked["entropy"])
