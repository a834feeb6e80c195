"""Processes of their own that load nothing: each is forked from one that has loaded torch and keel once for all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line sets it: read when torch is loaded
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [  # all that a short training with its report imports: each process of a test is then there at once
        *("keel.api", "keel.cli", "keel.rollout.native.engine", "keel.doctor.examine", "keel.lab.report"),
        *("keel.reference.adapter", "scipy.special", "transformers.models.llama.modeling_llama"),
        *("transformers.tokenization_utils_tokenizers", "transformers.integrations.mistral"),
    ]
)
LIMIT_S = 120.0


def process(
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """`sys.exit(function(*args))`, to be started; what it writes goes to the files out and err of the folder."""
    environment = dict(os.environ if env is None else env)
    return CONTEXT.Process(target=_main, args=(folder, cwd or Path.cwd(), environment, function, args))


def run(function: Callable[..., Any], *args: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The same, from its start to its end; what hangs is killed."""
    with tempfile.TemporaryDirectory() as name:
        running = process(Path(name), function, *args, **settings)
        running.start()
        running.join(LIMIT_S)
        running.kill()
        running.join()
        out, err = ((Path(name) / kind).read_text() for kind in ("out", "err"))
        return subprocess.CompletedProcess(args, running.exitcode or 0, out, err)


def run_keel(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The command line as `python -m keel` runs it."""
    return run(_command, arguments, **settings)


def spawn(function: Callable[..., Any], args: tuple[Any, ...], nprocs: int) -> None:
    """`torch.multiprocessing.spawn`: `function(rank, *args)` in each process; what one raises is raised here."""
    from torch.multiprocessing import start_processes

    start_processes(function, args, nprocs, start_method="forkserver")


def _command(arguments: tuple[str, ...]) -> int:
    from keel.cli import main

    return main(list(arguments))


def _main(folder: Path, cwd: Path, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, str(cwd))
    for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(folder / kind, os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.exit(function(*args))
