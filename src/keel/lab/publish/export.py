"""A checkpoint's model as a folder of its own: an adapter in peft's format, or merged into whole weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from keel.base.errors import KeelError
from keel.lab.publish.hub import CARD, merge_adapter, model_files, public_card, wants_merging
from keel.run.model_ref import model_folder, resolve_model


def export(source: str, folder: str | Path, *, checkpoint: str | None = None, merged: bool = False) -> Path:
    """Write the model of a run (its newest checkpoint, `best`, or a step) or of a folder into a new folder.

    `merged` adds a LoRA adapter's update to its base, W + (alpha / r) B A, and writes whole weights.
    """
    model_dir = model_folder(source, checkpoint)
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise KeelError(f"{target} is there already and not empty: name a folder that is not")
    merging = wants_merging(model_dir, merged)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if merging:
            merge_adapter(resolve_model(str(model_dir)), model_dir, target)
        else:
            for path in model_files(model_dir):
                copy = target / path.relative_to(model_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        card = target / CARD
        if card.is_file():
            card.write_text(public_card(card.read_text(encoding="utf-8"), str(target)), encoding="utf-8")
    except OSError as error:
        raise KeelError(f"cannot write {target}: {error.strerror or error}") from error
    return target
