"""`keel plan` against real steps: foretold and measured peak memory and time of several configurations, here.

    python bench/plan.py --out results                    # this machine's GPU, else its CPU
    python bench/plan.py --small                          # small jobs for a CPU, in a minute or two
    python bench/plan.py --jobs 124m 124m-recomputed      # some of the jobs
    python bench/plan.py --model PATH.gguf                # two jobs more, with this model
    python bench/plan.py --draw 20 --seed 0               # jobs drawn at random, and by which factors times are off

A job is a process of its own: the plan with its measurement, one warm-up step, one step whose peaks are read (on CUDA
the allocator's bytes, on a CPU the bytes of live tensors), and a few that are timed. Steps are real ones, sampling
included; completions are forced to their full length and prompts are cut to one length, as a plan assumes. Nothing is
downloaded: models are random, weights do not change what a step costs. `plan.csv` in `--out` has every figure, phase by
phase. On a CPU times are the process's own, with one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.envs import Task

GIB = 2**30
TIMED_STEPS = 3
PHASES = {"rollout": ("rollout",), "score": ("reference",), "update": ("update", "optimizer step")}


@dataclass(frozen=True)
class Job:
    """A model and what one step has to do; `more` are further overrides, `seconds` what a measurement may take."""

    model: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    more: tuple[str, ...] = ()
    seconds: float | None = None

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


SCRATCH, RANDOM = "keel.envs.chess.models:", "random"  # RANDOM is bench/random_model.py's Llama of 16,384 tokens
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


def drawn(seed: int, large: bool) -> tuple[Job, dict[str, Any]]:
    """A job drawn at random, and the shape of its model; on a CPU such that a step takes seconds."""
    rng = random.Random(seed)
    while True:
        head, heads = rng.choice((32, 64)), rng.choice((2, 4, 8, 12) if not large else (8, 12, 16, 24))
        shape = {
            "family": rng.choice(("llama", "llama", "qwen2", "gpt2")),
            "hidden": head * heads,
            "heads": heads,
            "layers": rng.randint(2, 24),
            "vocabulary": int(2 ** rng.uniform(9, 14 if not large else 17)),
        }
        longest = 512 if not large else 1024
        prompts, group = rng.randint(2, 16 if not large else 64), rng.choice((2, 4, 8, 16))
        prompt, new = round(2 ** rng.uniform(4, 8)), round(2 ** rng.uniform(4, 7 if not large else 9))
        more = [tokens(rng.choice((1024, 4096, 8192, 16384))), f"optim.minibatches={rng.choice((1, 1, 1, 2))}"]
        more += ["model.lora={r: 8}"] if rng.random() < 0.3 else []
        more += EXACT if rng.random() < 0.4 else []
        more += [RECOMPUTED] if rng.random() < 0.3 else []
        more += ["rollout.max_batch=16"] if rng.random() < 0.15 else []
        more += [HALF] if large and rng.random() < 0.7 else []
        parameters = 12 * shape["layers"] * shape["hidden"] ** 2 + shape["vocabulary"] * shape["hidden"]
        flops = 10 * parameters * prompts * (prompt + group * new)
        if prompt + new <= longest and flops < (4e10 if not large else 1e15):
            seconds = rng.choice((None, 0.5, 0.25))  # parts of it are measured, as of larger jobs
            return Job(f"drawn-{seed}", prompts, group, prompt, new, tuple(more), seconds), shape


def save_drawn(folder: Path, shape: dict[str, Any]) -> None:
    """A random model of a drawn shape, with the tiny model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

    from keel.models.tiny import tiny_tokenizer

    tokenizer, hidden, heads = tiny_tokenizer(), shape["hidden"], shape["heads"]
    shared = {"vocab_size": shape["vocabulary"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if shape["family"] == "gpt2":
        config: Any = GPT2Config(n_embd=hidden, n_layer=shape["layers"], n_head=heads, n_positions=2048, **shared)
    else:
        config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape["family"]](
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=shape["layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            **shared,
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    """Peaks of the second real step, median seconds of those after it."""
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
    step.Clock = lambda device: watched  # type: ignore[misc,assignment]
    watched.read("before")
    with live or nullcontext():
        state = step.train_step(run, state).state
    watched.read("between")
    step.Clock = clock  # type: ignore[misc]
    timed = []
    for _ in range(TIMED_STEPS):
        state, metrics, _ = step.train_step(run, state)
        timed.append(metrics)
    seconds = {name: statistics.median(line[f"time/{name}_s"] for line in timed) for name in (*PHASES, "sync", "total")}
    peaks = {name: peak for name, peak in watched.peaks.items() if name != "before"}
    reserved = torch.cuda.max_memory_reserved() if loaded.device.type == "cuda" else 0
    return {
        "peak": max(peaks.values()),
        "peaks": peaks,
        "reserved": reserved,
        "seconds": {**seconds, "step": seconds["total"]},
        "decoder": str(engine.fallback_reason or "shared prompts"),
        "layers": loaded.model.config.num_hidden_layers,
    }


def one(name: str, job: Job) -> dict[str, Any]:
    """A job in this process: everything foretold and measured, flat."""
    import torch

    import keel.lab.plan.measure as plan_measure
    from keel.config import load_config
    from keel.lab.plan.hardware import find_hardware
    from keel.lab.plan.plan import plan

    config = load_config({}, job.overrides())
    if not torch.cuda.is_available():
        time.perf_counter = time.process_time  # type: ignore[assignment]
    began = time.perf_counter()
    if job.seconds is not None:
        plan_measure.STEP_S = plan_measure.ROLLOUT_S = job.seconds  # as if the job were so much larger
    foretold = plan(config, find_hardware(), job.prompt_tokens, measured=True)
    planned_s = time.perf_counter() - began
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
    for phase in (*PHASES, "step"):
        row[f"computed_{phase}_s"] = foretold.computed[phase]
        row[f"predicted_{phase}_s"] = foretold.seconds[phase]
        row[f"measured_{phase}_s"] = found["seconds"][phase]
    row |= {f"{part.replace(' ', '_')}_gib": size / GIB for part, size in foretold.parts.items()}
    row |= {
        "flops": foretold.flops,
        "plan_s": planned_s,
        "timing": foretold.timing,
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
        elif options.draw:
            save_drawn(Path(folder), drawn(int(name), options.large)[1])
        place = folder if job.model == RANDOM or options.draw else job.model
        command = [sys.executable, __file__, "--one", name, "--place", place, *(["--small"] if options.small else [])]
        command += ["--model", options.model] if options.model else []
        command += ["--draw", "1", "--seed", name, *(["--large"] if options.large else [])] if options.draw else []
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        print("\n".join(lines[-12:]), file=sys.stderr)
        return {"job": name, "error": lines[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(row: dict[str, Any]) -> None:
    """One job for a person: peaks, then phase by phase foretold/measured in GiB and in seconds."""
    if "error" in row:
        print(f"{row['job']:30s} failed: {row['error']}", flush=True)
        return
    memory = "  ".join(f"{p} {row[f'predicted_{p}_gib']:.3f}/{row[f'measured_{p}_gib']:.3f}" for p in PHASES)
    times = "  ".join(f"{p} {row[f'predicted_{p}_s']:.2f}/{row[f'measured_{p}_s']:.2f}" for p in (*PHASES, "step"))
    peaks = f"{row['predicted_gib']:9.3f} {row['measured_gib']:9.3f} {row['ratio']:6.3f}"
    print(f"{row['job']:30s} {peaks} {row['predicted_step_s']:8.2f} {row['measured_step_s']:8.2f}")
    print(f"{'':4s}GiB: {memory}  between {row['measured_between_gib']:.3f}\n{'':4s}s:   {times}", flush=True)


def factor(row: dict[str, Any], phase: str, foretold: str = "predicted") -> float:
    """By how much a time is off, in either direction."""
    ratio = row[f"{foretold}_{phase}_s"] / max(row[f"measured_{phase}_s"], 1e-9)
    return max(ratio, 1 / max(ratio, 1e-9))


def show_factors(rows: list[dict[str, Any]]) -> None:
    """Median, 95th percentile and largest factor of each phase; computed, then measured."""
    print(f"{'phase':10s} {'computed: median':>17s} {'95 %':>6s} {'measured: median':>17s} {'95 %':>6s} {'max':>6s}")
    for phase in (*PHASES, "step"):
        rated = [row for row in rows if row.get(f"measured_{phase}_s", 0) > 1e-3]
        if not rated:
            continue
        before, after = (sorted(factor(row, phase, kind) for row in rated) for kind in ("computed", "predicted"))
        high = min(len(rated) - 1, round(0.95 * (len(rated) - 1)))
        figures = (statistics.median(before), before[high], statistics.median(after), after[high], after[-1])
        print(
            f"{phase:10s} {figures[0]:17.2f} {figures[1]:6.2f} {figures[2]:17.2f} {figures[3]:6.2f} {figures[4]:6.2f}"
        )


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
    parser.add_argument("--draw", type=int, default=0, help="so many jobs drawn at random in place of those listed")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of --draw")
    parser.add_argument("--large", action="store_true", help="--draw draws jobs for a GPU")
    parser.add_argument("--out", type=Path, help="folder for plan.csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jobs = {**(SMALL if options.small else JOBS), **(with_model(options.model, options.small) if options.model else {})}
    if options.draw:
        seeds = range(options.seed, options.seed + options.draw)
        jobs = {str(seed): drawn(seed, options.large)[0] for seed in seeds}
    if options.one:
        row = one(options.one, replace(jobs[options.one], model=options.place))
        print(json.dumps({**row, "overrides": " ".join(jobs[options.one].overrides())}))
        return
    wrong = sorted(set(options.jobs or ()) - set(jobs))
    if wrong:
        parser.error(f"no job {', '.join(wrong)}: there are {', '.join(jobs)}")
    print(f"{'job':30s} {'foretold':>9s} {'measured':>9s} {'ratio':>6s} {'s':>8s} {'real s':>8s}   (GiB)")
    rows = []
    for name in options.jobs or jobs:
        rows.append(apart(name, options, jobs[name]))
        show(rows[-1])
        if options.out:
            write(rows, options.out)
    show_factors(rows)
    raise SystemExit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
