"""Functions run in several processes, as ranks of one world on loopback; torch is loaded once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line sets it: read when torch is loaded
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["keel.api"])
LIMIT_S = 120.0
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
        folder = Path(name)
        processes = [_CONTEXT.Process(target=_rank, args=(folder, rank, world, function, args)) for rank in ranks]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [[(folder / f"{kind}{rank}").read_text() for kind in ("out", "err")] for rank in ranks]
        return [Ended(process.exitcode or 0, *text) for process, text in zip(processes, texts, strict=True)]


def _rank(
    folder: Path, rank: int, world: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
        descriptor = os.open(folder / f"{kind}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, stream.fileno())
    sys.exit(function(*args))
