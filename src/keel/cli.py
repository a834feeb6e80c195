"""The command line. Commands import what they need when they run, so `keel --help` answers at once."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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


VERIFY_HELP = """Prove every KL fact, or audit a KL formula of your own.

Without options: prove all facts by exact enumeration and print them as tables (exit status 1 if one fails).

With --formula or --callable: say what the formula's value estimates, what its expected gradient is in the loss and
in the reward, on- and off-policy, where it overflows, and what to use instead.

Examples:

  keel verify

  keel verify --formula 'exp(ref - logp) - (ref - logp) - 1'

  keel verify --callable my_trainer.kl:per_token_kl --json

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
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bias and spread of the estimators against the true KL to this file.")
    ] = None,
) -> int:
    if formula is not None and function is not None:
        raise KeelError("--formula and --callable exclude each other: give one")
    import torch
    from rich.console import Console

    from keel.verify import audit, load_callable, parse_formula, run
    from keel.verify.show import plot_estimators, show_audit, show_checks

    torch.set_num_threads(1)  # the tensors are tiny: threads only wait for each other
    console = Console()
    if plot is not None:
        plot_estimators(plot)
        if not as_json:
            typer.echo(f"wrote {plot}")
    if formula is not None or function is not None:
        term = parse_formula(formula) if formula is not None else load_callable(str(function))
        report = audit(term, formula if formula is not None else str(function))
        if as_json:
            _print_json(report)
        else:
            show_audit(report, console)
        return 0
    if as_json:
        rows = [check for _, checks in run() for check in checks]
        _print_json({"ok": all(row.ok for row in rows), "facts": [asdict(row) for row in rows]})
    else:
        rows = show_checks(run(), console)
    return 0 if all(row.ok for row in rows) else 1


# Options under any name Keel knows are words like the configuration's path; `arguments.split` tells them apart.
ANY_OPTION = {"ignore_unknown_options": True, "allow_interspersed_args": True}
WORDS = typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file, a run's folder, and options.")

TRAIN_HELP = """Train a model: warm start, GRPO under the KL term, evaluation, checkpoints, report.

Without CONFIG the default is trained, a tiny model on arithmetic. Options are written key=value; the names of TRL and
verl and short ones work too, also as flags, and the first lines say what they became.

Examples:

  keel train configs/default.yaml

  keel train configs/default.yaml kl.beta=0.05 run.name=stronger

  keel train default --kl-beta 0.05 --num-generations 16 --max-steps 50

  keel train configs/default.yaml --print-config

  keel train --resume runs/default
"""

SFT_HELP = """Supervised fine-tuning by the warmstart section: behaviour cloning of gold answers or of a JSONL file.

Examples:

  keel sft configs/default.yaml

  keel sft configs/default.yaml warmstart.steps=500 warmstart.learning_rate=3e-4
"""

REPORT_HELP = """Write one self-contained HTML page on a run, or on several over each other.

Examples:

  keel report runs/default

  keel report runs/beta-0 runs/beta-1 --out compare.html
"""

PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Show the resolved configuration with a sentence on each option.")
]


@app.command(help=TRAIN_HELP, context_settings=ANY_OPTION)
def train(
    words: Annotated[list[str] | None, WORDS] = None,
    print_config: PrintConfig = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, run one step on one group, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint; a run's folder may stand for CONFIG.")
    ] = False,
) -> int:
    config = _configuration(words or [], resume=resume)
    if print_config:
        return _print_config(config)
    training = importlib.import_module("keel.train")
    return int(training.main(config, resume=resume, dry_run=dry_run).exit_status)


@app.command(help=SFT_HELP, context_settings=ANY_OPTION)
def sft(words: Annotated[list[str] | None, WORDS] = None, print_config: PrintConfig = False) -> int:
    config = _configuration(words or [])
    if config.warmstart is None:
        raise KeelError("keel sft needs a warmstart section: set warmstart.steps=200, or add it to the configuration")
    if print_config:
        return _print_config(config)
    result = importlib.import_module("keel.train.sft").main(config)
    return int(getattr(result, "exit_status", 0))


@app.command(help=REPORT_HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="File to write; by default report.html in the first run.")] = None,
) -> int:
    from keel.report import write_report

    typer.echo(f"wrote {write_report(runs, out)}")
    return 0


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print data instead of lines.")] = False) -> int:
    """Show versions, device, cores, threads and memory: what a bug report needs."""
    from keel.train.environment import environment

    found = {**environment(), "memory_gib": _memory_gib()}
    found.pop("argv", None)
    if as_json:
        _print_json(found)
        return 0
    packages = found.pop("packages")
    for name, value in {**found, **packages}.items():
        typer.echo(f"{name:<14} {'not installed' if value is None else _plain(value)}")
    return 0


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not every system has it
        return None


def _plain(value: Any) -> str:
    return ", ".join(_plain(item) for item in value) or "none" if isinstance(value, list) else str(value)


def _configuration(words: list[str], *, resume: bool = False) -> Any:
    """The configuration that the words name; what was renamed and what may surprise goes to stderr."""
    from keel.config import arguments, read_config

    sys.path.insert(0, "")  # module:attr of the folder one stands in, as with python -m
    paths, overrides = arguments.split(words)
    source, brought = arguments.choose(paths, resume=resume)
    config, renamed = read_config(source, [*brought, *overrides])
    for note in (*renamed, *config.notes()):
        typer.echo(f"keel: note: {note}", err=True)
    return config


def _print_config(config: Any) -> int:
    from keel.config.show import show_config

    typer.echo(show_config(config), nl=False)
    return 0


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; what a user can cause is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ‖ gets a question mark, not a crash
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="keel", standalone_mode=False)
    except KeelError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("keel: interrupted\n")
        return 130
    except Exception as error:
        # typer's own usage errors carry an exit code and a message; anything else is our bug and keeps its traceback
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # `keel` alone: the help has been printed
            return 2
        message = f"{error.format_message()} (see keel --help)"
    else:
        return result if isinstance(result, int) else 0
    sys.stderr.write(f"keel: error: {' '.join(message.split())}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
