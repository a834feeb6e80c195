"""Scores of a packed batch: log-probability, entropy and exact KL from one pass of the body and a chunked head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from keel.base.errors import KeelError
from keel.base.types import Scores
from keel.models.chunked import Divergence, StatsOptions, default_chunk, token_stats
from keel.models.head import Head, JoinedHeads, LogitsOf, body_of, head_of, takes_positions
from keel.models.pack import PackedBatch, padded_mask, padding_columns
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
        raise KeelError(f"ref_hidden scores {len(ref_hidden)} tokens, this batch has {len(tokens)}: pack both alike")
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
