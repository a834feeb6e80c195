"""`keel sft`."""

from __future__ import annotations

from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, CONFIG_ARGS, PrintConfig, announce_loading, app, configuration, print_config_of
from keel.cli.launch import Nproc, launch

HELP = """Run only the SFT of the warmstart section, on gold answers or on a JSONL file.

Examples:

  keel sft configs/default.yaml

  keel sft configs/default.yaml warmstart.steps=500 warmstart.learning_rate=3e-4

  keel sft configs/default.yaml --nproc 2
"""


@app.command(help=HELP, context_settings=ANY_OPTION)
def sft(
    context: typer.Context,
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    print_config: PrintConfig = False,
    nproc: Nproc = 1,
) -> int:
    config = configuration(args or [], notes=nproc == 1)
    if config.warmstart is None:
        raise KeelError("keel sft needs a warmstart section: set warmstart.steps=200, or add it to the configuration")
    if print_config:
        return print_config_of(config)
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    announce_loading()
    from keel import api

    return int(api.supervise(config).exit_status)
