"""Plug-ins for verifiers: a chat loop that runs in this process, and a renderer that gives Keel's tokens.

verifiers loads a harness by the name of its module. Importing this module registers it as `keel_chat`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import aiohttp
import verifiers.v1 as vf
from renderers import RenderedTokens
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from keel.base.types import Problem
from keel.envs.tool_calls import parse_calls, write_call

HARNESS = "keel_chat"
OVERFLOW = "maximum context length"  # words of the error for a context that is too long
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_ENDLESS = 10**9  # number of rollouts that share one renderer


class KeelChat(vf.Harness[vf.HarnessConfig]):
    """The chat loop of verifiers' harness `null`, without a process: turns and tool calls until a reply has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(_wire, prompt or ())
        messages: list[dict[str, Any]] = [*([{"role": "system", "content": system}] if system else []), *opening]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            headers = {"Authorization": f"Bearer {secret}"}
            while True:
                async with client.post(f"{endpoint}/chat/completions", headers=headers, json=body) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    full = trace.num_turns > 0 and OVERFLOW in text  # the episode ends here, and is graded
                    return vf.ProgramResult(0 if full else 1, "", text)
                message = json.loads(text)["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await _called(call["function"], connections, dispatch)
                    tool = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    messages.append({**tool, "content": content})


async def _called(function: Mapping[str, str], connections: Any, dispatch: Mapping[str, Any]) -> Any:
    """The tool's answer, or the error of its call."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON ({error})"
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    return await call_mcp(connections, dispatch, function["name"], arguments)


def _wire(message: Any) -> dict[str, Any]:
    content: dict[str, Any] = message.model_dump(exclude_none=True)
    return content


class Rendering:
    """The interface that verifiers' train client needs; subclasses map messages to tokens and tokens to text."""

    supports_tools = True
    is_multimodal = False

    def tokens(self, messages: list[dict[str, str]], tools: Sequence[Any]) -> list[int]:
        raise NotImplementedError

    def after(self, messages: list[dict[str, str]], last: int) -> list[int] | None:
        """The tokens of messages after a turn that ended with the token `last`; None: render everything again."""
        return None

    def text(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def get_stop_token_ids(self) -> list[int]:
        return []

    def render(
        self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        return _attributed([], self.tokens(_plain(messages), tools or ()), messages)

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: Any, **options: Any
    ) -> RenderedTokens | None:
        """The next turn's prompt: all previous tokens unchanged, and those of the new messages."""
        added = self.after(_plain(new_messages), previous_completion_ids[-1])
        before = [*previous_prompt_ids, *previous_completion_ids]
        return None if added is None else _attributed(before, added, new_messages)

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        text = self.text(token_ids)
        thought = _THOUGHT.match(text)
        content = text[thought.end() :] if thought else text
        calls = [
            ParsedToolCall(content, call.name, dict(call.arguments or {}), id=call.id)
            if call.fault is None
            else ParsedToolCall(content, status=ToolCallParseStatus.INVALID_JSON)
            for call in parse_calls(content, "json", ())
        ]
        if any(call.status is ToolCallParseStatus.OK for call in calls):
            content = content.partition("<tool_call>")[0]
        return ParsedResponse(content, thought[1] if thought else None, calls)


class KeelRendering(Rendering):
    """Keel's renderer, which gives the same tokens as other rollouts and the warm start."""

    def __init__(self, renderer: Any, stop: Sequence[str]) -> None:
        self.renderer, self.stop = renderer, stop
        self.problem = Problem("verifiers", [{"role": "user", "content": "."}])

    def tokens(self, messages: list[dict[str, str]], tools: Sequence[Any]) -> list[int]:
        return list(self.renderer.prompt(Problem("verifiers", messages, tools=tools)))

    def after(self, messages: list[dict[str, str]], last: int) -> list[int]:
        return list(self.renderer.reply(self.problem, messages, last))

    def text(self, tokens: list[int]) -> str:
        text = str(self.renderer.tokenizer.decode(tokens, skip_special_tokens=True))
        return text[: min((text.find(stop) for stop in self.stop if stop in text), default=len(text))]


class TextRendering(Rendering):
    """Messages as the bytes of their JSON, and texts as their bytes, for scripted turns."""

    def tokens(self, messages: list[dict[str, str]], tools: Sequence[Any]) -> list[int]:
        return list(json.dumps(messages).encode())

    def text(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages with text contents; an assistant's tool calls become part of its text."""
    plain = []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = {}
            text += write_call(function["name"], arguments, "json", ())
        fields = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
        plain.append({**fields, "content": text})
    return plain


def _attributed(before: list[int], added: list[int], messages: Sequence[Mapping[str, Any]]) -> RenderedTokens:
    """Rendered tokens; `added` are attributed to the last message, `before` to none."""
    owners = [-1] * len(before) + [len(messages) - 1] * len(added)
    return RenderedTokens([*before, *added], owners, message_roles=[message["role"] for message in messages])


@contextmanager
def installed(name: str, rendering: Rendering) -> Any:
    """Register a renderer for the model called `name`."""
    slots = ElasticRendererPool(name, None, multiplex=_ENDLESS).renderers
    slots.append(RendererSlot(rendering))
    try:
        yield
    finally:
        slots.clear()


def access(url: str, secret: str) -> Any:
    """The configuration of verifiers' client for an endpoint."""
    return vf.TrainClientConfig(base_url=url, headers={"Authorization": f"Bearer {secret}"}, multiplex=_ENDLESS)


sys.modules.setdefault(HARNESS, sys.modules[__name__])

__all__ = ["KeelChat"]
