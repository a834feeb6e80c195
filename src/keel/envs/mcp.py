"""Tools of MCP servers: an entry `{mcp: …}` of `task.tools` becomes one tool per tool of the server."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError, first_line, unknown
from keel.base.options import Options, PositiveFloat, PositiveInt, read_options
from keel.base.redact import UnsetVariable, expand_env, redact_text
from keel.envs.tools import MAX_CHARACTERS, TIMEOUT_S, Tool

START_S = 30.0  # time limit for a server to list its tools
STOP_S = 10.0  # time limit for a server to stop when Python exits
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None), "object": dict}


class ToolError(Exception):
    """A call failed on the server, or the server cannot be reached. The model gets the first line."""


def mcp_tools(entry: Mapping[str, Any]) -> list[Tool]:
    """The tools of one entry. Starts the server, or reuses the one of an equal entry."""
    checked = _checked(entry)
    address = checked.mcp
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise KeelError("task.tools: an mcp entry needs mcp 2.0 or newer: pip install 'keel-rl[mcp]'") from error
    server = _server(address, checked.variables)
    listed = {tool.name: tool for tool in server.listed()}
    for name in checked.only or ():
        if name not in listed:
            raise unknown(f"tool of the MCP server {address!r}", name, listed)
    if not listed:
        raise KeelError(f"the MCP server {address!r} has no tools: leave it out of task.tools")
    limits = checked.model_dump(include={"timeout_s", "max_characters", "at_once"})
    return [_tool(server, listed[name], limits) for name in checked.only or listed]


class McpServer:
    """A connection to one server, on an event loop in a daemon thread, so that any thread can call its tools.

    After a lost connection the next call reconnects. A command is restarted once; it is restarted again only after it
    has answered a call, so that a server that crashes at every call is not restarted forever.
    """

    def __init__(self, address: str, variables: Mapping[str, str]) -> None:
        self.address, self.variables, self.is_url = address, dict(variables), _is_url(address)
        self.loop = asyncio.new_event_loop()
        self._opened: asyncio.Future[tuple[Any, list[Any]]] | None = None  # the client and its tools
        self._holder: asyncio.Task[None] | None = None
        self._may_start = True
        self._errors = tempfile.TemporaryFile("w")  # noqa: SIM115 - open as long as the server
        threading.Thread(target=self.loop.run_forever, name="keel-mcp", daemon=True).start()

    def listed(self) -> list[Any]:
        """The server's tools; raises a KeelError if it does not start or respond."""
        try:
            return asyncio.run_coroutine_threadsafe(self._listed(), self.loop).result()
        except ToolError as error:
            fix = "start it, or check the address" if self.is_url else "try the command in a terminal"
            raise KeelError(f"task.tools: the MCP server {self.address!r} {error}; {fix}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text; raises ToolError if the call fails or the server has ended."""
        try:
            client, _ = await asyncio.shield(opened := self._connection())
        except ToolError as error:
            raise ToolError(f"its server {error}") from error
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if not await _answers(client):
                self._lose(opened)
                raise ToolError("its server ended during the call") from error
            raise ToolError(_cause(error)) from error
        self._may_start = True
        if result.is_error:
            raise ToolError(next(iter(_text(result).strip().splitlines()), "no reason given"))
        return _text(result)

    async def end(self) -> None:
        """Close the connection and stop the server process."""
        self._lose(self._opened)
        if self._holder is not None:
            await asyncio.wait([self._holder])
        self.loop.call_soon(self.loop.stop)

    async def _listed(self) -> list[Any]:
        """The server's tools; restarts a server that has ended."""
        if self._opened is not None and self._opened.done() and not await _answers(self._opened.result()[0]):
            self._lose(self._opened)
        self._may_start = True
        _, tools = await asyncio.shield(self._connection())
        self._may_start = True
        return tools

    def _connection(self) -> asyncio.Future[tuple[Any, list[Any]]]:
        """The connection; opens it if needed."""
        if self._opened is None:
            if not (self._may_start or self.is_url):
                raise ToolError("has ended again and is not restarted")
            self._may_start = False
            self._opened = self.loop.create_future()
            self._holder = self.loop.create_task(self._hold(self._opened, self._holder))
        return self._opened

    def _lose(self, opened: asyncio.Future[Any] | None) -> None:
        if opened is not None and self._opened is opened and self._holder is not None:
            self._opened = None
            self._holder.cancel()

    async def _hold(self, opened: asyncio.Future[tuple[Any, list[Any]]], before: asyncio.Task[None] | None) -> None:
        """Connect and hold the connection until this task is cancelled; the client must live in one task."""
        limit = asyncio.timeout(START_S)
        try:
            if before is not None:
                await asyncio.wait([before])
            async with limit, self._client() as client:
                tools = await _all_tools(client)
                limit.reschedule(None)
                opened.set_result((client, tools))
                await self.loop.create_future()
        except BaseException as error:  # a failure raises an exception group, a shutdown a cancellation
            if self._opened is opened:
                self._opened = None
            if not opened.done():
                timed_out, failed = limit.expired(), "cannot be reached" if self.is_url else "did not start"
                reason = f"did not answer within {START_S:g} s" if timed_out else f"{failed}: {self._why(error)}"
                opened.set_exception(ToolError(reason))
                opened.exception()  # mark as retrieved

    def _client(self) -> Any:
        from mcp import Client, StdioServerParameters, stdio_client

        variables = {name: _filled(value) for name, value in self.variables.items()}
        if self.is_url:
            return Client(_over_http(_filled(self.address), variables))
        command, *arguments = [_filled(argument) for argument in shlex.split(self.address)]
        parameters = StdioServerParameters(command=command, args=arguments, env=variables)
        return Client(stdio_client(parameters, errlog=self._errors))

    def _why(self, error: BaseException) -> str:
        """The first line of an error and the last line of the server's stderr."""
        size = os.fstat(self._errors.fileno()).st_size
        stderr = (
            os.pread(self._errors.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip().splitlines()
        )
        last = stderr[-1].strip() if stderr else ""
        return redact_text(_cause(error) + (f" (stderr: {last[:200]})" if last else ""))


_servers: dict[tuple[str, tuple[tuple[str, str], ...]], McpServer] = {}
_lock = threading.Lock()


def _server(address: str, variables: Mapping[str, str]) -> McpServer:
    """The server for an address with its environment or headers; one per process."""
    key = address, tuple(sorted(variables.items()))
    with _lock:
        if key not in _servers:
            _servers[key] = McpServer(address, variables)
        return _servers[key]


@atexit.register
def end_servers() -> None:
    """Stop all servers and wait for them."""
    with _lock:
        ending = [asyncio.run_coroutine_threadsafe(server.end(), server.loop) for server in _servers.values()]
        _servers.clear()
    for end in ending:
        with suppress(Exception):
            end.result(STOP_S)


class McpEntry(Options):
    """An entry `{mcp: …}` of `task.tools`: a command or URL, the names of tools to use, limits, variables."""

    mcp: str
    only: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    timeout_s: PositiveFloat | None = TIMEOUT_S
    max_characters: PositiveInt = MAX_CHARACTERS
    at_once: PositiveInt = 1
    env: dict[str, str | int | float | bool] | None = None
    headers: dict[str, str | int | float | bool] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a command, or the headers for a URL."""
        return {name: str(value) for name, value in (self.env or self.headers or {}).items()}


def _checked(entry: Mapping[str, Any]) -> McpEntry:
    checked = read_options(McpEntry, entry, "task.tools")
    try:
        fine = bool(shlex.split(checked.mcp))
    except ValueError:  # a quote that is not closed
        fine = False
    if not fine:
        raise KeelError(f"task.tools: mcp is {checked.mcp!r}: give the server's command or its URL http://…/mcp")
    if checked.env and _is_url(checked.mcp):
        raise KeelError(f"task.tools: env of {checked.mcp!r} is for a command: give headers for a URL")
    if checked.headers and not _is_url(checked.mcp):
        raise KeelError(f"task.tools: headers of {checked.mcp!r} are for a URL: give env for a command")
    return checked


@asynccontextmanager
async def _over_http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    """The HTTP transport; sends the headers only to this origin."""
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http_client(url, http_client=client) as both,
    ):
        yield both


def _filled(text: str) -> str:
    """Expand environment variables at connection time, so that entries do not store secrets."""
    try:
        return expand_env(text)
    except UnsetVariable as error:
        raise ToolError(f"cannot be started: its entry {error}") from None


def _tool(server: McpServer, listed: Any, limits: Mapping[str, Any]) -> Tool:
    """A tool from the server's description; characters that are invalid in calls become `_` in its name."""
    schema = listed.input_schema
    properties, required = schema.get("properties") or {}, tuple(schema.get("required") or ())
    hints = {name: hint_of(properties.get(name)) for name in dict.fromkeys((*properties, *required))}
    parameters = {"type": "object", **schema, "properties": properties}
    name = re.sub(r"^(?=[\d-])|[^\w-]", "_", listed.name, flags=re.ASCII)

    async def call(**arguments: Any) -> str:
        future = asyncio.run_coroutine_threadsafe(server.call(listed.name, arguments), server.loop)
        return await asyncio.wrap_future(future)

    about = (listed.description or listed.title or listed.name).strip()
    return Tool(name, about, call, hints, required, {}, tag=name, parameters=parameters, **limits)


def hint_of(schema: Any) -> Any:
    """The Python type of a JSON schema; Any if it is too complex to check here."""
    if not isinstance(schema, Mapping):
        return Any
    if isinstance(choices := schema.get("enum"), list):
        plain = bool(choices) and all(isinstance(choice, str | int | None) for choice in choices)
        return Literal.__getitem__(tuple(choices)) if plain else Any
    kind, several = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kind, list):
        several = [{**schema, "type": member} for member in kind]
    if isinstance(several, list) and several:
        members = [hint_of(member) for member in several]
        return Any if Any in members else reduce(or_, members)
    hint = list[hint_of(schema.get("items"))] if kind == "array" else _TYPES.get(str(kind), Any)  # type: ignore[misc]
    return hint | None if schema.get("nullable") and hint is not Any else hint


async def _all_tools(client: Any) -> list[Any]:
    """All pages of the tool list."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


async def _answers(client: Any) -> bool:
    """Whether a server still responds."""
    try:
        async with asyncio.timeout(START_S):
            await client.list_tools(cache_mode="refresh")
    except Exception:
        return False
    return True


def _text(result: Any) -> str:
    """The text of a result; other content is replaced by its type."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    parts = (getattr(part, "resource", part) for part in result.content)
    return "\n".join(getattr(part, "text", f"[{getattr(part, 'type', 'resource')}]") for part in parts)


def _cause(error: BaseException) -> str:
    """The first line of an error, or of the first in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return first_line(error)


def _is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))
