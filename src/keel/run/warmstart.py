"""The supervised start of a run, done once: its weights are kept under a digest of what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keel.base.world import SINGLE_PROCESS, World
from keel.config.text import absolute_paths
from keel.models.loaded import LoadedModel
from keel.run.build import Supervised
from keel.run.warmstart_cache import Started, cached_sft
from keel.trainer.checkpoint import atomic_folder, save_weights, whole_state
from keel.trainer.integrity import WARMSTART, checksums, with_checksums
from keel.trainer.sft import Report

FOLDER = "warmstart"


def warmstart_folder(run: Path, config: Any) -> Path:
    """Where the warm start of this configuration lies in the run's folder, or will lie: under all that makes it.

    It is scored by Keel's own pass whatever scorer the run has. Files that are named count by size and time of change:
    a hash of a whole model would cost more than it saves.
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
    """(name, size, time of change) of a file or of every file of a folder; nothing for a name that is neither."""
    path = path.expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def is_complete(folder: Path) -> bool:
    """Whether a warm start was finished there: the folder gets its name last."""
    return (folder / WARMSTART).is_file()


def warmstart(
    folder: Path,
    loaded: LoadedModel,
    recipe: Callable[[LoadedModel], Supervised],
    report: Report | None = None,
    world: World = SINGLE_PROCESS,
) -> Started:
    """Train the loaded model in place and keep its weights; returns how it ended."""
    start = recipe(loaded)
    started = cached_sft(loaded, start, report, world)
    weights = whole_state(loaded.model, wanted=world.is_main)
    if world.is_main:
        with atomic_folder(folder) as temporary:
            save_weights(temporary, loaded.model, loaded.tokenizer, weights)
            record = with_checksums({"loss": started.loss, "steps": start.options.steps}, checksums(temporary))
            (temporary / WARMSTART).write_text(record, encoding="utf-8")
    world.barrier()
    return started
