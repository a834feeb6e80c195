"""A user's own scorer, from tokens to log-probabilities.

`model.scorer: module:attr` names a function

    scorer(model, rows: ScoreRows, *, temperature: float) -> Tensor [B, T] | Scores

which replaces Keel's forward pass for the policy (with gradient) and for the reference (without gradient).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.base.parts import import_object, is_import_path
from keel.base.types import Scores
from keel.models.head import at_least_fp32
from keel.models.logprobs import FullScores
from keel.models.pack import PackedBatch


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
        raise KeelError(f"model.scorer is {name!r}: it must be native or a scorer module:attr")
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
                f"the scorer returned {name} of {shape}: give {tuple(packed.action_mask.shape)}, one value a token of "
                "the completion (rows.completion selects them)"
            )
        value = at_least_fp32(value)
        checked[name] = torch.where(packed.completion_mask, value, value.new_zeros(()))
    assert checked["logp"] is not None
    return FullScores(logp=checked["logp"], entropy=checked["entropy"])
