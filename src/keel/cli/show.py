"""`keel show`: print the rollouts of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import app, print_json

SHOW_HELP = """Print the recorded rollouts of a step: prompts, completions, log-ratios, rewards, advantages.

Sampled tokens are coloured by their log-ratio to the reference, a k1 sample of the KL (orange: more likely than under
the reference, blue: less likely). An episode is shown turn by turn: what the policy sampled, the calls or the reward of
the turn, and the replies of tools or the environment, which are not trained on.

Examples:

  keel show runs/default

  keel show runs/default --step 50 --worst --limit 3

  keel show runs/default --step 50 --problem 'sort/0/49/3' --json
"""


@app.command(help=SHOW_HELP)
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option(help="Step to show (default: the last with rollouts).")] = None,
    problem: Annotated[str | None, typer.Option(metavar="KEY", help="Only this problem's completions.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group's completions.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of completions.")] = 16,
    full: Annotated[bool, typer.Option("--full", help="Print long episodes and replies in full.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as data.")] = False,
) -> int:
    from keel.lab.report.rollouts import choose, read_step

    if best and worst:
        raise KeelError("--best and --worst exclude each other: give one")
    shown_step, records = read_step(run, step)
    order = "best" if best else "worst" if worst else None
    selected = choose(records, problem=problem, group=group, order=order, limit=limit)
    if as_json:
        print_json(selected)
        return 0
    from rich.console import Console

    from keel.lab.report.terminal import show_rollouts

    console = Console(no_color=True if no_color else None, highlight=False)
    show_rollouts(str(run), shown_step, selected, console, recorded=len(records), full=full)
    return 0
