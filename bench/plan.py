"""`keel train --plan` against real steps: foretold and measured peak memory of several configurations, here.

    python bench/plan.py --out results                    # this machine's GPU, else its CPU
    python bench/plan.py --small                          # small jobs for a CPU, in a minute or two
    python bench/plan.py --jobs 124m 124m-recomputed      # some of the jobs
    python bench/plan.py --model PATH.gguf                # two jobs more, with this model

A job is a process of its own: the plan, one warm-up step, and one step whose peaks are read (on CUDA the allocator's
bytes, on a CPU the bytes of live tensors). Steps are real ones, sampling included; completions are forced to their full
length and prompts are cut to one length, as a plan assumes. Nothing is downloaded: models are random. `plan.csv` in
`--out` has every figure, phase by phase.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.envs import Task

GIB = 2**30
PHASES = {"rollout": ("rollout",), "score": ("reference",), "update": ("update", "optimizer step")}


@dataclass(frozen=True)
class Job:
    """A model and what one step has to do; `more` are further overrides."""

    model: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    more: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        return [
            f"model.name={self.model}",
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.num_generations={self.group}",
            f"rollout.max_completion_length={self.new_tokens}",
            f"data.max_prompt_length={self.prompt_tokens}",
            "data.truncation=left",
            "kl.beta=0.01",
            "task.name=plan:LongPrompts",
            *self.more,
        ]


SCRATCH, RANDOM = "keel.recipes.chess.models:", "random"  # RANDOM is bench/random_model.py's Llama of 16,384 tokens
HALF, RECOMPUTED = "optim.precision=bfloat16", "model.gradient_checkpointing=true"
EXACT = ("kl.estimator=exact", "kl.exact=true")


def tokens(count: int) -> str:
    return f"optim.microbatch_tokens={count}"


_30M, _124M = SCRATCH + "chess_30m", SCRATCH + "chess_124m"
JOBS = {
    "tiny-large-batch": Job("tiny", 256, 8, 32, 64, (tokens(65536),)),
    "30m": Job(_30M, 32, 8, 128, 64, (tokens(16384),)),
    "124m": Job(_124M, 32, 8, 128, 64, (tokens(16384),)),
    "124m-recomputed": Job(_124M, 32, 8, 128, 64, (tokens(16384), RECOMPUTED)),
    "124m-bfloat16-passes": Job(_124M, 32, 8, 128, 64, (tokens(32768), HALF)),
    "124m-bfloat16-recomputed": Job(_124M, 64, 8, 128, 64, (tokens(65536), HALF, RECOMPUTED)),
    "124m-bfloat16-weights-exact": Job(_124M, 32, 8, 128, 64, (tokens(16384), "model.dtype=bfloat16", *EXACT)),
    "124m-lora": Job(_124M, 32, 8, 128, 64, (tokens(16384), "model.lora={r: 16}")),
    "124m-long-prompts": Job(_124M, 16, 8, 768, 128, (tokens(8192),)),
    "llama-large-vocabulary-exact": Job(RANDOM, 32, 8, 128, 64, (tokens(16384), *EXACT)),
    "llama-long-prompts": Job(RANDOM, 8, 8, 2048, 128, (tokens(8192),)),
    "llama-small-microbatches": Job(RANDOM, 32, 8, 128, 64, (tokens(2048),)),
}
_SMALL = SCRATCH + "chess_small"
SMALL = {
    "tiny": Job("tiny", 8, 4, 16, 32),
    "small": Job(_SMALL, 4, 4, 64, 32, (tokens(1024),)),
    "small-recomputed": Job(_SMALL, 4, 4, 64, 32, (tokens(1024), RECOMPUTED)),
    "small-bfloat16-passes": Job(_SMALL, 4, 4, 64, 32, (HALF,)),
    "small-lora-exact": Job(_SMALL, 4, 4, 64, 32, ("model.lora={r: 4}", *EXACT)),
    "small-long-rows": Job(_SMALL, 2, 4, 320, 180, (tokens(2048),)),
    "llama-exact": Job(RANDOM, 2, 4, 64, 16, EXACT),
}


def with_model(path: str, small: bool) -> dict[str, Job]:
    """The jobs of `--model`."""
    shape = (2, 4, 64, 16) if small else (32, 8, 256, 128)
    return {
        "given": Job(path, *shape, (tokens(16384),)),
        "given-bfloat16-recomputed": Job(path, *shape, (tokens(16384), HALF, RECOMPUTED)),
    }


class LongPrompts(Task):
    """A task of endless prompts, which `data.max_prompt_length` cuts, and a reward that differs within a group."""

    name = "long_prompts"

    def sample(self, count: int, *, seed: int, step: int) -> list[Any]:
        from keel.base.types import Problem

        return [
            Problem(f"{seed}/{step}/{i}", " ".join(f"{i} {n} time people" for n in range(600))) for i in range(count)
        ]

    def held_out(self, count: int, *, seed: int = 0) -> list[Any]:
        return []

    def gold(self, problem: Any) -> str:
        return "1"

    def reward(self, problem: Any, turns: Any) -> Any:
        from keel.base.types import Reward

        return Reward(float(zlib.crc32(str(turns).encode()) % 7))


class Watch:
    """What `train_step` takes for its clock: peaks by phase."""

    def __init__(self, device: Any, live: Any = None) -> None:
        self.device, self.live = device, live
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.read("between")
        yield
        self.read(phase)

    def read(self, phase: str) -> None:
        """The peak since the last reading belongs to this phase."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        elif self.live is not None:
            peak, self.live.peak = self.live.peak, self.live.now
        else:
            return
        self.peaks[phase] = max(peak, self.peaks.get(phase, 0))

    def metrics(self, tokens: int) -> dict[str, float]:
        self.read("between")
        return {}


def measure(config: Any) -> dict[str, Any]:
    """Peaks of the second real step."""
    import torch

    import keel.trainer.step as step
    from keel.models.memory import LiveBytes
    from keel.run.build import build_policy, build_run
    from keel.trainer.state import State

    loaded = build_policy(config)
    run = build_run(config, loaded).run
    engine: Any = run.engine
    generate = engine.generate
    engine.generate = lambda asked, how, **more: generate(asked, replace(how, ignore_eos=True), **more)

    state = step.train_step(run, State(kl=run.controller.init())).state
    live = LiveBytes() if loaded.device.type == "cpu" else None
    if live is not None:
        live.hold((*loaded.model.parameters(), *loaded.model.buffers()))
        if run.reference is not None:
            with run.reference.model() as held:
                live.hold((*held.parameters(), *held.buffers()))
        live.hold(x for moments in run.optimizer.inner.state.values() for x in moments.values() if torch.is_tensor(x))
    watched, clock = Watch(loaded.device, live), step.Clock
    step.Clock = lambda device, queue: watched  # type: ignore[misc,assignment]
    watched.read("before")
    with live or nullcontext():
        step.train_step(run, state)
    watched.read("between")
    step.Clock = clock  # type: ignore[misc]
    peaks = {name: peak for name, peak in watched.peaks.items() if name != "before"}
    reserved = torch.cuda.max_memory_reserved() if loaded.device.type == "cuda" else 0
    return {
        "peak": max(peaks.values()),
        "peaks": peaks,
        "reserved": reserved,
        "decoder": str(engine.fallback_reason or "shared prompts"),
        "layers": loaded.model.config.num_hidden_layers,
    }


def one(name: str, job: Job) -> dict[str, Any]:
    """A job in this process: everything foretold and measured, flat."""
    import torch

    from keel.config import load_config
    from keel.lab.plan.plan import plan
    from keel.lab.plan.shapes import find_hardware

    config = load_config({}, job.overrides())
    foretold = plan(config, find_hardware(), job.prompt_tokens)
    found = measure(config)
    row: dict[str, Any] = {
        "job": name,
        "parameters": foretold.parameters,
        "layers": found["layers"],
        "predicted_gib": foretold.peak / GIB,
        "measured_gib": found["peak"] / GIB,
        "ratio": foretold.peak / found["peak"],
        "reserved_gib": found["reserved"] / GIB,
    }
    for phase, parts in PHASES.items():
        row[f"predicted_{phase}_gib"] = max(foretold.phases.get(part, 0) for part in parts) / GIB
        row[f"measured_{phase}_gib"] = found["peaks"].get(phase, 0) / GIB
    row["measured_between_gib"] = found["peaks"].get("between", 0) / GIB
    row |= {f"{part.replace(' ', '_')}_gib": size / GIB for part, size in foretold.parts.items()}
    row |= {
        "decoder": found["decoder"],
        "torch": torch.__version__,
    }
    return {**row, "hardware": foretold.hardware.name}


def apart(name: str, options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """A job in a fresh process: the JSON on its last line, or what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        if job.model == RANDOM:
            from random_model import save_random_llama

            save_random_llama(Path(folder), ("time", "people"))
        place = folder if job.model == RANDOM else job.model
        command = [sys.executable, __file__, "--one", name, "--place", place, *(["--small"] if options.small else [])]
        command += ["--model", options.model] if options.model else []
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        print("\n".join(lines[-12:]), file=sys.stderr)
        return {"job": name, "error": lines[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(row: dict[str, Any]) -> None:
    """One job for a person: peaks, then phase by phase foretold/measured in GiB."""
    if "error" in row:
        print(f"{row['job']:30s} failed: {row['error']}", flush=True)
        return
    memory = "  ".join(f"{p} {row[f'predicted_{p}_gib']:.3f}/{row[f'measured_{p}_gib']:.3f}" for p in PHASES)
    peaks = f"{row['predicted_gib']:9.3f} {row['measured_gib']:9.3f} {row['ratio']:6.3f}"
    print(f"{row['job']:30s} {peaks}")
    print(f"{'':4s}GiB: {memory}  between {row['measured_between_gib']:.3f}", flush=True)


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(key for row in rows for key in row))
    with (folder / "plan.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", help="some of the jobs (default: all)")
    parser.add_argument("--small", action="store_true", help="small jobs for a CPU")
    parser.add_argument("--model", help="a folder or GGUF file for two further jobs")
    parser.add_argument("--out", type=Path, help="folder for plan.csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jobs = {**(SMALL if options.small else JOBS), **(with_model(options.model, options.small) if options.model else {})}
    if options.one:
        row = one(options.one, replace(jobs[options.one], model=options.place))
        print(json.dumps({**row, "overrides": " ".join(jobs[options.one].overrides())}))
        return
    wrong = sorted(set(options.jobs or ()) - set(jobs))
    if wrong:
        parser.error(f"no job {', '.join(wrong)}: there are {', '.join(jobs)}")
    print(f"{'job':30s} {'foretold':>9s} {'measured':>9s} {'ratio':>6s}   (GiB)")
    rows = []
    for name in options.jobs or jobs:
        rows.append(apart(name, options, jobs[name]))
        show(rows[-1])
        if options.out:
            write(rows, options.out)
    raise SystemExit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
