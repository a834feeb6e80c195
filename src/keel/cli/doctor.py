"""`keel doctor`: what is wrong with a run, or will be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, configuration, print_json

DOCTOR_HELP = """Say what is wrong with a run, or with a configuration before it is run; worst first.

A run's folder (Keel's, finished or running; TRL's output folder; any TensorBoard folder) or a table (CSV, JSONL) is
read and checked. A configuration is built and tried on one small batch, each cause by an experiment of its own.
Without a path the default configuration is tried. Exit status: 0 healthy (notes allowed), 1 findings, 2 could not run.

Examples:

  keel doctor runs/default

  keel doctor configs/default.yaml optim.learning_rate=1e-3

  keel doctor trl-output/ --json

  keel doctor log.csv --map step=it,kl=train_kl,reward=score

  keel doctor runs/default --threshold kl_over_budget=0.4
"""

DOCTOR_ARGS = typer.Argument(metavar="[RUN|CONFIG|LOG] [KEY=VALUE]...", help="What to look at; options of a CONFIG.")


@app.command(help=DOCTOR_HELP, context_settings=ANY_OPTION)
def doctor(
    args: Annotated[list[str] | None, DOCTOR_ARGS] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    columns: Annotated[
        str | None, typer.Option("--map", help="Columns of a table or tags of a TensorBoard folder: kl=COL,reward=COL.")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option("--threshold", help="name=value in place of a shipped threshold; repeatable.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the findings in the run's findings.json.")] = False,
) -> int:
    from keel.config import arguments

    paths, overrides = arguments.split(args or [])
    log = _log_at(paths)
    if log is None:
        for value, option in ((columns, "--map"), (write, "--write")):
            if value:
                raise KeelError(f"{option} is for a run or a log, and {' '.join(paths) or 'the default'} is neither")
        name, diagnosis = _preflight(args or [], threshold or [], as_json)
    else:
        if overrides:
            raise KeelError(f"{overrides[0]} changes nothing about {log}, which is finished: leave it out")
        from keel.lab.doctor.examine import examine, write_findings
        from keel.lab.doctor.readers import parse_map

        name, diagnosis = str(log), examine(log, parse_map(columns), threshold or [])
        if write:
            typer.echo(f"wrote {write_findings(log, diagnosis)}", err=True)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        from rich.console import Console

        from keel.lab.doctor.display import show_diagnosis

        show_diagnosis(diagnosis, Console(), name)
    return int(diagnosis.exit_status)


def _log_at(paths: list[str]) -> Path | None:
    """The run or log that the arguments name; None where they name a configuration."""
    if len(paths) > 1:
        raise KeelError(f"one run or configuration at a time, but {paths[1]!r} is another")
    if not paths:
        return None
    path = Path(paths[0]).expanduser()
    if path.suffix in (".yaml", ".yml") or not path.exists():
        return None  # a configuration, by its path or by the name it is shipped under
    if path.is_dir() and (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        return None  # a run that never took a step: its configuration is what can be tried
    return path


def _preflight(args: list[str], threshold: list[str], as_json: bool) -> tuple[str, Any]:
    from keel.base.thresholds import thresholds_of
    from keel.lab.doctor.preflight import preflight

    config = configuration(args)
    limits = thresholds_of(config.model_dump(), threshold)
    return f"preflight of {config.run.name}", preflight(config, limits, None if as_json else _print_outcome)


def _print_outcome(outcome: Any, seconds: float) -> None:
    """One line a probe on stderr: some take a while."""
    codes = ", ".join(finding.code for finding in outcome.findings) or "nothing found"
    typer.echo(f"keel: {outcome.name}: {codes} ({seconds:.1f} s)", err=True)
