"""Keel's part of a TRL checkpoint: the state of the controller and the guards, and a reference that has moved."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.reference import Reference
from keel.trainer.state import State

STATE, REFERENCE = "keel.json", "keel_reference.pt"
STILL = ("frozen", "adapter_off")  # kinds of references that never move, so their weights need not be saved
_NAME = re.compile(r"checkpoint-(\d+)")


def save_state(
    folder: Path,
    state: State,
    batches: int,
    reference: Reference,
    start: str,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write keel.json, and the weights of a reference that moves.

    The weights are needed to return to this checkpoint after the reference has moved again. `options`, by dotted name,
    must not change on resume.
    """
    fingerprint = reference.fingerprint()
    record = {
        "keel": keel.__version__,
        "state": state.to_dict(),
        "batches": batches,
        "options": dict(options or {}),
        "reference": {"kind": reference.kind, "fingerprint": fingerprint, "start": start},
    }
    if reference.kind not in STILL or fingerprint != start:
        unfinished = folder / f".{REFERENCE}.tmp"
        torch.save(reference.state_dict(), unfinished)
        os.replace(unfinished, folder / REFERENCE)
    write_atomic(folder / STATE, json.dumps(record, indent=1))


def load_state(
    folder: Path, reference: Reference, start: str, options: Mapping[str, Any] | None = None
) -> tuple[State, int] | None:
    """Restore the reference; return the state and the number of rollout batches, or None for a plain TRL checkpoint.

    Options that differ from the saved ones are refused, because β, the controller's state and the reference depend on
    them.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        saved, batches = record["reference"], int(record["batches"])
        state = State.from_dict(record["state"])
        before = dict(record["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{path} cannot be read ({error}): put it back, or resume from another checkpoint") from None
    for name, now in (options or {}).items():
        if name in before and before[name] != now:
            raise KeelError(
                f"{name} was {before[name]!r} in {folder} and is {now!r} now: resume with what it was, or start a new "
                "run from that checkpoint with model=…"
            )
    if saved["start"] != start:
        raise KeelError(
            f"the run of {folder} began with a reference of fingerprint {saved['start'][:12]}, this trainer with "
            f"{start[:12]}: build the trainer with the model that the run was started with, and let "
            "resume_from_checkpoint load the policy"
        )
    if saved["kind"] != reference.kind:
        raise KeelError(f"the saved reference is {saved['kind']!r} but reference.kind is {reference.kind!r}: keep one")
    if (folder / REFERENCE).is_file() or saved["fingerprint"] != reference.fingerprint():
        try:
            weights = torch.load(folder / REFERENCE, map_location="cpu", weights_only=True)
        except Exception as error:
            raise KeelError(f"{folder / REFERENCE} cannot be read ({type(error).__name__}): put it back") from None
        reference.load_state_dict(weights)
    return state, batches


def saved_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """TRL's checkpoints as (step, folder), oldest first."""
    folders = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in folders)


def good_checkpoints(output_dir: Path, confirmed: int) -> Iterator[Path]:
    """Checkpoints up to the last confirmed step whose own update was applied, newest first."""
    for step, path in reversed(saved_checkpoints(output_dir)):
        whole = all((path / name).is_file() for name in (STATE, TRAINER_STATE_NAME))  # TRL writes its state last
        if step <= confirmed and whole:
            record: Any = json.loads((path / STATE).read_text(encoding="utf-8"))
            if State.from_dict(record["state"]).good:
                yield path
