"""What several processes cost on one machine without a GPU: the default job, one process beside one and two ranks.

    python bench/ranks.py                   # five turns of all sides on two cores
    python bench/ranks.py --side torchrun --repeats 1 --steps 4

`plain` is `keel train` with one thread, `torchrun` the same as the only rank of torch's launcher; `threads` is one
process with two threads, `replicated` and `sharded` are two gloo ranks with one thread each. The sides take turns, and
every other round goes the other way. Times are the run's own `time/total_s` of each step (so neither start-up nor the
warm start nor saving), the median of those after the first two. Reported are the median of each side over its turns,
with the smallest and the largest, `ratio`: the median of side over base within the same turn, and `quiet`: the fastest
turn of each step, averaged, which other work on the machine moves least. The load of the machine is shown, since two
ranks wait for the slower one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from step import take_turns

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 2  # steps that find caches cold
KEEL = ["-m", "keel", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SIDES: dict[str, tuple[list[str], int]] = {  # how it is started, threads of a process
    "plain": (KEEL, 1),
    "torchrun": ([*TORCHRUN, "1", *KEEL], 1),
    "threads": (KEEL, 2),
    "replicated": ([*TORCHRUN, "2", *KEEL], 1),
    "sharded": ([*TORCHRUN, "2", *KEEL], 1),
}
BASES = {"torchrun": "plain", "replicated": "threads", "sharded": "threads"}


def run(side: str, steps: int) -> list[float]:
    """The seconds of each step."""
    start, threads = SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", "run.name=timed", f"run.max_steps={steps + SKIPPED}", "warmstart.steps=20"]
        settings += ["optim.warmup_steps=0", "eval.every=0", "eval.samples=1", "eval.tasks=[]", "checkpoint.every=1000"]
        settings += ["log.console=none", "log.tensorboard=false", "model.device=cpu"]
        settings += ["parallel.sharding=full"] * (side == "sharded")
        command = [sys.executable, *start, str(ROOT / "configs" / "default.yaml"), *settings]
        ended = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True
        )
        if ended.returncode:
            raise SystemExit(f"{side} ended with {ended.returncode}: {ended.stderr[-1000:]}")
        lines = (Path(folder) / "timed" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["time/total_s"] for line in lines[SKIPPED:]]
    print(f"{side:>10}  {statistics.median(seconds):.3f} s a step, load {os.getloadavg()[0]:.1f}", flush=True)
    return seconds


def summarise(turns: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Median and range of each side over its turns, and of its ratios to its base."""
    medians = {side: [statistics.median(steps) for steps in runs] for side, runs in turns.items()}
    figures = {}
    for side, seconds in medians.items():
        quiet = statistics.mean(map(min, zip(*turns[side], strict=True)))
        figures[side] = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "quiet": quiet}
    for side, base in ((side, BASES[side]) for side in turns if side in BASES):
        ratios = [own / other for own, other in zip(medians[side], medians[base], strict=True)]
        figures[side] |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        figures[side]["quiet_ratio"] = figures[side]["quiet"] / figures[base]["quiet"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=10, help="steps that count, after two that do not")
    parser.add_argument("--side", action="append", choices=BASES, help="beside its base; may be given several times")
    given = parser.parse_args()
    wanted = {name for side in given.side or BASES for name in (side, BASES[side])}
    sides = [side for side in SIDES if side in wanted]
    figures = summarise(take_turns(sides, given.repeats, lambda side: run(side, given.steps)))
    for side, row in figures.items():
        line = f"{side:>10}  {row['median']:.3f} s ({row['min']:.3f} to {row['max']:.3f}), quiet {row['quiet']:.3f} s"
        if side in BASES:
            line += f"; of {BASES[side]}: {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
            line += f", quiet {row['quiet_ratio']:.2f}"
        print(line)
    print(json.dumps({side: {name: round(value, 4) for name, value in row.items()} for side, row in figures.items()}))


if __name__ == "__main__":
    main()
