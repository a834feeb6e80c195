"""`keel env`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from keel.cli.app import app, print_json


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print data instead of lines.")] = False) -> int:
    """Show versions, device, cores, threads and memory: what a bug report needs."""
    from keel.run.environment import environment

    facts = {**environment(), "memory_gib": _memory_gib()}
    facts.pop("argv", None)
    if as_json:
        print_json(facts)
        return 0
    packages = facts.pop("packages")
    for name, value in {**facts, **packages}.items():
        typer.echo(f"{name:<14} {'not installed' if value is None else _plain(value)}")
    return 0


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not every system has it
        return None


def _plain(value: Any) -> str:
    return ", ".join(_plain(item) for item in value) or "none" if isinstance(value, list) else str(value)
