"""Export a checkpoint's model to a folder: an adapter in peft's format, or merged into full weights."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from keel.base.errors import KeelError
from keel.models.lora import merge
from keel.run.model_ref import ModelRef, model_folder, resolve_model
from keel.trainer.checkpoint import save_weights
from keel.trainer.integrity import MANIFEST, TRAINER, WARMSTART
from keel.trainer.summary import MODEL_CODE

CARD = "README.md"


def export(source: str, folder: str | Path, *, checkpoint: str | None = None, merged: bool = False) -> Path:
    """Write the model of a run (its newest checkpoint, `best`, or a step) or of a folder into a new folder.

    `merged` adds a LoRA adapter's update to its base, W + (alpha / r) B A, and writes full weights.
    """
    model_dir = model_folder(source, checkpoint)
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise KeelError(f"{target} exists and is not empty: name a new or empty folder")
    if merged and not (model_dir / "adapter_config.json").is_file():
        raise KeelError(f"--merged needs a LoRA adapter, and {model_dir} has full weights: leave --merged out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if merged:
            _merge_adapter(resolve_model(str(model_dir)), model_dir, target)
        else:
            for path in _model_files(model_dir):
                copy = target / path.relative_to(model_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        card = target / CARD
        if card.is_file():
            card.write_text(_public_card(card.read_text(encoding="utf-8"), str(target)), encoding="utf-8")
    except OSError as error:
        raise KeelError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _merge_adapter(model_ref: ModelRef, folder: Path, target: Path) -> None:
    """Write the base with the adapter's update added to its weights, and the adapter's card."""
    # adapters cannot be merged into quantized weights
    model = model_ref.config.model.model_copy(update={"quantization": None})
    loaded = replace(model_ref, config=model_ref.config.model_copy(update={"model": model})).load()
    save_weights(target, merge(loaded.model), loaded.tokenizer)
    card = folder / CARD
    if card.is_file():
        (target / CARD).write_text(_merged_card(card.read_text(encoding="utf-8")), encoding="utf-8")


def _model_files(folder: Path) -> list[Path]:
    """A model's files, without those for resuming and hidden ones (a downloaded model has .cache)."""

    def is_private(parts: tuple[str, ...]) -> bool:
        return parts[0] in (TRAINER, MANIFEST, WARMSTART) or any(part.startswith(".") for part in parts)

    return sorted(p for p in folder.rglob("*") if p.is_file() and not is_private(p.relative_to(folder).parts))


def _public_card(card: str, name: str) -> str:
    """The card with the model's name in its code, without the part on files that are not exported."""
    card = card.replace("path/to/this/folder", name)
    return re.sub(r"\n`trainer/` holds [^\n]*\n", "\n", card).rstrip() + "\n"


def _merged_card(card: str) -> str:
    """An adapter's card, changed for merged weights."""
    from huggingface_hub import ModelCard

    merged = ModelCard(card, ignore_metadata_errors=True)
    merged.data["library_name"] = "transformers"
    merged.text = re.sub(r"```python\n.*?\n```", f"```python\n{MODEL_CODE}\n```", merged.text, count=1, flags=re.DOTALL)
    return str(merged)
