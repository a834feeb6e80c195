"""`http`: an environment behind a URL; docs/environments.md has the protocol."""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from keel.base.errors import KeelError
from keel.base.json_http import certificates
from keel.base.redact import UnsetVariable, expand_env
from keel.base.types import Problem
from keel.envs.games import Game, Messages, RemoteEpisode, SeededTask, TurnResult, seeded_task, users
from keel.envs.problems import is_held_out
from keel.envs.rewards.http import shown

if TYPE_CHECKING:
    import httpx2

MAX_BYTES = 1 << 20  # maximum size of an answer
RETRIES = 2  # of `reset` only, because the server could play a repeated `step` twice
BACKOFF_S = 0.5
CLOSE_S = 5.0
IDLE_S = 2.0
START_SERVER = "; start the server, or fix task.url"  # advice for an environment that does not start


class ServerFailed(Exception):
    """A server cannot be reached, or does not follow the protocol; the message names its URL."""


class ServerUnavailable(ServerFailed):
    """A failure after which the same request may succeed later."""


@dataclass(frozen=True)
class EnvironmentServer:
    """An environment's server, and the connections to it."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    params: Mapping[str, Any] = field(default_factory=dict)
    _clients: Any = field(default_factory=weakref.WeakKeyDictionary, repr=False, compare=False)  # by event loop

    def client(self) -> httpx2.AsyncClient:
        """The client of this event loop. It does not reuse long-idle connections, which the server may be closing."""
        import httpx2

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx2.AsyncClient(
                headers={"Accept-Encoding": "identity", **expanded(self.headers)},
                timeout=self.timeout_s,
                limits=httpx2.Limits(keepalive_expiry=IDLE_S),
                verify=certificates(trust_env=True),
                follow_redirects=False,
            )
        return self._clients[loop]

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; the time and size limits cover the whole answer."""
        import httpx2

        where, data = f"{shown(self.url)}/{path}", b""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.client().stream("POST", f"{expanded_text(self.url, 'url')}/{path}", json=dict(body)) as response,
            ):
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > MAX_BYTES:
                        raise ServerFailed(f"{where} answered more than 1 MiB")
        except (TimeoutError, httpx2.TimeoutException):
            raise ServerUnavailable(f"{where} did not answer within {self.timeout_s:g} s (task.timeout_s)") from None
        except httpx2.RequestError as error:
            raise ServerUnavailable(f"{where} cannot be reached: {error or type(error).__name__}") from error
        if response.is_redirect:
            raise ServerFailed(f"{where} redirects, and redirects are not followed: set task.url to the final address")
        if response.status_code != 200:
            kind = ServerUnavailable if response.status_code == 429 or response.status_code >= 500 else ServerFailed
            raise kind(f"{where} answered with status {response.status_code}")
        try:
            answer = json.loads(data)
        except ValueError:
            raise ServerFailed(f"the answer of {where} is not JSON") from None
        if not isinstance(answer, dict):
            raise ServerFailed(f"the answer of {where} is a JSON {type(answer).__name__}, not an object")
        return answer


class HttpGame(Game):
    """One episode on a server; `env` is the server's last answer."""

    def __init__(self, server: EnvironmentServer) -> None:
        self.server, self.turns = server, 0
        self.id: str | None = None
        self.env: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}

    async def reset(self, problem: Problem) -> Messages:
        """Start an episode; the request is repeated if the server is unavailable."""
        seed = problem.info["seed"]
        body = {"seed": seed, "held_out": is_held_out(str(seed)), "params": dict(self.server.params)}
        for attempt in range(RETRIES + 1):
            try:
                self.env = await self.server.ask("reset", body)
                break
            except ServerUnavailable:
                if attempt == RETRIES:
                    raise
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        self.id = _checked(self.env, "id", str, "a text")
        return _messages(self.env)

    async def step(self, text: str) -> TurnResult:
        self.turns += 1
        body = {"id": self.id, "turn": self.turns, "text": text}
        self.env = answer = await self.server.ask("step", body)
        reward = _checked(answer, "reward", int | float, "a finite number", 0.0)
        over = _checked(answer, "done", bool, "true or false", False)
        if isinstance(reward, bool) or not math.isfinite(reward):
            raise ServerFailed(f"reward is {reward!r}, not a finite number")
        metrics = _checked(answer, "metrics", dict, "an object", {})
        self.metrics = {f"env/{name}": float(value) for name, value in metrics.items()}
        return TurnResult(() if over else _messages(answer), float(reward), over)

    def counts(self) -> Mapping[str, float]:
        return self.metrics

    async def close(self) -> None:
        """Close the episode on the server; errors are ignored."""
        name, self.id = self.id, None
        if name is not None:
            with suppress(ServerFailed, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.server.ask("close", {"id": name})


def http(
    url: str,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 20.0,
    player: str | None = None,
    view: str | None = None,
    success: float = 1.0,
    **params: Any,
) -> SeededTask:
    """An environment behind `url`. The other parameters are sent to it with each `reset`.

    `url` and `headers` may contain environment variables: `{Authorization: Bearer $ENV_TOKEN}`. `timeout_s` limits each
    request. `player` and `view` are functions, `module:attr`: `player(answer, observation)` gives the next turn of a
    demonstration from the server's last answer, `view(text)` the model's text for an observation. An episode is
    correct if its rewards sum to at least `success`.
    """
    check_address(url, headers, timeout_s)
    server = EnvironmentServer(url.rstrip("/"), headers or {}, timeout_s, params)
    return seeded_task("http", lambda problem: HttpGame(server), player, view, success, RemoteEpisode, START_SERVER)


def check_address(url: str, headers: Mapping[str, str] | None, timeout_s: float) -> None:
    """Refuse an invalid URL, an unset environment variable, and a time limit that is not positive."""
    expanded(headers)
    parts = urlsplit(expanded_text(url, "url"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise KeelError(f"task.url is {shown(url)!r}: give http://host:port/path or https://…, without a query")
    if not timeout_s > 0:
        raise KeelError(f"task.timeout_s is {timeout_s}: it must be above 0")


def expanded(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers with environment variables expanded, so that configurations contain no secrets."""
    return {name: expanded_text(value, "headers") for name, value in (headers or {}).items()}


def expanded_text(text: str, option: str) -> str:
    """A text with environment variables expanded."""
    try:
        return expand_env(text)
    except UnsetVariable as error:
        raise KeelError(f"task.{option} {error}") from None


def _messages(answer: Mapping[str, Any]) -> Messages:
    """The observation: a text, or messages with role and content."""
    observation = answer.get("observation")
    if isinstance(observation, str):
        return users(observation)
    if isinstance(observation, list) and observation and all(_is_message(entry) for entry in observation):
        return [{"role": entry["role"], "content": entry["content"]} for entry in observation]
    raise ServerFailed("observation is neither a text nor a list of messages with role and content")


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))


def _checked(answer: Mapping[str, Any], key: str, kind: Any, what: str, *default: Any) -> Any:
    value = answer.get(key, *default)
    if not isinstance(value, kind):
        raise ServerFailed(f"{key} is {value!r:.40}, not {what}")
    return value
