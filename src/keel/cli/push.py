"""`keel push`: a model to a hub."""

from __future__ import annotations

from typing import Annotated

import typer

from keel.cli.app import app

HELP = """Upload a checkpoint's model and its card to a hub, in one commit.

Of a run the newest checkpoint is taken unless --checkpoint names another. A LoRA adapter is uploaded in peft's format,
or with --merged as whole weights. What resuming needs (trainer/) stays here. Log in first: hf auth login.

Examples:

  keel push runs/default me/sorter --checkpoint best --private

  keel push runs/lora me/sorter-whole --merged
"""


@app.command(help=HELP)
def push(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run, or a folder that holds a model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Where to: owner/name.")],
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: best or a step; the newest by default.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Upload a LoRA adapter as whole weights.")] = False,
) -> int:
    from keel.lab.publish import hub

    pushed = hub.push(source, repo, checkpoint=checkpoint, private=private, merged=merged)
    for note in pushed.notes:
        typer.echo(f"keel: note: {note}", err=True)
    typer.echo(f"pushed {len(pushed.files)} files to {pushed.url}")
    return 0
