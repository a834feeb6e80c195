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
    found = model_folder(source, checkpoint)
    place = Path(folder).expanduser()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise KeelError(f"{place} is there already and not empty: name a folder that is not")
    whole = wants_merging(found, merged)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if whole:
            merge_adapter(resolve_model(str(found)), found, place)
        else:
            for path in model_files(found):
                target = place / path.relative_to(found)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        card = place / CARD
        if card.is_file():
            card.write_text(public_card(card.read_text(encoding="utf-8"), str(place)), encoding="utf-8")
    except OSError as error:
        raise KeelError(f"cannot write {place}: {error.strerror or error}") from error
    return place
