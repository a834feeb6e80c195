"""The checks of `keel.lab.traces` and `keel.integrations.sync` on a verl run."""

from __future__ import annotations

from itertools import repeat
from typing import Any, Literal

from torch import nn

from keel.base.errors import KeelError
from keel.integrations.sync import Sampler, SyncLedger, SyncResult, stop_or_warn
from keel.integrations.versions import VERL
from keel.lab.traces.tokens import Trace

NEEDED = ("prompts", "responses", "response_mask")
FIELDS = (*NEEDED, "rollout_log_probs", "old_log_probs")  # verl's fields that a trace needs


class SyncCheck:
    """Compare the sampler's weights with the policy's: `updated(step)` after an update, `check(step)` after a sync.

    `sampler` is `Sampler.served(*urls)` with the address of each of verl's vLLM servers. They need
    VLLM_SERVER_DEV_MODE=1, and `rollout.engine_kwargs.vllm.worker_extension_cls` must be
    keel.integrations.verl.worker.SyncWorker. `adapter` is the id of a LoRA adapter that they store separately
    from the base (verl uses 123); None means that adapters are merged.
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
        self.ledger, self.on_mismatch = SyncLedger(sampler, policy, adapter), on_mismatch
        self.results = list[SyncResult]()

    def updated(self, step: int) -> None:
        self.ledger.note(step)

    def check(self, step: int) -> SyncResult:
        self.results.append(self.ledger.compare(step))
        stop_or_warn(self.results[-1], self.on_mismatch)
        return self.results[-1]


def traces(rows: Any, step: int | None = None) -> list[Trace]:
    """Traces from rows of verl's TransferQueue, or from a DataProto; `logp` is old_log_probs."""
    VERL.check_version()
    tensors = getattr(rows, "batch", rows)
    columns = {name: tensors[name].unbind() for name in FIELDS if name in set(tensors.keys())}
    if missing := [name for name in NEEDED if name not in columns]:
        raise KeelError(f"these rows of verl lack {', '.join(missing)}: select the fields {', '.join(FIELDS)}")
    if not tensors["responses"].is_nested:  # a DataProto pads prompts on the left and completions on the right
        seen, width = tensors["attention_mask"].bool(), tensors["responses"].shape[1]
        for name, values in columns.items():
            masks = seen[:, :-width] if name == "prompts" else seen[:, -width:]
            columns[name] = [row[mask] for row, mask in zip(values, masks, strict=True)]
    numbers = {name: [tuple(row.tolist()) for row in values] for name, values in columns.items()}
    each = zip(*(numbers.get(name, repeat(None)) for name in FIELDS), strict=False)
    return [
        Trace(prompt, ids, tuple(map(bool, mask)), sampled, logp, step=step)
        for prompt, ids, mask, sampled, logp in each
    ]
