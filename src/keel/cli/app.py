"""Shared by all commands: the application, configuration arguments, JSON output, progress bars."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

import keel
from keel.base.errors import KeelError
from keel.base.watchdog import process_count, process_rank

MULTIPROCESS_COMMANDS = ("train", "sft", "eval")  # commands that run in several processes


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit; add --verbose for a bug report.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: also print packages, device, cores, threads and memory.")
    ] = False,
) -> None:
    """Handle the options before the command."""
    if version:
        _show_version(verbose)
        raise typer.Exit
    if verbose:
        raise KeelError("--verbose works only with --version: use keel --version --verbose")
    if (command := context.invoked_subcommand) is None:
        raise KeelError(f"name a command: {context.command.name} --help lists them")
    if process_count() > 1 and command not in MULTIPROCESS_COMMANDS:
        line = f"{context.command.name} {command}"
        raise KeelError(
            f"{line} runs in one process: run it without torchrun (several processes: "
            f"{', '.join(MULTIPROCESS_COMMANDS)})"
        )


def application(name: str, about: str) -> typer.Typer:
    """Create a command line without commands. `keel.cli.main` runs it."""
    return typer.Typer(
        name=name,
        help=about,
        callback=_root,
        no_args_is_help=True,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = application(
    "keel", "Train language models with GRPO and a KL term that is verified, measured, controlled and diagnosed."
)


def _show_version(verbose: bool) -> None:
    if not verbose:
        typer.echo(f"keel {keel.__version__}")
        return
    from keel.run.environment import environment

    facts = environment()
    packages = facts.pop("packages")
    for name, value in {**facts, **packages}.items():
        typer.echo(f"{name:<14} {'not installed' if value is None else value}")


# Typer passes options such as --kl.beta on as arguments; `split` separates them from paths.
ANY_OPTION = {"ignore_unknown_options": True, "allow_interspersed_args": True}
CONFIG_ARGS = typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file or a run folder, and options.")


_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.\-]*=")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (paths, overrides).

    `key=value`, `--key=value` and `--key value` are overrides. A `--key` without a value is true: the next argument is
    its value unless that is itself a flag or `key=value`.
    """
    paths, overrides = [], []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            if not equals:
                has_value = queue and not queue[0].startswith("--") and not _SETTING.match(queue[0])
                value = queue.pop(0) if has_value else "true"
            overrides.append(f"{name}={value}")
        elif _SETTING.match(argument):
            overrides.append(argument)
        elif argument.startswith("-") and len(argument) > 1:
            raise KeelError(f"unknown option {argument}: write --name value or name=value")
        else:
            paths.append(argument)
    return paths, overrides


def configuration(args: list[str], *, resume: bool = False, notes: bool = True) -> Any:
    """Load the configuration that the arguments name. `notes` prints renamed options and advice to stderr."""
    from keel.config.checks import advice
    from keel.config.load import choose, read_config
    from keel.doctor.thresholds import check_thresholds

    paths, overrides = split(args)
    source, implied = choose(paths, resume=resume, overrides=overrides)
    config, renamed = read_config(source, [*implied, *overrides])
    check_thresholds(config)
    for note in (*renamed, *advice(config)) if notes and process_rank() == 0 else ():
        typer.echo(f"keel: note: {note}", err=True)
    return config


def announce_loading() -> None:
    """Print on a terminal that torch and transformers are loading, which takes seconds."""
    if sys.stderr.isatty() and process_rank() == 0:
        typer.echo("keel: loading torch and transformers", err=True)


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


@contextmanager
def bar() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A transient progress bar on stderr. The yielded `watch(label, total)` returns a function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal or process_rank() > 0
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:

        def watch(label: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(label, total=total)
            return lambda count: progress.advance(task, count)

        yield watch


PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved configuration with a description of each option.")
]


def print_config_of(config: Any) -> int:
    """Print the resolved configuration with a description of each option."""
    from keel.config.text import show_config

    typer.echo(show_config(config), nl=False)
    return 0
