"""Keel's own drawing inside vLLM: a logits processor that draws each row's token by Keel's noise.

vLLM computes logits; which token they give is a pure function of (seed, attempt, step, problem, sample, position), as
in the native engine, so that a row drawn again after a crash is the same row. The processor leaves the drawn token as
the only candidate, with its log-probability after filters as logit, and the one before filters on a neighbour: vLLM
samples greedily and reports logits as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.rollout.vllm.rows import EXTRA


class _Slot:
    """A row of the batch: its noise, its parameters, and vLLM's own list of its tokens so far."""

    def __init__(self, drawn: dict[str, Any], tokens: list[int]) -> None:
        self.key, self.start, self.tokens = int(drawn["key"]), int(drawn["start"]), tokens
        names = ("temperature", "top_p", "top_k", "min_p")
        self.params = SamplingParams(**{name: drawn[name] for name in names})
        self.vocabulary = int(drawn["vocabulary"])

    @property
    def position(self) -> int:
        return self.start + len(self.tokens)


class KeelSampler(LogitsProcessor):
    """Draws for the rows that carry Keel's parameters; others are left alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.slots: dict[int, _Slot] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.slots.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            drawn = (params.extra_args or {}).get(EXTRA)
            self.slots.pop(index, None)
            if drawn is not None:
                self.slots[index] = _Slot(drawn, tokens)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.slots.pop(source, None), self.slots.pop(target, None)
            if moved is not None:
                self.slots[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.slots[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        alike: dict[tuple[SamplingParams, int], list[int]] = {}
        for index, slot in self.slots.items():
            alike.setdefault((slot.params, slot.vocabulary), []).append(index)
        for (params, width), indices in alike.items():
            rows = torch.tensor(indices, device=logits.device)
            slots = [self.slots[index] for index in indices]
            own = logits[rows, :width]  # beyond it vLLM may have padding
            logits[rows] = -torch.inf
            logits[rows, :width] = drawn_logits(own, params, [s.key for s in slots], [s.position for s in slots])
        return logits


def drawn_logits(logits: Tensor, params: SamplingParams, keys: list[int], positions: list[int]) -> Tensor:
    """Logits `[B, V]` of which only the drawn token is left, with log-probability after filters; where that before
    filters is another number, it stands on the token after it, and is the smaller one."""
    noise = None
    if not params.greedy:
        device, width = logits.device, sum(block_shape(logits.shape[-1]))
        noise = gumbel(torch.tensor(keys, device=device), torch.tensor(positions, device=device), width)
    token, before, after = draw(logits, params, noise)
    only = torch.full_like(logits, -torch.inf)
    neighbour = (token + 1) % logits.shape[-1]
    only.scatter_(-1, neighbour.unsqueeze(-1), torch.where(before < after, before, -torch.inf).unsqueeze(-1))
    return only.scatter_(-1, token.unsqueeze(-1), after.unsqueeze(-1))
