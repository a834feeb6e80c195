"""Weight sync as users of servers report it: what sleep throws away, shards in another order, ranks of adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from faults.engines import Copied, fault, has_full_weights, has_lora, is_matrix, is_synced


@fault(
    "sync/rotary-lost-in-sleep",
    "the engine sleeps between steps and wakes without its table of rotary frequencies, which no sync sends",
    "sampler/mismatch",
    "sampler/stale",
    "sampler/other-model",
    fits=is_synced,
)
class RotaryLostInSleep(Copied):
    def load(self, weights: dict[str, Tensor]) -> None:
        super().load(weights)
        for name, table in self.model.named_buffers():
            if name.endswith("inv_freq"):
                table.zero_()


@fault(
    "sync/shards-in-the-wrong-order",
    "the two halves of matrices that are cut by rows arrive in the wrong order",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=has_full_weights,
)
class ShardsInTheWrongOrder(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        whole = weights[name]
        cut = is_matrix(name, whole) and ("q_proj" in name or "gate_proj" in name)
        return whole.roll(whole.shape[0] // 2, 0) if cut else whole


@fault(
    "sync/rank-cut",
    "the server keeps half of an adapter's rank, its own limit, and drops the rest",
    "sampler/stale",
    "sampler/mismatch",
    fits=has_lora,
)
class RankCut(Copied):
    def arriving(self, name: str, held: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        whole = weights[name]
        if "lora_B" not in name:
            return whole
        kept = torch.arange(whole.shape[1], device=whole.device) < whole.shape[1] // 2
        return whole * kept
