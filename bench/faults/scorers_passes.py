"""Scorers whose pass attends, normalises or keeps gradients otherwise than it should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.base import option
from faults.models import is_chat
from faults.scorers import given, is_scored_natively, logits_of, picked, right, scorer_fault
from keel.models.scorer import ScoreRows

# What is attended to


def end_tokens_unattended(model, rows, *, temperature):
    """The mask is made of the tokens' values, where padding and end are one token: the ends of turns are left out."""
    seen = rows.attention_mask * (rows.tokens != model.config.eos_token_id)
    return given(model, rows, temperature, attention_mask=seen)


def packed_together(model, rows, *, temperature):
    """All rows as one long row with positions that begin anew, and nothing that keeps them apart."""
    real = rows.attention_mask.bool()
    ids, positions = rows.tokens[real][None], rows.position_ids[real][None]
    out = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    logits = out.logits.new_zeros((*rows.tokens.shape, out.logits.shape[-1])).masked_scatter(
        real[..., None], out.logits[0]
    )
    return picked((logits[:, :-1].float() / temperature).log_softmax(-1), rows)


def chunks_forgotten(model, rows, *, temperature):
    """Chunks of four tokens, none of which sees the ones before it."""
    starts = range(0, rows.tokens.shape[1], 4)
    chunks = [
        model(
            input_ids=rows.tokens[:, at : at + 4], position_ids=rows.position_ids[:, at : at + 4], use_cache=False
        ).logits
        for at in starts
    ]
    return picked((torch.cat(chunks, 1)[:, :-1].float() / temperature).log_softmax(-1), rows)


def seeing_ahead(model, rows, *, temperature):
    """Every token is attended to from everywhere, as by an encoder."""
    hidden = (1.0 - rows.attention_mask[:, None, None, :].to(next(model.parameters()).dtype)) * -1e9
    mask = hidden.expand(-1, 1, rows.tokens.shape[1], -1).contiguous()
    return given(model, rows, temperature, attention_mask=mask)


scorer_fault(
    "scorer/end-tokens-unattended",
    "the ends of turns are left out of the attention mask, as where padding is told by its token",
    "mask/attention",
    "scoring/mismatch",
    scorers=[end_tokens_unattended],
    fits=lambda config: is_scored_natively(config) and is_chat(config),
)
scorer_fault(
    "scorer/packed-together",
    "rows are packed into one and attend to each other",
    "scoring/mismatch",
    "mask/attention",
    scorers=[packed_together],
)
scorer_fault(
    "scorer/chunks-forgotten",
    "rows are scored in chunks that do not see the ones before",
    "mask/attention",
    "scoring/mismatch",
    scorers=[chunks_forgotten],
)
scorer_fault(
    "scorer/sees-ahead",
    "the attention is not causal: tokens see those that they are asked to predict",
    "scoring/mismatch",
    "mask/attention",
    scorers=[seeing_ahead],
)

# Which numbers


def likeliest_token(model, rows, *, temperature):
    logp = (logits_of(model, rows) / temperature).log_softmax(-1)
    return rows.completion(logp.amax(-1))


def floored(model, rows, *, temperature):
    return right(model, rows, temperature=temperature).clamp_min(-1.0)


def few_tokens_normalised(model, rows, *, temperature):
    """The normaliser is the sum over the two likeliest tokens, as of a server's short list."""
    logits = logits_of(model, rows) / temperature
    return picked(logits - logits.topk(2, -1).values.logsumexp(-1, keepdim=True), rows)


def rows_rolled(model, rows, *, temperature):
    return right(model, rows, temperature=temperature).roll(1, 0)


scorer_fault(
    "scorer/likeliest-token",
    "the likeliest token's log-probability is taken in place of the sampled one's",
    "scoring/mismatch",
    scorers=[likeliest_token],
)
scorer_fault(
    "scorer/floored",
    "log-probabilities under −1 are raised to it, against infinite ratios",
    "scoring/mismatch",
    "scoring/gradient",
    scorers=[floored],
)
scorer_fault(
    "scorer/few-tokens-normalised",
    "log-probabilities are normalised over the two likeliest tokens",
    "scoring/mismatch",
    scorers=[few_tokens_normalised],
)
scorer_fault(
    "scorer/rows-rolled",
    "every completion gets the log-probabilities of the row before it",
    "scoring/mismatch",
    scorers=[rows_rolled],
)

# Which gradient


def _trains_all(config: Any) -> bool:
    return is_scored_natively(config) and option(config, "model.lora") is None


def _last_hidden(model: nn.Module, rows: ScoreRows) -> Tensor:
    out = model(
        input_ids=rows.tokens,
        attention_mask=rows.attention_mask,
        position_ids=rows.position_ids,
        output_hidden_states=True,
    )
    return out.hidden_states[-1][:, :-1]


def _with_head(hidden: Tensor, weight: Tensor, rows: ScoreRows, temperature: float) -> Tensor:
    logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
    return picked((logits / temperature).log_softmax(-1), rows)


def body_detached(model, rows, *, temperature):
    return _with_head(_last_hidden(model, rows).detach(), model.get_output_embeddings().weight, rows, temperature)


def head_detached(model, rows, *, temperature):
    """As of a fused kernel that keeps no gradient for the head's weights."""
    weight = model.get_output_embeddings().weight.detach()
    return _with_head(_last_hidden(model, rows), weight, rows, temperature)


scorer_fault(
    "scorer/body-detached",
    "only the head has a gradient: the layers before it are detached",
    "scoring/gradient",
    scorers=[body_detached],
    fits=_trains_all,
)
scorer_fault(
    "scorer/head-detached",
    "the head's weights have no gradient from the tokens that are scored",
    "scoring/gradient",
    scorers=[head_detached],
    fits=_trains_all,
)
