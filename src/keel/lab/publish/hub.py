"""To a hub: a checkpoint's model with its card, through huggingface_hub."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.lab.publish.pull import check_repo, hub_errors
from keel.rollout.native.weights import merge
from keel.run.model_ref import ModelRef, model_folder, resolve_model
from keel.trainer.card import MODEL_CODE, is_hub_name
from keel.trainer.checkpoint import save_weights
from keel.trainer.integrity import MANIFEST, TRAINER, WARMSTART

CARD = "README.md"


@dataclass(frozen=True)
class PushResult:
    """The repository's URL and the files pushed; `notes` are for those who pull them."""

    url: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def push(
    source: str,
    repo: str,
    *,
    checkpoint: str | None = None,
    private: bool = False,
    merged: bool = False,
    api: Any = None,
) -> PushResult:
    """Upload the model of a run (its newest checkpoint, `best`, or a step) or of a folder, in one commit.

    `merged` puts a LoRA adapter into its base first and uploads whole weights. `trainer/` stays here: it is for
    resuming. `api` is an object with HfApi's `create_repo`, `repo_info` and `create_commit` (default: HfApi itself).
    """
    check_repo(repo)
    folder = model_folder(source, checkpoint)
    if not wants_merging(folder, merged):
        return _upload(folder, repo, private, api, _adapter_notes(folder) if _is_adapter(folder) else ())
    with tempfile.TemporaryDirectory(prefix="keel-merged-") as merged_folder:
        merge_adapter(resolve_model(str(folder)), folder, Path(merged_folder))
        return _upload(Path(merged_folder), repo, private, api, ())


def wants_merging(folder: Path, merged: bool) -> bool:
    """`merged`, once it is clear that there is something to merge."""
    if merged and not _is_adapter(folder):
        raise KeelError(f"--merged is for LoRA adapters, and {folder} holds whole weights: leave it out")
    return merged


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def merge_adapter(model_ref: ModelRef, folder: Path, target: Path) -> None:
    """The base with the adapter's update added to its weights, in the ordinary format, with the adapter's card."""
    model = model_ref.config.model.model_copy(update={"quantization": None})  # what is rounded cannot be added to
    loaded = replace(model_ref, config=model_ref.config.model_copy(update={"model": model})).load()
    save_weights(target, merge(loaded.model), loaded.tokenizer)
    card = folder / CARD
    if card.is_file():
        (target / CARD).write_text(_merged_card(card.read_text(encoding="utf-8")), encoding="utf-8")


def _upload(folder: Path, repo: str, private: bool, api: Any, notes: tuple[str, ...]) -> PushResult:
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi() if api is None else api
    with hub_errors(f"push to {repo}"):
        url = hub.create_repo(repo_id=repo, private=private or None, exist_ok=True)
        repo = url.repo_id  # a name without an owner is the user's own
        # one that is there already keeps its visibility, whatever was asked for
        if private and not hub.repo_info(repo_id=repo).private:
            raise KeelError(f"{repo} is there already and public: make it private on its page, or leave out --private")
    operations = []
    for path in model_files(folder):
        name = path.relative_to(folder).as_posix()
        data: Any = public_card(path.read_text(encoding="utf-8"), repo).encode() if name == CARD else path
        operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=data))
    with hub_errors(f"push to {repo}"):
        hub.create_commit(repo_id=repo, operations=operations, commit_message=f"{folder.name} by keel push")
    names = tuple(operation.path_in_repo for operation in operations)
    if CARD not in names:
        notes += ("the folder has no README.md, so the model has no card",)
    return PushResult(str(url), names, notes)


def model_files(folder: Path) -> list[Path]:
    """A model's files, without what resuming needs and what tools keep to themselves (a pulled folder has .cache)."""

    def is_private(parts: tuple[str, ...]) -> bool:
        return parts[0] in (TRAINER, MANIFEST, WARMSTART) or any(part.startswith(".") for part in parts)

    return sorted(p for p in folder.rglob("*") if p.is_file() and not is_private(p.relative_to(folder).parts))


def _adapter_notes(folder: Path) -> tuple[str, ...]:
    """A note where the adapter's base cannot be found by others."""
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base and is_hub_name(base):
        return ()
    named = f"its base {base!r} is not a name on a hub" if base else "it does not name its base"
    return (f"the adapter was pushed alone and {named}: use --merged for weights that others can load",)


def public_card(card: str, repo: str) -> str:
    """The card as the hub shows it: loaded by its name there, and without the part that stayed here."""
    card = card.replace("path/to/this/folder", repo)
    return re.sub(r"\n`trainer/` holds [^\n]*\n", "\n", card).rstrip() + "\n"


def _merged_card(card: str) -> str:
    """An adapter's card, once its update is part of the weights."""
    from huggingface_hub import ModelCard

    merged = ModelCard(card, ignore_metadata_errors=True)
    merged.data["library_name"] = "transformers"
    merged.text = re.sub(r"```python\n.*?\n```", f"```python\n{MODEL_CODE}\n```", merged.text, count=1, flags=re.DOTALL)
    return str(merged)
