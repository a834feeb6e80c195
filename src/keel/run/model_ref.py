"""Resolve a command's MODEL argument: a run's checkpoint, a configuration, or a model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import Config, load_config, text
from keel.config.load import is_run
from keel.models.options import LoadedModel
from keel.run.build import build_policy
from keel.run.warmstart import is_complete, warmstart_folder
from keel.trainer.checkpoint import no_progress_bars, step_folders, step_of
from keel.trainer.integrity import TRAINER, Damage, check_model, find_damage, saved_record

NAMED_CHECKPOINTS = ("best", "start", "warmstart")


@dataclass(frozen=True)
class ModelRef:
    """A model and its configuration; `weights` is a checkpoint or a warm start, None for the named model.

    `has_tasks` is whether the configuration names tasks, instead of having only the defaults.
    """

    name: str
    config: Config
    weights: Path | None = None
    has_tasks: bool = True

    def load(self) -> LoadedModel:
        """Load the model, with its adapter if it has one."""
        if self.weights is not None:
            check_model(self.weights)
        with no_progress_bars():
            return build_policy(self.config, self.weights)


def resolve_model(source: str, overrides: Sequence[str] = (), checkpoint: str | None = None) -> ModelRef:
    """The model that `source` names: a run's folder (`RUN`, or `RUN@` with best, start, warmstart or a step), a
    checkpoint's folder, a YAML file, a model's name or folder, an adapter's folder, a .gguf file.

    `checkpoint` means the same as the part after @; the default is a run's newest checkpoint.
    """
    base, at, which = source.rpartition("@")
    if at and is_run(Path(base).expanduser()):
        if checkpoint is not None:
            raise KeelError(f"both {source} and --checkpoint {checkpoint} name a checkpoint: give one of them")
        source, checkpoint = base, which
    elif at and (which in NAMED_CHECKPOINTS or which.isdigit()) and not Path(source).expanduser().exists():
        raise KeelError(f"no run at {base!r}: {source} needs the folder of a run, which has a config.yaml")
    path = Path(source).expanduser()
    if is_run(path):
        return _of_run(path, overrides, checkpoint)
    if checkpoint is not None:
        raise KeelError(f"--checkpoint {checkpoint} needs the folder of a run, which {source} is not: leave it out")
    home = path.resolve().parent.parent
    if path.is_dir() and path.resolve().parent.name == "checkpoints" and is_run(home):
        return ModelRef(str(path), load_config(home / "config.yaml", overrides), path)
    if path.is_dir() and (path / "adapter_config.json").is_file():
        return ModelRef(str(path), load_config(_adapter(path, overrides), overrides), has_tasks=names_tasks(overrides))
    if path.suffix in (".yaml", ".yml") or (source != "tiny" and text.find(path).is_file() and path.suffix != ".gguf"):
        return ModelRef(source, load_config(path, overrides))
    return ModelRef(source, load_config({"model": {"name": source}}, overrides), has_tasks=names_tasks(overrides))


def names_tasks(overrides: Sequence[str]) -> bool:
    """Whether any of these overrides sets the tasks."""
    return any(item.startswith(("task.", "task=", "eval.tasks")) for item in overrides)


def saved_steps(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, of training or `keel sft`, oldest first.

    Damaged ones are included, because skipping one would silently select another checkpoint.
    """
    return step_folders(run / "checkpoints")


def checkpoint_of(run: Path, which: str | None = None, *, names: Sequence[str] = ("best",)) -> Path:
    """The folder of a run's newest checkpoint, of its `best`, or of step N; one with a damaged model is refused.

    `names` are the named checkpoints that an error offers.
    """
    saved = {step_of(path): path for path in saved_steps(run)}
    if not saved:
        raise KeelError(f"{run} has no complete checkpoint yet: wait for one, or lower checkpoint.every")
    newest = saved[max(saved)]
    if which is None:
        return _undamaged(newest, run, saved)
    steps = ", ".join(map(str, saved))
    if which == "best":
        record = saved_record(newest)
        if record is None and (newest / TRAINER).exists():
            _undamaged(newest, run, saved)
        best = ((record or {}).get("state") or {}).get("best")
        if not best or int(best["step"]) not in saved:
            raise KeelError(f"{run} has no best checkpoint: name one of the steps {steps}")
        return _undamaged(saved[int(best["step"])], run, saved)
    if not which.isdigit():
        raise KeelError(f"{run} has no checkpoint {which!r}: use a step ({steps}) or {', '.join(names)}")
    if int(which) not in saved:
        raise KeelError(f"{run} has no checkpoint of step {which}: choose one of {steps}")
    return _undamaged(saved[int(which)], run, saved)


def _undamaged(checkpoint: Path, run: Path, saved: Collection[int]) -> Path:
    """The checkpoint, or an error if its model is damaged; files that only a resume needs may be missing."""
    wrong = find_damage(checkpoint, model_only=True)
    if not wrong and not any((checkpoint / name).is_file() for name in ("config.json", "adapter_config.json")):
        wrong = [Damage("config.json", "is missing")]
    if wrong:
        others = ", ".join(str(step) for step in saved if step != step_of(checkpoint)) or "none"
        raise KeelError(
            f"the checkpoint {checkpoint} is damaged: {wrong[0]}; restore the file, or name another step with "
            f"{run}@STEP (other steps: {others})"
        )
    return checkpoint


def model_folder(source: str, checkpoint: str | None = None) -> Path:
    """The folder with a model's files: a run's checkpoint (newest, best, a step), or the folder itself."""
    base, at, which = source.rpartition("@")
    if at and checkpoint is None and is_run(Path(base).expanduser()):
        source, checkpoint = base, which
    path = Path(source).expanduser()
    if is_run(path):
        return checkpoint_of(path, checkpoint)
    if checkpoint is not None:
        raise KeelError(f"--checkpoint {checkpoint} needs the folder of a run, which {source} is not: leave it out")
    if not path.is_dir():
        raise KeelError(f"there is no folder {source}: give a run, or a folder with a model")
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise KeelError(f"{source} contains no model: it has neither config.json nor adapter_config.json")
    check_model(path)
    return path


def _of_run(run: Path, overrides: Sequence[str], which: str | None) -> ModelRef:
    config = load_config(run / "config.yaml", overrides)
    if which not in ("start", "warmstart"):
        folder = checkpoint_of(run, which, names=NAMED_CHECKPOINTS)
        return ModelRef(f"{run}@{step_of(folder)}", config, folder)
    name, as_run = f"{run}@{which}", load_config(run / "config.yaml")
    supervised = any(not (path / TRAINER).exists() for path in saved_steps(run))  # keel sft has no warm start
    if as_run.warmstart is None or supervised:
        if which == "warmstart":
            raise KeelError(f"{run} has no warm start: use {run}@start for its initial model")
        return ModelRef(name, config)
    folder = warmstart_folder(run, as_run)
    complete = [path for path in folder.parent.glob("*") if is_complete(path)]
    if not is_complete(folder) and len(complete) == 1:  # options added since the run change the digest
        folder = complete[0]
    if not is_complete(folder):
        raise KeelError(f"the warm start of {run} is missing ({folder}): name another checkpoint")
    return ModelRef(name, config, folder)


def adapter_base(folder: Path) -> str | None:
    """The base model that the adapter in a folder names, or None."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        raise KeelError(f"{folder / 'adapter_config.json'} cannot be read: give a folder that peft wrote") from None
    return str(base) if base else None


def _adapter(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A configuration for an adapter outside a run, on the base that it names or that `model.name=` gives."""
    base = adapter_base(folder)
    if base is None and not any(item.startswith("model.name=") for item in overrides):
        raise KeelError(f"the adapter {folder} does not name its base model: add model.name=BASE")
    return {"model": {"name": base or "tiny", "lora": {"adapter": str(folder)}}}
