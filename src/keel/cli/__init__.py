"""The command line: one file a command. They import what they need when they run, so `keel --help` answers at once."""

from __future__ import annotations

import io
import os
import sys
import traceback

import typer

from keel.base.errors import KeelError
from keel.base.watchdog import hard_exit, is_first_failure, process_count, process_rank
from keel.cli import (
    ablate,
    check_task,
    doctor,
    eval,
    export,
    kl,
    migrate,
    report,
    serve,
    sft,
    show,
    train,
    verify,
    watch,
)
from keel.cli.app import app


def main(argv: list[str] | None = None, app: typer.Typer = app) -> int:
    """Run a command line, `keel` or a recipe's; what a user can cause is one line on stderr and exit status 2.

    Of several processes rank 0 has the run's exit status, and the first that fails says why.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ‖ gets a question mark, not a crash
    if process_count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a connection that ends is not told by every rank
    if process_rank() > 0:
        os.environ.setdefault("TQDM_DISABLE", "1")  # one bar for all
    command = typer.main.get_command(app)
    name = str(command.name)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        result = command.main(args=arguments, prog_name=name, standalone_mode=False, obj=arguments)
    except KeelError as error:
        line, status = f"keel: error: {_rank()}{' '.join(str(error).split())}\n", 2
    except (KeyboardInterrupt, typer.Abort):
        line, status = "keel: interrupted\n", 130
    except Exception as error:
        # typer's own usage errors carry an exit code and a message; anything else is our bug and keeps its traceback
        if hasattr(error, "format_message"):
            if not error.format_message():  # `keel` alone: the help has been printed
                return 2
            line, status = f"keel: error: {' '.join(error.format_message().split())} (see {name} --help)\n", 2
        elif process_count() == 1:
            raise
        else:
            line, status = traceback.format_exc(), 1
    else:
        return result if isinstance(result, int) and process_rank() == 0 else 0
    if is_first_failure(status):
        sys.stderr.write(line)
    if process_count() > 1:
        hard_exit(status)  # the group of processes is broken: nothing waits for it
    return status


def _rank() -> str:
    """Who speaks, where it is not the first of several processes."""
    return f"rank {process_rank()} of {process_count()}: " if process_rank() > 0 else ""


__all__ = [
    "ablate",
    "app",
    "check_task",
    "doctor",
    "eval",
    "export",
    "kl",
    "main",
    "migrate",
    "report",
    "serve",
    "sft",
    "show",
    "train",
    "verify",
    "watch",
]
