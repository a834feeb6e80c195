"""Keel's part of a TRL checkpoint: the controller's and the guards' state, and a reference that has moved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.reference import Reference
from keel.trainer.state import State

STATE, REFERENCE = "keel.json", "keel_reference.pt"
_NAME = re.compile(r"checkpoint-(\d+)")


def save_state(folder: Path, state: State, batches: int, reference: Reference, start: str) -> None:
    """Write keel.json, and the reference's weights where they are no longer those of the start, which is built anew."""
    fingerprint = reference.fingerprint()
    record = {
        "keel": keel.__version__,
        "state": state.to_dict(),
        "batches": batches,
        "reference": {"kind": reference.kind, "fingerprint": fingerprint, "start": start},
    }
    if fingerprint != start:
        torch.save(reference.state_dict(), folder / REFERENCE)
    write_atomic(folder / STATE, json.dumps(record, indent=1))


def load_state(folder: Path, reference: Reference, start: str) -> tuple[State, int] | None:
    """The state and the batches of rollouts so far, with the reference put back; None of a plain TRL checkpoint."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        saved, batches = record["reference"], int(record["batches"])
        state = State.from_dict(record["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{path} cannot be read ({error}): put it back, or resume from another checkpoint") from None
    if saved["start"] != start:
        raise KeelError(
            f"the run of {folder} began with a reference of fingerprint {saved['start'][:12]}, this trainer with "
            f"{start[:12]}: build the trainer with the model that the run was started with, and let "
            "resume_from_checkpoint load the policy"
        )
    if saved["kind"] != reference.kind:
        raise KeelError(f"the saved reference is {saved['kind']!r} but reference.kind is {reference.kind!r}: keep one")
    if saved["fingerprint"] != start:
        try:
            weights = torch.load(folder / REFERENCE, map_location="cpu", weights_only=True)
        except Exception as error:
            raise KeelError(f"{folder / REFERENCE} cannot be read ({type(error).__name__}): put it back") from None
        reference.load_state_dict(weights)
    return state, batches


def saved_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of TRL's checkpoints, oldest first."""
    folders = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in folders)


def good_checkpoints(output_dir: Path, confirmed: int) -> Iterator[Path]:
    """Those up to the last step whose weights were seen to be fine, and whose own update was made; newest first."""
    for step, path in reversed(saved_checkpoints(output_dir)):
        record: Any = json.loads((path / STATE).read_text(encoding="utf-8")) if (path / STATE).is_file() else None
        if step <= confirmed and record is not None and State.from_dict(record["state"]).good:
            yield path
