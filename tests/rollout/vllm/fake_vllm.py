"""Stand-ins of vLLM's classes, as far as Keel calls them: NCCL's group hands tensors from thread to thread."""

from __future__ import annotations

import queue
import secrets
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class Meeting:
    """Where the members of a group wait for each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors = threading.Barrier(size), queue.Queue[Any](1)


MEETINGS: dict[bytes, Meeting] = {}
LOCK = threading.Lock()


class Group:
    """One side of a group; a broadcast ends once the tensor was taken, or this side is destroyed."""

    def __init__(self, identity: bytes, rank: int, size: int, device: Any) -> None:
        with LOCK:
            self.meeting = MEETINGS.setdefault(identity, Meeting(size))
        self.rank, self.destroyed = rank, threading.Event()
        self.meeting.barrier.wait(20)

    def broadcast(self, tensor: torch.Tensor) -> None:
        sent = False
        while not (sent or self.destroyed.is_set()):
            with suppress(queue.Full):
                self.meeting.tensors.put(tensor.clone(), timeout=0.05)
                sent = True

    def receive(self) -> torch.Tensor:
        return self.meeting.tensors.get(timeout=20)  # type: ignore[no-any-return]

    def destroy(self) -> None:
        self.destroyed.set()


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2


class NCCLTrainerWeightTransferEngine:
    """Sends as vLLM's does: the call that receives runs beside the broadcasts."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool, packed: bool) -> None:
        self.client, self.source, self.model_update_group = client, source, None  # type: Any, Any, Any

    def send_weights(self) -> None:
        meta = self.source.metadata()
        info = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self.client.start_weight_update()
        outcome: queue.Queue[BaseException | None] = queue.Queue()

        def receive() -> None:
            try:
                self.client.update_weights(info)
                outcome.put(None)
            except BaseException as error:
                outcome.put(error)

        threading.Thread(target=receive, daemon=True).start()
        for (name, tensor), expected in zip(self.source, meta, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == expected
            self.model_update_group.broadcast(tensor)
        if (error := outcome.get(timeout=30)) is not None:
            raise error
        self.client.finish_weight_update()


class NCCLLibrary:
    def ncclGetUniqueId(self) -> Any:
        return SimpleNamespace(internal=secrets.token_bytes(128))


class LogitsProcessor:
    """vLLM's base of either runner."""


class LogitsProcessorV2:
    """And of the other: neither accepts the other's classes."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make these what `import vllm…` finds."""
    names = {
        "distributed.device_communicators.pynccl_wrapper": {"NCCLLibrary": NCCLLibrary},
        "distributed.weight_transfer.nccl_common": {
            "NCCLWeightTransferInitInfo": NCCLWeightTransferInitInfo,
            "uid_init_process_group": Group,
            "worker_init_payload": lambda info: {k: v for k, v in asdict(info).items() if v is not None},
        },
        "distributed.weight_transfer.base": {
            "WeightTransferInitRequest": SimpleNamespace,
            "WeightTransferUpdateRequest": SimpleNamespace,
        },
        "distributed.weight_transfer.nccl_engine": {"NCCLTrainerWeightTransferEngine": NCCLTrainerWeightTransferEngine},
        "v1.sample.logits_processor": {
            "LogitsProcessor": LogitsProcessor,
            "BatchUpdate": SimpleNamespace,
            "MoveDirectionality": SimpleNamespace(SWAP="swap", UNIDIRECTIONAL="one way"),
        },
        "v1.worker.gpu.sample.logits_processor.interface": {"LogitsProcessor": LogitsProcessorV2},
    }
    for name, members in names.items():
        path = f"vllm.{name}".split(".")
        for depth in range(1, len(path) + 1):
            package = ".".join(path[:depth])
            if package not in sys.modules or depth == len(path):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[".".join(path)]).update(members)
