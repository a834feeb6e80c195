"""A Keel run directory next to TRL's files, so that `keel report`, `show`, `doctor` and `kl` can read a TRL run.

Also Keel's part of a TRL checkpoint: the state of the controller and the guards, and a reference that has moved.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

import keel
from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.doctor.names import TRAINERS
from keel.integrations.trl.settings import TrlSettings, config_of
from keel.integrations.trl.window import messages_of
from keel.integrations.versions import TRL
from keel.kl import KLState
from keel.lab.report import AT_END
from keel.loggers import MultiLogger, RunDirectory
from keel.loggers.rundir import CHECKPOINTS, CONFIG, SKIPPED, JsonlLogger, RunExists
from keel.models.fingerprint import fingerprint_tensors
from keel.models.head import causal_lm, is_lora
from keel.reference import Reference
from keel.reference.weights import unwrap
from keel.run.environment import environment
from keel.run.resume import to_yaml
from keel.run.train import collect_findings, write_run_report
from keel.trainer.state import State
from keel.trainer.summary import summarise

logger = logging.getLogger("keel")
PROMPTS = "prompts.jsonl"  # some of the dataset's prompts, for `keel kl RUN`
NUM_PROMPTS = 64
MAX_SKIPPED_FILES = 20  # largest number of skipped batches kept for inspection
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
        saved = {name: str(record["reference"][name]) for name in ("start", "kind", "fingerprint")}
        batches = int(record["batches"])
        state = State.from_dict(record["state"])
        before = dict(record["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{path} cannot be read ({error}): put it back, or resume from another checkpoint") from None
    for name, now in (options or {}).items():
        if name in before and before[name] != now:
            raise KeelError(
                f"{name} was {before[name]!r} in {folder} and is {now!r} now: resume with the saved value, or start a "
                "new run from that checkpoint with model=…"
            )
    if saved["start"] != start:
        raise KeelError(
            f"the run of {folder} started with a reference of fingerprint {saved['start'][:12]}, but this trainer's "
            f"reference has {start[:12]}: build the trainer with the model that the run was started with; "
            "resume_from_checkpoint loads the policy"
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
    """Checkpoints up to the last confirmed step whose own update was applied, newest first, without damaged ones."""
    for step, path in reversed(saved_checkpoints(output_dir)):
        whole = all((path / name).is_file() for name in (STATE, TRAINER_STATE_NAME))  # TRL writes its state last
        if step <= confirmed and whole:
            try:
                good = State.from_dict(json.loads((path / STATE).read_text(encoding="utf-8"))["state"]).good
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if good:
                yield path


class KeelRunCallback(TrainerCallback):
    """Writes metrics.jsonl, config.yaml, events.jsonl, rollouts.jsonl, findings.json, summary.json and report.html.

    The files are in TRL's `output_dir`, and `checkpoints/step-N` links to TRL's `checkpoint-N`. With `push_to_hub` they
    are in its subfolder `_keel`, which is not uploaded. Added to a plain `GRPOTrainer`, the callback writes TRL's logs
    under Keel's metric names. `KeelGRPOTrainer` has this callback built in and writes a complete line every step.
    `if_exists="replace"` discards an existing run with its checkpoints. rollouts.jsonl has two groups of every
    `rollouts_every`-th batch; with `rollouts_every=0` it is not written.
    """

    def __init__(self, *, if_exists: str = "refuse", report: bool = True, rollouts_every: int | None = None) -> None:
        if if_exists not in ("refuse", "replace"):
            raise KeelError(f"if_exists is {if_exists!r}: use refuse or replace")
        if rollouts_every is not None and rollouts_every < 0:
            raise KeelError(f"rollouts_every is {rollouts_every}: use 0 (never) or more")
        self.if_exists, self.report, self.rollouts_every = if_exists, report, rollouts_every
        self.settings: TrlSettings | None = None  # set by KeelGRPOTrainer, which writes the lines itself
        self.notes: list[str] = []
        self.state: State | None = None
        self._directory: RunDirectory | None = None
        self._loggers: MultiLogger | None = None

    # --------------------------------------------------------------------------------- written by trainers

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics.jsonl."""
        if self._loggers is not None:
            self._loggers.step(step, metrics)

    def shows(self, batch: int) -> bool:
        """Whether rollouts.jsonl includes completions of this batch; batches are counted from 0."""
        every = 1 if self.rollouts_every is None else self.rollouts_every
        return every > 0 and batch % every == 0

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write completions of a step to rollouts.jsonl."""
        if self._loggers is not None:
            self._loggers.rollouts(step, records)

    def event(self, kind: str, **fields: Any) -> None:
        if self._loggers is not None:
            self._loggers.event(kind, **fields)

    def skipped(self, step: int, record: Mapping[str, Any], cause: str) -> None:
        """Save a batch whose update was skipped; at most `MAX_SKIPPED_FILES` are saved."""
        if self._directory is None:
            return
        fields: dict[str, Any] = {"message": f"an update was skipped: {cause}", "nonfinite": record["first_nonfinite"]}
        name = f"{SKIPPED}/step-{step}.json"
        folder = self._directory.path / SKIPPED
        if (self._directory.path / name).exists() or len(list(folder.glob("*.json"))) < MAX_SKIPPED_FILES:
            self._directory.write_json(name, record, raw=True)
            fields["batch"] = name
        self.event("guard/skipped", step=step, cause="spike" if "spike" in cause else "non-finite", **fields)

    # --------------------------------------------------------------------------------------- events of TRL

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        if self.settings is None and self.rollouts_every is not None:
            raise KeelError(
                "rollouts_every is for KeelGRPOTrainer, because rollouts of a plain GRPOTrainer are not recorded: "
                "leave it out"
            )
        if not state.is_world_process_zero:
            return
        self.close()  # an interrupted run may have left it open
        self._began = time.monotonic()
        path, resumed = run_folder(args), state.global_step > 0
        self._directory = _open(path, resumed, state.global_step, replace_old=self.if_exists == "replace")
        self._loggers = MultiLogger(JsonlLogger(self._directory))
        prompts = _write_prompts(self._directory, named.get("train_dataloader"))
        about = _about(args, state, model, path, prompts)
        if self.rollouts_every is not None:
            about["log__rollouts_every"] = self.rollouts_every
        config, notes = config_of(args, self.settings, **about)
        self._directory.write_text(CONFIG, to_yaml(config))
        self._directory.write_json("env.json", {**environment(), "trl": TRL.check_version()})
        self._weights = trained_weights(model)
        self.state = self.state if resumed else None
        if resumed:
            self.event("resume", step=state.global_step, message=f"resumed from checkpoint-{state.global_step}")
        for note in (*self.notes, *notes):
            self.event("note", step=state.global_step, message=note)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        """Write a plain trainer's log under Keel's names. `KeelGRPOTrainer` writes its own line every step."""
        if self._loggers is None or self.settings is not None or "loss" not in (logs or {}):
            return
        line = {}
        for name, value in logs.items():
            known = TRAINERS["TRL"].find(name)
            if known is not None and not known[1].keel.startswith("other/") and isinstance(value, int | float):
                line[known[1].keel] = known[1].factor * value
        if args.beta:
            line["kl/beta"] = args.beta
        self.step(state.global_step, line)
        if self.state is None:
            self.state = State(kl=KLState(args.beta, args.beta))
        measured = {name: value for name, value in line.items() if name.startswith("kl/policy_ref/")}
        self.state = replace(self.state, step=state.global_step, last_kl=measured or self.state.last_kl)

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self._directory is None:
            return
        self._directory.sync()
        _link_checkpoints(self._directory.checkpoints, Path(args.output_dir))
        name = f"step-{state.global_step}"
        if (self._directory.checkpoints / name).exists():  # after a guard's stop there is no checkpoint
            self.event("checkpoint", step=state.global_step, path=f"{CHECKPOINTS}/{name}")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        """Write whether the weights have changed, the findings, the summary and the report."""
        if self._directory is None or self._loggers is None:
            return
        after = trained_weights(model)
        same = "are the same as" if after == self._weights else "differ from those"
        message = f"the trainable weights after step {state.global_step} {same} before training"
        self.event("weights", step=state.global_step, message=message, before=self._weights, after=after)
        _link_checkpoints(self._directory.checkpoints, Path(args.output_dir))
        self._directory.sync()
        findings = collect_findings(self._directory, self._loggers, AT_END)
        self._directory.write_json("findings.json", findings)
        if errors := [finding["code"] for finding in findings or () if finding["severity"] == "error"]:
            logger.warning("%s: see keel doctor %s", ", ".join(errors), self._directory.path)
        finished = self.state or State(kl=KLState(math.nan, math.nan))
        finished = replace(finished, step=state.global_step, wall_s=time.monotonic() - self._began)
        self._directory.write_json("summary.json", summarise("trl", finished, findings))
        self._directory.sync()
        if self.report:
            write_run_report(self._directory.path, self._loggers, AT_END)
        self.close()

    def close(self) -> None:
        """Release the folder. It may be called twice."""
        if self._directory is not None and self._loggers is not None:
            self._loggers.close()
            self._directory.close()
        self._directory, self._loggers = None, None


def trained_weights(model: Any) -> str:
    """A fingerprint of the weights that the optimizer may change.

    The base under LoRA is excluded, because TRL's syncs merge and unmerge adapters there.
    """
    named = unwrap(model).named_parameters()
    return fingerprint_tensors((name, parameter) for name, parameter in named if parameter.requires_grad)


def run_folder(args: Any) -> Path:
    """The folder of Keel's files. A name with a leading underscore is not pushed to the hub with the model."""
    return Path(args.output_dir) / "_keel" if args.push_to_hub else Path(args.output_dir)


def _open(path: Path, resumed: bool, step: int, *, replace_old: bool) -> RunDirectory:
    """Open the folder as a run directory. On resume, lines after the checkpoint are moved to another file."""
    if resumed and (path / CONFIG).is_file():
        directory = RunDirectory.resume(path)
        if directory.has_lines_past(step):
            directory.set_aside(step, directory.unused_attempt(0))
        directory.truncate_after(step)
        return directory
    discarded = _linked_checkpoints(path) if replace_old else []
    try:
        directory = RunDirectory.create(path, overwrite=replace_old)
    except RunExists:
        raise KeelError(
            f"output_dir {path} already holds a run: choose another folder, continue the run with "
            "trainer.train(resume_from_checkpoint=True), or discard the run with "
            "callbacks=[KeelRunCallback(if_exists='replace')]"
        ) from None
    for folder in discarded:  # the folder is now locked; the new run must not use the old run's checkpoints
        shutil.rmtree(folder)
    return directory


def _write_prompts(directory: RunDirectory, loader: Any) -> Path | None:
    """Write some of the dataset's prompts to a file for the task `dataset`; None if the dataset has no prompts."""
    dataset, lines = getattr(loader, "dataset", None), dict[str, None]()
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    for index in range(min(len(dataset), NUM_PROMPTS)):
        prompt = dataset[index].get("prompt")
        if prompt:
            row = prompt if isinstance(prompt, str) else messages_of(prompt)
            lines[json.dumps({"question": row}, ensure_ascii=False)] = None
    return directory.write_text(PROMPTS, "".join(f"{line}\n" for line in lines)) if lines else None


def _about(args: Any, state: Any, model: Any, path: Path, prompts: Path | None) -> dict[str, Any]:
    """The entries of config.yaml in addition to the options: name, length, model, adapter, prompts."""
    inner = unwrap(model)
    own: dict[str, Any] = {
        "run__name": path.name or "trl",
        "run__dir": str(path.parent),
        "run__max_steps": max(1, int(state.max_steps)),
        "eval__every": 0,
    }
    name = getattr(causal_lm(inner).config, "_name_or_path", "")
    if name:
        own["model__name"] = str(name)
    if is_lora(inner):
        adapter = inner.peft_config[inner.active_adapters[0]]
        targets = adapter.target_modules
        own["model__lora"] = {
            "r": adapter.r,
            "alpha": float(adapter.lora_alpha),
            "dropout": adapter.lora_dropout,
            "targets": targets if isinstance(targets, str) else sorted(targets or ()) or "all-linear",
        }
    if prompts is not None:
        own |= {"task__name": "dataset", "data__path": str(prompts.resolve()), "data__columns__answer": None}
    return own


def _linked_checkpoints(path: Path) -> list[Path]:
    """TRL's folders to which the run's `checkpoints/step-N` link."""
    links = [link for link in (path / CHECKPOINTS).glob("step-*") if link.is_symlink()]
    folders = [link.resolve() for link in links]
    return [folder for folder in folders if folder.name.startswith("checkpoint-") and folder.is_dir()]


def _link_checkpoints(folder: Path, output_dir: Path) -> None:
    """Link `checkpoints/step-N` to every existing `checkpoint-N`, and remove links to checkpoints that TRL removed."""
    for link in folder.glob("step-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    for step, path in saved_checkpoints(output_dir):
        link = folder / f"step-{step}"
        if not link.exists():
            link.symlink_to(os.path.relpath(path, folder), target_is_directory=True)
