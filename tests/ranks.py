"""Functions run in several processes, as ranks of one world on loopback; torch is loaded once for all of them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from processes import LIMIT_S, process

NOTHING: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How a rank ended and what it said."""

    status: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    size: int = 2,
    only: int | None = None,
    env: Mapping[str, str] = NOTHING,
) -> list[Ended]:
    """Call `function(*args)` on every rank (or on `only` one of them) and wait; what hangs is killed."""
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", **env}
    ranks = range(size) if only is None else (only,)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(rank) for rank in ranks]
        processes = []
        for rank, folder in zip(ranks, folders, strict=True):
            folder.mkdir()
            own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(process(folder, function, *args, env=own))
        try:
            for started in processes:
                started.start()
            for started in processes:
                started.join(LIMIT_S)
        finally:
            for started in processes:
                started.kill()
                started.join()
        texts = [[(folder / kind).read_text() for kind in ("out", "err")] for folder in folders]
        return [Ended(ended.exitcode or 0, *text) for ended, text in zip(processes, texts, strict=True)]
