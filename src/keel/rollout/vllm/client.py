"""The client of sampling servers (`keel serve`): rows over HTTP, weight syncs with a secret, and recovery.

Rows of a lost server are sampled again by another server, or by the same one once it is back. Noise depends on the row
alone, so the result is the same. A server that comes back gets the weights of the last sync before it samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from keel.base.errors import KeelError, first_line
from keel.base.world import World
from keel.envs.endpoint import SECRET
from keel.models.head import causal_lm, is_lora
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.engine import Interrupted, ModelMismatch, StaleWeights
from keel.rollout.options import RolloutOptions
from keel.rollout.vllm.connection import (
    CONNECT_S,
    Loading,
    SamplingServer,
    ServerLost,
    addresses,
    digests_of,
    dtype_of,
    parse_sampled,
    shared_secret,
    whole_lines,
)
from keel.rollout.vllm.direct import (
    NOT_RUN,
    NcclSender,
    check_transfer,
    loopback_only,
    sender,
)
from keel.rollout.vllm.engine import (
    HEARTBEAT_S,
    PROTOCOL,
    TRAINING,
    Drawing,
    Row,
    Sampled,
    SamplerInfo,
    VllmSampler,
    first_difference,
    model_facts,
    to_json,
)
from keel.rollout.vllm.transfer import (
    PartDigests,
    adapter_of,
    check_digests,
    checkpoint_weights,
    lora_rank,
    process_folder,
    save_adapter,
    save_shards,
)

logger = logging.getLogger("keel")
SILENCE_S = 30 * HEARTBEAT_S  # seconds without a heartbeat after which a server counts as lost
TRIES = 5  # attempts per row
STATUS_S = 5.0
LOAD_S = 3600.0  # seconds: limit of a weight load, even with heartbeats
UPLOAD_BYTES_S = 2**20  # bytes per second; a slower upload counts as lost
_STATUS = {
    **{"boot": str, "weights": str, "dtype": str, "context": int, "max_lora_rank": int},
    **{"model": dict, "tokenizer": str, "parts": list},
}


@dataclass(eq=False)
class Stream:
    """The unfinished rows of one request to a server; results after `closed` are dropped."""

    server: SamplingServer
    rows: dict[str, Row]
    drawing: Drawing
    closed: bool = False


class ServerSampler(VllmSampler):
    """Samples on this process's servers. Processes share servers if there are fewer servers than processes."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, rollout: RolloutOptions, world: World, *, silence_s: float = SILENCE_S
    ) -> None:
        options = rollout.vllm
        urls = addresses(options.urls)
        self._world, self._wait_s, self._silence_s = world, options.wait_s, silence_s
        training = world.broadcast(secrets.token_hex(8))
        secret = shared_secret(options.secret)
        if not secret:
            raise KeelError(f"the sampling server needs a secret: set {SECRET} to the one that keel serve printed")
        headers = {"authorization": f"Bearer {secret}", TRAINING: training}
        own = urls[world.rank :: world.size] or [urls[world.rank % len(urls)]]
        self.servers = [SamplingServer(url, headers) for url in own]
        self._uploads = world.rank < len(urls)  # one process per server uploads weights
        self._model, self._tokenizer = model, tokenizer
        self._nccl, self._device = options.transfer == "nccl", next(model.parameters()).device
        self._senders: dict[str, tuple[str, NcclSender | None]] = {}  # by server: (boot, sender)
        self.notes = (NOT_RUN,) if self._nccl else ()
        self._folder = process_folder("sync")
        self._files = Path(world.all_gather(str(self._folder))[world.rank % len(urls)])  # of the uploading process
        self._queue: queue.Queue[tuple[Stream, Sampled | Exception] | None] = queue.Queue()  # None: interrupted
        self._streams: list[Stream] = []
        self._sync, self._ranks = "", None  # type: str, dict[str, int] | None
        self._tries: dict[str, int] = {}
        self._events: list[tuple[str, str]] = []
        try:
            for server in self.servers:
                self._retry(self._connect, [server])
            first = self.servers[0].status
            self._dtype = dtype_of(self.servers[0])
            self._part_digests = PartDigests(first["parts"], model)
            context = min(server.status["context"] for server in self.servers)
            self.info = SamplerInfo(context, first["model"]["vocab_size"])
            self.load(model)
        except BaseException:
            self.close()
            raise

    def _connect(self, server: SamplingServer) -> None:
        """Get a server's status, and refuse another model, tokenizer or version."""
        status = server.call("GET", "/keel/status", timeout_s=STATUS_S, deadline_s=STATUS_S)
        if status.get("protocol") != PROTOCOL:
            raise KeelError(
                f"{server} has another version of Keel (protocol {status.get('protocol')}, here {PROTOCOL}): "
                "install the same version on both sides"
            )
        odd = next((name for name, kind in _STATUS.items() if not isinstance(status.get(name), kind)), None)
        if odd is not None:
            raise KeelError(
                f"{server} reports {odd}={status.get(odd)!r}, so it is not keel serve: start keel serve there"
            )
        own, theirs = model_facts(causal_lm(self._model).config), status["model"]
        if name := first_difference(own, theirs):
            raise ModelMismatch(
                f"{server} serves another model: its {name} is {str(theirs.get(name))[:40]} and the policy's is "
                f"{str(own.get(name))[:40]}; start keel serve with this run's model"
            )
        if status["tokenizer"] != vocabulary_digest(self._tokenizer):
            raise ModelMismatch(f"{server} has another tokenizer: start keel serve with this run's model")
        rank = lora_rank(self._model)
        if rank > status["max_lora_rank"]:
            raise KeelError(
                f"{server} takes adapters up to rank {status['max_lora_rank']}, but the policy's has {rank}: "
                f"start keel serve with --max-lora-rank {rank}"
            )
        if self._nccl:
            check_transfer(status, self._device, str(server))
            loopback_only(server.url)
        first = self.servers[0].status or status
        for name in ("dtype", "parts"):
            if status[name] != first[name]:
                raise KeelError(
                    f"{server} differs from {self.servers[0]} in its {name}: start all servers with the same options"
                )
        server.status = status

    def _retry(self, attempt: Callable[[SamplingServer], None], servers: Sequence[SamplingServer]) -> None:
        """Try servers in turn until one does not raise `ServerLost`, for at most `wait_s`."""
        end, warned = time.monotonic() + self._wait_s, False
        while True:
            for server in servers:
                try:
                    return attempt(server)
                except ServerLost as error:
                    lost = server, error
            if time.monotonic() >= end:
                raise KeelError(
                    f"{lost[0]} has not answered for {self._wait_s:.0f} s ({lost[1]}): start keel serve there, or "
                    "correct rollout.vllm.url"
                )
            if not warned:
                logger.warning("waiting up to %.0f s for %s (%s)", self._wait_s, *lost)
                warned = True
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        alive = [server for server in self.servers if server.alive] or self.servers
        shares = {server.url: dict[str, Row]() for server in alive}
        busy = {server.url: 0 for server in self.servers}
        for stream in self._streams:
            busy[stream.server.url] += len(stream.rows)
        for row in rows:
            shares[min(shares, key=lambda url: busy[url] + len(shares[url]))][row.id] = row
        for server in alive:
            if shares[server.url]:
                stream = Stream(server, shares[server.url], drawing)
                self._streams.append(stream)
                arguments = (stream, list(stream.rows.values()))
                threading.Thread(target=self._read, args=arguments, name="keel-sampler", daemon=True).start()

    def _read(self, stream: Stream, rows: Sequence[Row]) -> None:
        """Request rows and queue each finished one, or the error."""
        end = time.monotonic() + LOAD_S
        try:
            while True:
                try:
                    for result in self._results(stream, rows):
                        self._queue.put((stream, result))
                    return
                except Loading:
                    if stream.closed or time.monotonic() >= end:
                        raise
                    time.sleep(0.2)
        except Exception as error:  # raised by `finished`
            self._queue.put((stream, error))

    def _results(self, stream: Stream, rows: Sequence[Row]) -> Iterator[Sampled]:
        import httpx2

        server = stream.server
        body = json.dumps({**to_json(rows, stream.drawing), "weights": self._sync})
        missing = {row.id for row in rows}
        try:
            with (
                server.client(self._silence_s) as client,
                client.stream("POST", f"{server.url}/keel/generate", content=body) as response,
            ):
                if response.status_code != 200:
                    server.read(response.status_code, response.read())
                for line in whole_lines(response.iter_bytes(), self._silence_s):
                    if stream.closed:  # closing the connection cancels the rows on the server
                        return
                    if line.strip():
                        result = parse_sampled(server, line, stream.drawing.vocabulary)
                        missing.discard(result.id)
                        yield result
        except httpx2.RequestError as error:
            raise ServerLost(first_line(error)) from error
        if missing:
            raise ServerLost("its answer is incomplete")

    def finished(self) -> list[Sampled]:
        ended: list[Sampled] = []
        while not ended or not self._queue.empty():
            arrived = self._queue.get()
            if arrived is None:
                raise Interrupted
            stream, result = arrived
            if stream.closed:
                continue
            if isinstance(result, ServerLost):
                self._resample_rows(stream.server, result)
            elif isinstance(result, Exception):
                raise result
            elif stream.rows.pop(result.id, None) is not None:
                ended.append(result)
                if not stream.rows:
                    self._close(stream)
        return ended

    def _close(self, *streams: Stream) -> None:
        for stream in streams:
            stream.closed = True
            self._streams.remove(stream)

    def _resample_rows(self, server: SamplingServer, error: ServerLost) -> None:
        """Sample a lost server's rows again, on other servers or on the same one once it is back."""
        streams = [stream for stream in self._streams if stream.server is server]
        rows, drawing = [row for stream in streams for row in stream.rows.values()], streams[0].drawing
        self._close(*streams)
        self._tries |= {row.id: self._tries.get(row.id, 0) + 1 for row in rows}
        tries = max(self._tries[row.id] for row in rows)
        if tries > TRIES:
            raise KeelError(
                f"{server} was lost {TRIES} times while it sampled the same completions ({error}): see its log"
            )
        time.sleep(0.2 * (tries - 1))  # the server may be shutting down
        self._events.append(("sampler/lost", f"{server} was lost ({error}); its {len(rows)} rows are sampled again"))
        server.alive = False
        try:
            self._restore(server)
        except ServerLost:
            if not any(other.alive for other in self.servers):
                self._retry(self._restore, self.servers)
        self.start(rows, drawing)

    def _restore(self, server: SamplingServer) -> None:
        """Reconnect to a server, and send it the weights of the last sync if it has other weights."""
        self._connect(server)
        if server.status["weights"] != self._sync:
            self._send(server)
            self._events.append(("sampler/back", f"{server} is back and has the weights of the last sync"))
        server.alive = True

    def cancel(self) -> None:
        self._close(*self._streams)

    def load(self, policy: nn.Module) -> None:
        """Write the weights (or the adapter) to files, send them to each server, and verify their digests."""
        self.cancel()
        self._tries = {}
        previous, self._sync = self._sync, self._world.broadcast(secrets.token_hex(8))
        folder = self._folder / self._sync
        folder.mkdir()
        adapted = is_lora(policy)
        if not adapted or not self._part_digests.digests:
            weights = self._part_digests.recorded(checkpoint_weights(policy, self._dtype))
            if adapted or not self._uploads:
                deque(weights, maxlen=0)
            else:
                save_shards(weights, folder)
        if adapted:
            adapter = adapter_of(policy, self._dtype)
            self._ranks, self._expected = adapter.ranks, adapter.digests()
            if self._uploads:
                _flatten_adapter(save_adapter(policy, folder / "adapter"), folder)
        else:
            self._expected = dict(self._part_digests.digests)
        if self._uploads:
            for server in self.servers:
                self._sync_one(server)
            if not any(server.alive for server in self.servers):
                self._retry(self._restore, self.servers)
        shutil.rmtree(self._folder / (previous or "-"), ignore_errors=True)
        self._world.barrier()

    def _sync_one(self, server: SamplingServer) -> None:
        """Send the weights to a server; if it does not answer, retry at the next sync."""
        back = not server.alive and bool(server.base[0])
        try:
            self._connect(server)
            self._send(server)
            server.alive = True
        except ServerLost as error:
            if server.alive:
                self._events.append(("sampler/lost", f"{server} was lost during a sync ({error})"))
            server.alive = back = False
        if back:
            self._events.append(("sampler/back", f"{server} is back and has the weights of this sync"))

    def _send(self, server: SamplingServer) -> None:
        """Send the files of the last sync and verify the server's digests."""
        read_back = 0 if self._ranks is None else len(self._part_digests.digests)  # base tensors verified now or before
        if self._ranks is not None and server.base != (server.status["boot"], server.status["weights"]):
            answer = self._call_with_heartbeats(server, "/keel/digests", {})
            check_digests(digests_of(server, answer), self._part_digests.digests, str(server), sent=False)
        folder = self._files / self._sync
        if not folder.is_dir():
            raise ServerLost("it has other weights, and the files of the last sync are on another machine")
        direct = self._ranks is None and self._uploads and self._send_direct(server, folder)
        for path in [] if direct else sorted(folder.glob("*.*")):
            with path.open("rb") as file:
                own = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                where = f"/keel/weights/{self._sync}/{path.name}"
                chunks = iter(partial(file.read, 2**20), b"")
                deadline_s = self._wait_s + path.stat().st_size / UPLOAD_BYTES_S + CONNECT_S
                sent = server.call("PUT", where, timeout_s=self._wait_s, deadline_s=deadline_s, content=chunks)
            if sent.get("sha256") != own:
                raise ServerLost(f"{path.name} was changed in transit")
        answer = self._call_with_heartbeats(server, f"/keel/weights/{self._sync}", {"ranks": self._ranks})
        if self._ranks is None and answer.get("adapter"):
            raise StaleWeights(f"{server} still samples with an adapter after full weights were sent: restart it")
        self.read_back = read_back + check_digests(digests_of(server, answer), self._expected, str(server))
        server.status = {**server.status, "weights": self._sync}
        server.base = (server.status["boot"], self._sync)

    def _call_with_heartbeats(self, server: SamplingServer, path: str, data: dict[str, Any]) -> dict[str, Any]:
        """Make a request that may take up to `LOAD_S`; it fails earlier if heartbeats stop."""
        return server.call("POST", path, timeout_s=self._silence_s, deadline_s=LOAD_S, json=data)

    def _send_direct(self, server: SamplingServer, folder: Path) -> bool:
        """Send full weights by NCCL; return False if they must be sent as files.

        A failed first transfer raises an error. After a later failure, files are used until the server restarts.
        """
        if not self._nccl:
            return False
        boot, channel = self._senders.get(server.url, ("", None))

        def call(step: str, info: dict[str, Any]) -> None:
            self._call_with_heartbeats(server, f"/keel/transfer/{self._sync}/{step}", info)

        try:
            if boot != server.status["boot"]:
                workers = len(server.status["devices"])
                channel = sender(call, self._device, workers, self._wait_s)
            if channel is not None:
                channel.send(folder)
        except Exception as error:
            if channel is not None:
                channel.close()
            if isinstance(error, ServerLost):
                self._senders[server.url] = "lost", None
                raise
            if not boot:
                raise KeelError(
                    f"weights cannot be sent to {server} by nccl ({first_line(error)}): see its log, or use "
                    "rollout.vllm.transfer=http"
                ) from error
            channel = None
            lost = f"weights can no longer be sent to {server} by nccl ({first_line(error)}); files are used"
            self._events.append(("sampler/transfer", lost))
        self._senders[server.url] = server.status["boot"], channel
        return channel is not None

    def events(self) -> list[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def interrupt(self) -> None:
        self._queue.put(None)

    def close(self) -> None:
        self.cancel()
        for _, channel in self._senders.values():
            if channel is not None:
                channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _flatten_adapter(source: Path, target: Path) -> None:
    """Move the adapter's files into `target`, and remove its folder."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).rename(target / name)
    shutil.rmtree(target / "adapter")
