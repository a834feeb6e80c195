"""Scorers of one's own (`model.scorer`) that shift, cut, scale, mask or detach log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.base import edited, is_float32, lookalike, operator, option, path_of
from keel.models.scorer import ScoreRows

Config = Mapping[str, Any]
TEMPERATURES = (0.6, 0.7, 0.8, 1.2)


def is_scored_natively(config: Config) -> bool:
    """Whether a scorer of one's own may stand in: none is there, and nothing asks for more than log-probabilities."""
    exact = str(option(config, "kl.estimator", "k3")).startswith("exact") or option(config, "kl.exact", False)
    return option(config, "model.scorer", "native") == "native" and not exact and not _reads_entropy(config)


def _reads_entropy(config: Config) -> bool:
    return option(config, "loss.entropy_coef", 0) > 0


def scorer_fault(
    name: str,
    breaks: str,
    *codes: str,
    scorers: Sequence[Callable[..., Tensor]],
    also: Mapping[str, Sequence[Any]] = {},
    fits: Callable[[Any], bool] = is_scored_natively,
) -> None:
    """Registers scorers, of which one is drawn, as an operator."""

    def apply(config: Config, random: Random) -> dict[str, Any]:
        changes = {path: random.choice(values) for path, values in also.items()}
        return edited(config, {"model.scorer": path_of(random.choice(scorers)), **changes})

    operator(name, breaks, *codes, fits=fits)(apply)


def logits_of(model: nn.Module, rows: ScoreRows, **inputs: Any) -> Tensor:
    """Of every token but the last, `[B, L − 1, V]`, but for what `inputs` say otherwise."""
    given = {"attention_mask": rows.attention_mask, "position_ids": rows.position_ids, **inputs}
    return model(input_ids=rows.tokens, **given).logits[:, :-1].float()


def picked(logp: Tensor, rows: ScoreRows) -> Tensor:
    """The completions' part of log-probabilities `[B, L − 1, V]`."""
    return rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))


def given(model: nn.Module, rows: ScoreRows, temperature: float, **inputs: Any) -> Tensor:
    """The right log-probabilities, but for the model's inputs."""
    return picked((logits_of(model, rows, **inputs) / temperature).log_softmax(-1), rows)


def right(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return given(model, rows, temperature)


# Temperature


def without_temperature(model, rows, *, temperature):
    return right(model, rows, temperature=1.0)


def temperature_twice(model, rows, *, temperature):
    return right(model, rows, temperature=temperature**2)


def temperature_multiplied(model, rows, *, temperature):
    return right(model, rows, temperature=1 / temperature)


scorer_fault(
    "scorer/temperature-missing",
    "training's log-probabilities are taken at temperature 1 while sampling has another",
    "scoring/temperature",
    scorers=[without_temperature],
    also={"rollout.temperature": TEMPERATURES},
)
scorer_fault(
    "scorer/temperature-applied-wrong",
    "logits are divided by the temperature twice, or multiplied by it",
    "scoring/temperature",
    scorers=[temperature_twice, temperature_multiplied],
    also={"rollout.temperature": TEMPERATURES},
)

# Which place


def one_place_late(model, rows, *, temperature):
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask).logits[:, 1:].float()
    return picked((logits / temperature).log_softmax(-1), rows)


def one_place_early(model, rows, *, temperature):
    logits = logits_of(model, rows)
    return picked((torch.cat((logits[:, :1], logits[:, :-1]), 1) / temperature).log_softmax(-1), rows)


def end_token_masked(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    last = functional.one_hot((rows.completion_mask.sum(-1) - 1).clamp_min(0), logp.shape[1]).bool()
    return logp.masked_fill(last, 0.0)


def prompt_cut(model, rows, *, temperature):
    """Scores without the first two tokens, as where rows are cut from the left to a limit."""
    shorter = model(input_ids=rows.tokens[:, 2:], attention_mask=rows.attention_mask[:, 2:]).logits[:, :-1].float()
    logits = functional.pad(shorter, (0, 0, 2, 0))
    return picked((logits / temperature).log_softmax(-1), rows)


scorer_fault(
    "scorer/one-place-off",
    "log-probabilities are read from the logits of a neighbouring place",
    "scoring/shifted",
    scorers=[one_place_late, one_place_early],
)
scorer_fault(
    "scorer/end-token-masked",
    "the last token of every completion gets 0, as a label of −100 does",
    "scoring/shifted",
    "scoring/mismatch",
    scorers=[end_token_masked],
)
scorer_fault(
    "scorer/prompt-cut",
    "rows are scored without the first tokens of the prompt",
    "scoring/shifted",
    "scoring/mismatch",
    "mask/attention",
    scorers=[prompt_cut],
)

# What is attended to, and where it stands


def completion_only(model, rows, *, temperature):
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    hidden = (places < rows.prompt_lengths[:, None] - 1).long()
    return picked(
        (logits_of(model, rows, attention_mask=rows.attention_mask * (1 - hidden)) / temperature).log_softmax(-1), rows
    )


def last_half_of_the_prompt(model, rows, *, temperature):
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    hidden = (places < rows.prompt_lengths[:, None] // 2).long()
    return picked(
        (logits_of(model, rows, attention_mask=rows.attention_mask * (1 - hidden)) / temperature).log_softmax(-1), rows
    )


def positions_wrapped(model, rows, *, temperature):
    """Positions start again every few tokens, as in rows that were packed for another length."""
    return given(model, rows, temperature, position_ids=rows.position_ids % 4)


def positions_all_equal(model, rows, *, temperature):
    return given(model, rows, temperature, position_ids=rows.attention_mask)


def one_more_bos(model, rows, *, temperature):
    """Scores every row behind one more token, as where a tokenizer adds a BOS that sampling had not."""
    first = torch.ones_like(rows.tokens[:, :1])
    longer = torch.cat((first, rows.tokens), 1), torch.cat((first, rows.attention_mask), 1)
    logits = model(input_ids=longer[0], attention_mask=longer[1]).logits[:, 1:-1].float()
    return picked((logits / temperature).log_softmax(-1), rows)


scorer_fault(
    "scorer/prompt-hidden",
    "the prompt, or its first half, is left out of the attention mask",
    "mask/attention",
    scorers=[completion_only, last_half_of_the_prompt],
)
scorer_fault(
    "scorer/positions-wrong",
    "positions start again every few tokens, or are all the same",
    "scoring/positions",
    "scoring/mismatch",
    scorers=[positions_wrapped, positions_all_equal],
)
scorer_fault(
    "scorer/one-more-bos",
    "rows are scored behind a BOS token that sampling did not see",
    "scoring/mismatch",
    scorers=[one_more_bos],
)


def tools_hidden(model, rows, *, temperature):
    """What the environment wrote is left out of the attention mask."""
    hidden = torch.zeros_like(rows.tokens)
    for row, start in enumerate(rows.prompt_lengths.tolist()):
        unsampled = (rows.completion_mask & ~rows.action_mask)[row, : hidden.shape[1] - start].long()
        hidden[row, start : start + len(unsampled)] = unsampled
    return given(model, rows, temperature, attention_mask=rows.attention_mask * (1 - hidden))


# Which numbers


def half_precision(model, rows, *, temperature):
    logits = (logits_of(model, rows) / temperature).to(torch.bfloat16)
    return picked(logits.log_softmax(-1).float(), rows)


def vocabulary_cut(model, rows, *, temperature):
    """Normalises over every second token, as one of two shards whose sums are never added."""
    logits = logits_of(model, rows) / temperature
    return picked(logits - logits[..., ::2].logsumexp(-1, keepdim=True), rows)


def not_normalised(model, rows, *, temperature):
    return picked(logits_of(model, rows) / temperature, rows)


def smoothed(model, rows, *, temperature):
    logp = (logits_of(model, rows) / temperature).log_softmax(-1)
    return picked(0.9 * logp + 0.1 * logp.mean(-1, keepdim=True), rows)


def mean_of_the_sequence(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    return logp.sum(-1, keepdim=True).expand_as(logp) / rows.completion_mask.sum(-1, keepdim=True).clamp_min(1)


def divided_by_length(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    return logp / rows.completion_mask.sum(-1, keepdim=True).clamp_min(1)


def softcapped(model, rows, *, temperature):
    return picked((5 * torch.tanh(logits_of(model, rows) / 5) / temperature).log_softmax(-1), rows)


def log_of_softmax(model, rows, *, temperature):
    """log(softmax) of 16 bits: rare tokens underflow to −∞."""
    logits = (logits_of(model, rows) / temperature * 8).to(torch.float16)
    return picked(logits.softmax(-1).log().float() / 8, rows)


def noisy(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    return logp + 0.1 * torch.randn_like(logp)


def dropping(model, rows, *, temperature):
    """Dropout on the logits that asks nobody for the mode."""
    return picked((functional.dropout(logits_of(model, rows), 0.1) / temperature).log_softmax(-1), rows)


scorer_fault(
    "scorer/half-precision-softmax",
    "log-softmax runs in bfloat16",
    "scoring/mismatch",
    "sampler/precision",
    scorers=[half_precision],
    fits=lambda config: is_scored_natively(config) and is_float32(config),
)
scorer_fault(
    "scorer/vocabulary-cut",
    "log-probabilities are normalised over half of the vocabulary, or not at all",
    "scoring/mismatch",
    scorers=[vocabulary_cut, not_normalised],
)
scorer_fault("scorer/smoothed", "labels are smoothed where tokens are scored", "scoring/mismatch", scorers=[smoothed])
scorer_fault(
    "scorer/sequence-in-place-of-token",
    "tokens get the mean of their completion, or are divided by its length",
    "scoring/mismatch",
    scorers=[mean_of_the_sequence, divided_by_length],
)
scorer_fault(
    "scorer/softcapped",
    "logits are squashed before they are scored",
    "scoring/mismatch",
    scorers=[softcapped],
)
scorer_fault(
    "scorer/underflow",
    "probabilities underflow before their logarithm is taken",
    "scoring/non-finite",
    scorers=[log_of_softmax],
)
scorer_fault(
    "scorer/random",
    "scoring draws random numbers: noise, or dropout of its own",
    "scoring/nondeterministic",
    "scoring/dropout",
    scorers=[noisy, dropping],
)

# Which gradient


def half_detached(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    return logp.detach() + 0.5 * (logp - logp.detach())


def normaliser_detached(model, rows, *, temperature):
    """The right values with the gradient of the chosen logit alone."""
    logits = logits_of(model, rows) / temperature
    return picked(logits - logits.detach().logsumexp(-1, keepdim=True), rows)


def every_second_row_detached(model, rows, *, temperature):
    logp = right(model, rows, temperature=temperature)
    trained = (torch.arange(len(logp), device=logp.device) % 2 == 0)[:, None]
    return torch.where(trained, logp, logp.detach())


scorer_fault(
    "scorer/gradient-scaled",
    "the values are right and the gradient is half of theirs",
    "scoring/gradient",
    scorers=[half_detached],
)
scorer_fault(
    "scorer/normaliser-detached",
    "the normaliser of the softmax is detached, so that only the chosen logit is pushed",
    "scoring/gradient",
    scorers=[normaliser_detached],
)
scorer_fault(
    "scorer/rows-detached",
    "every second row has no gradient",
    "scoring/gradient",
    "loss/no-gradient",
    scorers=[every_second_row_detached],
)

# Healthy: scorers that look odd and are right


def left_padded(model, rows, *, temperature):
    """Rows padded on the left, with positions that count the real tokens."""
    lengths = rows.attention_mask.sum(1)
    move = rows.tokens.shape[1] - lengths
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)[None] - move[:, None]
    real = places >= 0
    tokens = torch.where(real, rows.tokens.gather(1, places.clamp_min(0)), 0)
    out = model(input_ids=tokens, attention_mask=real.long(), position_ids=places.clamp_min(0))
    logp = (out.logits[:, :-1].float() / temperature).log_softmax(-1)
    scored = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    back = torch.arange(scored.shape[1], device=scored.device)[None] + move[:, None]
    return rows.completion(scored.gather(1, back.clamp_max(scored.shape[1] - 1)))


def in_chunks(model, rows, *, temperature):
    """One row at a time, cut to its own length."""
    lines = []
    for row, length in enumerate(rows.attention_mask.sum(1).tolist()):
        ids = rows.tokens[row : row + 1, :length]
        logp = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        line = logp.gather(-1, ids[0, 1:, None]).squeeze(-1)
        lines.append(functional.pad(line, (0, rows.tokens.shape[1] - length)))
    return rows.completion(torch.stack(lines))


def cross_entropy(model, rows, *, temperature):
    logits = logits_of(model, rows) / temperature
    loss = functional.cross_entropy(logits.flatten(0, 1), rows.tokens[:, 1:].flatten(), reduction="none")
    return rows.completion(-loss.view(rows.tokens.shape[0], -1))


@lookalike("scorer of one's own", is_scored_natively)
def healthy_scorer(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(random.choice((left_padded, in_chunks, cross_entropy)))})
