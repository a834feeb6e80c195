"""What must hold before a run goes on: the same settings, and its checkpoints where it left them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from keel.config import Config, load_config
from keel.errors import KeelError
from keel.loggers import RunDirectory
from keel.tasks import Task
from keel.train.checkpoint import read_record
from keel.train.paths import absolute_paths

# What may change between a run and its resumption without making it another run.
FREE_TO_CHANGE = (
    "run.",
    "log.",
    "eval.",
    "checkpoint.",
    "guards.",
    "doctor.",
    "kl.budget",
    "reward.timeout_s",
    "reward.on_error",
)


def check_same_run(folder: Path, config: Config) -> None:
    """Refuse to resume under other settings: controller, optimizer and reference go on from what was saved."""
    try:
        before = _leaves(absolute_paths(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))))
    except (OSError, yaml.YAMLError):
        return
    now = _leaves(absolute_paths(config.to_dict()))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name) and (name == "run.seed" or not name.startswith(FREE_TO_CHANGE)):
            raise KeelError(
                f"{name} was {before.get(name)!r} in {folder} and is {now.get(name)!r} now: resume with what it was, "
                "or start a new run from its checkpoint with model.name"
            )


def fingerprint(task: Task | None) -> str | None:
    """The digest of a task's data, None of one that makes its own problems."""
    method = getattr(task, "fingerprint", None)
    return None if method is None else method()


def check_same_data(checkpoint: Path, config: Config, task: Task | None) -> None:
    """Refuse to go on where the file has other rows than the run was trained on: what was held out may not be now."""
    before = (read_record(checkpoint) or {}).get("state", {}).get("data")
    now = fingerprint(task)
    if before is not None and now is not None and before != now:
        path = config.data.path or (task.name if task is not None else config.task.name)
        named = path if isinstance(path, str) else ", ".join(path)
        raise KeelError(
            f"{named} has changed since {checkpoint.parent.parent} was trained on it (other rows, or another split): "
            "put the old rows back, or start a new run from its checkpoint with model.name"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a configuration; lists are values."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {name: value for key, part in tree.items() for name, value in _leaves(part, f"{prefix}{key}.").items()}


def check_nothing_lost(directory: RunDirectory) -> None:
    """Refuse to begin again at step 0 where checkpoints should be: it would cut off everything that was logged."""
    found = sorted(path.name for path in directory.checkpoints.glob("step-*"))
    if found:
        raise KeelError(
            f"none of the checkpoints in {directory.checkpoints} is whole ({', '.join(found)}): put back a good one, "
            "or start again with run.if_exists=replace"
        )
    config = load_config(directory.path / "config.yaml") if (directory.path / "config.yaml").exists() else None
    lines = directory.path / "metrics.jsonl"
    logged = sum(1 for _ in lines.open("rb")) if lines.exists() else 0
    if config is not None and config.checkpoint.every and logged > config.checkpoint.every:
        raise KeelError(
            f"{directory.path} has {logged} steps and no checkpoint: put its checkpoints back, or start again with "
            "run.if_exists=replace"
        )


def to_yaml(config: Config) -> str:
    """The whole configuration, so that the run directory alone is enough to do it again."""
    settings = absolute_paths(config.to_dict())
    settings["run"]["if_exists"] = "refuse"  # doing it again must not delete what it was read from
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
