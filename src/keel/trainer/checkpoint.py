"""Checkpoints: all state for an exact resume, written atomically.

`checkpoints/step-N/` is an ordinary transformers folder (or a peft adapter) with a model card. Its subfolder `trainer/`
holds the remaining state. A checkpoint is written to a temporary folder, synced to disk and renamed, so a folder called
`step-N` is complete. If `step-N` exists, it is first renamed to `.replaced-step-N`; `clean` renames it back if the
process was killed before the new one took its place. `trainer/state.json` records the sha256 of every file, so that a
changed file is reported by name (`integrity.py`).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import keel
from keel.base.errors import KeelError, first_line
from keel.base.files import sync_folder, write_atomic
from keel.models.dropout import original_dropout
from keel.models.fingerprint import persistent_buffers
from keel.models.head import is_lora
from keel.models.sharding import copy_into, full_tensor, is_sharded
from keel.reference import Reference
from keel.reference.weights import unwrap
from keel.trainer.checkpoint_parts import load_optimizer, load_pending, optimizer_state, save_pending
from keel.trainer.integrity import (
    MANIFEST,
    TRAINER,
    Damage,
    checksum,
    checksums,
    find_damage,
    saved_checksums,
    with_checksums,
)
from keel.trainer.integrity import STATE as RECORD
from keel.trainer.state import State, TrainingRun
from keel.trainer.summary import model_card

STATE, OPTIMIZER, REFERENCE, RNG = "state.json", "optimizer.pt", "reference.pt", "rng.pt"
MOMENTS = "optimizer"  # folder for torch.distributed.checkpoint, if moments are sharded
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY, _REPLACED = ".writing-", ".replaced-"


def save_checkpoint(folder: Path, run: TrainingRun, state: State, *, about: Mapping[str, Any] | None = None) -> Path:
    """Write `step-N` atomically. A failure, such as a full disk, raises a KeelError and keeps earlier checkpoints.

    All processes must call this: sharded weights are gathered, and rank 0 writes them.
    """
    target, world, model = folder / f"step-{state.step}", run.world, run.policy.model
    temporary = folder / f"{_TEMPORARY}step-{state.step}"
    if world.is_main:
        with _saving(target, temporary):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / TRAINER).mkdir(parents=True)
    world.barrier()
    weights = full_state_dict(model, wanted=world.is_main)
    with _saving(target, temporary, (OSError,)):  # a RuntimeError here means that another process has ended
        optimizer = optimizer_state(run.optimizer, model, temporary / TRAINER / MOMENTS)
    references = {name: _reference_state(reference) for name, reference in _references(run).items()}
    if world.is_main:
        with _saving(target, temporary):
            save_weights(temporary, model, run.policy.tokenizer, weights)
            (temporary / "README.md").write_text(model_card(run, state, about or {}), encoding="utf-8")
            save_pending(temporary / TRAINER, run, state)
            _save_trainer(temporary / TRAINER, state, optimizer, references, newest(folder))
            _flush(temporary)
            _move_into_place(temporary, target)
    world.barrier()
    return target


def _move_into_place(temporary: Path, target: Path) -> None:
    """Rename a complete folder to `target`. The folder that it replaces is removed when the new one is on disk."""
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    replaces = target.exists()  # a step is saved again after a rollback
    if replaces:
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaces:
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _saving(
    target: Path, temporary: Path, kinds: tuple[type[Exception], ...] = (OSError, RuntimeError)
) -> Iterator[None]:
    """Convert errors of a save to KeelError and remove its files. torch reports a failed write as RuntimeError."""
    try:
        yield
    except kinds as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise KeelError(
            f"cannot save the checkpoint {target}: {_reason(error)}; earlier checkpoints are intact: free some space "
            "and resume the run with --resume"
        ) from error


def full_state_dict(model: nn.Module, *, wanted: bool = True) -> dict[str, Tensor] | None:
    """The weights of a sharded model, gathered on the CPU of processes with `wanted`; None for other models.

    A LoRA model is not gathered, because only its adapters are saved, and these are never sharded.
    """
    if not is_sharded(model) or is_lora(model):
        return None
    tensors = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}
    gathered = ((name, full_tensor(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in gathered if wanted}


def save_weights(folder: Path, model: Any, tokenizer: Any, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save the model in transformers' format, or only the trained adapter in peft's format.

    The config keeps the model's original dropout values, although training disables dropout. `weights` are the
    gathered weights of a sharded model.
    """
    inner = unwrap(model)
    chosen: dict[str, Any] = {}
    if is_lora(inner):
        chosen["selected_adapters"] = [inner.active_adapters[0]]
    elif weights is not None or next(inner.parameters()).is_cuda:
        chosen["state_dict"] = state_dict_on_cpu(inner) if weights is None else dict(weights)
    try:
        with no_progress_bars(), original_dropout(inner):
            inner.save_pretrained(str(folder), **chosen)
    except SafetensorError as error:  # safetensors raises its own type for a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(str(folder))


def state_dict_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """The weights in main memory. Tied weights are stored once.

    transformers clones tensors that share a storage on their device. The sampler stores projections in one tensor, and
    a GPU may lack memory for the clones.
    """
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = tensor.cpu()
        state[name] = copies[key]
    return state


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would break the live display."""
    from transformers.utils import logging as hf_logging

    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `target` at the end. A failed write raises a KeelError."""
    temporary = target.parent / f"{_TEMPORARY}{target.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _move_into_place(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise KeelError(f"cannot write {target}: {_reason(error)}; free some space and run it again") from error


def save_manifest(folder: Path) -> None:
    """Write the checksums of a folder that has no other record."""
    (folder / MANIFEST).write_text(with_checksums({"keel": keel.__version__}, checksums(folder)), encoding="utf-8")


def _save_trainer(
    folder: Path,
    state: State,
    optimizer: Mapping[str, Any],
    references: Mapping[str, Mapping[str, Any]],
    previous: Path | None,
) -> None:
    torch.save(dict(optimizer), folder / OPTIMIZER)
    torch.save(rng_state(), folder / RNG)
    record: dict[str, Any] = {"keel": keel.__version__, "state": state.to_dict(), "reference": None}
    for name, saved in references.items():
        record[name] = {"kind": saved["kind"], "fingerprint": saved["fingerprint"]}
        _save_reference(folder, name, saved, previous)
    record["files"] = {
        str(path.relative_to(folder.parent)): path.stat().st_size
        for path in sorted(folder.parent.rglob("*"))
        if path.is_file()
    }
    (folder / STATE).write_text(with_checksums(record, checksums(folder.parent)), encoding="utf-8")


def _references(run: TrainingRun) -> dict[str, Reference]:
    """The references of all anchors by name. The record's entry and the file have the same name."""
    named = {"reference": run.reference, "teacher": None if run.teacher is None else run.teacher.reference}
    return {name: reference for name, reference in named.items() if reference is not None}


def _reference_state(reference: Reference) -> dict[str, Any]:
    """A reference's state. The state of a user's own reference may have any form and is stored under `own`."""
    state = reference.state_dict()
    if {"kind", "fingerprint", "moves"} <= state.keys():
        return state
    return {"kind": reference.kind, "fingerprint": reference.fingerprint(), "moves": None, "own": state}


def _save_reference(folder: Path, name: str, reference_state: Mapping[str, Any], previous: Path | None) -> None:
    """Save a reference. If it has not changed since the last checkpoint, hard-link that checkpoint's file.

    A damaged file is not linked, because its new checksum would hide the damage. A file without weights is small and is
    not linked either, so that damage to it affects only one checkpoint.
    """
    path = folder / f"{name}.pt"
    if reference_state.get("weights") and previous is not None and (before := read_record(previous)) is not None:
        same = (before.get(name) or {}).get("fingerprint") == reference_state["fingerprint"]
        old = previous / TRAINER / path.name
        saved = saved_checksums(previous).get(f"{TRAINER}/{path.name}")
        if same and saved is not None and old.is_file() and checksum(old) == saved:
            moved = torch.load(old, map_location="cpu", weights_only=True, mmap=True)["moves"]
            if moved is not None and moved == reference_state["moves"]:
                try:
                    os.link(old, path)
                    return
                except OSError:  # a file system without hard links
                    pass
    torch.save(dict(reference_state), path)


def load_checkpoint(folder: Path, run: TrainingRun) -> State:
    """Restore all state except the weights, which the model already has. Raises if the reference differs."""
    if run.queue is not None:
        run.queue.clear()
    record = _record_of(folder)
    trainer = folder / TRAINER
    load_optimizer(run.optimizer, run.policy.model, _load(trainer / OPTIMIZER), trainer / MOMENTS)
    references = _references(run)
    for name in ("reference", "teacher"):
        if (name in references) != (record.get(name) is not None):
            saved, now = ("has a", "has none") if record.get(name) else ("has no", "has one")
            raise KeelError(
                f"the checkpoint {folder} {saved} {name} and this configuration {now}: use the kl options of the saved "
                "run"
            )
    for name, reference in references.items():
        reference_state, expected = _load(trainer / f"{name}.pt"), record[name]["fingerprint"]
        if reference_state["fingerprint"] != expected:
            raise KeelError(
                f"the {name} in {folder} has fingerprint {reference_state['fingerprint'][:12]} but the checkpoint "
                f"says {expected[:12]}: the file was replaced; restore the saved file"
            )
        reference.load_state_dict(reference_state.get("own", reference_state))
    set_rng_state(_load(trainer / RNG))
    state = State.from_dict(record["state"])
    run.optimizer.factor = state.lr_factor
    if state.max_loss_scale is not None:
        run.optimizer.limit_loss_scale(0.0, state.max_loss_scale)
    run.engine.sync(run.policy.model, state.policy_version)
    if run.queue is not None:
        run.queue.restore(load_pending(trainer, run, state), state.policy_version)
    return state


def restore_weights(folder: Path, model: Any) -> None:
    """Load the checkpoint's weights into a model in place, because optimizer, engine and reference use its tensors.

    The checkpoint is first loaded on the CPU by the model's own class, so that names and tied weights match.
    """
    inner = unwrap(model)
    if is_lora(inner):
        from peft import load_peft_weights, set_peft_model_state_dict

        saved = load_peft_weights(str(folder), device="cpu")
        set_peft_model_state_dict(inner, saved, adapter_name=inner.active_adapters[0])
        return
    with no_progress_bars():
        fresh = type(inner).from_pretrained(str(folder), dtype=next(inner.parameters()).dtype)
    try:
        if is_sharded(model):
            saved_weights = fresh.state_dict()
            for name, tensor in inner.state_dict().items():
                copy_into(tensor, saved_weights[name])
        else:
            inner.load_state_dict(fresh.state_dict())
    except (RuntimeError, KeyError) as error:
        raise KeelError(
            f"the checkpoint {folder} does not fit the model that wrote it ({_reason(error)}): the model's "
            "loader must return a model that save_pretrained saves completely"
        ) from error


def rewrite_state(folder: Path, state: State) -> None:
    """Replace the state of a checkpoint atomically."""
    record = {**_record_of(folder), "state": state.to_dict()}
    write_atomic(folder / RECORD, with_checksums(record, saved_checksums(folder)))


def replace_reference(folder: Path, reference: Reference) -> None:
    """Rewrite a checkpoint's reference as a separate file, if the given one has the recorded fingerprint."""
    name, reference_state = f"{TRAINER}/{REFERENCE}", _reference_state(reference)
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if (record["reference"] or {}).get("fingerprint") != reference_state["fingerprint"]:
        return
    fresh = folder / TRAINER / f".{REFERENCE}.new"
    torch.save(dict(reference_state), fresh)
    record["files"][name] = fresh.stat().st_size
    text = with_checksums(record, {**saved_checksums(folder), name: checksum(fresh)})
    fresh.replace(folder / name)  # if killed here, the checkpoint stays damaged and can be repaired again
    write_atomic(folder / RECORD, text)


def _record_of(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    if record is None:
        wrong = next(iter(find_damage(folder, record=RECORD)), "it cannot be read")
        raise KeelError(f"the checkpoint {folder} is damaged: {wrong}; restore the file, or move the checkpoint away")
    return record


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's errors have no common base class
        raise KeelError(
            f"{path} cannot be read ({type(error).__name__}): restore the file, or move its checkpoint away"
        ) from error


def saved_state(folder: Path) -> State | None:
    """The state of an intact checkpoint, or None."""
    record = read_record(folder)
    return None if record is None else State.from_dict(record["state"])


def last_good(folder: Path, confirmed: int) -> Path | None:
    """The newest checkpoint of a confirmed step without skipped updates, or of step 0; None if there is none."""
    return next(iter(good_checkpoints(folder, confirmed)), None)


def good_checkpoints(folder: Path, confirmed: int) -> Iterator[Path]:
    """Good checkpoints, newest first."""
    for path in reversed(checkpoints(folder)):
        state = saved_state(path)
        if state is not None and (state.step == 0 or (state.good and state.step <= confirmed)):
            yield path


def newest_intact(
    folder: Path, repair: Callable[[Path, list[Damage]], bool] | None = None
) -> tuple[Path | None, list[tuple[Path, Damage]]]:
    """The newest checkpoint without damage, and the newer, damaged checkpoints with the first damage of each.

    `repair` tries to repair a damaged checkpoint and returns whether it succeeded.
    """
    damaged: list[tuple[Path, Damage]] = []
    for path in reversed(step_folders(folder)):
        wrong = find_damage(path, record=RECORD)
        if not wrong or (repair is not None and repair(path, wrong)):
            return path, damaged
        damaged.append((path, wrong[0]))
    return None, damaged


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint, to keep it for inspection."""
    return path.rename(quarantine_path(path))


def quarantine_path(path: Path) -> Path:
    """The path that `quarantine` uses: `damaged-step-N`, with a number if that path exists."""
    names = (f"damaged-{path.name}{'' if number == 1 else f'-{number}'}" for number in count(1))
    return next(candidate for name in names if not (candidate := path.with_name(name)).exists())


def drop_after(folder: Path, step: int) -> None:
    """Remove all checkpoints after `step`, including damaged ones."""
    for path in step_folders(folder):
        if step_of(path) > step:
            _remove(path)
    for replaced in folder.glob(f"{_REPLACED}*"):  # `clean` would restore one whose checkpoint was dropped
        _remove(replaced)


def _remove(path: Path) -> None:
    doomed = path.parent / f"{_TEMPORARY}old-{path.name}"
    path.rename(doomed)  # rename first, so that an interrupted removal does not leave a partial checkpoint
    shutil.rmtree(doomed, ignore_errors=True)


def step_folders(folder: Path) -> list[Path]:
    """All folders called `step-N`, including damaged ones, oldest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Intact checkpoints, oldest first; temporary folders and damaged ones are skipped."""
    return [path for path in step_folders(folder) if read_record(path) is not None]


def newest(folder: Path) -> Path | None:
    """The last intact checkpoint, or None."""
    intact = checkpoints(folder)
    return intact[-1] if intact else None


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def read_record(path: Path) -> dict[str, Any] | None:
    """`trainer/state.json`, or None if a file lacks its recorded size. `find_damage` also checks contents."""
    try:
        record: dict[str, Any] = json.loads((path / TRAINER / STATE).read_text(encoding="utf-8"))
        intact = all((path / name).stat().st_size == size for name, size in record["files"].items())
        intact = intact and isinstance(record["state"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file may contain any JSON
        return None
    return record if intact else None


def clean(folder: Path, *, keep: int | None = None, also: Collection[int | None] = ()) -> list[Path]:
    """Undo interrupted saves and remove their temporary folders. With `keep`, also remove old checkpoints.

    The last `keep` intact checkpoints and those in `also` stay. Damaged checkpoints do not count, so the last intact
    one is never removed.
    """
    for replaced in folder.glob(f"{_REPLACED}*"):
        target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not target.exists():
            replaced.rename(target)
    for leftover in (*folder.glob(f"{_TEMPORARY}*"), *folder.glob(f"{_REPLACED}*")):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return []
    removed = []
    for path in checkpoints(folder)[: -max(1, keep)]:
        if step_of(path) not in also:
            _remove(path)
            removed.append(path)
    return removed


def rng_state() -> dict[str, Any]:
    """The random states of torch, CUDA and Python. Dropout depends on them; sampling noise does not."""
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [int(version), list(internal), following],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `rng_state`."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))


def _flush(folder: Path) -> None:
    """fsync every file and folder. Call it before the rename."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
