"""Send full weights from GPU to GPU by NCCL, to a server on other devices. Experimental: not run on a GPU yet.

One process sends the tensors in the files of the sync, which a restarted server needs anyway. If a transfer fails, the
files are uploaded instead. vLLM receives with its API `weight_transfer_config`. Control messages, including NCCL's
id, are JSON requests with the secret, because vLLM's own rendezvous would unpickle the id.
"""

from __future__ import annotations

import base64
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.rollout.vllm.transfer import read_weights

NOT_RUN = "rollout.vllm.transfer=nccl is experimental: tested without a GPU, but not run on one yet"
Call = Callable[[str, dict[str, Any]], None]  # runs a step of the transfer (init, start, update, finish) on a server


class TransferBroken(Exception):
    """A call of `run_concurrently` did not return in time."""


class TensorMeta(NamedTuple):
    """The metadata of a tensor to send, in vLLM's form."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FileSource:
    """vLLM's `WeightSource`: iterates over the tensors of a folder's files on a device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in read_weights(str(self.folder))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self.device)) for name, tensor in read_weights(str(self.folder)))


class Client:
    """Implements the four calls of vLLM's `VLLMWeightSyncClient` as requests to keel serve."""

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
            self.on_error()  # without a receiver a started broadcast would never end
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish", {})


class NcclSender:
    """The NCCL group of this process and a server's workers."""

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
    """Create the sender of full weights to a server; `call` runs a step of the transfer there."""
    try:
        return NcclSender(call, device, workers, timeout_s)
    except ImportError as error:
        raise KeelError(
            f"rollout.vllm.transfer=nccl needs vLLM in the training process too ({error}): install it there, or use "
            "http"
        ) from error


def check_transfer(status: dict[str, Any], device: torch.device, server: str) -> None:
    """Refuse a server that was not started for this transfer, or that shares the policy's GPU."""
    if device.type != "cuda":
        raise KeelError(f"rollout.vllm.transfer=nccl sends from a GPU, but the policy is on the {device}: use http")
    if status.get("transfer") != "nccl":
        raise KeelError(f"{server} does not take weights by nccl: start keel serve with --transfer nccl, or use http")
    if device_id(device) in status.get("devices", []):
        raise KeelError(f"{server} is on the policy's own GPU, where nccl does not work: use http")


def device_id(device: torch.device) -> str:
    """The UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def loopback_only(url: str) -> None:
    """Use loopback for NCCL's sockets if the server is local, unless the environment sets an interface."""
    if any(name in url for name in ("127.0.0.1", "localhost", "[::1]")):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def run_concurrently(*calls: Callable[[], Any], timeout_s: float) -> list[Any]:
    """Run calls in threads and return their results within `timeout_s`; raise the first error without waiting."""
    answers: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            answers.put((index, call(), None))
        except BaseException as error:
            answers.put((index, None, error))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), name="keel-transfer", daemon=True).start()
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(results) < len(calls):
        try:
            index, result, error = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TransferBroken(f"the two sides did not connect within {timeout_s:.0f} s") from None
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in range(len(calls))]
