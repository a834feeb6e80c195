"""A small MCP server: `python mcp_server.py` over stdio, `python mcp_server.py http PORT` on the loopback.

`once FILE` starts a first time only, `mute FILE` never answers but writes its number there, `broken` ends at once.
"""

import os
import sys
import time
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small", log_level="ERROR")


@server.tool()
def add(a: int, b: float = 1.0) -> str:
    """Add two numbers."""
    return f"{a!r} + {b!r} = {a + b!r}"


@server.tool()
def find(query: str, kind: Literal["web", "news"] = "web", words: list[str] | None = None) -> str:
    """Look something up."""
    return f"{query}/{kind}/{words}"


@server.tool()
def fails(reason: str) -> str:
    """Always fails."""
    raise ToolError(f"{reason}\nand more")


@server.tool()
def talks(letters: int) -> str:
    """Say much."""
    return "a" * letters


@server.tool()
def sleeps(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return f"slept {seconds}"


@server.tool(structured_output=False)
def draws() -> list[str | Image]:
    """Draw something."""
    return ["here:", Image(data=b"0", format="png")]


@server.tool(name="server.pid")
def pid() -> str:
    """The number of the server's process, and what its environment says."""
    return f"{os.getpid()} {os.environ.get('SMALL_WORD', '-')}"


@server.tool()
def ends() -> str:
    """End the server in the middle of the call."""
    os._exit(3)


def main(mode: str = "stdio", argument: str = "") -> None:
    if mode == "broken" or (mode == "once" and Path(argument).exists()):
        sys.exit("small: cannot find its database")
    if mode == "mute":
        Path(argument).write_text(str(os.getpid()))
        time.sleep(60)
    if mode == "once":
        Path(argument).touch()
    if mode == "http":
        server.run("streamable-http", port=int(argument))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main(*sys.argv[1:])
