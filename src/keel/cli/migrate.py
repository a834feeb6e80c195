"""`keel migrate`: convert another trainer's configuration."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keel.cli.app import app, print_json

if TYPE_CHECKING:
    from keel.lab.migrate import MigratedOption, Migration

MIGRATE_HELP = """Convert a configuration of TRL, verl or OpenRLHF to Keel.

The configuration goes to stdout (or to --out). A table of all options goes to stderr: what each became, what the peer
does by default, what has no counterpart, and what you must set by hand. Reads YAML (interpolations are filled
in), JSON, a Python file with GRPOConfig(...), DistillationConfig(...) or GKDConfig(...) and a shell script with
key=value words and variables (neither is executed). Exit status 1 if Keel would refuse the result as it is.

Examples:

  keel migrate grpo_config.yaml > configs/mine.yaml

  keel migrate train_grpo.py --out configs/mine.yaml

  keel migrate run_verl.sh --json
"""


@app.command(help=MIGRATE_HELP)
def migrate(
    file: Annotated[Path, typer.Argument(help="A configuration of TRL, verl or OpenRLHF: .yaml, .json, .py or .sh.")],
    out: Annotated[Path | None, typer.Option(help="Output file; must not exist.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> int:
    from keel.base.errors import KeelError
    from keel.lab.migrate import migrate as migrated

    result = migrated(file)
    if out is not None and out.exists():
        raise KeelError(f"{out} exists already: give another --out, or remove it")
    page = f"# keel train {out or 'FILE'}\n# From {file.name}, a configuration of {result.origin}.\n{result.yaml()}"
    if out is not None:
        try:
            out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise KeelError(f"cannot write {out}: {error.strerror or error}") from None
    if as_json:
        rows = [asdict(row) for row in result.rows]
        verdict = {"refused": result.refused, "computes": result.computes, "missing": result.missing}
        print_json({"origin": result.origin, "config": result.tree, "options": rows, **verdict})
    elif out is None:
        typer.echo(page, nl=False)
    if not as_json:
        _show(result, str(out) if out else None)
    return 0 if result.refused is None else 1


def _show(result: Migration, out: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table(title=f"{result.origin} → Keel", title_justify="left")
    for column in ("option", "value", "Keel", "note"):
        table.add_column(column, overflow="fold")
    for row in result.rows:
        table.add_row(*_cells(row), style="dim" if row.silent else None)
    console.print(table)
    by_hand = [row.name for row in result.unmapped if row.by_hand]
    dropped = sum(not row.silent and not row.by_hand for row in result.unmapped)
    mapped = sum(not row.silent and not row.reason for row in result.rows)
    counts = f"{mapped} options mapped, {dropped} without a counterpart, {len(by_hand)} to set by hand"
    console.print(counts + (f"; wrote {out}" if out else ""))
    if result.computes is not None:
        console.print(f"Its KL term: {result.computes}", markup=False)
    if by_hand:
        console.print(f"To set by hand: {', '.join(by_hand)}", style="yellow", markup=False)
    if result.missing is not None:
        console.print(f"To run it on this machine: {result.missing}", style="yellow", markup=False)
    if result.refused is not None:
        console.print(f"Keel rejects the result: {result.refused}", style="bold red", markup=False)


def _cells(row: MigratedOption) -> tuple[str, str, str, str]:
    from rich.markup import escape

    from keel.base.redact import masked
    from keel.config import text

    options = " ".join(f"{name}={text.dump(masked(value, name))}" for name, value in row.options.items())
    unmapped = "[yellow]by hand[/yellow]" if row.by_hand else "[red]no counterpart[/red]"
    became = escape(options) if options else unmapped if row.reason else "nothing to set"
    name = f"({row.name})" if row.silent else row.name
    return escape(name), escape(text.dump(masked(row.value, row.name))), became, escape(row.reason or row.note)
