"""`keel train` and `keel sft`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, CONFIG_ARGS, app, configuration

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

PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Show the resolved configuration with a sentence on each option.")
]


@app.command(help=TRAIN_HELP, context_settings=ANY_OPTION)
def train(
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    print_config: PrintConfig = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, run one step on one group, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint; a run's folder may stand for CONFIG.")
    ] = False,
) -> int:
    config = configuration(args or [], resume=resume)
    if print_config:
        return _print_config(config)
    from keel import api

    return int(api.main(config, resume=resume, dry_run=dry_run).exit_status)


@app.command(help=SFT_HELP, context_settings=ANY_OPTION)
def sft(args: Annotated[list[str] | None, CONFIG_ARGS] = None, print_config: PrintConfig = False) -> int:
    config = configuration(args or [])
    if config.warmstart is None:
        raise KeelError("keel sft needs a warmstart section: set warmstart.steps=200, or add it to the configuration")
    if print_config:
        return _print_config(config)
    from keel import api

    return int(api.supervise(config).exit_status)


def _print_config(config: Any) -> int:
    from keel.config.show import show_config

    typer.echo(show_config(config), nl=False)
    return 0
