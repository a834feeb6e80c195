"""The client of sampling servers (`keel serve`): rows over HTTP, weight syncs with a secret, and recovery.

Rows of a lost server are sampled again by another server, or by the same one once it is back. Noise belongs to the row,
so the result is the same. A server that comes back gets the weights of the last sync before it samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keel.base.certificates import certificates
from keel.base.errors import KeelError, first_line
from keel.base.redact import UnsetVariable, expand_env
from keel.base.world import World
from keel.envs.endpoint import SECRET
from keel.models.adapters import is_lora
from keel.models.head import causal_lm
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.engine import Interrupted, ModelMismatch, StaleWeights
from keel.rollout.options import RolloutOptions
from keel.rollout.vllm.direct import (
    NOT_RUN,
    NcclSender,
    TransferBroken,
    check_transfer,
    loopback_only,
    run_concurrently,
    sender,
)
from keel.rollout.vllm.rows import HEARTBEAT_S, PROTOCOL, TRAINING, Drawing, Row, Sampled, check_sampled, to_json
from keel.rollout.vllm.samplers import SamplerInfo, VllmSampler, first_difference, model_facts
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
SILENCE_S = 30 * HEARTBEAT_S  # without a heartbeat the server counts as lost
TRIES = 5  # attempts per row
CONNECT_S = STATUS_S = 5.0
LOAD_S = 3600.0  # limit of a weight load with heartbeats
UPLOAD_BYTES_S = 2**20  # a slower upload counts as lost
ANSWER_BYTES = 2**26
_STATUS = {
    **{"boot": str, "weights": str, "dtype": str, "context": int, "max_lora_rank": int},
    **{"model": dict, "tokenizer": str, "parts": list},
}


class ServerLost(Exception):
    """The server does not answer, or has other weights."""


class Loading(ServerLost):
    """The server is loading weights, possibly for another process of this training."""


@dataclass
class Server:
    """One server, with its last known status."""

    url: str
    headers: Mapping[str, str]
    status: Mapping[str, Any] = field(default_factory=dict)
    alive: bool = False
    base: tuple[str, str] = ("", "")  # (boot, sync) for which the server's base weights were verified

    def __str__(self) -> str:
        return f"the sampler at {self.url}"

    def call(
        self, method: str, path: str, *, timeout_s: float, deadline_s: float | None = None, **body: Any
    ) -> dict[str, Any]:
        """Send one request and return its JSON answer; raises `ServerLost` without an answer, `KeelError` if refused.

        `timeout_s` limits silence, `deadline_s` the whole request.
        """
        import httpx2

        def exchange() -> tuple[int, bytes]:
            content = bytearray()
            with (
                self.client(timeout_s) as client,
                client.stream(method, f"{self.url}{path}", **body) as response,
            ):
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > ANSWER_BYTES:
                        raise KeelError(f"{self} sends an endless answer: start keel serve there")
                return response.status_code, bytes(content)

        deadline_s = deadline_s or timeout_s + CONNECT_S
        try:
            [(code, content)] = run_concurrently(exchange, timeout_s=deadline_s)
        except httpx2.RequestError as error:
            raise ServerLost(first_line(error) or type(error).__name__) from error
        except TransferBroken:
            raise ServerLost(f"no whole answer in {deadline_s:.0f} s") from None
        return self.read(code, content)

    def client(self, timeout_s: float) -> Any:
        """An HTTP client that ignores proxies of the environment."""
        import httpx2

        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        return httpx2.Client(
            headers=dict(self.headers), timeout=timeout, verify=certificates(trust_env=False), trust_env=False
        )

    def read(self, code: int, content: bytes) -> dict[str, Any]:
        """Parse an answer; after heartbeats the status code is in the JSON."""
        try:
            data = json.loads(content)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise KeelError(f"{self} answers {content[:40]!r}, so it is no keel serve: start keel serve there")
        code = data.get("code", code)
        if code == 401:
            raise KeelError(f"401 from {self}: {SECRET} (or rollout.vllm.secret) does not match the server's")
        if data.get("loading"):
            raise Loading("its weights are being loaded")
        if code == 409:
            raise ServerLost(data["error"] if data.get("busy") else "it has other weights, as after a restart")
        if code == 503:
            raise ServerLost(str(data.get("error")))
        if code != 200 or "error" in data:
            raise KeelError(f"{self} refused: {data.get('error', code)}")
        return data


@dataclass(eq=False)
class Stream:
    """The unfinished rows of one request to a server; results after `closed` are dropped."""

    server: Server
    rows: dict[str, Row]
    drawing: Drawing
    closed: bool = False


class ServerSampler(VllmSampler):
    """Samples by the servers of this process; processes share servers if there are too few."""

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
        self.servers = [Server(url, headers) for url in own]
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
            self._dtype = _dtype(self.servers[0])
            self._part_digests = PartDigests(first["parts"], model)
            context = min(server.status["context"] for server in self.servers)
            self.info = SamplerInfo(context, first["model"]["vocab_size"])
            self.load(model)
        except BaseException:
            self.close()
            raise

    def _connect(self, server: Server) -> None:
        """Get a server's status, and refuse another model, tokenizer or version."""
        status = server.call("GET", "/keel/status", timeout_s=STATUS_S, deadline_s=STATUS_S)
        if status.get("protocol") != PROTOCOL:
            raise KeelError(
                f"{server} has another version of Keel (protocol {status.get('protocol')}, here {PROTOCOL}): "
                "install the same version on both sides"
            )
        odd = next((name for name, kind in _STATUS.items() if not isinstance(status.get(name), kind)), None)
        if odd is not None:
            raise KeelError(f"{server} says {status.get(odd)!r} as its {odd}, so it is no keel serve: start keel serve")
        own, theirs = model_facts(causal_lm(self._model).config), status["model"]
        if name := first_difference(own, theirs):
            raise ModelMismatch(
                f"{server} serves another model: its {name} is {str(theirs.get(name))[:40]} and the policy's "
                f"{str(own.get(name))[:40]}; start keel serve with this run's model"
            )
        if status["tokenizer"] != vocabulary_digest(self._tokenizer):
            raise ModelMismatch(f"{server} has another tokenizer: start keel serve with this run's model")
        rank = lora_rank(self._model)
        if rank > status["max_lora_rank"]:
            raise KeelError(
                f"{server} takes adapters up to rank {status['max_lora_rank']} and the policy's has {rank}: "
                f"start keel serve with --max-lora-rank {rank}"
            )
        if self._nccl:
            check_transfer(status, self._device, str(server))
            loopback_only(server.url)
        first = self.servers[0].status or status
        for name in ("dtype", "parts"):
            if status[name] != first[name]:
                raise KeelError(
                    f"{server} differs from {self.servers[0]} in its {name}: start all with the same options"
                )
        server.status = status

    def _retry(self, attempt: Callable[[Server], None], servers: Sequence[Server]) -> None:
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
        except Exception as error:  # `finished` raises it
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
                for line in _whole_lines(response.iter_bytes(), self._silence_s):
                    if stream.closed:  # closing the connection cancels the rows on the server
                        return
                    if line.strip():
                        result = _sampled(server, line, stream.drawing.vocabulary)
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

    def _resample_rows(self, server: Server, error: ServerLost) -> None:
        """Sample a lost server's rows again, on other servers or on the same one once it is back."""
        streams = [stream for stream in self._streams if stream.server is server]
        rows, drawing = [row for stream in streams for row in stream.rows.values()], streams[0].drawing
        self._close(*streams)
        self._tries |= {row.id: self._tries.get(row.id, 0) + 1 for row in rows}
        tries = max(self._tries[row.id] for row in rows)
        if tries > TRIES:
            raise KeelError(f"{server} was lost {TRIES} times over the same completions ({error}): see its log")
        time.sleep(0.2 * (tries - 1))  # the server may be shutting down
        self._events.append(("sampler/lost", f"{server} was lost ({error}); its {len(rows)} rows are sampled again"))
        server.alive = False
        try:
            self._restore(server)
        except ServerLost:
            if not any(other.alive for other in self.servers):
                self._retry(self._restore, self.servers)
        self.start(rows, drawing)

    def _restore(self, server: Server) -> None:
        """Send the weights of the last sync to a reachable server, if it has others."""
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
            self._part_digests.reset()
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

    def _sync_one(self, server: Server) -> None:
        """Send the weights to a server; if it does not answer, retry at the next sync."""
        back = not server.alive and bool(server.base[0])
        try:
            self._connect(server)
            self._send(server)
            server.alive = True
        except ServerLost as error:
            if server.alive:
                self._events.append(("sampler/lost", f"{server} was lost in a sync ({error})"))
            server.alive = back = False
        if back:
            self._events.append(("sampler/back", f"{server} is back and has the weights of this sync"))

    def _send(self, server: Server) -> None:
        """Send the files of the last sync and verify the server's digests."""
        read_back = 0 if self._ranks is None else len(self._part_digests.digests)  # base tensors verified now or before
        if self._ranks is not None and server.base != (server.status["boot"], server.status["weights"]):
            answer = self._call_with_heartbeats(server, "/keel/digests", {})
            check_digests(_digests(server, answer), self._part_digests.digests, str(server), sent=False)
        folder = self._files / self._sync
        if not folder.is_dir():
            raise ServerLost("it has other weights, and the files of the last sync are on another machine")
        direct = self._ranks is None and self._uploads and self._send_direct(server, folder)
        for path in [] if direct else sorted(folder.glob("*.*")):
            with path.open("rb") as file:
                own = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                where = f"/keel/weights/{self._sync}/{path.name}"
                slow_s = self._wait_s + path.stat().st_size / UPLOAD_BYTES_S
                sent = server.call(
                    "PUT", where, timeout_s=self._wait_s, deadline_s=slow_s + CONNECT_S, content=_chunks(file)
                )
            if sent.get("sha256") != own:
                raise ServerLost(f"{path.name} did not arrive as it was sent")
        answer = self._call_with_heartbeats(server, f"/keel/weights/{self._sync}", {"ranks": self._ranks})
        if self._ranks is None and answer.get("adapter"):
            raise StaleWeights(f"{server} still samples with an adapter after full weights were sent: start it again")
        self.read_back = read_back + check_digests(_digests(server, answer), self._expected, str(server))
        server.status = {**server.status, "weights": self._sync}
        server.base = (server.status["boot"], self._sync)

    def _call_with_heartbeats(self, server: Server, path: str, data: dict[str, Any]) -> dict[str, Any]:
        """Make a request that may take long: it is alive while heartbeats arrive."""
        return server.call("POST", path, timeout_s=self._silence_s, deadline_s=LOAD_S, json=data)

    def _send_direct(self, server: Server, folder: Path) -> bool:
        """Send full weights by NCCL; returns False if they must be sent as files, until the server restarts.

        If the first transfer fails, it raises an error.
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


def shared_secret(given: str | None) -> str:
    """The shared secret from the option (with `$NAME` expanded) or the environment; "" if neither is set."""
    try:
        return expand_env(given) if given else os.environ.get(SECRET, "")
    except UnsetVariable as error:
        raise KeelError(f"rollout.vllm.secret {error}") from None


def _dtype(server: Server) -> torch.dtype:
    """The dtype of a server's weights."""
    dtype = getattr(torch, server.status["dtype"].removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise KeelError(f"{server} has weights of type {server.status['dtype']!r}, which torch does not know")
    return dtype


def _digests(server: Server, answer: Mapping[str, Any]) -> dict[str, str]:
    """The digests in a server's answer."""
    digests = answer.get("digests")
    if not isinstance(digests, dict):
        raise KeelError(f"{server} says {str(digests)[:40]!r} as its digests: start keel serve there")
    return digests


def addresses(urls: Sequence[str]) -> list[str]:
    """Normalise the servers' addresses, and refuse duplicates."""
    import httpx2

    parsed: dict[str, str] = {}
    for url in urls:
        try:
            address = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise KeelError(f"rollout.vllm.url is {url!r}, which is not a valid URL ({error})") from None
        if address.scheme not in ("http", "https") or not address.host or any(map(str.isspace, url)):
            raise KeelError(f"rollout.vllm.url is {url!r}: write it as http://127.0.0.1:8000")
        name = str(address).rstrip("/")
        if name in parsed:
            raise KeelError(f"rollout.vllm.url names the same server twice, {parsed[name]} and {url}: leave one out")
        parsed[name] = url
    return list(parsed)


def _sampled(server: Server, line: str, vocabulary: int) -> Sampled:
    """Parse a line of the answer."""
    try:
        data = json.loads(line)
        if "error" in data:
            raise ServerLost(str(data["error"]))
        tokens = tuple(map(int, data["tokens"]))
        before, after = (tuple(map(float, data[name])) for name in ("sample_logp", "filtered_logp"))
        result = Sampled(str(data["id"]), tokens, before, after)
    except (ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{server} answers {line[:40]!r}, which is not a completion: start keel serve there") from error
    if not len(tokens) == len(before) == len(after):
        raise KeelError(f"{server} gives {len(tokens)} tokens and {len(before)} and {len(after)} log-probabilities")
    return check_sampled(result, vocabulary, str(server))


def _whole_lines(chunks: Iterable[bytes], silence_s: float) -> Iterator[str]:
    """Lines of an answer; a line that does not end in time or is too long raises `ServerLost`."""
    rest, begun = b"", time.monotonic()
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        now = time.monotonic()
        begun = now if lines else begun
        if now - begun > silence_s or len(rest) > ANSWER_BYTES:
            raise ServerLost("its answer has no end of line")
        yield from (line.decode(errors="replace") for line in lines)
    yield rest.decode(errors="replace")


def _chunks(file: Any, size: int = 2**20) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _flatten_adapter(source: Path, target: Path) -> None:
    """Move the adapter's files into `target`, and remove its folder."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).rename(target / name)
    shutil.rmtree(target / "adapter")
