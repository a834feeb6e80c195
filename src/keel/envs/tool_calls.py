"""Parse tool calls: JSON as in chat templates, or tags for models without such a template."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from keel.envs.tools import Tool

Format = Literal["json", "tags"]
FORMATS: tuple[str, ...] = get_args(Format)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT = re.compile(r"(?:<think>|\A)(?:(?!<think>).)*?</think>", re.DOTALL)
_MISTRAL_MARK = "[TOOL_CALLS]"
_BARE = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(?=[\[{])")
_LOOKS_LIKE_A_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type|function)\"")
_LATER_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type|function)\"\s*:")
_ARGUMENTS = re.compile(r"\"(?:arguments|parameters)\"\s*:")
_ID = re.compile(r"[\w-]+")
_PYTHON_CALL = re.compile(r"\s*([A-Za-z_][\w-]*)\s*\((.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One parsed call; if it cannot be parsed, `fault` gives the reason and the other fields are empty."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    id: str | None = None
    fault: str | None = None


def parse_calls(text: str, format: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """All calls of a turn in order, including malformed ones; empty if the text contains no call."""
    return _json_calls(text) if format == "json" else _tag_calls(text, tools)


def write_call(name: str, arguments: Mapping[str, Any], format: str, tools: Sequence[Tool]) -> str:
    """Write a call in the format that `parse_calls` reads, for demonstrations."""
    if format == "json":
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    called = next(tool for tool in tools if tool.name == name)
    alone = len(arguments) == 1 and next(iter(arguments)) == next(iter(called.hints), None)
    value = next(iter(arguments.values())) if alone else None
    body = value if isinstance(value, str) else json.dumps(dict(arguments), ensure_ascii=False)
    return f"<{called.tag}> {body} </{called.tag}>"


def _json_calls(text: str) -> list[ToolCall]:
    """Parse `<tool_call>{…}</tool_call>`, `[TOOL_CALLS] [{…}]`, or bare JSON with a name at the end of a turn.

    Bare JSON is accepted because decoding drops markers that are special tokens. Calls inside <think> are ignored.
    """
    text = _THOUGHT.sub("", text)
    if _OPEN in text:
        return [call for block in _blocks(text) for call in _read_json(block, sure=True)]
    if _MISTRAL_MARK in text:
        return _read_json(text.partition(_MISTRAL_MARK)[2], sure=True)
    start = _BARE.match(text)
    if start:
        return _read_json(text[start.end() :], sure=False)
    later = _LATER_CALL.search(text)
    # after other text a call must have arguments, so that a JSON answer is not a call
    if later and _ARGUMENTS.search(text, later.end()):
        return _read_json(text[later.start() :].rstrip().removesuffix("```"), sure=False)
    return []


def _blocks(text: str) -> list[str]:
    """The texts between call markers. A marker that another one follows without JSON between them is skipped."""
    bodies: list[str] = []
    position = text.find(_OPEN)
    while position >= 0:
        start = position + len(_OPEN)
        end = text.find(_CLOSE, start)
        body = text[start:] if end < 0 else text[start:end]
        again = body.find(_OPEN)
        if again >= 0 and _values(body)[1] is not None:  # the marker may also occur inside an argument
            body, end = body[:again], start + again
            if not body.lstrip().startswith(("{", "[")):
                position = end
                continue
        bodies.append(body)
        position = text.find(_OPEN, end) if end >= 0 else -1
    return bodies


def _read_json(text: str, *, sure: bool) -> list[ToolCall]:
    """Parse consecutive JSON calls; `sure` if the text was marked as a call."""
    values, fault = _values(text)
    if fault is not None:
        attempted = sure or values or _LOOKS_LIKE_A_CALL.match(text.strip())
        return [ToolCall(fault=fault)] if attempted else []
    several = [item for value in values for item in (value if isinstance(value, list) else [value])]
    calls = [_call(item) for item in several]
    if not sure and any(call.fault for call in calls):
        return [] if all(call.fault for call in calls) else calls
    return calls or ([ToolCall(fault="the call is empty")] if sure else [])


def _values(text: str) -> tuple[list[Any], str | None]:
    """Parse JSON values separated by spaces, commas or semicolons; returns the values and the first error."""
    decoder, text, position = json.JSONDecoder(), text.strip(), 0
    values: list[Any] = []
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            where = f" ({error.msg} at character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
            return values, f"the call is not valid JSON{where}"
        values.append(value)
        while position < len(text) and text[position] in " \t\r\n,;":
            position += 1
    return values, None


def _call(value: Any) -> ToolCall:
    """Parse `{"name", "arguments" or "parameters"}`, also inside `{"function": …}`."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall(fault="a call is an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        values, fault = _values(arguments)
        arguments = values[0] if fault is None and len(values) == 1 else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(fault="the arguments of a call are an object")
    call_id = value.get("id")
    return ToolCall(
        value["name"], dict(arguments), call_id if isinstance(call_id, str) and _ID.fullmatch(call_id) else None
    )


def _tag_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """Parse `<name>argument</name>` with a tool's tag, or `<tool>name(a, b=…)</tool>`, in order."""
    tags = {tool.tag: tool for tool in tools}
    opening = re.compile("<(" + "|".join(map(re.escape, [*tags, "tool"])) + ")>")
    calls: list[ToolCall] = []
    position = 0
    while match := opening.search(text, position):
        tag = match[1]
        end = text.find(f"</{tag}>", match.end())
        if end < 0:
            return [*calls, ToolCall(fault=f"<{tag}> is not closed: write <{tag}>…</{tag}>")]
        body, position = text[match.end() : end], end + len(tag) + 3
        calls.append(_python_call(body, tools) if tag == "tool" and "tool" not in tags else _tagged(tags[tag], body))
    return calls


def _tagged(tool: Tool, body: str) -> ToolCall:
    """The body is the first argument, or a JSON object with all arguments."""
    body = body.strip()
    if body.startswith("{"):
        values, fault = _values(body)
        if fault is not None or len(values) != 1:
            return ToolCall(fault=fault or "the call has more than one object")
        return ToolCall(tool.name, values[0])
    first = next(iter(tool.hints), None)
    return ToolCall(tool.name, {first: body} if first is not None else {})


def _python_call(body: str, tools: Sequence[Tool]) -> ToolCall:
    """Parse `name(1, key="two")` with literal values; nothing is executed."""
    match = _PYTHON_CALL.fullmatch(body)
    if match is None:
        return ToolCall(fault="a call is written name(argument, …)")
    name, inside = match.groups()
    hints = next((list(tool.hints) for tool in tools if tool.name == name), [])
    try:
        parsed = ast.parse(f"_({inside})", mode="eval").body
        assert isinstance(parsed, ast.Call)
        positional = [ast.literal_eval(value) for value in parsed.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in parsed.keywords}
    except (ValueError, SyntaxError, AssertionError, RecursionError, MemoryError, TypeError):
        return ToolCall(fault="the arguments of a call must be literals: strings in quotes, numbers, lists")
    if len(positional) > len(hints) and hints:
        return ToolCall(fault=f"{name} takes {len(hints)} arguments, not {len(positional)}")
    keys = hints or [f"argument{i}" for i in range(len(positional))]
    return ToolCall(name, {**dict(zip(keys, positional, strict=False)), **keywords})
