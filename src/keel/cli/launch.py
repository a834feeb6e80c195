"""`--nproc N` runs the command in N local processes with torch's launcher; `--on ray` runs it on a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError

STEP_S = 3600  # seconds to wait after a signal for the current step and its checkpoint

Nproc = Annotated[
    int,
    typer.Option("--nproc", metavar="N", help="Run in N local processes, such as one per GPU (torchrun)."),
]

On = Annotated[
    str,
    typer.Option("--on", metavar="local|ray[:ADDRESS]", help="This machine, or a Ray cluster (options: section ray)."),
]


def launch(arguments: list[str], nproc: int, *, device: str = "auto") -> int:
    """Run `keel ARGUMENTS` in `nproc` local processes and return its exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check(nproc, device, torch.cuda.device_count())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STEP_S))
    logging.disable()  # silence torch's launcher, which runs in this process
    with tempfile.TemporaryDirectory(prefix="keel-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "keel", *drop_flags(arguments, "--nproc"))
        except ChildFailedError as error:
            return _status({rank: failure.exitcode for rank, failure in error.failures.items()}, nproc)
        except SignalException as error:
            return 128 + error.sigval
        finally:
            logging.disable(logging.NOTSET)
    return 0


def launch_on_ray(on: str, arguments: list[str], config: Any) -> int:
    """Run `keel ARGUMENTS` as ranks and samplers on a Ray cluster and return its exit status."""
    from keel.run.cluster.train import train_on_ray

    if "WORLD_SIZE" in os.environ:
        raise KeelError(f"--on {on} does not work under torchrun: run the command without torchrun")
    exits = train_on_ray(on, drop_flags(arguments, "--nproc", "--on"), config)
    resume = f"keel train --resume {Path(config.run.dir) / config.run.name} --on {on}"
    return _status(exits, len(exits), resume=f"; resume with: {resume}")


def drop_flags(arguments: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in flags:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in flags)):
            rest.append(word)
    return rest


def _check(nproc: int, device: str, devices: int) -> None:
    if nproc < 1:
        raise KeelError(f"--nproc {nproc}: give the number of processes, 1 or more")
    if "WORLD_SIZE" in os.environ:
        raise KeelError(f"--nproc {nproc} does not work under torchrun: leave one of them out")
    if device != "cpu" and 0 < devices < nproc:
        raise KeelError(
            f"--nproc {nproc}: this machine has {devices} CUDA device{'s' * (devices > 1)}, and each process needs "
            f"one: give --nproc {devices}, or model.device=cpu"
        )


def _status(exits: Mapping[int, int], nproc: int, resume: str = "") -> int:
    """The exit status of the first rank that failed. That rank printed the error, unless a signal killed it."""
    if not any(exits.values()):
        return 0
    own = [status for status in exits.values() if status > 0]
    if own:
        return own[0]
    # the launcher ends the other ranks with SIGTERM
    killed = {rank: -status for rank, status in exits.items() if status != -signal.SIGTERM}
    for rank, number in killed.items():
        name = signal.Signals(number).name
        others = ", which ended the other ranks" if nproc > 1 else ""
        sys.stderr.write(f"keel: error: {name} killed rank {rank} of {nproc}{others}{resume}\n")
        return 128 + number
    return 128 + signal.SIGTERM
