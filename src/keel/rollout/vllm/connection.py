"""One sampling server (`keel serve`): its address and secret, requests, and the parsing of its answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keel.base.errors import KeelError, first_line
from keel.base.json_http import certificates
from keel.base.redact import UnsetVariable, expand_env
from keel.envs.endpoint import SECRET
from keel.rollout.vllm.direct import TransferBroken, run_concurrently
from keel.rollout.vllm.engine import Sampled, check_sampled

CONNECT_S = 5.0
ANSWER_BYTES = 2**26


class ServerLost(Exception):
    """The server does not answer, or has other weights."""


class Loading(ServerLost):
    """The server is loading weights, possibly for another process of this training."""


@dataclass
class SamplingServer:
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
                        raise KeelError(
                            f"{self} sends an answer of more than {ANSWER_BYTES} bytes, so it is not keel serve: "
                            "start keel serve there"
                        )
                return response.status_code, bytes(content)

        deadline_s = deadline_s or timeout_s + CONNECT_S
        try:
            [(code, content)] = run_concurrently(exchange, timeout_s=deadline_s)
        except httpx2.RequestError as error:
            raise ServerLost(first_line(error) or type(error).__name__) from error
        except TransferBroken:
            raise ServerLost(f"no complete answer in {deadline_s:.0f} s") from None
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
            raise KeelError(f"{self} answers {content[:40]!r}, so it is not keel serve: start keel serve there")
        code = data.get("code", code)
        if code == 401:
            raise KeelError(f"401 from {self}: {SECRET} (or rollout.vllm.secret) does not match the server's")
        if data.get("loading"):
            raise Loading("its weights are being loaded")
        if code == 409:
            raise ServerLost(data["error"] if data.get("busy") else "it has other weights; it may have restarted")
        if code == 503:
            raise ServerLost(str(data.get("error")))
        if code != 200 or "error" in data:
            raise KeelError(f"{self} refused the request: {data.get('error', code)}")
        return data


def shared_secret(given: str | None) -> str:
    """The shared secret from the option (with `$NAME` expanded) or the environment; "" if neither is set."""
    try:
        return expand_env(given) if given else os.environ.get(SECRET, "")
    except UnsetVariable as error:
        raise KeelError(f"rollout.vllm.secret {error}") from None


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
            raise KeelError(f"rollout.vllm.url is {url!r}: it must look like http://127.0.0.1:8000")
        name = str(address).rstrip("/")
        if name in parsed:
            raise KeelError(f"rollout.vllm.url names the same server twice, {parsed[name]} and {url}: leave one out")
        parsed[name] = url
    return list(parsed)


def dtype_of(server: SamplingServer) -> torch.dtype:
    dtype = getattr(torch, server.status["dtype"].removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise KeelError(f"{server} has weights of type {server.status['dtype']!r}, which torch does not know")
    return dtype


def digests_of(server: SamplingServer, answer: Mapping[str, Any]) -> dict[str, str]:
    digests = answer.get("digests")
    if not isinstance(digests, dict):
        raise KeelError(f"{server} answers {str(digests)[:40]!r} instead of digests: start keel serve there")
    return digests


def parse_sampled(server: SamplingServer, line: str, vocabulary: int) -> Sampled:
    """Parse and check a line of a server's answer."""
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
        raise KeelError(
            f"{server} returned {len(tokens)} tokens with {len(before)} unfiltered and {len(after)} filtered "
            "log-probabilities"
        )
    return check_sampled(result, vocabulary, str(server))


def whole_lines(chunks: Iterable[bytes], silence_s: float) -> Iterator[str]:
    """Yield the lines of an answer; raises `ServerLost` if a line does not end in time or is too long."""
    rest, last_line = b"", time.monotonic()
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        now = time.monotonic()
        last_line = now if lines else last_line
        if now - last_line > silence_s or len(rest) > ANSWER_BYTES:
            raise ServerLost("a line of its answer is too long or did not end in time")
        yield from (line.decode(errors="replace") for line in lines)
    yield rest.decode(errors="replace")
