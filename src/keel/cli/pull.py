"""`keel pull`: a model from a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app

HELP = """Download a model from a hub into a new folder, for model.name, keel eval or keel kl.

Code that a model brings is downloaded and never run, unless model.trust_remote_code=true is set when it is loaded.

Examples:

  keel pull HuggingFaceTB/SmolLM2-135M-Instruct models/smollm2

  keel train configs/default.yaml model.name=models/smollm2
"""


@app.command(help=HELP)
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model's name on the hub: owner/name.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be new or empty.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; the default branch by default.")] = None,
) -> int:
    from keel.lab.publish import pull as hub

    model = hub.pull(name, folder, revision=revision)
    if hub.brings_code(model):
        typer.echo(
            f"keel: note: {name} brings Python code of its own: it is refused unless model.trust_remote_code=true",
            err=True,
        )
    typer.echo(f"pulled {name} into {model}: use it as model.name={model}")
    return 0
