"""The command line: one file a command. They import what they need when they run, so `keel --help` answers at once."""

from __future__ import annotations

import io
import sys

import typer

from keel.base.errors import KeelError
from keel.cli import (
    ablate,
    check_task,
    data,
    doctor,
    env,
    eval,
    export,
    kl,
    migrate,
    plan,
    play_chess,
    pull,
    push,
    report,
    sft,
    show,
    train,
    verify,
)
from keel.cli.app import app


def main(argv: list[str] | None = None) -> int:
    """Run the command line; what a user can cause is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ‖ gets a question mark, not a crash
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="keel", standalone_mode=False)
    except KeelError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("keel: interrupted\n")
        return 130
    except Exception as error:
        # typer's own usage errors carry an exit code and a message; anything else is our bug and keeps its traceback
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # `keel` alone: the help has been printed
            return 2
        message = f"{error.format_message()} (see keel --help)"
    else:
        return result if isinstance(result, int) else 0
    sys.stderr.write(f"keel: error: {' '.join(message.split())}\n")
    return 2


__all__ = [
    "ablate",
    "app",
    "check_task",
    "data",
    "doctor",
    "env",
    "eval",
    "export",
    "kl",
    "main",
    "migrate",
    "plan",
    "play_chess",
    "pull",
    "push",
    "report",
    "sft",
    "show",
    "train",
    "verify",
]
