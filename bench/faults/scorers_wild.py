"""Scorers as trainers of one's own get them wrong: after the softmax, at another layer, of another copy."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch
from torch import nn

from faults.base import edited, is_float32, lookalike, path_of
from faults.models import has_layers
from faults.scorers import TEMPERATURES, given, is_scored_natively, logits_of, picked, right, scorer_fault
from faults.scorers_passes import _trains_all

# Which numbers


def temperature_after_softmax(model, rows, *, temperature):
    return right(model, rows, temperature=1.0) / temperature


def epsilon_inside_the_log(model, rows, *, temperature):
    return (right(model, rows, temperature=temperature).exp() + 0.1).log()


def softmax_twice(model, rows, *, temperature):
    return picked((logits_of(model, rows) / temperature).softmax(-1).log_softmax(-1), rows)


def before_the_last_layer(model, rows, *, temperature):
    given_to = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids}
    hidden = model(input_ids=rows.tokens, output_hidden_states=True, **given_to).hidden_states[-2]
    logits = model.get_output_embeddings()(hidden)[:, :-1].float()
    return picked((logits / temperature).log_softmax(-1), rows)


def completions_from_zero(model, rows, *, temperature):
    """Positions begin anew with the completion, as where both parts are made into rows of their own."""
    places = rows.position_ids
    starts = rows.prompt_lengths[:, None]
    return given(model, rows, temperature, position_ids=torch.where(places < starts, places, places - starts))


scorer_fault(
    "scorer/temperature-after-softmax",
    "log-probabilities are divided by the temperature in place of the logits",
    "scoring/temperature",
    "scoring/mismatch",
    scorers=[temperature_after_softmax],
    also={"rollout.temperature": TEMPERATURES},
)
scorer_fault(
    "scorer/epsilon-inside-the-log",
    "a tenth is added to probabilities before their logarithm is taken, against infinities",
    "scoring/mismatch",
    scorers=[epsilon_inside_the_log],
)
scorer_fault(
    "scorer/softmax-twice",
    "log-probabilities are those of a softmax of a softmax",
    "scoring/mismatch",
    scorers=[softmax_twice],
)
scorer_fault(
    "scorer/before-the-last-layer",
    "the head is put on the hidden states before the last layer",
    "scoring/mismatch",
    scorers=[before_the_last_layer],
    fits=lambda config: _trains_all(config) and has_layers(config),
)
scorer_fault(
    "scorer/completions-from-zero",
    "positions begin anew with the completion",
    "scoring/positions",
    "scoring/mismatch",
    scorers=[completions_from_zero],
)

# Which gradient


def embeddings_detached(model, rows, *, temperature):
    """As under checkpointing whose input needs no gradient."""
    embedded = model.get_input_embeddings()(rows.tokens).detach()
    places = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids}
    logits = model(inputs_embeds=embedded, **places).logits[:, :-1].float()
    return picked((logits / temperature).log_softmax(-1), rows)


def sure_tokens_detached(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    return torch.where(logp < -0.5, logp, logp.detach())


_copies: dict[int, nn.Module] = {}


def first_weights(model, rows, *, temperature):
    """Scores with a copy that was made at the first call; the policy's own part has no gradient left."""
    held = _copies.setdefault(id(model), copy.deepcopy(model))
    own = right(model, rows, temperature=temperature)
    return right(held, rows, temperature=temperature) + 0.0 * own


scorer_fault(
    "scorer/embeddings-detached",
    "the input embeddings get no gradient from the tokens that are read",
    "scoring/gradient",
    scorers=[embeddings_detached],
    fits=_trains_all,
)
scorer_fault(
    "scorer/sure-tokens-detached",
    "tokens of a probability over 0.6 have no gradient, so that only the doubtful ones are trained",
    "scoring/gradient",
    "loss/no-gradient",
    scorers=[sure_tokens_detached],
)
scorer_fault(
    "scorer/copy-of-the-first-weights",
    "training scores with a copy of the first weights, which no update reaches",
    "scoring/gradient",
    "optim/no-update",
    "scoring/mismatch",
    scorers=[first_weights],
)

# Healthy


def in_float64(model, rows, *, temperature):
    return picked((logits_of(model, rows).double() / temperature).log_softmax(-1), rows).float()


@lookalike("scorer with a softmax of 64 bits", lambda config: is_scored_natively(config) and is_float32(config))
def healthy_double_scorer(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(in_float64)})
