"""HTTP requests with JSON answers. Redirects are refused, failures retried, time and size limited."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from keel.base.redact import UnsetVariable, expand_env

if TYPE_CHECKING:
    import httpx2
import functools
import ssl


@functools.cache
def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """One SSL context per process. Without it, each client rereads the machine's certificates: 60 to 100 ms."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=trust_env)


_MAX_BYTES = 1 << 20  # of an answer
_MAX_BACKOFF_S = 30.0


class RequestFailed(Exception):
    """A request failed; the message names its URL."""


def check_reachable(
    who: str, url: str, headers: Mapping[str, str] | None = None, *, option: str, timeout_s: float
) -> None:
    """Check that the server accepts connections. An unset environment variable raises `RequestFailed` too."""
    parts = urlsplit(_filled(url, option))
    _headers(headers, option)
    host = str(parts.hostname)
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return  # cannot be checked behind a proxy
    try:
        socket.create_connection((host, parts.port or (443 if parts.scheme == "https" else 80)), timeout_s).close()
    except OSError as error:
        raise RequestFailed(f"{who} at {shown(url)} is down: {_why(error)}; start it, or fix {option}") from error


def shown(url: str) -> str:
    """A URL for messages, without credentials and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def below(url: str, path: str) -> str:
    """Append a path to the URL, before its query."""
    parts = urlsplit(url)
    full_path = parts.path if parts.path.endswith(path) else parts.path.rstrip("/") + path
    return urlunsplit(parts._replace(path=full_path))


def ask(
    url: str,
    body: Any = None,
    *,
    option: str,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    retries: int,
    backoff_s: float,
    max_bytes: int = _MAX_BYTES,
) -> Any:
    """Return the JSON answer to a POST of `body`, or to a GET without `body`. Raises `RequestFailed`.

    `url` and `headers` may contain environment variables. Errors name `option` for the URL, and `headers` in the same
    section. Connection errors, timeouts, status 429 and 5xx are retried with exponential backoff.
    """
    import httpx2

    target = httpx2.URL(_filled(url, option))

    with httpx2.Client(
        headers={"Content-Type": "application/json", **_headers(headers, option)},
        timeout=timeout_s,
        verify=certificates(trust_env=True),
        follow_redirects=False,  # 301 to 303 drop the body; 307 and 308 may send it to another server
    ) as client:
        content = None if body is None else json.dumps(body).encode()
        for attempt in range(retries + 1):
            try:
                response, data = _exchange(client, target, content, timeout_s, max_bytes)
            except httpx2.RequestError as error:
                cause = f"cannot be reached: {_why(error)}"
            else:
                status = response.status_code
                if response.has_redirect_location:
                    moved = _joined(str(target), response.headers["Location"])
                    raise RequestFailed(
                        f"{shown(url)} redirects to {moved} (status {status}), and redirects are not followed: "
                        f"set {option} to the address that answers"
                    )
                if 200 <= status < 300:
                    return _json(data, url, max_bytes)
                cause = f"answered with status {status}"
                if status != 429 and status < 500:
                    raise RequestFailed(f"{shown(url)} {cause}{_message(data)}")
            if attempt < retries:
                time.sleep(min(backoff_s * 2**attempt, _MAX_BACKOFF_S))
    raise RequestFailed(f"{shown(url)} {cause}" + (f" ({retries + 1} tries)" if retries else ""))


def _exchange(
    client: httpx2.Client, url: httpx2.URL, content: bytes | None, timeout_s: float, max_bytes: int
) -> tuple[httpx2.Response, bytes]:
    """The response to one request and its data; the time limit covers the whole answer."""
    import httpx2

    ends = time.monotonic() + timeout_s
    data = bytearray()
    with client.stream("GET" if content is None else "POST", url, content=content) as response:
        for chunk in response.iter_bytes():
            data += chunk
            if time.monotonic() > ends:
                raise httpx2.ReadTimeout("timed out")
            if len(data) > max_bytes:
                break
    return response, bytes(data)


def _joined(url: str, location: str) -> str:
    """The address that a redirect points to, for messages."""
    try:
        return shown(urljoin(url, location))
    except ValueError:
        return "an address that cannot be read"


def _json(data: bytes, url: str, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        raise RequestFailed(f"{shown(url)} did not answer in JSON: longer than {max_bytes >> 20} MiB")
    try:
        return json.loads(data.decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise RequestFailed(f"{shown(url)} did not answer in JSON: {error}") from error


def _message(data: bytes) -> str:
    """The message of an error answer in OpenAI's form, `{"error": {"message": …}}`, in one line."""
    try:
        text = " ".join(str(json.loads(data)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {text[:200]}"


def _headers(headers: Mapping[str, str] | None, option: str) -> dict[str, str]:
    """Expand environment variables in headers, so that configurations contain no tokens."""
    section = option.rpartition(".")[0]
    return {name: _filled(value, f"{section}.headers") for name, value in (headers or {}).items()}


def _filled(text: str, option: str) -> str:
    try:
        return expand_env(text)
    except UnsetVariable as error:
        raise RequestFailed(f"{option} {error}") from None


def _why(error: Exception) -> str:
    name = type(error).__name__  # TimeoutError of a socket, ReadTimeout and others of httpx2
    return "timed out" if "Timeout" in name else str(error) or name
