"""Checkpoints: everything a run needs to go on exactly, written so that a kill at any moment loses no earlier one.

`checkpoints/step-N/` is an ordinary transformers folder (or a peft adapter) with a model card; `trainer/` inside it
holds the rest. It is written beside it, brought to the disk, and renamed: a folder called `step-N` is complete.
Its record, `trainer/state.json`, has the sha256 of every file: one that has changed since is named (`integrity.py`).
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
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.models.adapters import is_lora
from keel.models.dropout import original_dropout
from keel.models.fingerprint import persistent_buffers
from keel.models.sharding import is_sharded, put, whole
from keel.reference import Reference
from keel.reference.weights import unwrap
from keel.trainer.card import model_card
from keel.trainer.integrity import MANIFEST, TRAINER, Damage, checksum, checksums, damages, saved_sums, with_checksums
from keel.trainer.integrity import STATE as RECORD
from keel.trainer.moments import load_optimizer, saved_optimizer
from keel.trainer.pending import load_pending, save_pending
from keel.trainer.state import State, TrainingRun

STATE, OPTIMIZER, REFERENCE, RNG = "state.json", "optimizer.pt", "reference.pt", "rng.pt"
MOMENTS = "optimizer"  # a folder of torch.distributed.checkpoint, where moments are spread over processes
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = ".writing-"


def save_checkpoint(folder: Path, run: TrainingRun, state: State, *, about: Mapping[str, Any] | None = None) -> Path:
    """Write `step-N` completely or not at all; what fails (a full disk) is one line, and earlier checkpoints stay.

    All processes take part: weights that are spread over them are gathered, and the first writes what is whole.
    """
    target, world, model = folder / f"step-{state.step}", run.world, run.policy.model
    temporary = folder / f"{_TEMPORARY}step-{state.step}"
    if world.leads:
        with _saving(target, temporary):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / TRAINER).mkdir(parents=True)
    world.wait()
    weights = whole_state(model, wanted=world.leads)
    with _saving(target, temporary, (OSError,)):  # what else is raised here is another process's end
        optimizer = saved_optimizer(run.optimizer, model, temporary / TRAINER / MOMENTS)
    references = {name: _reference_state(reference) for name, reference in _references(run).items()}
    if world.leads:
        with _saving(target, temporary):
            save_weights(temporary, model, run.policy.tokenizer, weights)
            (temporary / "README.md").write_text(model_card(run, state, about or {}), encoding="utf-8")
            save_pending(temporary / TRAINER, run, state)
            _save_trainer(temporary / TRAINER, state, optimizer, references, newest(folder))
            _flush(temporary)
            if target.exists():  # a rollback came past this step again
                shutil.rmtree(target)
            temporary.rename(target)
            _flush_folder(folder)
    world.wait()
    return target


@contextmanager
def _saving(
    target: Path, temporary: Path, kinds: tuple[type[Exception], ...] = (OSError, RuntimeError)
) -> Iterator[None]:
    """What stops a save is one line, and leaves nothing of it behind; torch reports a failed write as RuntimeError."""
    try:
        yield
    except kinds as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise KeelError(
            f"cannot save the checkpoint {target}: {_reason(error)}; earlier checkpoints are intact: free some space "
            "and resume the run with --resume"
        ) from error


def whole_state(model: nn.Module, *, wanted: bool = True) -> dict[str, Tensor] | None:
    """The weights of a model that is spread over processes, in main memory where they are wanted; None of any other.

    Adapters are whole everywhere, and all that is saved of a model that has some.
    """
    if not is_sharded(model) or is_lora(model):
        return None
    tensors = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}
    gathered = ((name, whole(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in gathered if wanted}


def save_weights(folder: Path, model: Any, tokenizer: Any, weights: Mapping[str, Tensor] | None = None) -> None:
    """In the ordinary format: a transformers folder, or the trained adapter alone in peft's.

    The config keeps the model's own dropout values, which are off in the model that runs. `weights` are those of a
    model that does not have them whole.
    """
    inner = unwrap(model)
    chosen: dict[str, Any] = {"selected_adapters": [inner.active_adapters[0]]} if is_lora(inner) else {}
    if weights is not None:
        chosen["state_dict"] = dict(weights)
    try:
        with no_progress_bars(), original_dropout(inner):
            inner.save_pretrained(str(folder), **chosen)
    except SafetensorError as error:  # a full disk has a type of its own there
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(str(folder))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """No progress bars of transformers: they would tear the live display."""
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
    """A folder that becomes `target` once all is written; a failed write is one line and leaves nothing behind."""
    temporary = target.parent / f"{_TEMPORARY}{target.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise KeelError(f"cannot write {target}: {_reason(error)}; free some space and run it again") from error


def save_manifest(folder: Path) -> None:
    """The checksums of a folder that has no record of its own."""
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
    """What the policy is held near, by the name of its entry and its file."""
    named = {"reference": run.reference, "teacher": None if run.teacher is None else run.teacher.reference}
    return {name: reference for name, reference in named.items() if reference is not None}


def _reference_state(reference: Reference) -> dict[str, Any]:
    """A reference's state; a user's own, which may hold anything, lies below the three entries that are read here."""
    state = reference.state_dict()
    if {"kind", "fingerprint", "moves"} <= state.keys():
        return state
    return {"kind": reference.kind, "fingerprint": reference.fingerprint(), "moves": None, "own": state}


def _save_reference(folder: Path, name: str, reference_state: Mapping[str, Any], previous: Path | None) -> None:
    """A reference that has not moved since the last checkpoint is the same file: a hard link instead of a copy.

    A file that is not as it was saved is not linked: its new checksum would make the damage good.
    """
    path = folder / f"{name}.pt"
    if previous is not None and (before := read_record(previous)) is not None:
        same = (before.get(name) or {}).get("fingerprint") == reference_state["fingerprint"]
        old = previous / TRAINER / path.name
        saved = saved_sums(previous).get(f"{TRAINER}/{path.name}")
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
    """Everything but the weights, which the model was built from; a reference that does not match is refused."""
    if run.queue is not None:
        run.queue.clear()
    record = _record_of(folder)
    trainer = folder / TRAINER
    load_optimizer(run.optimizer, run.policy.model, _load(trainer / OPTIMIZER), trainer / MOMENTS)
    references = _references(run)
    for name in ("reference", "teacher"):
        if (name in references) != (record.get(name) is not None):
            saved = f"has a {name}" if record.get(name) else f"has no {name}"
            raise KeelError(
                f"the checkpoint {folder} {saved} and this configuration wants it otherwise: keep kl as it was"
            )
    for name, reference in references.items():
        reference_state, expected = _load(trainer / f"{name}.pt"), record[name]["fingerprint"]
        if reference_state["fingerprint"] != expected:
            raise KeelError(
                f"the {name} in {folder} has fingerprint {reference_state['fingerprint'][:12]} but the checkpoint "
                f"says {expected[:12]}: the file was exchanged; use the one that was saved"
            )
        reference.load_state_dict(reference_state.get("own", reference_state))
    set_rng_state(_load(trainer / RNG))
    state = State.from_dict(record["state"])
    run.optimizer.factor = state.lr_factor
    run.engine.sync(run.policy.model, state.policy_version)
    if run.queue is not None:
        run.queue.restore(load_pending(trainer, run, state), state.policy_version)
    return state


def restore_weights(folder: Path, model: Any) -> None:
    """The checkpoint's weights into a model that is in use, in place: optimizer, engine and reference keep theirs.

    The full model is read into main memory first, by its own class, so that names and tied weights come out as they
    were saved.
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
                put(tensor, saved_weights[name])
        else:
            inner.load_state_dict(fresh.state_dict())
    except (RuntimeError, KeyError) as error:
        raise KeelError(
            f"the checkpoint {folder} does not fit the model that wrote it ({_reason(error)}): the loader has to "
            "return a model that save_pretrained saves whole"
        ) from error


def rewrite_state(folder: Path, state: State) -> None:
    """Replace the state of a checkpoint, atomically, and leave the rest as it is."""
    record = {**_record_of(folder), "state": state.to_dict()}
    write_atomic(folder / RECORD, with_checksums(record, saved_sums(folder)))


def replace_reference(folder: Path, reference: Reference) -> None:
    """Write a checkpoint's reference anew, as a file of its own, if it is the one that the checkpoint names."""
    name, reference_state = f"{TRAINER}/{REFERENCE}", _reference_state(reference)
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if (record["reference"] or {}).get("fingerprint") != reference_state["fingerprint"]:
        return
    fresh = folder / TRAINER / f".{REFERENCE}.new"
    torch.save(dict(reference_state), fresh)
    record["files"][name] = fresh.stat().st_size
    text = with_checksums(record, {**saved_sums(folder), name: checksum(fresh)})
    fresh.replace(folder / name)  # a kill here leaves a damaged checkpoint, which is what it was
    write_atomic(folder / RECORD, text)


def _record_of(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    if record is None:
        wrong = next(iter(damages(folder, record=RECORD)), "it cannot be read")
        raise KeelError(f"the checkpoint {folder} is damaged: {wrong}; put the file back, or move the checkpoint away")
    return record


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own types differ by what is wrong
        raise KeelError(
            f"{path} cannot be read ({type(error).__name__}): put the file back, or move its checkpoint away"
        ) from error


def saved_state(folder: Path) -> State | None:
    """The state of an intact checkpoint, or None."""
    record = read_record(folder)
    return None if record is None else State.from_dict(record["state"])


def last_good(folder: Path, confirmed: int) -> Path | None:
    """The newest checkpoint whose step was fine, and whose weights the step after it found fine; or the start."""
    return next(iter(good_checkpoints(folder, confirmed)), None)


def good_checkpoints(folder: Path, confirmed: int) -> Iterator[Path]:
    """`last_good`, and those before it that are good too."""
    for path in reversed(checkpoints(folder)):
        state = saved_state(path)
        if state is not None and (state.step == 0 or (state.good and state.step <= confirmed)):
            yield path


def newest_intact(
    folder: Path, mend: Callable[[Path, list[Damage]], bool] | None = None
) -> tuple[Path | None, list[tuple[Path, Damage]]]:
    """The newest checkpoint with every file as it was saved, and the damaged ones after it with their first damage.

    `mend` may repair a damaged one, and returns whether it did.
    """
    damaged: list[tuple[Path, Damage]] = []
    for path in reversed(numbered(folder)):
        wrong = damages(path, record=RECORD)
        if not wrong or (mend is not None and mend(path, wrong)):
            return path, damaged
        damaged.append((path, wrong[0]))
    return None, damaged


def quarantine(path: Path) -> Path:
    """Move a damaged checkpoint out of the run's way, for inspection."""
    return path.rename(quarantine_path(path))


def quarantine_path(path: Path) -> Path:
    """Where `quarantine` will put it: `damaged-step-N`, with a number where an earlier one has that name."""
    names = (f"damaged-{path.name}{'' if number == 1 else f'-{number}'}" for number in count(1))
    return next(candidate for name in names if not (candidate := path.with_name(name)).exists())


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints past `step`, damaged ones too."""
    for path in numbered(folder):
        if step_of(path) > step:
            _remove(path)


def _remove(path: Path) -> None:
    doomed = path.parent / f"{_TEMPORARY}old-{path.name}"
    path.rename(doomed)  # half a removal is no longer called step-N
    shutil.rmtree(doomed, ignore_errors=True)


def numbered(folder: Path) -> list[Path]:
    """The folders called `step-N`, oldest first, damaged or not."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Intact checkpoints, oldest first; temporary folders and damaged ones are skipped."""
    return [path for path in numbered(folder) if read_record(path) is not None]


def newest(folder: Path) -> Path | None:
    """The last intact checkpoint, or None."""
    intact = checkpoints(folder)
    return intact[-1] if intact else None


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def read_record(path: Path) -> dict[str, Any] | None:
    """`trainer/state.json` if the checkpoint looks intact: every file there, at its size. `damages` reads them all."""
    try:
        record: dict[str, Any] = json.loads((path / TRAINER / STATE).read_text(encoding="utf-8"))
        intact = all((path / name).stat().st_size == size for name, size in record["files"].items())
        intact = intact and isinstance(record["state"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it may hold any JSON
        return None
    return record if intact else None


def clean(folder: Path, *, keep: int | None = None, also: Collection[int | None] = ()) -> list[Path]:
    """Remove leftovers of a kill while saving and, with `keep`, all but the last `keep` checkpoints and `also`.

    Only intact checkpoints count, so the last of them is never removed.
    """
    for leftover in folder.glob(f"{_TEMPORARY}*"):
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
    """Random streams of torch, CUDA and Python: the noise of sampling does not depend on them, dropout does."""
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [int(version), list(internal), following],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))


def _flush(folder: Path) -> None:
    """Every file and folder to the disk itself, before the rename makes them a checkpoint."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a system that cannot open folders
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
