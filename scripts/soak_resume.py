"""Kill a shortened default at random steps with SIGKILL, resume it each time, and compare it with a run left alone.

    python scripts/soak_resume.py --kills 20        # `make soak`

The skill is an easy one, so that rewards differ early; kills begin after the warm start. Every metric of every step,
every rollout and every evaluation must be equal, but for times, speeds and memory.
"""

from __future__ import annotations

import argparse
import json
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


def command(folder: Path, name: str, steps: int, resume: bool) -> list[str]:
    """`keel train` on a shortened default with frequent checkpoints."""
    base = [sys.executable, "-m", "keel.cli", "train"]
    if resume:
        return [*base, "--resume", str(folder / name)]
    settings = [f"run.dir={folder}", f"run.name={name}", f"run.max_steps={steps}", "checkpoint.every=5"]
    settings += ["warmstart.steps=100", "rollout.prompts_per_step=8", "eval.every=20", "eval.samples=16"]
    settings += ["task.skill=copy", "task.digits=4"]  # learnt soonest: rewards differ, so that every step moves weights
    return [*base, "configs/default.yaml", *settings, "log.console=plain", "log.tensorboard=false"]


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


def interrupted(folder: Path, steps: int, kills: int, rng: random.Random) -> int:
    """Run to the end through `kills` kills; returns how many were dealt."""
    run, dealt = folder / "killed", 0
    while True:
        started = run.exists() and (run / "config.yaml").exists()
        process = subprocess.Popen(command(folder, "killed", steps, started), stderr=subprocess.PIPE, text=True)
        begin = last_step(run)
        room = max(2, (steps - begin) // (kills - dealt + 2))  # leave steps for the kills still to come
        target = begin + rng.randint(1, room)
        while process.poll() is None and not (dealt < kills and last_step(run) >= target):
            time.sleep(0.02)
        if process.poll() is None:
            time.sleep(rng.random() * 0.15)  # anywhere in a step, a save or an evaluation
            process.send_signal(signal.SIGKILL)
            process.wait()
            dealt += 1
            print(f"kill {dealt}: at step {last_step(run)}", flush=True)
            continue
        if process.returncode:
            raise SystemExit(
                f"soak: the run ended with {process.returncode}: {(process.stderr or sys.stdin).read()[-500:]}"
            )
        return dealt


def difference(folder: Path, name: str) -> str | None:
    """Where two runs part, with the fields that do; None if they are equal."""
    one, other = records(folder / "alone", name), records(folder / "killed", name)
    for number, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        if a != b:
            fields = {key: (a.get(key), b.get(key)) for key in {*a, *b} if a.get(key) != b.get(key)}
            return f"{name} differs first at line {number} of {len(one)}: {str(fields)[:600]}"
    return None if len(one) == len(other) else f"{name} has {len(one)} and {len(other)} lines"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = subprocess.run(command(folder, "alone", options.steps, False), capture_output=True, text=True)
        if alone.returncode:
            raise SystemExit(f"soak: the run left alone failed: {alone.stderr[-500:]}")
        dealt = interrupted(folder, options.steps, options.kills, random.Random(options.seed))
        different = [text for name in COMPARED if (text := difference(folder, name))]
        if different or dealt < options.kills:
            raise SystemExit(f"soak: {dealt} of {options.kills} kills; " + "; ".join(different or ["no difference"]))
        print(f"{dealt} kills, every resume exact: {len(records(folder / 'alone', 'metrics.jsonl'))} steps compared")


if __name__ == "__main__":
    main()
