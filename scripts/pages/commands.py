"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from keel.cli import app
from keel.recipes.chess.__main__ import app as chess
from keel.recipes.multihop.__main__ import app as multihop
from pages.tables import prose, table

HEAD = """# Command line

Every command with its arguments and flags, made from the commands themselves; `keel COMMAND --help` shows the same.
Behind a configuration, options are written `section.option=value` ([Options](options.md)). An error that a user can
mend is one line on stderr and exit status 2; `keel train` ends with 1 where a guard stopped the run and with 130 or
143 after Ctrl-C or SIGTERM, `keel doctor` with 1 where something is wrong. `python -m keel` is the same program.

"""


def commands_page() -> str:
    return HEAD + "\n\n".join(_command(name, command) for name, command in commands()) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of `keel` and of the recipes, by the words that call it."""
    for each in (app, chess):
        group: Any = typer.main.get_command(each)
        yield from ((f"{group.name} {word}", command) for word, command in sorted(group.commands.items()))
    oracle = typer.main.get_command(multihop)
    yield str(oracle.name), oracle


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([name, *(_metavar(p) for p in arguments), *(["[FLAGS]"] if options else [])])
    flags = table(("flag", "default", ""), [_row(p) for p in options]) if options else ""
    given = table(("argument", ""), [(f"`{_metavar(p)}`", prose(p.help or "")) for p in arguments]) if arguments else ""
    parts = [f"## {name}", f"```text\n{usage}\n```", *_help(command.help or ""), given, flags]
    return "\n\n".join(part for part in parts if part)


def _help(text: str) -> Iterator[str]:
    """Paragraphs; lines that are set in, which are examples, become one block."""
    examples: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("  "):
            examples += [line.strip() for line in paragraph.splitlines()]
            continue
        if examples:
            yield _block(examples)
            examples = []
        yield prose(" ".join(paragraph.split()))
    if examples:
        yield _block(examples)


def _block(lines: list[str]) -> str:
    return "```text\n" + "\n".join(lines) + "\n```"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(option: Any) -> tuple[str, str, str]:
    placeholder = option.metavar or option.opts[0].lstrip("-").upper()
    value = "" if option.is_flag else f" {placeholder}"
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    default = "" if option.is_flag or option.default in (None, ()) else f"`{option.default}`"
    return names, default, prose(option.help or "")
