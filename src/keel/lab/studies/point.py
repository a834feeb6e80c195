"""One run of a study in its own process: link the warm start, train, measure the drift, write the outcome."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from keel.base.errors import KeelError
from keel.base.files import JsonlFile, encode, read_json, write_atomic
from keel.config import Config, load_config
from keel.doctor.judge import guard_stop
from keel.doctor.runs import read_run
from keel.lab.hooks import AT_END
from keel.lab.studies.folder import DONE, DRIFT, FAILED, INTERRUPTED, STOPPED, JobOutcome, write_outcome
from keel.lab.studies.grid import Measurements
from keel.lab.studies.process import CONFIG
from keel.lab.studies.progress import supervised_lines
from keel.run.build import build_policy, build_warmstart
from keel.run.train import run_training
from keel.run.warmstart import is_complete, warmstart, warmstart_folder
from keel.trainer.checkpoint import atomic_folder, no_progress_bars
from keel.trainer.integrity import find_damage


def shared_warmstart(shared: Path, config: Config) -> Path:
    """The folder of the warm start that this run shares; it depends on microbatches, which change the last digits."""
    return warmstart_folder(shared / f"{config.optim.microbatch_tokens}-{config.optim.precision}", config)


def make_warmstart(config: Config, folder: Path) -> None:
    """Train the warm start as a run does, unless an undamaged one exists; writes one line per step."""
    if is_complete(folder) and not find_damage(folder):
        return
    path = supervised_lines(folder)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with no_progress_bars(), closing(JsonlFile(path)) as lines:
        policy = build_policy(config)
        lines.append({"step": 0})
        recipe = partial(build_warmstart, config)
        warmstart(folder, policy, recipe, lambda step, metrics: lines.append({"step": step, **metrics}))


def link_warmstart(config: Config, source: Path, run: Path) -> None:
    """Put the shared warm start into a run's folder, by hard links if the file system has them."""
    target = warmstart_folder(run, config)
    if is_complete(target):
        return
    with atomic_folder(target) as temporary:
        for file in sorted(source.iterdir()):
            try:
                os.link(file, temporary / file.name)
            except OSError:
                shutil.copy2(file, temporary / file.name)


def run_point(config: Config, measure: Measurements, shared: Path) -> JobOutcome:
    """Train, resume, or measure a killed run; the outcome is written unless interrupted."""
    folder = Path(config.run.dir) / config.run.name
    try:
        outcome = _train(config, folder, shared)
        if outcome.state in (DONE, STOPPED) and read_json(folder / DRIFT) is None:  # written atomically, so complete
            from keel.lab.studies.measure import measure_run

            write_atomic(folder / DRIFT, encode(measure_run(folder, measure), indent=2) + "\n")
    except KeelError as error:
        outcome = JobOutcome(FAILED, str(error))
    if outcome.state != INTERRUPTED and folder.is_dir():
        write_outcome(folder, outcome)
    return outcome


def _train(config: Config, folder: Path, shared: Path) -> JobOutcome:
    if not (folder / "summary.json").is_file():
        if config.warmstart is not None:
            folder.mkdir(parents=True, exist_ok=True)
            link_warmstart(config, shared_warmstart(shared, config), folder)
        try:
            result = run_training(config, at_end=AT_END)
        except KeelError as error:
            stop = guard_stop(read_run(folder))
            if stop is None:
                raise
            print(f"keel: {error}", file=sys.stderr)
            return JobOutcome(STOPPED, stop)
        if result.exit_status >= 128:
            return JobOutcome(INTERRUPTED)
    stop = guard_stop(read_run(folder))
    return JobOutcome(DONE) if stop is None else JobOutcome(STOPPED, stop)


def main(argv: list[str] | None = None) -> int:
    """`python -m keel.lab.studies.child --shared FOLDER [--measure JSON]`; without `--measure` only the warm start.

    The configuration is in the environment, as JSON.
    """
    parser = argparse.ArgumentParser(prog="keel.lab.studies.child")
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--measure")
    args = parser.parse_args(argv)
    config = load_config(json.loads(os.environ.pop(CONFIG)))
    try:
        if args.measure is None:
            make_warmstart(config, shared_warmstart(args.shared, config))
            return 0
        outcome = run_point(config, Measurements(**json.loads(args.measure)), args.shared)
    except KeelError as error:
        sys.stderr.write(f"keel: error: {' '.join(str(error).split())}\n")
        return 2
    if outcome.reason:
        sys.stderr.write(f"keel: {outcome.state}: {outcome.reason}\n")
    return {DONE: 0, STOPPED: 0, INTERRUPTED: 130}.get(outcome.state, 2)
