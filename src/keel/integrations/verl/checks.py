"""The checks of `keel.lab.traces` and `keel.integrations.sync` on a verl run."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from keel.integrations.sync import Sampler, SyncLedger, SyncResult, stop_or_warn
from keel.integrations.versions import VERL
from keel.lab.traces.records import Trace


class SyncCheck:
    """Compare the sampler's weights with the policy's: `updated(step)` after an update, `check(step)` after a sync.

    `sampler` is `Sampler.served(*urls)` with the address of each of verl's vLLM servers, which answer with
    VLLM_SERVER_DEV_MODE=1 and `rollout.engine_kwargs.vllm.worker_extension_cls` set to
    keel.integrations.verl.worker.SyncWorker. `adapter` is the id of a LoRA that they keep beside their base (verl's own
    is 123); without one, adapters are merged.
    """

    def __init__(
        self,
        policy: nn.Module,
        sampler: Sampler,
        *,
        on_mismatch: Literal["stop", "warn"] = "stop",
        adapter: int | None = None,
    ) -> None:
        VERL.check_version()
        self.ledger, self.on_mismatch, self.results = (
            SyncLedger(sampler, policy, adapter),
            on_mismatch,
            list[SyncResult](),
        )

    def updated(self, step: int) -> None:
        self.ledger.note(step)

    def check(self, step: int) -> SyncResult:
        self.results.append(self.ledger.compare(step))
        stop_or_warn(self.results[-1], self.on_mismatch)
        return self.results[-1]


def traces(batch: Any, step: int | None = None) -> list[Trace]:
    """The traces of a DataProto, or of its tensors, once old_log_probs were computed."""
    VERL.check_version()
    tensors = getattr(batch, "batch", batch)
    rows, width = [], tensors["responses"].shape[1]
    for row in range(len(tensors["responses"])):
        seen = tensors["attention_mask"][row].bool()
        prompt = tensors["input_ids"][row][:-width][seen[:-width]]
        real, keys = seen[-width:], set(tensors.keys())

        def of(name: str, real: Tensor = real, row: int = row, keys: set[str] = keys) -> tuple[float, ...] | None:
            return tuple(tensors[name][row][real].float().tolist()) if name in keys else None

        rows.append(
            Trace(
                tuple(prompt.tolist()),
                tuple(tensors["responses"][row][real].tolist()),
                tuple(tensors["response_mask"][row][real].bool().tolist()),
                of("rollout_log_probs"),
                of("old_log_probs"),
                step=step,
            )
        )
    return rows
