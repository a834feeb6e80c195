"""A logits processor for vLLM that draws each row's token with Keel's noise.

The noise is a pure function of (seed, attempt, step, problem, sample, position), as in the native engine, so a row
sampled again after a crash is the same. vLLM samples greedily and reports logits. So the processor keeps only the drawn
token, whose logit is its log-probability after filters. The one before filters is the logit of a neighbour token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.rollout.vllm.engine import EXTRA


class _Slot:
    """A row of the batch: noise and parameters."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        self.key, self.start = int(drawn["key"]), int(drawn["start"])
        names = ("temperature", "top_p", "top_k", "min_p")
        self.params = SamplingParams(**{name: drawn[name] for name in names})
        self.vocabulary = int(drawn["vocabulary"])
        self.tokens: list[int] = []  # vLLM's list of the tokens so far (V1)
        self.prompt = 0  # prompt length, if positions include the prompt (V2)


def _slot(params: Any) -> _Slot | None:
    drawn = (params.extra_args or {}).get(EXTRA)
    return None if drawn is None else _Slot(drawn)


class KeelSampler(LogitsProcessor, LogitsProcessorV2):
    """Draws tokens for rows with Keel's parameters; other rows are unchanged.

    vLLM chooses between two model runners: V1 (without Triton, as on a CPU) reports row moves and token lists; V2 gives
    each row a slot and its position on the device.
    """

    def __init__(self, vllm_config: Any, *state: Any) -> None:
        self.slots: dict[int, _Slot] = {}
        self.requests: Any = state[0] if len(state) == 1 else None  # V1 gives a device and whether to pin memory

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: rows added, removed and moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.slots.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            self._put(index, _slot(params))
            if index in self.slots:
                self.slots[index].tokens = tokens
        for source, target, direction in batch_update.moved:
            moved, replaced = self.slots.pop(source, None), self.slots.pop(target, None)
            self._put(target, moved)
            self._put(source, replaced if direction == MoveDirectionality.SWAP else None)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: assign a slot to a request; returns whether this processor draws it."""
        slot = _slot(sampling_params)
        self._put(req_idx, slot)
        if slot is not None:
            slot.prompt = int(self.requests.prompt_len.np[req_idx])
        return slot is not None

    def _put(self, index: int, slot: _Slot | None) -> None:
        if slot is None:
            self.slots.pop(index, None)
        else:
            self.slots[index] = slot

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """`ctx` (V2) has each row's slot and the position of its last token."""
        rows = self.slots if ctx is None else dict(enumerate(map(self.slots.get, ctx.idx_mapping_np.tolist())))
        alike: dict[tuple[SamplingParams, int], list[int]] = {}
        for row, slot in rows.items():
            if slot is not None:
                alike.setdefault((slot.params, slot.vocabulary), []).append(row)
        for (params, width), indices in alike.items():
            slots: list[Any] = [rows[row] for row in indices]
            index = _on_device(indices, logits)
            keys = _on_device([slot.key for slot in slots], logits)
            positions = _on_device([slot.start - slot.prompt + len(slot.tokens) for slot in slots], logits)
            if ctx is not None:
                positions = positions + ctx.pos[index] + 1
            own = logits[index, :width]  # vLLM may pad the vocabulary
            logits[index] = -torch.inf
            logits[index, :width] = drawn_logits(own, params, keys, positions)
        return logits


def _on_device(numbers: list[int], like: Tensor) -> Tensor:
    """A tensor on the device of `like`, copied without synchronisation."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def drawn_logits(logits: Tensor, params: SamplingParams, keys: Tensor, positions: Tensor) -> Tensor:
    """Logits `[B, V]` with only the drawn token, at its log-probability after filters.

    If the log-probability before filters is smaller, it is stored on the next token.
    """
    noise = None
    if not params.greedy:
        noise = gumbel(keys, positions, sum(block_shape(logits.shape[-1])))
    token, before, after = draw(logits, params, noise)
    only = torch.full_like(logits, -torch.inf)
    neighbour = (token + 1) % logits.shape[-1]
    only.scatter_(-1, neighbour.unsqueeze(-1), torch.where(before < after, before, -torch.inf).unsqueeze(-1))
    return only.scatter_(-1, token.unsqueeze(-1), after.unsqueeze(-1))
