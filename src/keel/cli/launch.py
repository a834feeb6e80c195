"""`--nproc N`: the same command in N processes of this machine, by torch's own launcher; `--on ray`: on a cluster."""

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

STEP_S = 3600  # a signal waits for the step in flight and its checkpoint, up to this

Nproc = Annotated[
    int,
    typer.Option("--nproc", metavar="N", help="Run in N processes of this machine, such as one a GPU (torchrun)."),
]

On = Annotated[
    str, typer.Option("--on", metavar="local|ray[:ADDRESS]", help="Here, or placed on a Ray cluster (ray: options).")
]


def launch(arguments: list[str], nproc: int, *, device: str = "auto") -> int:
    """Run `keel ARGUMENTS` in `nproc` processes of this machine and return its exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check(nproc, device, torch.cuda.device_count())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STEP_S))
    logging.disable()  # in this process only, which has nothing to say but torch's reports on the others
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
            elastic_launch(config, sys.executable)("-m", "keel", *without(arguments, "--nproc"))
        except ChildFailedError as error:
            return _status({rank: failure.exitcode for rank, failure in error.failures.items()}, nproc)
        except SignalException as error:
            return 128 + error.sigval
        finally:
            logging.disable(logging.NOTSET)
    return 0


def launch_on_ray(on: str, arguments: list[str], config: Any) -> int:
    """Run `keel ARGUMENTS` as ranks on a Ray cluster, with samplers beside them, and return its exit status."""
    from keel.run.cluster.train import train_on_ray

    if "WORLD_SIZE" in os.environ:
        raise KeelError(f"--on {on} inside of torchrun: leave torchrun out, Ray starts the processes")
    exits = train_on_ray(on, without(arguments, "--nproc", "--on"), config)
    resume = f"keel train --resume {Path(config.run.dir) / config.run.name} --on {on}"
    return _status(exits, len(exits), go_on=f"; resume with: {resume}")


def without(arguments: list[str], *flags: str) -> list[str]:
    """The arguments of each process: those of the launcher are left out."""
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
        raise KeelError(f"--nproc {nproc} inside of torchrun: give the number of processes to one of them")
    if device != "cpu" and 0 < devices < nproc:
        raise KeelError(
            f"--nproc {nproc}: this machine has {devices} CUDA device{'s' * (devices > 1)}, and each process needs "
            f"one: give --nproc {devices}, or model.device=cpu"
        )


def _status(exits: Mapping[int, int], nproc: int, go_on: str = "") -> int:
    """The exit status of the first that failed: it has said why, and the others ended for it, unless it was killed."""
    if not any(exits.values()):
        return 0
    own = [status for status in exits.values() if status > 0]
    if own:
        return own[0]
    killed = {rank: -status for rank, status in exits.items() if status != -signal.SIGTERM}  # that is the launcher's
    for rank, number in killed.items():
        name = signal.Signals(number).name
        others = ", and the others after it" if nproc > 1 else ""
        sys.stderr.write(f"keel: error: rank {rank} of {nproc} was ended by {name}{others}{go_on}\n")
        return 128 + number
    return 128 + signal.SIGTERM
