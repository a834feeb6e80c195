"""`keel export`: a run's model as a folder that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app

EXPORT_HELP = """Write a checkpoint's model and its card into a new folder, ready for transformers, peft or vLLM.

Of a run the newest checkpoint is taken unless --checkpoint names another. A LoRA adapter is written in peft's format,
or with --merged as whole weights. What resuming needs (trainer/) stays behind. The card's example code names FOLDER, so
give it the name that the model will have on a hub, and upload it with: hf upload me/sorter me/sorter

Examples:

  keel export runs/default me/sorter --checkpoint best

  keel export runs/lora me/sorter-whole --merged
"""


@app.command(help=EXPORT_HELP)
def export(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run, or a folder that holds a model.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be new or empty.")],
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: best or a step; the newest by default.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Write a LoRA adapter as whole weights.")] = False,
) -> int:
    from keel.lab.publish.export import export as write

    written = write(source, folder, checkpoint=checkpoint, merged=merged)
    typer.echo(f"exported {source} into {written}")
    return 0
