"""The command line, one file per command. Commands import their dependencies when they run, so `--help` is fast."""

from __future__ import annotations

import io
import os
import sys
import traceback

import typer

from keel.base.errors import KeelError
from keel.base.watchdog import hard_exit, is_first_failure, process_count, process_rank
from keel.cli import ablate, check_task, doctor, eval, kl, migrate, runs, serve, train
from keel.cli.app import app


def main(argv: list[str] | None = None, app: typer.Typer = app) -> int:
    """Run the command line of `keel` or of a recipe. User errors print one line to stderr and exit with status 2.

    With several processes, rank 0 returns the run's exit status and the first process that fails prints the error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print ? for characters that the encoding lacks, such as ‖
    if process_count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise every rank logs closed connections
    if process_rank() > 0:
        os.environ.setdefault("TQDM_DISABLE", "1")  # only rank 0 shows a progress bar
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
        # Typer's usage errors have a message. Any other exception is a bug and keeps its traceback.
        if hasattr(error, "format_message"):
            if not error.format_message():  # `keel` alone: typer has printed the help
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
        hard_exit(status)  # the process group is broken: exit without waiting for the other ranks
    return status


def _rank() -> str:
    """The rank as a prefix of messages, empty on rank 0."""
    return f"rank {process_rank()} of {process_count()}: " if process_rank() > 0 else ""


__all__ = ["ablate", "app", "check_task", "doctor", "eval", "kl", "main", "migrate", "runs", "serve", "train"]
