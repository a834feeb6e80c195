"""Samplers behind servers (`keel serve`): rows over HTTP, weights under a secret, and what to do when one is lost.

A lost server's rows are drawn again, by another server or by itself once it is back: the noise is theirs, so that they
come out as they would have. A server that comes back gets the weights of the last sync again before it samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keel.base.errors import KeelError, first_line
from keel.base.redact import fill
from keel.base.world import World
from keel.models.head import causal_lm
from keel.models.lora import is_lora
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.engine import OtherModel
from keel.rollout.options import RolloutOptions
from keel.rollout.vllm.rows import Drawing, Row, Sampled, to_json
from keel.rollout.vllm.samplers import Sampler, SamplerInfo, model_facts
from keel.rollout.vllm.service import HEARTBEAT_S, PROTOCOL
from keel.rollout.vllm.transfer import (
    Held,
    adapter_of,
    check_digests,
    checkpoint_weights,
    lora_rank,
    save_adapter,
    save_shards,
)

logger = logging.getLogger("keel")
SECRET = "KEEL_SERVE_SECRET"  # where the secret is read from unless rollout.vllm.secret names another variable
SILENCE_S = 30 * HEARTBEAT_S  # without a heartbeat
TRIES = 3  # of one row


class Lost(Exception):
    """The server does not answer, or no longer has the weights."""


@dataclass
class Server:
    """One server as this process knows it."""

    url: str
    headers: Mapping[str, str]
    status: Mapping[str, Any] = field(default_factory=dict)
    running: dict[str, Row] = field(default_factory=dict)
    alive: bool = False

    def __str__(self) -> str:
        return f"the sampler at {self.url}"

    def call(self, method: str, path: str, *, timeout_s: float, **body: Any) -> dict[str, Any]:
        """One request and its answer as data; what is not an answer is `Lost`, what is refused a line."""
        import httpx2

        try:
            with httpx2.Client(headers=dict(self.headers), timeout=httpx2.Timeout(timeout_s, connect=5.0)) as client:
                response = client.request(method, f"{self.url}{path}", **body)
        except httpx2.RequestError as error:
            raise Lost(first_line(error) or type(error).__name__) from error
        return self.read(response.status_code, response.content)

    def read(self, code: int, content: bytes) -> dict[str, Any]:
        try:
            data = json.loads(content)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise KeelError(f"{self} answers {content[:40]!r}: no sampler of Keel's; start one with keel serve")
        if code == 401:
            raise KeelError(f"{self} wants another secret: give both the same in {SECRET}, or as rollout.vllm.secret")
        if code == 409:
            raise Lost("it has other weights, as after a restart")
        if code != 200 or "error" in data:
            raise KeelError(f"{self} refused: {data.get('error', code)}")
        return data


class ServerSampler(Sampler):
    """The servers of this process: each of several processes has its own where there are enough of them."""

    def __init__(self, model: nn.Module, tokenizer: Any, rollout: RolloutOptions, world: World) -> None:
        options = rollout.vllm
        urls = options.urls
        self._world, self._wait_s = world, options.wait_s
        headers = {"authorization": f"Bearer {_secret(options.secret)}"}
        own = urls[world.rank :: world.size] or [urls[world.rank % len(urls)]]
        self.servers = [Server(url.rstrip("/"), headers) for url in own]
        self._leads = world.rank < len(urls)  # of those that share a server
        self._model, self._tokenizer = model, tokenizer
        self._folder = Path(tempfile.mkdtemp(prefix="keel-sync-"))
        self._queue: queue.Queue[tuple[int, Server, Sampled | Exception]] = queue.Queue()
        self._epoch, self._sync, self._ranks = 0, "", None  # type: int, str, dict[str, int] | None
        self._tries: dict[str, int] = {}
        self._events: list[tuple[str, str]] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for server in self.servers:
                self._connect(server)
            first = self.servers[0].status
            self._dtype = getattr(torch, str(first["dtype"]).removeprefix("torch."))
            self._held = Held(first["parts"], model)
            self.info = SamplerInfo(first["context"], first["model"]["vocab_size"])
            self.load(model, None)
            on_error.pop_all()

    def _connect(self, server: Server) -> None:
        """Wait until the server answers, and refuse one of another model, tokenizer or version."""
        server.status = self._answer(server)
        server.alive = True
        own, theirs = model_facts(causal_lm(self._model).config), server.status["model"]
        for name, value in own.items():
            if theirs.get(name) != value:
                raise OtherModel(
                    f"{server} serves another model: its {name} is {theirs.get(name)} and the policy's {value}; start "
                    "keel serve with this run's model"
                )
        if server.status["tokenizer"] != vocabulary_digest(self._tokenizer):
            raise OtherModel(f"{server} has another tokenizer than the policy: start keel serve with this run's model")
        rank = lora_rank(self._model)
        if rank > server.status["max_lora_rank"]:
            raise KeelError(
                f"{server} takes adapters up to rank {server.status['max_lora_rank']} and the policy's has {rank}: "
                f"start keel serve with --max-lora-rank {rank}"
            )

    def _answer(self, server: Server) -> dict[str, Any]:
        """The server's status, once it answers."""
        end, said = time.monotonic() + self._wait_s, False
        while True:
            try:
                status = server.call("GET", "/keel/status", timeout_s=5.0)
            except Lost as error:
                if time.monotonic() >= end:
                    raise KeelError(
                        f"{server} has not answered for {self._wait_s:.0f} s ({error}): start keel serve there, or "
                        "correct rollout.vllm.url"
                    ) from None
                if not said:
                    logger.warning("waiting up to %.0f s for %s (%s)", self._wait_s, server, error)
                    said = True
                time.sleep(min(0.5, max(0.0, end - time.monotonic())))
                continue
            if status.get("protocol") != PROTOCOL:
                raise KeelError(
                    f"{server} is of another version of Keel (protocol {status.get('protocol')}, here {PROTOCOL}): "
                    "install the same version on both sides"
                )
            return status

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        self._drawing = drawing
        alive = [server for server in self.servers if server.alive] or self.servers
        shares: dict[int, list[Row]] = {}
        for row in rows:
            index = min(range(len(alive)), key=lambda i: len(alive[i].running) + len(shares.get(i, ())))
            shares.setdefault(index, []).append(row)
        for index, share in shares.items():
            server = alive[index]
            server.running |= {row.id: row for row in share}
            arguments = (self._epoch, server, share, drawing)
            threading.Thread(target=self._read, args=arguments, name="keel-sampler", daemon=True).start()

    def _read(self, epoch: int, server: Server, rows: Sequence[Row], drawing: Drawing) -> None:
        """Ask for rows and pass on each that ends; at the end, what went wrong."""
        try:
            for result in self._results(server, rows, drawing):
                self._queue.put((epoch, server, result))
        except Exception as error:  # raised where the results are waited for
            self._queue.put((epoch, server, error))

    def _results(self, server: Server, rows: Sequence[Row], drawing: Drawing) -> Iterator[Sampled]:
        import httpx2

        body = json.dumps({**to_json(rows, drawing), "weights": self._sync})
        missing = {row.id for row in rows}
        timeout = httpx2.Timeout(SILENCE_S, connect=5.0)
        try:
            with (
                httpx2.Client(headers=dict(server.headers), timeout=timeout) as client,
                client.stream("POST", f"{server.url}/keel/generate", content=body) as response,
            ):
                if response.status_code != 200:
                    server.read(response.status_code, response.read())
                for line in response.iter_lines():
                    if line.strip():
                        result = _sampled(server, line)
                        missing.discard(result.id)
                        yield result
        except httpx2.RequestError as error:
            raise Lost(first_line(error) or type(error).__name__) from error
        if missing:
            raise Lost("it ended its answer too early")

    def finished(self) -> list[Sampled]:
        ended: list[Sampled] = []
        while not ended or not self._queue.empty():
            epoch, server, result = self._queue.get()
            if epoch != self._epoch:  # of rows that were given up
                continue
            if isinstance(result, Lost):
                self._again(server, result)
            elif isinstance(result, Exception):
                raise result
            elif server.running.pop(result.id, None) is not None:
                ended.append(result)
        return ended

    def _again(self, server: Server, error: Lost) -> None:
        """Draw a lost server's rows again: by the others, or by itself once it is back."""
        rows = list(server.running.values())
        server.running.clear()
        if not rows:
            return
        for row in rows:
            self._tries[row.id] = self._tries.get(row.id, 0) + 1
            if self._tries[row.id] > TRIES:
                raise KeelError(f"{server} was lost {TRIES} times over the same completions ({error}): see its log")
        self._events.append(("sampler/lost", f"{server} was lost ({error}); its {len(rows)} rows are drawn again"))
        server.alive = False
        if not any(other.alive for other in self.servers):
            self._revive(server)
        self.start(rows, self._drawing)

    def _revive(self, server: Server) -> None:
        """Wait for a server to come back, and give it the weights of the last sync again if it has others."""
        self._connect(server)
        if server.status["weights"] != self._sync:
            self._send(server)
            self._events.append(("sampler/back", f"{server} is back and has the weights of the last sync again"))

    def cancel(self) -> None:
        self._epoch += 1
        for server in self.servers:
            server.running.clear()

    def load(self, policy: nn.Module, version: int | None) -> None:
        """Write the weights (or the adapter) to files, send them to each server, and compare what it then holds."""
        self._epoch, self._tries = self._epoch + 1, {}
        previous, self._sync = self._sync, self._world.agree(secrets.token_hex(8))
        folder = self._folder / self._sync
        folder.mkdir()
        adapted = is_lora(policy)
        if not adapted or not self._held.digests:
            self._held.reset()
            weights = self._held.pass_by(checkpoint_weights(policy, self._dtype))
            if adapted or not self._leads:
                deque(weights, maxlen=0)
            else:
                save_shards(weights, folder)
        if adapted:
            adapter = adapter_of(policy, self._dtype)
            self._ranks, self._expected = adapter.ranks, adapter.digests()
            if self._leads:
                _flat(save_adapter(policy, folder / "adapter"), folder)
        else:
            self._expected = dict(self._held.digests)
        if self._leads:
            for server in self.servers:
                try:
                    if not server.alive:
                        self._connect(server)
                    self._send(server)
                except Lost as error:
                    self._events.append(("sampler/lost", f"{server} was lost in a sync ({error})"))
                    self._revive(server)
        shutil.rmtree(self._folder / (previous or "-"), ignore_errors=True)
        self._world.wait()

    def _send(self, server: Server) -> None:
        """Send the files of the last sync; a server that then holds anything else is refused."""
        read_back = 0
        if self._ranks is not None:  # the base is the server's own
            held = server.call("POST", "/keel/digests", timeout_s=self._wait_s, json={})["digests"]
            read_back = check_digests(held, self._held.digests, str(server), sent=False)
        folder = self._folder / self._sync
        for path in sorted(folder.glob("*.*")):
            with path.open("rb") as file:
                own = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                where = f"/keel/weights/{self._sync}/{path.name}"
                sent = server.call("PUT", where, timeout_s=self._wait_s, content=_chunks(file))
            if sent.get("sha256") != own:
                raise Lost(f"{path.name} did not arrive as it was sent")
        commit = {"ranks": self._ranks}
        answer = server.call("POST", f"/keel/weights/{self._sync}", timeout_s=self._wait_s, json=commit)
        self.read_back = read_back + check_digests(answer["digests"], self._expected, str(server))
        server.status = {**server.status, "weights": self._sync}

    def events(self) -> list[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._epoch += 1
        shutil.rmtree(self._folder, ignore_errors=True)


def _secret(given: str | None) -> str:
    """The shared secret: the option's, with `$NAME` filled in, or the environment's."""
    secret = fill(given) if given else os.environ.get(SECRET, "")
    if not secret:
        raise KeelError(f"a sampler's server has a secret: put the one that keel serve showed into {SECRET}")
    return secret


def _sampled(server: Server, line: str) -> Sampled:
    """A row from a line of the answer."""
    try:
        data = json.loads(line)
        if "error" in data:
            raise Lost(str(data["error"]))
        numbers = ("sample_logp", "filtered_logp")
        result = Sampled(str(data["id"]), tuple(data["tokens"]), *(tuple(map(float, data[name])) for name in numbers))
    except (ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{server} answers {line[:40]!r}, which is no completion: start keel serve there") from error
    if not len(result.tokens) == len(result.sample_logp) == len(result.filtered_logp):
        raise KeelError(f"{server} gives {len(result.tokens)} tokens and {len(result.sample_logp)} log-probabilities")
    return result


def _chunks(file: Any, size: int = 2**20) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _flat(source: Path, target: Path) -> None:
    """The adapter's files where the others lie, and nothing else."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).rename(target / name)
    shutil.rmtree(target / "adapter")
