"""`keel export`: write a model folder for other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app

EXPORT_HELP = """Write a checkpoint's model and a model card to a new folder, ready for transformers, peft or vLLM.

The newest checkpoint of a run is exported unless --checkpoint names another. A LoRA adapter is written in peft's
format, or as merged weights with --merged. The trainer state (trainer/) is not exported. The card's example code uses
FOLDER as the model's name, so name the folder as on the hub, and upload it with: hf upload me/sorter me/sorter

Examples:

  keel export runs/default me/sorter --checkpoint best

  keel export runs/lora me/sorter-whole --merged
"""


@app.command(help=EXPORT_HELP)
def export(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run folder or a model folder.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Output folder; it must be new or empty.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of a run: best or a step (default: the newest).")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Merge a LoRA adapter into the base weights.")] = False,
) -> int:
    from keel.lab.publish import export as write

    written = write(source, folder, checkpoint=checkpoint, merged=merged)
    typer.echo(f"exported {source} into {written}")
    return 0
