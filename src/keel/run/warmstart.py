"""The SFT warm start of a run; its weights are saved under a digest of its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keel.base.world import SINGLE_PROCESS, World
from keel.config.text import absolute_paths
from keel.models.loaded import LoadedModel
from keel.run.build import SftInputs
from keel.run.warmstart_cache import WarmstartResult, cached_sft
from keel.trainer.checkpoint import atomic_folder, full_state_dict, save_weights
from keel.trainer.integrity import WARMSTART, checksums, with_checksums
from keel.trainer.sft import Report

FOLDER = "warmstart"


def warmstart_folder(run: Path, config: Any) -> Path:
    """The folder of this configuration's warm start in the run's folder, named by a digest of its settings.

    The run's scorer does not affect it. Files enter the digest by size and modification time, since hashing a whole
    model would be slow.
    """
    plain = absolute_paths(config.to_dict())
    plain["model"].pop("scorer")
    files = [plain["model"]["name"], *_as_list(plain["data"]["path"]), *_as_list(plain["warmstart"]["path"])]
    sections = {name: plain[name] for name in ("model", "warmstart", "task", "data")}
    settings = {**sections, "seed": config.run.seed, "files": [_file_stamps(Path(name)) for name in files]}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return run / FOLDER / digest


def _as_list(path: Any) -> list[str]:
    return [] if path is None else [path] if isinstance(path, str) else list(path)


def _file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """(name, size, modification time) of a file or of every file in a folder; empty for a name that is neither."""
    path = path.expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a complete warm start; it is renamed last."""
    return (folder / WARMSTART).is_file()


def warmstart(
    folder: Path,
    loaded: LoadedModel,
    recipe: Callable[[LoadedModel], SftInputs],
    report: Report | None = None,
    world: World = SINGLE_PROCESS,
) -> WarmstartResult:
    """Train the loaded model in place and save its weights; returns the last loss and the cache file."""
    start = recipe(loaded)
    started = cached_sft(loaded, start, report, world)
    weights = full_state_dict(loaded.model, wanted=world.is_main)
    if world.is_main:
        with atomic_folder(folder) as temporary:
            save_weights(temporary, loaded.model, loaded.tokenizer, weights)
            record = with_checksums({"loss": started.loss, "steps": start.options.steps}, checksums(temporary))
            (temporary / WARMSTART).write_text(record, encoding="utf-8")
    world.barrier()
    return started
