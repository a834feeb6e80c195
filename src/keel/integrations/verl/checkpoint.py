"""Keel's part of a verl checkpoint: `global_step_N/keel.json`, with the state of the controller of β."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.kl import KLOptions, KLState

STATE = "keel.json"
logger = logging.getLogger("keel")


def saved_folder(trainer: Any, step: int) -> Path:
    """Where verl writes the checkpoint of that step; `trainer` is that section of its configuration."""
    return Path(trainer.default_local_dir) / f"global_step_{step}"


def resumed_folder(trainer: Any, step: int) -> Path:
    """The checkpoint that verl has resumed from."""
    return Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else saved_folder(trainer, step)


def _settings(kl: KLOptions) -> dict[str, Any]:
    """What a state belongs to: under other settings it would steer something else."""
    return json.loads(json.dumps({"beta": kl.beta, "controller": kl.controller.model_dump()}))


def save_state(folder: Path, kl: KLOptions, state: KLState) -> None:
    """Write keel.json before verl writes its part, so that no complete checkpoint is without it."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"keel": keel.__version__, "settings": _settings(kl), "state": state.to_dict()}
    write_atomic(folder / STATE, json.dumps(record, indent=1))


def load_state(folder: Path, kl: KLOptions) -> KLState | None:
    """The controller's state; None of a checkpoint of plain verl, or where β or its controller were changed since."""
    path = folder / STATE
    if not path.is_file():
        logger.warning("%s is a checkpoint of plain verl: Keel's controller of β begins anew", folder)
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings, state = record["settings"], KLState.from_dict(record["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{path} cannot be read ({error}): put it back, or resume from another checkpoint") from None
    if settings != _settings(kl):
        logger.warning("kl.beta or kl.controller is not that of %s: β begins anew, at %g", path, kl.beta)
        return None
    return state
