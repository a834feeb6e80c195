"""`keel verify`: verify the KL estimators, or audit a formula."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import app, print_json

VERIFY_HELP = """Verify every KL fact by exact enumeration, or audit a KL formula of your own.

Without options: verify all facts and print them as tables (exit status 1 if one fails).

With --peers: verify the KL terms of installed trainers (TRL, verl and others) by calling their functions.

With --formula or --callable: report what the value estimates, the expected gradient in the loss and in the reward, on-
and off-policy, where the formula overflows, and which estimator to use instead.

Examples:

  keel verify

  keel verify --formula 'exp(ref - logp) - (ref - logp) - 1'

  keel verify --callable my_trainer.kl:per_token_kl --json

  keel verify --peers

  keel verify --plot estimators.png

A formula may use logp, ref, old (the sampler's log-probability; on-policy the detached logp), numbers, + - * / **,
and exp, expm1, log, log1p, abs, clamp(x, low, high), minimum, maximum, detach, sigmoid, softplus.
"""


@app.command(help=VERIFY_HELP)
def verify(
    formula: Annotated[str | None, typer.Option(help="Audit this formula of logp, ref and old.")] = None,
    function: Annotated[
        str | None,
        typer.Option("--callable", help="Audit module:function, called as f(logp, ref[, old]) on [B, T] tensors."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Verify the KL terms of installed trainers (TRL, verl and others).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot bias and standard deviation of the estimators against the true KL to this file."),
    ] = None,
) -> int:
    given = [name for name, on in (("--formula", formula), ("--callable", function), ("--peers", peers)) if on]
    if len(given) > 1:
        raise KeelError(f"{given[0]} and {given[1]} exclude each other: give one")
    import torch
    from rich.console import Console

    from keel.lab.report.proofs import plot_estimators, show_audit, show_checks
    from keel.verify import audit, load_callable, parse_formula, run

    torch.set_num_threads(1)  # the tensors are tiny, so threads only add overhead
    console = Console()
    if plot is not None:
        plot_estimators(plot)
        if not as_json:
            typer.echo(f"wrote {plot}")
    if peers:
        return _peers(as_json)
    if formula is not None or function is not None:
        term = parse_formula(formula) if formula is not None else load_callable(str(function))
        report = audit(term, formula if formula is not None else str(function))
        if as_json:
            print_json(report)
        else:
            show_audit(report, console)
        return 0
    if as_json:
        rows = [check for _, checks in run() for check in checks]
        print_json({"ok": all(row.ok for row in rows), "facts": [asdict(row) for row in rows]})
    else:
        rows = show_checks(run(), console)
    return 0 if all(row.ok for row in rows) else 1


def _peers(as_json: bool) -> int:
    """Verify the KL terms of installed trainers, printing each at once: importing a trainer takes seconds."""
    from contextlib import redirect_stdout

    from keel.integrations.formulas import lines, peers

    found, out = [], sys.stdout
    with redirect_stdout(sys.stderr):  # trainers print while they are imported
        for peer in peers():
            found.append(peer)
            if not as_json:
                typer.echo("\n".join(lines(peer)), file=out)
    if not any(peer.rows for peer in found):
        raise KeelError(
            "no installed trainer has KL terms that can be called: pip install 'trl==1.16.*' or 'verl==0.9.*'"
        )
    if as_json:
        print_json({"peers": [asdict(peer) for peer in found]})
    return 0
