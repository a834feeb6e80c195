"""`keel doctor`: what is wrong with a run, or will be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, configuration, print_json, split

if TYPE_CHECKING:
    from keel.lab.doctor.diagnosis import Diagnosis
    from keel.lab.doctor.probes import ProbeResult

DOCTOR_HELP = """Find what is wrong with a run, or with a configuration before it runs, and list the worst first.

Read and checked are: a run's folder (Keel's, finished or running; TRL's output folder; a W&B run folder; any
TensorBoard folder), a table (CSV or JSON lines, also one exported from W&B), and the lines that a trainer printed.
Logs of TRL, verl, OpenRLHF, NeMo-RL and prime-rl are known by their metrics' names. A configuration is built and tried
on one small batch, each cause by an experiment of its own; without a path it is the default's turn. With --trl a
trainer of TRL's is built by your own function and tried on its first batch, and left as it was. The verdict and
the findings are printed first; figures, hypotheses and what could not be checked with --verbose. Exit status: 0
healthy (notes allowed), 1 findings, 2 could not run.

Examples:

  keel doctor runs/default

  keel doctor configs/default.yaml optim.learning_rate=1e-3

  keel doctor configs/default.yaml --quick

  keel doctor trl-output/ --html doctor.html

  keel doctor wandb/run-20260101-abc/

  keel doctor wandb-export.csv

  keel doctor verl.log

  keel doctor log.csv --map step=it,kl=train_kl,reward=score

  keel doctor runs/default --threshold kl_over_budget=0.4

  keel doctor --trl my_script:build_trainer
"""

DOCTOR_ARGS = typer.Argument(metavar="[RUN|CONFIG|LOG] [KEY=VALUE]...", help="What to look at; options of a CONFIG.")


@app.command(help=DOCTOR_HELP, context_settings=ANY_OPTION)
def doctor(
    args: Annotated[list[str] | None, DOCTOR_ARGS] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print figures, hypotheses and what could not be checked too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write all of it as a self-contained page too.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Of a CONFIG: a smaller batch, and some experiments left out."),
    ] = False,
    columns: Annotated[
        str | None, typer.Option("--map", help="Columns of a table or tags of a TensorBoard folder: kl=COL,reward=COL.")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option("--threshold", help="name=value in place of a shipped threshold; repeatable.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the findings in the run's findings.json.")] = False,
    trl: Annotated[
        str | None,
        typer.Option(
            "--trl", metavar="MODULE:FUNCTION", help="A function without arguments that returns a GRPOTrainer."
        ),
    ] = None,
) -> int:

    if verbose and as_json:
        raise KeelError("--verbose is for text, and --json prints all of it anyway: leave one of them out")
    paths, overrides = split(args or [])
    log = None if trl is not None else _log_at(paths)
    if trl is not None:
        others = [*(args or []), *(("--quick",) if quick else ()), *(("--map",) if columns else ())]
        others += ["--write"] if write else []
        if others:
            raise KeelError(f"--trl looks at the trainer that {trl} builds, and {others[0]} is for something else")
        name, diagnosis = _of_trainer(trl, threshold or [], as_json=as_json, verbose=verbose)
    elif log is None:
        for value, option in ((columns, "--map"), (write, "--write")):
            if value:
                raise KeelError(f"{option} is for a run or a log, and {' '.join(paths) or 'the default'} is neither")
        name, diagnosis = _preflight(args or [], threshold or [], quick=quick, as_json=as_json, verbose=verbose)
    else:
        if quick:
            raise KeelError(f"--quick is for a configuration, and {log} is a run or a log: leave it out")
        if overrides:
            raise KeelError(f"{overrides[0]} changes nothing about {log}, which is finished: leave it out")
        from keel.lab.doctor.examine import examine, write_findings
        from keel.lab.doctor.readers import parse_map

        name, diagnosis = log.resolve().name, examine(log, parse_map(columns), threshold or [])
        if write:
            typer.echo(f"wrote {write_findings(log, diagnosis)}", err=True)
    from keel.lab.doctor.display import show_diagnosis, verdict

    if html is not None:
        from keel.lab.doctor.page import write_diagnosis

        typer.echo(f"wrote {write_diagnosis(diagnosis, verdict(diagnosis, name), html)}", err=True)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        from rich.console import Console

        show_diagnosis(diagnosis, Console(), name, verbose=verbose)
    return int(diagnosis.exit_status)


def _log_at(paths: list[str]) -> Path | None:
    """The run or log that the arguments name; None where they name a configuration."""
    if len(paths) > 1:
        raise KeelError(f"one run or configuration at a time, but {paths[1]!r} is another")
    if not paths:
        return None
    path = Path(paths[0]).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return None
    if not path.exists():
        from keel.config.text import find  # only here: loading it takes longer than examining a log

        if find(path) == path:
            raise KeelError(f"no run, log or configuration at {path}: check the path")
        return None  # the name that a configuration is shipped under
    if path.is_dir() and (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        return None  # a run that never took a step: its configuration is what can be tried
    return path


def _preflight(
    args: list[str], threshold: list[str], *, quick: bool, as_json: bool, verbose: bool
) -> tuple[str, Diagnosis]:
    config = configuration(args)  # before torch is loaded
    from keel.lab.doctor.preflight import preflight
    from keel.lab.doctor.probes import PROBES
    from keel.lab.thresholds import thresholds_of

    limits = thresholds_of(config.model_dump(), threshold)
    with _progress(as_json, verbose, [name for name, _ in PROBES]) as on_probe:
        diagnosis = preflight(config, limits, on_probe, quick=quick)
    return f"{'quick ' if quick else ''}preflight of {config.run.name}", diagnosis


def _of_trainer(spec: str, threshold: list[str], *, as_json: bool, verbose: bool) -> tuple[str, Diagnosis]:
    """What the trainer of one's own says of itself goes to stderr, so that --json prints data alone."""
    from keel.lab.thresholds import thresholds_of

    limits = thresholds_of({}, threshold)
    with redirect_stdout(sys.stderr):
        from keel.integrations.trl.preflight import PROBES, load_trainer, preflight

        trainer = load_trainer(spec)
        with _progress(as_json, verbose, [name for name, _ in PROBES]) as on_probe:
            return f"preflight of {spec}", preflight(trainer, limits, on_probe)


@contextmanager
def _progress(
    as_json: bool, verbose: bool, names: Sequence[str]
) -> Iterator[Callable[[ProbeResult, float], None] | None]:
    """What is called after every probe: a bar on a terminal, with `--verbose` a line instead."""
    from rich.console import Console

    console = Console(stderr=True)
    if as_json or not (verbose or console.is_terminal):
        yield None
        return
    if verbose:
        yield _print_outcome
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"building the parts, {names[0]}", total=len(names))

        def advance(outcome: ProbeResult, seconds: float) -> None:
            done = names.index(outcome.name) + 1 if outcome.name in names else len(names)
            bar.update(task, completed=done, description=names[done] if done < len(names) else "")

        yield advance


def _print_outcome(outcome: ProbeResult, seconds: float) -> None:
    """One line a probe on stderr."""
    codes = ", ".join(finding.code for finding in outcome.findings) or "nothing found"
    typer.echo(f"keel: {outcome.name}: {codes} ({seconds:.1f} s)", err=True)
