"""Keel's own drawing inside vLLM: a logits processor that draws each row's token by Keel's noise.

vLLM computes logits; which token they give is a pure function of (seed, attempt, step, problem, sample, position), as
in the native engine, so that a row drawn again after a crash is the same row. The processor leaves the drawn token as
the only candidate, with its log-probability after filters as logit, and the one before filters on a neighbour: vLLM
samples greedily and reports logits as they are.

vLLM has two model runners, and each has logits processors of its own class: `KeelSampler` is for the one on a CPU,
`KeelDeviceSampler` for the one on a GPU, where positions are known on the device alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as DeviceLogitsProcessor

from keel.models.segments import to_device
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.rollout.vllm.rows import EXTRA


@dataclass(frozen=True)
class _Slot:
    """How a row is drawn: its noise, its parameters, and on a CPU vLLM's own list of its tokens so far."""

    key: int
    start: int
    params: SamplingParams
    vocabulary: int
    tokens: list[int]

    @classmethod
    def of(cls, params: Any, tokens: list[int]) -> _Slot | None:
        """That of vLLM's parameters, if they carry Keel's."""
        drawn = (params.extra_args or {}).get(EXTRA)
        if drawn is None:
            return None
        names = ("temperature", "top_p", "top_k", "min_p")
        own = SamplingParams(**{name: drawn[name] for name in names})
        return cls(int(drawn["key"]), int(drawn["start"]), own, int(drawn["vocabulary"]), tokens)


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
            self.slots.pop(index, None)
            if slot := _Slot.of(params, tokens):
                self.slots[index] = slot
        for source, target, direction in batch_update.moved:
            moved, replaced = self.slots.pop(source, None), self.slots.pop(target, None)
            if moved is not None:
                self.slots[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.slots[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        drawn = torch.zeros(logits.shape[0], dtype=torch.int64)
        for index, slot in self.slots.items():
            drawn[index] = len(slot.tokens)
        return draw_rows(logits, self.slots, to_device(drawn, logits.device))


class KeelDeviceSampler(DeviceLogitsProcessor):
    """The same for the model runner of GPUs: vLLM's requests keep their slots, and rows come in any order."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.slots: dict[int, _Slot] = {}
        self.prompt_len = req_states.prompt_len

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.slots.pop(req_idx, None)
        if slot := _Slot.of(sampling_params, []):
            self.slots[req_idx] = slot
        return req_idx in self.slots

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        requests = ctx.idx_mapping_np.tolist()
        slots = {row: self.slots[request] for row, request in enumerate(requests) if request in self.slots}
        return draw_rows(logits, slots, ctx.pos + 1 - self.prompt_len.gpu[ctx.idx_mapping])


def draw_rows(logits: Tensor, slots: Mapping[int, _Slot], drawn: Tensor) -> Tensor:
    """Logits `[B, V]` with the rows of `slots` drawn; `drawn` `[B]` is how many tokens each row has already."""
    alike: dict[tuple[SamplingParams, int], list[int]] = {}
    for index, slot in slots.items():
        alike.setdefault((slot.params, slot.vocabulary), []).append(index)
    for (params, width), indices in alike.items():
        numbers = [indices, [slots[index].key for index in indices], [slots[index].start for index in indices]]
        rows, keys, starts = to_device(torch.tensor(numbers), logits.device)
        own = logits[rows, :width]  # beyond it vLLM may have padding
        logits[rows] = -torch.inf
        logits[rows, :width] = drawn_logits(own, params, keys, starts + drawn[rows])
    return logits


def drawn_logits(logits: Tensor, params: SamplingParams, keys: Tensor, positions: Tensor) -> Tensor:
    """Logits `[B, V]` of which only the drawn token is left, with log-probability after filters; where that before
    filters is another number, it stands on the token after it, and is the smaller one."""
    noise = None if params.greedy else gumbel(keys, positions, sum(block_shape(logits.shape[-1])))
    token, before, after = draw(logits, params, noise)
    only = torch.full_like(logits, -torch.inf)
    neighbour = (token + 1) % logits.shape[-1]
    only.scatter_(-1, neighbour.unsqueeze(-1), torch.where(before < after, before, -torch.inf).unsqueeze(-1))
    return only.scatter_(-1, token.unsqueeze(-1), after.unsqueeze(-1))
