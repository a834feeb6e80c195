"""`keel push` and `keel pull`: models to a hub and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app

PUSH_HELP = """Upload a checkpoint's model and its card to a hub, in one commit.

Of a run the newest checkpoint is taken unless --checkpoint names another. A LoRA adapter is uploaded in peft's format,
or with --merged as whole weights. What resuming needs (trainer/) stays here. Log in first: hf auth login.

Examples:

  keel push runs/default me/sorter --checkpoint best --private

  keel push runs/lora me/sorter-whole --merged
"""

PULL_HELP = """Download a model from a hub into a new folder, for model.name, keel eval or keel kl.

Code that a model brings is downloaded and never run, unless model.trust_remote_code=true is set when it is loaded.

Examples:

  keel pull HuggingFaceTB/SmolLM2-135M-Instruct models/smollm2

  keel train configs/default.yaml model.name=models/smollm2
"""


@app.command(help=PUSH_HELP)
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


@app.command(help=PULL_HELP)
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model's name on the hub: owner/name.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; it must be new or empty.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; the default branch by default.")] = None,
) -> int:
    from keel.lab.publish import hub

    model = hub.pull(name, folder, revision=revision)
    if hub.brings_code(model):
        typer.echo(
            f"keel: note: {name} brings Python code of its own: it is refused unless model.trust_remote_code=true",
            err=True,
        )
    typer.echo(f"pulled {name} into {model}: use it as model.name={model}")
    return 0
