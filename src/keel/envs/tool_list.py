"""The tools of `task.tools`: functions, `module:attr`, `python`, and those of MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.base.errors import KeelError
from keel.base.imports import import_object, is_import_path
from keel.envs.tools import Tool, check_distinct, tool


def tools_of(entries: Sequence[Any]) -> tuple[Tool, ...]:
    """Build the tools of `task.tools`: `module:attr`, a function, a Tool, `python` (with limits: `{python: {…}}`), or
    the tools of an MCP server (`{mcp: …}`). Names must be distinct.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise KeelError(f"task.tools is {entries!r}: give a list of module:attr, python or {{mcp: …}}")
    tools: list[Tool] = []
    for entry in entries:
        if entry == "python" or (isinstance(entry, Mapping) and set(entry) == {"python"}):
            from keel.envs.python_tool import python_tool

            tools.append(python_tool(None if isinstance(entry, str) else entry["python"]))
            continue
        if isinstance(entry, Mapping):
            from keel.envs.mcp import mcp_tools

            tools += mcp_tools(entry)
            continue
        if isinstance(entry, str) and not is_import_path(entry):
            raise KeelError(f"task.tools: {entry!r} is not a tool: write python, or module:attr such as mytools:search")
        tools.append(tool(import_object(entry, "tool") if isinstance(entry, str) else entry))
    check_distinct([each.name for each in tools])
    return tuple(tools)
