"""Kill a shortened default at random moments with SIGKILL, resume it each time, and compare it with a run left alone.

    python scripts/soak_resume.py --kills 20        # `make soak` does all four
    python scripts/soak_resume.py --kills 10 --nproc 2 --steps 60
    python scripts/soak_resume.py --kills 3 --nproc 2 --steps 25 --set parallel.sharding=full
    python scripts/soak_resume.py --kills 6 --steps 42 --set rollout.max_staleness=2

The skill is an easy one, so that rewards differ early; kills begin after the warm start, and some fall into a resume's
own start. With --nproc each kill takes one rank, rank 0 among them, and the others must end by themselves, with the
status of a lost rank. Every metric of every step, every rollout and every evaluation must be equal, but for times,
speeds and memory. Ranks are told apart by /proc: Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHANGING = ("time/", "speed/", "memory/")
COMPARED = ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl")
EVERY = 2  # steps between two checkpoints
ENDING_S = 60.0  # in which the other ranks must have ended
START_S = 5.0  # about as long as a start takes
LOST = 137  # exit status of a run that has lost a rank


def command(folder: Path, name: str, options: argparse.Namespace, resume: bool) -> list[str]:
    """`keel train` on a shortened default with frequent checkpoints."""
    base = [sys.executable, "-m", "keel.cli", "train", "--nproc", str(options.nproc)]
    if resume:
        return [*base, "--resume", str(folder / name)]
    settings = [f"run.dir={folder}", f"run.name={name}", f"run.max_steps={options.steps}"]
    settings += [f"checkpoint.every={EVERY}"]
    settings += ["warmstart.steps=100", "rollout.prompts_per_step=8", "eval.every=20", "eval.samples=16"]
    settings += [f"optim.warmup_steps={min(10, options.steps // 2)}"]  # a few kills make a run of few steps
    settings += ["task.skill=copy", "task.digits=4"]  # learnt soonest: rewards differ, so that every step moves weights
    settings += ["log.console=plain", "log.tensorboard=false"]
    given = {text.partition("=")[0] for text in options.set}
    settings = [text for text in settings if text.partition("=")[0] not in given]
    return [*base, "configs/default.yaml", *settings, *options.set]


def steady(line: dict[str, Any]) -> dict[str, Any]:
    """A record without what may differ between two exact runs."""
    return {key: value for key, value in line.items() if not key.startswith(CHANGING) and key != "time"}


def records(run: Path, name: str) -> list[dict[str, Any]]:
    return [steady(json.loads(line)) for line in (run / name).read_text().splitlines()]


def last_step(run: Path) -> int:
    """The last complete line's step; a torn line is one that was being written."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def last_checkpoint(run: Path) -> int:
    return max((int(folder.name.removeprefix("step-")) for folder in run.glob("checkpoints/step-*")), default=0)


def ranks(process: int) -> dict[int, int]:
    """The id of each rank that a launcher has started so far."""
    started: dict[int, int] = {}
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                started |= {int(text[5:]): int(child) for text in variables if text.startswith(b"RANK=")}
        except OSError:  # one that has just ended
            continue
    return started


def kill_one(process: subprocess.Popen[str], nproc: int, rng: random.Random) -> int | None:
    """Kill a random rank and wait until all have ended; the rank, or None where the run was over before."""
    if nproc == 1:
        rank, victims = 0, {0: process.pid}
    else:
        rank = rng.randrange(nproc)
        while rank not in (victims := ranks(process.pid)) and process.poll() is None:
            time.sleep(0.02)
    if process.poll() is not None:
        return None
    os.kill(victims[rank], signal.SIGKILL)
    try:
        status = process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise SystemExit(f"soak: {ENDING_S:.0f} s after rank {rank} was killed the others still run") from None
    if status == 0:
        return None
    if status != (-signal.SIGKILL if nproc == 1 else LOST):
        raise SystemExit(f"soak: rank {rank} was killed, and the run ended with {status}")
    return rank


def interrupted(folder: Path, options: argparse.Namespace, rng: random.Random) -> tuple[int, int]:
    """Run to the end through `kills` kills; returns how many were dealt, and how many after a trained checkpoint."""
    run, errors, dealt, trained, steps = folder / "killed", folder / "stderr", 0, 0, options.steps
    while True:
        started = run.exists() and (run / "config.yaml").exists()
        with errors.open("w") as stream:
            process = subprocess.Popen(command(folder, "killed", options, started), stderr=stream, text=True)
        begin = last_step(run)
        room = max(2, (steps - begin) // (options.kills - dealt + 2))  # leave steps for the kills still to come
        first = 0 if started else EVERY + 1  # there is then a checkpoint with an optimiser's state to go on from
        target = begin + rng.randint(first, max(first, room))
        while process.poll() is None and not (dealt < options.kills and last_step(run) >= target):
            time.sleep(0.02)
        if process.poll() is None:  # anywhere in a start; in a step, a save or an evaluation
            time.sleep(rng.random() * (START_S if target == begin else 0.15))
            rank = kill_one(process, options.nproc, rng)
            if rank is not None:
                dealt += 1
                trained += last_checkpoint(run) > 0
                who = f" rank {rank}" * (options.nproc > 1)
                print(f"kill {dealt}:{who} at step {last_step(run)}{' or before' * (target == begin)}", flush=True)
                continue
        if process.returncode:
            raise SystemExit(f"soak: the run ended with {process.returncode}: {errors.read_text()[-500:]}")
        return dealt, trained


def difference(folder: Path, name: str) -> str | None:
    """Where two runs part, with the fields that do; None if they are equal."""
    one, other = records(folder / "alone", name), records(folder / "killed", name)
    for number, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        if a != b:
            fields = {key: (a.get(key), b.get(key)) for key in {*a, *b} if a.get(key) != b.get(key)}
            return f"{name} differs first at line {number} of {len(one)}: {str(fields)[:600]}"
    return None if len(one) == len(other) else f"{name} has {len(one)} and {len(other)} lines"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1, help="processes of the run, one of which each kill takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    return parser


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = subprocess.run(command(folder, "alone", options, False), capture_output=True, text=True)
        if alone.returncode:
            raise SystemExit(f"soak: the run left alone failed: {alone.stderr[-500:]}")
        dealt, trained = interrupted(folder, options, random.Random(options.seed))
        different = [text for name in COMPARED if (text := difference(folder, name))]
        if different or dealt < options.kills:
            raise SystemExit(f"soak: {dealt} of {options.kills} kills; " + "; ".join(different or ["no difference"]))
        if not trained:
            raise SystemExit(f"soak: none of {dealt} resumes went on from a step: take more --steps")
        compared = len(records(folder / "alone", "metrics.jsonl"))
        print(f"{dealt} kills, every resume exact, {trained} of them in mid-training: {compared} steps compared")


if __name__ == "__main__":
    main()
