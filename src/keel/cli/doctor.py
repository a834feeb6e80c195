"""`keel doctor`: diagnose a run, a log or a configuration."""

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
    from keel.doctor.findings import Diagnosis
    from keel.doctor.measure import Outcome

DOCTOR_HELP = """Diagnose a run, a log, or a configuration before it runs. The worst finding comes first.

Inputs: a run folder (Keel, finished or running; TRL's output folder; a W&B run folder; any TensorBoard folder), a table
(CSV or JSON lines, also W&B exports), or a trainer's printed output. Metric names of TRL, verl, OpenRLHF, NeMo-RL and
prime-rl are recognised. A configuration (default: `default`) is built and tested on one small batch, with one
experiment per cause. With --trl, your function builds a TRL trainer, which is tested on its first batch and restored.
The verdict and the findings are printed; --verbose adds figures, hypotheses and skipped checks. Exit status: 0 healthy
(notes allowed), 1 findings, 2 could not run.

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

DOCTOR_ARGS = typer.Argument(
    metavar="[RUN|CONFIG|LOG] [KEY=VALUE]...", help="What to diagnose, and options of a CONFIG."
)


@app.command(help=DOCTOR_HELP, context_settings=ANY_OPTION)
def doctor(
    args: Annotated[list[str] | None, DOCTOR_ARGS] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print figures, hypotheses and skipped checks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained HTML page.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="For a CONFIG: use a smaller batch and fewer experiments."),
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option("--map", help="Map metrics to columns of a table or TensorBoard tags: kl=COL,reward=COL."),
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option("--threshold", help="Override a threshold: name=value; repeatable.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the findings to the run's findings.json.")] = False,
    trl: Annotated[
        str | None,
        typer.Option(
            "--trl", metavar="MODULE:FUNCTION", help="A function without arguments that returns a GRPOTrainer."
        ),
    ] = None,
) -> int:
    if verbose and as_json:
        raise KeelError("--verbose has no effect with --json, which prints all data: give one of them")
    paths, overrides = split(args or [])
    log = None if trl is not None else _log_at(paths)
    if trl is not None:
        others = [*(args or []), *(("--quick",) if quick else ()), *(("--map",) if columns else ())]
        others += ["--write"] if write else []
        if others:
            raise KeelError(f"--trl {trl} cannot be combined with {others[0]}: leave {others[0]} out")
        name, diagnosis = _of_trainer(trl, threshold or [], as_json=as_json, verbose=verbose)
    elif log is None:
        for value, option in ((columns, "--map"), (write, "--write")):
            if value:
                raise KeelError(
                    f"{option} needs a run or a log, and {' '.join(paths) or 'the default'} is a configuration"
                )
        name, diagnosis = _preflight(args or [], threshold or [], quick=quick, as_json=as_json, verbose=verbose)
    else:
        if quick:
            raise KeelError(f"--quick needs a configuration, and {log} is a run or a log: leave --quick out")
        if overrides:
            raise KeelError(f"{overrides[0]} has no effect on {log}, which is a run or a log: leave it out")
        from keel.doctor.examine import examine, write_findings
        from keel.doctor.readers import parse_map

        name, diagnosis = log.resolve().name, examine(log, parse_map(columns), threshold or [])
        if write:
            typer.echo(f"wrote {write_findings(log, diagnosis)}", err=True)
    from keel.doctor.display import show_diagnosis, verdict

    if html is not None:
        from keel.lab.report.html import write_diagnosis

        typer.echo(f"wrote {write_diagnosis(diagnosis, verdict(diagnosis, name), html)}", err=True)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        from rich.console import Console

        show_diagnosis(diagnosis, Console(), name, verbose=verbose)
    return int(diagnosis.exit_status)


def _log_at(paths: list[str]) -> Path | None:
    """The run or log that the arguments name, or None for a configuration."""
    if len(paths) > 1:
        raise KeelError(f"keel doctor takes one run, log or configuration, not {len(paths)}: {' '.join(paths)}")
    if not paths:
        return None
    path = Path(paths[0]).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return None
    if not path.exists():
        from keel.config.text import find  # imported here because it is slow to load

        if find(path) == path:
            raise KeelError(f"no run, log or configuration at {path}: check the path")
        return None  # the name of a shipped configuration
    if path.is_dir() and (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        return None  # a run without steps: test its configuration
    return path


def _preflight(
    args: list[str], threshold: list[str], *, quick: bool, as_json: bool, verbose: bool
) -> tuple[str, Diagnosis]:
    config = configuration(args)  # before torch is loaded
    from keel.doctor.preflight import MEASURES, preflight
    from keel.doctor.thresholds import thresholds_of

    limits = thresholds_of(config.model_dump(), threshold)
    with _progress(as_json, verbose, [measure.name for measure in MEASURES]) as on_probe:
        diagnosis = preflight(config, limits, on_probe, quick=quick)
    return f"{'quick ' if quick else ''}preflight of {config.run.name}", diagnosis


def _of_trainer(spec: str, threshold: list[str], *, as_json: bool, verbose: bool) -> tuple[str, Diagnosis]:
    """Test the user's TRL trainer. Its code prints to stderr, so that --json prints only data."""
    from keel.doctor.thresholds import thresholds_of

    limits = thresholds_of({}, threshold)
    with redirect_stdout(sys.stderr):
        from keel.integrations.trl.preflight import MEASURES, load_trainer, preflight

        trainer = load_trainer(spec)
        with _progress(as_json, verbose, [measure.name for measure in MEASURES]) as on_probe:
            return f"preflight of {spec}", preflight(trainer, limits, on_probe)


@contextmanager
def _progress(as_json: bool, verbose: bool, names: Sequence[str]) -> Iterator[Callable[[Outcome, float], None] | None]:
    """Yield the callback for finished probes: it advances a progress bar, or prints a line with `--verbose`."""
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

        def advance(outcome: Outcome, seconds: float) -> None:
            done = names.index(outcome.name) + 1 if outcome.name in names else len(names)
            bar.update(task, completed=done, description=names[done] if done < len(names) else "")

        yield advance


def _print_outcome(outcome: Outcome, seconds: float) -> None:
    """Print one line per probe to stderr."""
    codes = ", ".join(finding.code for finding in outcome.findings) or "nothing found"
    typer.echo(f"keel: {outcome.name}: {codes} ({seconds:.1f} s)", err=True)
