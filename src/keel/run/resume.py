"""What must hold before a run goes on: the same settings, and its checkpoints where it left them."""

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
from keel.config.declared import own_defaults
from keel.config.text import absolute_paths
from keel.envs import Task
from keel.loggers import RunDirectory
from keel.reference import Reference
from keel.trainer.checkpoint import (
    REFERENCE,
    newest_intact,
    numbered,
    quarantine_path,
    read_record,
    replace_reference,
)
from keel.trainer.integrity import STATE, TRAINER, Damage, damages
from keel.trainer.optim import Optimizer, Schedule

# What may change between a run and its resumption without making it another run.
FREE_TO_CHANGE = (
    "run.",
    "log.",
    "eval.",
    "checkpoint.",
    "guards.",
    "doctor.",
    "parallel.",  # checkpoints are read on any number of processes
    "ray.",
    "rollout.vllm.url",  # where a server is, and how long it is waited for
    "rollout.vllm.secret",
    "rollout.vllm.wait_s",
    "kl.budget",
    "optim.decay_steps",  # kept from before unless it is given: `keep_schedule`
    "optim.microbatch_tokens",  # these six change a step's memory, and its numbers by rounding (dropout: other masks)
    "optim.offload",
    "reference.offload",
    "kl.teacher.offload",
    "rollout.max_batch",
    "rollout.vllm.",  # where vLLM samples: a server lost may be started again elsewhere
    "rollout.max_staleness",  # with another one, what was sampled ahead is sampled again
    "model.gradient_checkpointing",
    "reward.timeout_s",
    "reward.on_error",
)


def may_change(option: str) -> bool:
    """Whether a run can be resumed with another value of an option."""
    return option != "run.seed" and option.startswith(FREE_TO_CHANGE)


def check_same_run(folder: Path, config: Config) -> None:
    """Refuse to resume under other settings: controller, optimizer and reference go on from what was saved."""
    env = read_json(folder / "env.json")
    if isinstance(env, dict) and "trl" in env:
        raise KeelError(
            f"{folder} is a run of TRL {env['trl']}: go on with trainer.train(resume_from_checkpoint=True), or start a "
            "new run from its checkpoint with model.name"
        )
    written = read_settings(folder)
    if written is None:
        _check_nothing_begun(folder)
        return
    before = _leaves(absolute_paths(written))
    now = _leaves(absolute_paths(config.to_dict()))
    before |= _added_since(before, now)
    own = _leaves(own_defaults(config))  # one that is written out is the one that is not
    before, now = {**own, **before}, {**own, **now}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name) and not may_change(name):
            was, is_now = (masked(settings.get(name), name) for settings in (before, now))
            raise KeelError(
                f"{name} was {was!r} in {folder} and is {is_now!r} now: resume with what it was, or start a new run "
                "from its checkpoint with model.name"
            )


def _added_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a run of an earlier version did not know, in sections that it has: it went by their defaults."""
    default, sections = _leaves(load_config({}).to_dict()), {name.rpartition(".")[0] for name in before}
    new = (name for name in now if name not in before and name.rpartition(".")[0] in sections)
    return {name: default[name] for name in new if name in default}


def decay_end(settings: Mapping[str, Any]) -> int | None:
    """The step at which the learning rate's decay ends, None of a constant rate."""
    optim, run = settings.get("optim") or {}, settings.get("run") or {}
    if optim.get("schedule", "constant") == "constant":
        return None
    return optim.get("decay_steps") or run.get("max_steps")


def keep_schedule(folder: Path, config: Config) -> tuple[Config, int | None, list[ResumeEvent]]:
    """The configuration with the end of the decay that the run had, unless another is given; and that end.

    `optim.decay_steps=null` stands for `run.max_steps` when a run begins. When a run is extended it stays what it was:
    another length must not move the learning rate of the steps that come next.
    """
    before = decay_end(read_settings(folder) or {})
    if before is None or config.optim.decay_steps is not None or config.run.max_steps == before:
        return config, before, []
    extended = load_config(config, [f"optim.decay_steps={before}"])
    floor = config.optim.learning_rate * config.optim.final_ratio
    message = (
        f"run.max_steps is {config.run.max_steps}, and the {config.optim.schedule} decay of the learning rate still "
        f"ends at step {before}, as the run was begun: the rate is {floor:g} from there; give "
        f"optim.decay_steps={config.run.max_steps} to let it end with the run"
    )
    return extended, before, [ResumeEvent("schedule", message)]


def schedule_change(
    before: int | None, course: Schedule, config: Config, optimizer: Optimizer, step: int
) -> str | None:
    """The sentence on a decay that was given another end: at which step the learning rate jumps, from what to what.

    `before` is the end that it had, and `course` the schedule with that.
    """
    now = decay_end(config.to_dict())
    if before is None or now is None or before == now:
        return None
    rate, updates = optimizer.learning_rate * optimizer.factor, optimizer.updates
    last, due = (rate * course(update) for update in (max(0, updates - 1), updates))
    return (
        f"optim.decay_steps was {before} and is {now}: the learning rate goes from {last:.4g} at step {step} to "
        f"{optimizer.lr:.4g} at step {step + 1}, where it would have been {due:.4g}"
    )


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's config.yaml, None where there is none; one that cannot be read is named."""
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
        raise KeelError(f"{path} is damaged: it holds no configuration; put back the one that the run was started with")
    return settings


@dataclass(frozen=True)
class ResumeEvent:
    """An event of a resume, logged once the loggers are open; `damaged` is then quarantined."""

    kind: str
    message: str
    damaged: Path | None = None


def choose_checkpoint(
    directory: RunDirectory, start_reference: Callable[[], Reference | None]
) -> tuple[Path | None, list[ResumeEvent]]:
    """The newest checkpoint whose files are all as they were saved, and the events about others.

    A reference that never moved is one file for all checkpoints: where only that is damaged, it is made again from
    what the run started with, if it has the fingerprint that the checkpoint names.
    """
    events: list[ResumeEvent] = []

    def mend(path: Path, wrong: list[Damage]) -> bool:
        if [damage.file for damage in wrong] != [f"{TRAINER}/{REFERENCE}"]:
            return False
        try:
            reference = start_reference()
        except KeelError:  # the start is not there any more
            return False
        record = json.loads((path / STATE).read_text(encoding="utf-8"))
        if reference is None or reference.fingerprint() != (record["reference"] or {}).get("fingerprint"):
            return False
        for other in numbered(directory.checkpoints):  # they share the file
            if [damage.file for damage in damages(other, record=STATE)] == [f"{TRAINER}/{REFERENCE}"]:
                replace_reference(other, reference)
        message = f"the checkpoint {path.name} is damaged: {wrong[0]}; it was made again from the run's start"
        events.append(ResumeEvent("checkpoint/damaged", message))
        return True

    checkpoint, damaged = newest_intact(directory.checkpoints, mend)
    if checkpoint is None:
        if damaged:
            path, wrong = damaged[0]
            raise KeelError(
                f"none of the checkpoints in {directory.checkpoints} is whole: {path.name}/{wrong}; put back a good "
                "one, or start again with run.if_exists=replace"
            )
        _check_nothing_lost(directory)
        return None, events
    for path, wrong in damaged:
        message = (
            f"the checkpoint {path.name} is damaged: {wrong}; the run goes on from {checkpoint.name}, and the damaged "
            f"one is kept as {directory.checkpoints.name}/{quarantine_path(path).name}"
        )
        events.append(ResumeEvent("checkpoint/damaged", message, path))
    return checkpoint, events


def cut_lines(directory: RunDirectory, step: int, *, keep_as: int | None = None) -> list[ResumeEvent]:
    """Cut the run's lines off after `step`; lines before it that cannot be read are left out, and reported.

    `keep_as` is the attempt under which those that are cut are kept, as a rollback keeps them. Events go along here:
    the steps are taken again under the same noise, and tell the same again.
    """
    events = [
        ResumeEvent("lines/damaged", f"line {', '.join(map(str, numbers))} of {name} cannot be read and is left out")
        for name, numbers in directory.unreadable().items()
    ]
    if keep_as is not None and directory.has_lines_past(step):
        folder = directory.set_aside(step, directory.free_attempt(keep_as), events=True)
        location = folder.relative_to(directory.path).as_posix()
        events.append(ResumeEvent("note", f"what was logged after step {step} is kept in {location}"))
    directory.cut_after(step)
    return events


def fingerprint(task: Task | None) -> str | None:
    """The digest of a task's data, None of one that makes its own problems."""
    return None if task is None else task.fingerprint()


def check_same_data(checkpoint: Path, config: Config, task: Task | None) -> None:
    """Refuse to go on where the file has other rows than the run was trained on: what was held out may not be now."""
    before = (read_record(checkpoint) or {}).get("state", {}).get("data")
    now = fingerprint(task)
    if before is not None and now is not None and before != now:
        path = config.data.path or (task.name if task is not None else config.task.name)
        source = path if isinstance(path, str) else ", ".join(path)
        raise KeelError(
            f"{source} has changed since {checkpoint.parent.parent} was trained on it (other rows, or another split): "
            "put the old rows back, or start a new run from its checkpoint with model.name"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a configuration; lists are values."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {name: value for key, part in tree.items() for name, value in _leaves(part, f"{prefix}{key}.").items()}


def _check_nothing_begun(folder: Path) -> None:
    """Refuse to go on without config.yaml, which is written before anything else: no setting could be compared."""
    lines = folder / "metrics.jsonl"
    if numbered(folder / "checkpoints") or (lines.exists() and lines.stat().st_size):
        raise KeelError(
            f"{folder / 'config.yaml'} is missing, so that nothing says which settings the run had: put it back, for "
            "example from a backup, or start a new run from its checkpoint with model.name"
        )


def _check_nothing_lost(directory: RunDirectory) -> None:
    """Refuse to begin again at step 0 where checkpoints should be: it would cut off everything that was logged."""
    config = load_config(directory.path / "config.yaml") if (directory.path / "config.yaml").exists() else None
    lines = directory.path / "metrics.jsonl"
    logged = sum(1 for _ in lines.open("rb")) if lines.exists() else 0
    if config is not None and config.checkpoint.every and logged > config.checkpoint.every:
        raise KeelError(
            f"{directory.path} has {logged} steps and no checkpoint: put its checkpoints back, or start again with "
            "run.if_exists=replace"
        )


def write_config(directory: RunDirectory, config: Config) -> None:
    """config.yaml, from which the run is resumed: with references to the environment as they are, never their values.

    A secret that is written out has to stay, or nothing could be resumed: then its owner alone can read the file.
    """
    directory.write_text("config.yaml", to_yaml(config), private=bool(secrets_in(config.to_dict())))


def to_yaml(config: Config) -> str:
    """The whole configuration, so that the run directory alone is enough to do it again."""
    settings = absolute_paths(config.to_dict())
    settings["run"]["if_exists"] = "refuse"  # doing it again must not delete what it was read from
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
