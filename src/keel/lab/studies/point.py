"""One run of a study in a process of its own: warm start linked in, training, drift, outcome."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from keel.base.errors import KeelError
from keel.base.files import encode, read_json, write_atomic
from keel.config import Config, load_config
from keel.lab.hooks import AT_END
from keel.lab.runs import read_run
from keel.lab.studies.folder import DONE, DRIFT, FAILED, INTERRUPTED, STOPPED, Outcome, write_outcome
from keel.lab.studies.grid import Measure
from keel.lab.studies.process import CONFIG
from keel.run.build import build_policy, build_warmstart
from keel.run.train import train
from keel.run.warmstart import is_complete, warmstart, warmstart_folder
from keel.trainer.checkpoint import no_progress_bars, writing
from keel.trainer.integrity import damages


def start_place(shared: Path, config: Config) -> Path:
    """Where the warm start that this run shares with others lies: under all that makes it, cutting included."""
    return warmstart_folder(shared / f"{config.optim.microbatch_tokens}-{config.optim.precision}", config)


def make_start(config: Config, place: Path) -> None:
    """The warm start as a run itself would make it; nothing where it is there already and as it was saved."""
    if not is_complete(place) or damages(place):
        with no_progress_bars():
            warmstart(place, build_policy(config), lambda model: build_warmstart(config, model))


def link_start(config: Config, place: Path, run: Path) -> None:
    """The shared warm start into a run's folder, without copying where the disk can share files."""
    target = warmstart_folder(run, config)
    if is_complete(target):
        return
    with writing(target) as temporary:
        for file in sorted(place.iterdir()):
            try:
                os.link(file, temporary / file.name)
            except OSError:
                shutil.copy2(file, temporary / file.name)


def run_point(config: Config, measure: Measure, shared: Path) -> Outcome:
    """Train, or go on, or do what a kill left undone after training; the outcome is written unless interrupted."""
    folder = Path(config.run.dir) / config.run.name
    try:
        ended = _trained(config, folder, shared)
        if ended.state in (DONE, STOPPED) and read_json(folder / DRIFT) is None:  # whole, or not there
            from keel.lab.studies.measure import measure_run

            write_atomic(folder / DRIFT, encode(measure_run(folder, measure), indent=2) + "\n")
    except KeelError as error:
        ended = Outcome(FAILED, str(error))
    if ended.state != INTERRUPTED and folder.is_dir():
        write_outcome(folder, ended)
    return ended


def _trained(config: Config, folder: Path, shared: Path) -> Outcome:
    if not (folder / "summary.json").is_file():
        if config.warmstart is not None:
            folder.mkdir(parents=True, exist_ok=True)
            link_start(config, start_place(shared, config), folder)
        try:
            result = train(config, at_end=AT_END)
        except KeelError as error:
            stop = guard_stop(folder)
            if stop is None:
                raise
            print(f"keel: {error}", file=sys.stderr)
            return Outcome(STOPPED, stop)
        if result.exit_status >= 128:
            return Outcome(INTERRUPTED)
    stop = guard_stop(folder)
    return Outcome(DONE) if stop is None else Outcome(STOPPED, stop)


def guard_stop(folder: Path) -> str | None:
    """Why a guard ended the run, from its last events; None where it ended by itself or failed otherwise."""
    run = read_run(folder)
    ending = [event for event in run.events if event.get("kind") in ("stop", "kl/over-budget", "resume")]
    if not ending or ending[-1].get("kind") == "resume" or run.steps >= (run.max_steps or 0):
        return None
    last = ending[-1]
    if last.get("kind") == "kl/over-budget" and int(last.get("step") or 0) < run.steps:
        return None  # a budget that only warned, and the run went on
    return " ".join(str(last.get("message", "")).split())


def main(argv: list[str] | None = None) -> int:
    """`python -m keel.lab.studies.child --shared FOLDER [--measure JSON]`: without a measure the warm start only.

    The configuration is in the environment, as JSON.
    """
    parser = argparse.ArgumentParser(prog="keel.lab.studies.child")
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--measure")
    given = parser.parse_args(argv)
    config = load_config(json.loads(os.environ.pop(CONFIG)))
    try:
        if given.measure is None:
            make_start(config, start_place(given.shared, config))
            return 0
        ended = run_point(config, Measure(**json.loads(given.measure)), given.shared)
    except KeelError as error:
        sys.stderr.write(f"keel: error: {' '.join(str(error).split())}\n")
        return 2
    if ended.reason:
        sys.stderr.write(f"keel: {ended.state}: {ended.reason}\n")
    return {DONE: 0, STOPPED: 0, INTERRUPTED: 130}.get(ended.state, 2)
