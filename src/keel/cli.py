"""The command line. Commands import what they need when they run, so `keel --help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import keel
from keel.errors import KeelError

app = typer.Typer(
    name="keel",
    help="Train language models by GRPO under a KL term that is proven, measured, controlled and diagnosed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"keel {keel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the command."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; what a user can cause is one line on stderr and exit status 2."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="keel", standalone_mode=False)
    except KeelError as error:
        sys.stderr.write(f"keel: error: {error}\n")
        return 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
