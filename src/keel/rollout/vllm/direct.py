"""Full weights from GPU to GPU by NCCL, to a server on other devices. Experimental: it has not run on a GPU yet.

What is sent are the files of a sync, which a server that comes back needs anyway: one process sends alone, whenever it
has to, and a transfer that breaks goes on as files. vLLM's own calls receive (`weight_transfer_config`). Between the
two sides goes JSON: NCCL's id is handed over under the secret (vLLM's meeting point for it would unpickle).
"""

from __future__ import annotations

import base64
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.rollout.vllm.transfer import read_weights

NOT_RUN = "rollout.vllm.transfer=nccl is experimental: tested without a GPU, but not run on one yet"
Call = Callable[[str, dict[str, Any]], None]  # a step of the transfer (init, start, update, finish) at a server


class TransferBroken(Exception):
    """The transfer cannot go on: the weights are sent as files."""


class TensorMeta(NamedTuple):
    """A tensor that will be sent, as vLLM asks for it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FileSource:
    """The tensors of a folder's files on a device, as often as they are asked for; vLLM's `WeightSource`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in read_weights(str(self.folder))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self.device)) for name, tensor in read_weights(str(self.folder)))


class Client:
    """vLLM's `VLLMWeightSyncClient`: its four calls as steps at a server of Keel's."""

    def __init__(self, call: Call) -> None:
        self.call: Call = call
        self.on_error: Callable[[], None] = lambda: None

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.call("init", info)

    def start_weight_update(self) -> None:
        self.call("start", {})

    def update_weights(self, info: dict[str, Any]) -> None:
        try:
            self.call("update", info)
        except BaseException:
            self.on_error()  # nobody receives: a broadcast that has begun would never end
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish", {})


class NcclSender:
    """A group of this process and a server's workers; it lasts until one side is lost."""

    def __init__(self, call: Call, device: torch.device, workers: int, timeout_s: float) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import (
            NCCLWeightTransferInitInfo,
            uid_init_process_group,
            worker_init_payload,
        )

        self._client, self._device = Client(call), device
        identity = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        info = NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(identity).decode(),
            rank_offset=1,
            world_size=1 + workers,
            packed=True,
        )
        joined = run_concurrently(
            lambda: uid_init_process_group(identity, 0, 1 + workers, device),
            lambda: self._client.init_weight_transfer_engine(worker_init_payload(info)),
            timeout_s=timeout_s,
        )
        self._group = joined[0]

    def send(self, folder: Path) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        engine = NCCLTrainerWeightTransferEngine(
            client=self._client, source=FileSource(folder, self._device), is_sender=True, packed=True
        )
        engine.model_update_group = self._group
        self._client.on_error = self.close
        engine.send_weights()

    def close(self) -> None:
        self._group.destroy()


def sender(call: Call, device: torch.device, workers: int, timeout_s: float) -> NcclSender:
    """What sends full weights to a server: `call` does a step of the transfer there."""
    try:
        return NcclSender(call, device, workers, timeout_s)
    except ImportError as error:
        raise KeelError(
            f"rollout.vllm.transfer=nccl needs vLLM beside the training too ({error}): install it, or use http"
        ) from error


def check_transfer(status: dict[str, Any], device: torch.device, server: str) -> None:
    """Refuse a server that was not started for this transfer, or whose devices it cannot reach."""
    if device.type != "cuda":
        raise KeelError(f"rollout.vllm.transfer=nccl sends from a GPU and the policy is on the {device}: use http")
    if status.get("transfer") != "nccl":
        raise KeelError(f"{server} does not take weights by nccl: start keel serve with --transfer nccl, or use http")
    if device_id(device) in status.get("devices", []):
        raise KeelError(f"{server} is on the policy's own GPU, where nccl does not work: use http")


def device_id(device: torch.device) -> str:
    """The name of a GPU, the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def loopback_only(url: str) -> None:
    """Keep NCCL's own sockets on this machine where the server is, unless the environment names a network."""
    if any(name in url for name in ("127.0.0.1", "localhost", "[::1]")):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def run_concurrently(*calls: Callable[[], Any], timeout_s: float) -> list[Any]:
    """The results of calls that wait for each other; the first error is raised, whatever the others still wait for."""
    answers: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            answers.put((index, call(), None))
        except BaseException as error:
            answers.put((index, None, error))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), name="keel-transfer", daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(calls):
        try:
            index, result, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TransferBroken(f"the two sides have not met in {timeout_s:.0f} s") from None
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in range(len(calls))]
