"""Scores of a packed batch: log-probability, entropy and exact KL from one pass of the body and a chunked head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.base.types import Scores
from keel.models.branches import Piece, branch_attention, by_structure, pieces_of
from keel.models.chunked import Ask, default_chunk, token_stats
from keel.models.head import Head, LogitsOf, body_of, head_of, takes_positions
from keel.models.lengths import by_length, forget_lengths, length_regimes
from keel.models.pack import PackedBatch


@dataclass(frozen=True)
class FullScores(Scores):
    """Scores, and `ref_logp` `[B, T]`, the reference's log-probability of the tokens, without gradient."""

    ref_logp: Tensor | None = None


def hidden_states(model: nn.Module, packed: PackedBatch) -> Tensor:
    """The hidden states `[N, H]` that score the batch's tokens, final norm included, in the order of `[B, T]`.

    Of a reference they are computed once a batch and kept over all of its updates, instead of its logits. A model that
    reads longer contexts otherwise is run once for each kind of them that the batch has.
    """
    body = body_of(model)
    regimes = length_regimes(body)
    parts = [] if regimes is None else by_length(packed, regimes)
    if not parts:
        return states_at_once(model, packed)
    hidden = []
    for part in parts:
        forget_lengths(body)
        hidden.append(_body_states(body, part.rows).flatten(0, 1).index_select(0, part.where))
    return torch.cat(hidden).index_select(0, torch.cat([part.scored for part in parts]).argsort())


def states_at_once(model: nn.Module, packed: PackedBatch, pieces: list[Piece] | None = None) -> Tensor:
    """The hidden states of `hidden_states` by one forward of the whole batch.

    `pieces`, for who has them already, are attended by without asking whether the model is one for that.
    """
    where, _ = packed.scored()
    return _body_states(body_of(model), packed, pieces).flatten(0, 1).index_select(0, where)


def _body_states(body: Any, packed: PackedBatch, pieces: list[Piece] | None = None) -> Tensor:
    """The body's hidden states `[R, L, H]` of a batch's rows, whatever scores them."""
    inputs: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
    if takes_positions(body):
        inputs["position_ids"] = packed.position_ids
    elif packed.shared_prefix:
        raise KeelError(f"{type(body).__name__} takes no position ids: pack with shared_prefix=False")
    hidden: Tensor
    if pieces is not None or by_structure(body, packed):
        with branch_attention(body.config, pieces_of(packed) if pieces is None else pieces):
            hidden = body(**inputs, attention_mask=None)[0]
    else:
        hidden = body(**inputs, attention_mask=packed.attention_mask())[0]
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
    ref_hidden: Tensor | None = None,
    ref_head: LogitsOf | None = None,
    chunk_tokens: int | None = None,
) -> FullScores:
    """log softmax(logits / temperature) of hidden states `[N, H]`, a chunk at a time; all `[B, T]`, fp32.

    `exact_kl` adds Σ_v π_v (log π_v − log p_v) against the reference given by `ref_hidden` (its `hidden_states` for
    this batch) and `ref_head` (its `head_of`, or any function from hidden states to logits); `ref_policy` adds the
    other direction, as a measurement unless `ref_policy_grad`. Zero outside the completions.
    """
    _, tokens = packed.scored()
    exact_kl = exact_kl or ref_policy
    if exact_kl and (ref_hidden is None or ref_head is None):
        raise KeelError("exact KL needs the reference's hidden states and head: pass ref_hidden and ref_head")
    if temperature <= 0:
        raise KeelError(f"temperature must be positive for scoring, got {temperature}")
    if exact_kl and ref_hidden is not None and len(ref_hidden) != len(tokens):
        raise KeelError(f"ref_hidden scores {len(ref_hidden)} tokens, this batch has {len(tokens)}: pack both alike")
    if chunk_tokens is None:
        weight = getattr(head.module, "weight", None)
        chunk_tokens = default_chunk(len(weight) if weight is not None else 2**17, hidden.device)
    ask = Ask(temperature, entropy, ref_policy, ref_head, chunk_tokens, ref_policy_grad)
    stats = token_stats(hidden, head, tokens, ask, ref_hidden if exact_kl else None)

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else packed.spread(values)

    return FullScores(
        logp=packed.spread(stats.logp),
        entropy=spread(stats.entropy),
        exact_kl=spread(stats.kl),
        ref_logp=spread(stats.ref_logp),
        ref_policy_kl=spread(stats.ref_policy_kl),
    )


def score_tokens(model: nn.Module, packed: PackedBatch, **options: Any) -> FullScores:
    """One forward of the body, and the scores of its hidden states; `options` are those of `score_hidden`."""
    return score_hidden(hidden_states(model, packed), head_of(model), packed, **options)
