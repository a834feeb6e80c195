"""Checks before a run is resumed: equal settings, equal data, intact checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.base.files import read_json
from keel.base.redact import masked, secrets_in
from keel.config import Config, load_config
from keel.config.text import absolute_paths, plugin_defaults
from keel.envs import Task
from keel.loggers import RunDirectory
from keel.reference import Reference
from keel.trainer.checkpoint import (
    REFERENCE,
    newest_intact,
    quarantine_path,
    read_record,
    replace_reference,
    step_folders,
)
from keel.trainer.integrity import STATE, TRAINER, Damage, find_damage
from keel.trainer.optim import Optimizer, Schedule

# Options that may change when a run is resumed.
RESUMABLE_OPTIONS = (
    "run.",
    "log.",
    "eval.",
    "checkpoint.",
    "guards.",
    "doctor.",
    "parallel.",  # checkpoints are read on any number of processes
    "ray.",
    "rollout.vllm.url",  # the server's address, and how long to wait for it
    "rollout.vllm.secret",
    "rollout.vllm.wait_s",
    "kl.budget",
    "optim.decay_steps",  # unchanged unless given: see `keep_schedule`
    "optim.microbatch_tokens",  # up to rollout.max_batch: results change only by rounding (or dropout masks)
    "optim.offload",
    "reference.offload",
    "kl.teacher.offload",
    "rollout.max_batch",
    "rollout.vllm.",  # a lost vLLM server may be restarted elsewhere
    "rollout.max_staleness",  # if changed, rollouts sampled ahead are sampled again
    "model.gradient_checkpointing",  # results change only by rounding
    "task.url",  # an environment's server may be restarted elsewhere
    "task.headers",
    "reward.timeout_s",
    "reward.on_error",
)


def may_change(option: str) -> bool:
    """Whether a run can be resumed with another value of this option."""
    return option != "run.seed" and option.startswith(RESUMABLE_OPTIONS)


def check_same_run(folder: Path, config: Config) -> None:
    """Refuse to resume with other settings: controller, optimizer and reference continue from their saved state."""
    env = read_json(folder / "env.json")
    if isinstance(env, dict) and "trl" in env:
        raise KeelError(
            f"{folder} is a run of TRL {env['trl']}: resume it with trainer.train(resume_from_checkpoint=True), or "
            "start a new run from its checkpoint with model.name"
        )
    written = read_settings(folder)
    if written is None:
        _check_config_present(folder)
        return
    before = _leaves(absolute_paths(written))
    now = _leaves(absolute_paths(config.to_dict()))
    before |= _added_since(before, now)
    own = _leaves(plugin_defaults(config))  # a written-out default equals an omitted one
    before, now = {**own, **before}, {**own, **now}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name) and not may_change(name):
            was, is_now = (masked(settings.get(name), name) for settings in (before, now))
            raise KeelError(
                f"{name} was {was!r} in {folder} and is {is_now!r} now: resume with the old value, or start a new run "
                "from its checkpoint with model.name"
            )


def _added_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of options that were added since the run's version, in sections that the run has."""
    default, sections = _leaves(load_config({}).to_dict()), {name.rpartition(".")[0] for name in before}
    new = (name for name in now if name not in before and name.rpartition(".")[0] in sections)
    return {name: default[name] for name in new if name in default}


def decay_end(settings: Mapping[str, Any]) -> int | None:
    """The step at which the learning rate's decay ends; None for a constant rate."""
    optim, run = settings.get("optim") or {}, settings.get("run") or {}
    if optim.get("schedule", "constant") == "constant":
        return None
    return optim.get("decay_steps") or run.get("max_steps")


def keep_schedule(folder: Path, config: Config) -> tuple[Config, int | None, list[ResumeEvent]]:
    """Keep the end of the run's decay unless another is given; returns the configuration, that end, and events.

    `optim.decay_steps=null` means the `run.max_steps` at the start of the run. Extending the run does not change it, so
    that the learning rate of the next steps stays the same.
    """
    before = decay_end(read_settings(folder) or {})
    if before is None or config.optim.decay_steps is not None or config.run.max_steps == before:
        return config, before, []
    extended = load_config(config, [f"optim.decay_steps={before}"])
    floor = config.optim.learning_rate * config.optim.final_ratio
    message = (
        f"run.max_steps is {config.run.max_steps} now, but the {config.optim.schedule} decay of the learning rate "
        f"still ends at step {before}. From that step on the learning rate is {floor:g}. To end the decay with the "
        f"run, set optim.decay_steps={config.run.max_steps}"
    )
    return extended, before, [ResumeEvent("schedule", message)]


def schedule_change(
    before: int | None, old_schedule: Schedule, config: Config, optimizer: Optimizer, step: int
) -> str | None:
    """A message if the end of the decay has changed: the step and size of the jump in the learning rate.

    `before` is the old end, `old_schedule` the schedule with it.
    """
    now = decay_end(config.to_dict())
    if before is None or now is None or before == now:
        return None
    rate, updates = optimizer.learning_rate * optimizer.factor, optimizer.updates
    last, due = (rate * old_schedule(update) for update in (max(0, updates - 1), updates))
    return (
        f"optim.decay_steps was {before} and is {now}: the learning rate goes from {last:.4g} at step {step} to "
        f"{optimizer.lr:.4g} at step {step + 1}, where it would have been {due:.4g}"
    )


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's config.yaml; None if it is missing, an error if it cannot be read."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeelError(f"{path} cannot be read now ({error.strerror or error}): try again") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        settings = None
    if not isinstance(settings, dict):
        raise KeelError(f"{path} is damaged: it holds no configuration; restore the configuration of the run")
    return settings


@dataclass(frozen=True)
class ResumeEvent:
    """An event of a resume, logged when the loggers are open; the checkpoint `damaged` is then quarantined."""

    kind: str
    message: str
    damaged: Path | None = None


def choose_checkpoint(
    directory: RunDirectory, start_reference: Callable[[], Reference | None]
) -> tuple[Path | None, list[ResumeEvent]]:
    """The newest intact checkpoint, and events about damaged ones.

    All checkpoints share the file of a reference that never moved. If only that file is damaged, it is rebuilt from the
    run's initial weights and must match the checkpoint's fingerprint.
    """
    events: list[ResumeEvent] = []

    def repair(path: Path, wrong: list[Damage]) -> bool:
        if [damage.file for damage in wrong] != [f"{TRAINER}/{REFERENCE}"]:
            return False
        try:
            reference = start_reference()
        except KeelError:  # the initial weights are missing
            return False
        record = json.loads((path / STATE).read_text(encoding="utf-8"))
        if reference is None or reference.fingerprint() != (record["reference"] or {}).get("fingerprint"):
            return False
        for other in step_folders(directory.checkpoints):  # they share the file
            if [damage.file for damage in find_damage(other, record=STATE)] == [f"{TRAINER}/{REFERENCE}"]:
                replace_reference(other, reference)
        message = f"the checkpoint {path.name} is damaged: {wrong[0]}; it was rebuilt from the run's initial weights"
        events.append(ResumeEvent("checkpoint/damaged", message))
        return True

    checkpoint, damaged = newest_intact(directory.checkpoints, repair)
    if checkpoint is None:
        if damaged:
            path, wrong = damaged[0]
            raise KeelError(
                f"none of the checkpoints in {directory.checkpoints} is intact: {path.name}/{wrong}; restore a "
                "checkpoint, or start again with run.if_exists=replace"
            )
        _check_checkpoints_present(directory)
        return None, events
    for path, wrong in damaged:
        message = (
            f"the checkpoint {path.name} is damaged: {wrong}; the run resumes from {checkpoint.name}, and the damaged "
            f"one is kept as {directory.checkpoints.name}/{quarantine_path(path).name}"
        )
        events.append(ResumeEvent("checkpoint/damaged", message, path))
    return checkpoint, events


def truncate_logs(directory: RunDirectory, step: int, *, keep_as: int | None = None) -> list[ResumeEvent]:
    """Remove logged lines after `step`; unreadable lines before it are dropped and reported.

    With `keep_as` the removed lines are stored under that attempt, as in a rollback. Events are included here: the
    repeated steps use the same noise and log the same events again.
    """
    events = [
        ResumeEvent("lines/damaged", f"line {', '.join(map(str, numbers))} of {name} cannot be read and is dropped")
        for name, numbers in directory.unreadable().items()
    ]
    if keep_as is not None and directory.has_lines_past(step):
        folder = directory.set_aside(step, directory.unused_attempt(keep_as), events=True)
        location = folder.relative_to(directory.path).as_posix()
        events.append(ResumeEvent("note", f"the lines logged after step {step} were moved to {location}"))
    directory.truncate_after(step)
    return events


def fingerprint(task: Task | None) -> str | None:
    """The digest of a task's data; None for generated problems."""
    return None if task is None else task.fingerprint()


def check_same_data(checkpoint: Path, config: Config, task: Task | None) -> None:
    """Refuse to resume if the data file has other rows: held-out problems may now be trained on."""
    before = (read_record(checkpoint) or {}).get("state", {}).get("data")
    now = fingerprint(task)
    if before is not None and now is not None and before != now:
        path = config.data.path or (task.name if task is not None else config.task.name)
        source = path if isinstance(path, str) else ", ".join(path)
        raise KeelError(
            f"{source} has changed since {checkpoint.parent.parent} was trained on it (other rows, or another split): "
            "restore the old rows, or start a new run from its checkpoint with model.name"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a configuration; lists are values."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {name: value for key, part in tree.items() for name, value in _leaves(part, f"{prefix}{key}.").items()}


def _check_config_present(folder: Path) -> None:
    """Refuse to resume a run without config.yaml: its settings could not be compared."""
    lines = folder / "metrics.jsonl"
    if step_folders(folder / "checkpoints") or (lines.exists() and lines.stat().st_size):
        raise KeelError(
            f"{folder / 'config.yaml'} is missing, so the run's settings are unknown: restore it, for "
            "example from a backup, or start a new run from its checkpoint with model.name"
        )


def _check_checkpoints_present(directory: RunDirectory) -> None:
    """Refuse to restart at step 0 if checkpoints are missing, since all logged lines would be removed."""
    config = load_config(directory.path / "config.yaml") if (directory.path / "config.yaml").exists() else None
    lines = directory.path / "metrics.jsonl"
    logged = sum(1 for _ in lines.open("rb")) if lines.exists() else 0
    if config is not None and config.checkpoint.every and logged > config.checkpoint.every:
        raise KeelError(
            f"{directory.path} has {logged} steps and no checkpoint: restore its checkpoints, or start again with "
            "run.if_exists=replace"
        )


def write_config(directory: RunDirectory, config: Config) -> None:
    """Write config.yaml, which a resume reads; `$NAME` of environment variables stays unexpanded.

    A literal secret is written too, since a resume needs it: then only the owner can read the file.
    """
    directory.write_text("config.yaml", to_yaml(config), private=bool(secrets_in(config.to_dict())))


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, so that the run directory is enough to repeat the run."""
    settings = absolute_paths(config.to_dict())
    settings["run"]["if_exists"] = "refuse"  # a repeated run must not overwrite this one
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
