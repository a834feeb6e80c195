"""Remote rewards: a judge or reward model behind a URL, and a chat model as a judge."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from keel.base.certificates import certificates
from keel.base.errors import KeelError
from keel.base.redact import UnsetVariable, expand_env
from keel.base.types import Problem

if TYPE_CHECKING:
    import httpx2

CONCURRENCY = 8
TEMPLATE = (
    "Judge the answer to a question.\n\nQuestion:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n"
    "{completion}\n\nSay in one sentence why, then end with a line `Score: N`, N from 0 (wrong) to 10 (right)."
)
_MAX_BYTES = 1 << 20  # of an answer
_MAX_BACKOFF_S = 30.0


class JudgeFailed(Exception):
    """A judge returned no score; the message names its URL."""


def http(
    problem: Problem,
    text: str,
    turns: Sequence[str],
    url: str,
    score: str = "score",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    retries: int = 2,
    backoff_s: float = 0.5,
    concurrency: int = CONCURRENCY,
) -> float:
    """The score that the server at `url` returns.

    The request is `{"key", "prompt", "completion", "turns", "answer"}` as JSON. `score` is the path of the score in the
    JSON answer, such as `score` or `results.0.value`. Connection errors, timeouts (`timeout_s`), status 429 and 5xx are
    retried `retries` times with exponential backoff from `backoff_s`. `headers` and `url` may contain environment
    variables: `{Authorization: Bearer $JUDGE_TOKEN}`. `concurrency` is the number of concurrent requests per group.
    """
    body = {
        "key": problem.key,
        "prompt": problem.prompt if isinstance(problem.prompt, str) else [dict(m) for m in problem.prompt],
        "completion": text,
        "turns": list(turns),
        "answer": problem.answer,
    }
    answered = _ask(url, body, headers, timeout_s, retries, backoff_s)
    return _number(_at(answered, score, url), url, score)


def chat_judge(
    problem: Problem,
    text: str,
    url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)",
    low: float = 0.0,
    high: float = 10.0,
    max_tokens: int = 512,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    retries: int = 2,
    backoff_s: float = 1.0,
    concurrency: int = CONCURRENCY,
) -> float:
    """The score of a chat model behind an OpenAI-compatible `url` (such as http://host:8000/v1), scaled to [0, 1].

    `template` may contain {prompt}, {completion} and {answer}. The last match of `pattern` is the score, scaled by
    `(score − low) / (high − low)`. A reply without a score, or with one out of range, is a failure and not a 0.
    """
    filled = {"prompt": _plain(problem.prompt), "completion": text, "answer": str(problem.answer)}
    question = re.sub(r"\{(prompt|completion|answer)\}", lambda match: filled[match.group(1)], template)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    endpoint = _below(url, "/chat/completions")
    reply = _at(_ask(endpoint, body, headers, timeout_s, retries, backoff_s), "choices.0.message.content", endpoint)
    scores = re.findall(pattern, str(reply))
    if not scores:
        raise JudgeFailed(f"{shown(endpoint)} replied without a score: {str(reply)[:80]!r}")
    value = _number(scores[-1], endpoint, "the reply")
    if not low <= value <= high:
        raise JudgeFailed(f"{shown(endpoint)} gave the score {value:g}, outside {low:g} to {high:g}")
    return (value - low) / (high - low)


def probe(url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
    """Raise a KeelError if the server at `url` is down or a variable is not set. Sends no request."""
    try:
        parts = urlsplit(_filled(url, "url"))
        _headers(headers)
    except JudgeFailed as error:
        raise KeelError(str(error)) from None
    host = str(parts.hostname)
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return  # behind a proxy this cannot be checked
    try:
        socket.create_connection((host, parts.port or (443 if parts.scheme == "https" else 80)), timeout_s).close()
    except OSError as error:
        raise KeelError(f"the judge at {shown(url)} is down: {_why(error)}; start it, or fix rewards.url") from error


def shown(url: str) -> str:
    """A URL for messages, without credentials and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _below(url: str, path: str) -> str:
    """Append a path to the URL, before its query."""
    parts = urlsplit(url)
    full_path = parts.path if parts.path.endswith(path) else parts.path.rstrip("/") + path
    return urlunsplit(parts._replace(path=full_path))


def _ask(
    url: str, body: Any, headers: Mapping[str, str] | None, timeout_s: float, retries: int, backoff_s: float
) -> Any:
    import httpx2

    target = httpx2.URL(_filled(url, "url"))

    def same_origin(request: httpx2.Request) -> None:
        """Refuse redirects to another origin, which would get the tokens in the headers."""
        if (request.url.scheme, request.url.host, request.url.port) != (target.scheme, target.host, target.port):
            raise JudgeFailed(
                f"{shown(url)} redirects to {shown(str(request.url))}, another origin, which does not get the request; "
                "if that is the judge, set url to it"
            )

    with httpx2.Client(
        headers={"Content-Type": "application/json", **_headers(headers)},
        timeout=timeout_s,
        verify=certificates(trust_env=True),
        follow_redirects=True,
        event_hooks={"request": [same_origin]},
    ) as client:
        for attempt in range(retries + 1):
            try:
                status, data = _post(client, target, json.dumps(body).encode(), timeout_s)
            except httpx2.RequestError as error:
                cause = f"cannot be reached: {_why(error)}"
            else:
                if 200 <= status < 300:
                    return _json(data, url)
                cause = f"answered with status {status}"
                if status != 429 and status < 500:
                    raise JudgeFailed(f"{shown(url)} {cause}")
            if attempt < retries:
                time.sleep(min(backoff_s * 2**attempt, _MAX_BACKOFF_S))
    raise JudgeFailed(f"{shown(url)} {cause}" + (f" ({retries + 1} tries)" if retries else ""))


def _post(client: httpx2.Client, url: httpx2.URL, content: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Status and data of one request; the time limit covers the whole answer."""
    import httpx2

    ends = time.monotonic() + timeout_s
    data = b""
    with client.stream("POST", url, content=content) as response:
        for chunk in response.iter_bytes():
            data += chunk
            if time.monotonic() > ends:
                raise httpx2.ReadTimeout("timed out")
            if len(data) > _MAX_BYTES:
                break
    return response.status_code, data


def _json(data: bytes, url: str) -> Any:
    if len(data) > _MAX_BYTES:
        raise JudgeFailed(f"{shown(url)} did not answer in JSON: longer than 1 MiB")
    try:
        return json.loads(data.decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise JudgeFailed(f"{shown(url)} did not answer in JSON: {error}") from error


def _headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Expand environment variables in headers, so that configurations contain no tokens."""
    return {name: _filled(value, "headers") for name, value in (headers or {}).items()}


def _filled(text: str, option: str) -> str:
    try:
        return expand_env(text)
    except UnsetVariable as error:
        raise JudgeFailed(f"rewards.{option} {error}") from None


def _at(data: Any, path: str, url: str) -> Any:
    for key in path.split("."):
        try:
            data = data[int(key)] if isinstance(data, list) else data[key]
        except (KeyError, IndexError, ValueError, TypeError):
            holds = (
                f"has {', '.join(map(str, data)) or 'nothing'}" if isinstance(data, dict) else f"is {str(data)[:60]}"
            )
            raise JudgeFailed(f"{shown(url)} answered without {path!r}: at {key!r} the answer {holds}") from None
    return data


def _number(value: Any, url: str, where: str) -> float:
    try:
        if isinstance(value, bool | int | float | str):
            return float(value)
    except ValueError:
        pass
    raise JudgeFailed(f"{shown(url)} gave {str(value)[:60]!r} at {where}, which is not a number")


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)


def _why(error: Exception) -> str:
    name = type(error).__name__  # TimeoutError of a socket, ReadTimeout and others of httpx2
    return "timed out" if "Timeout" in name else str(error) or name
