"""Decoding speed of the native engine against transformers' generate and against the matrix products alone.

    python bench/decode.py --job 64x64      (8 prompts × 8; also: 64x1x64, 2x8x32, 2x8x32-long)

All are measured in one run, in turns, so that their ratios hold on a machine whose speed changes; medians. On a
machine that others use too, `--threads 1 --clock cpu` leaves out the time they take. The floor is the faster of the two
ways to write a linear layer: rows `X Wᵀ` as transformers does, columns `W X` as the engine's own step does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

# prompts, completions of each, prompt tokens, new tokens
JOBS = {"64x64": (8, 8, 37, 64), "2x8x32": (2, 8, 37, 32), "2x8x32-long": (2, 8, 512, 32), "64x1x64": (64, 1, 37, 64)}


class Endless:
    """A stand-in tokenizer: random weights say nothing worth decoding."""

    eos_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


def smollm2_shape() -> Any:
    """Random weights in the shape of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


FLOORS = ("rows", "columns")


def matmul_floor(model: Any, rows: int, steps: int, layout: str) -> Callable[[], None]:
    """The matrix products of `steps` decode steps as plain linear layers, and nothing else."""
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    widths = {weight.shape[1] for weight in weights}
    inputs = {width: torch.randn((rows, width) if layout == "rows" else (width, rows)) for width in widths}

    def product(weight: Tensor) -> Tensor:
        x = inputs[weight.shape[1]]
        return F.linear(x, weight) if layout == "rows" else torch.mm(weight, x)

    def run() -> None:
        with torch.no_grad():
            for _ in range(steps):
                for weight in weights:
                    product(weight)

    return run


def summarise(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians; of the two floors the lower one, since that is what no engine can be below."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    floor = min(medians.pop(layout) for layout in FLOORS)
    return {**medians, "floor": floor}


def seconds(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=sorted(JOBS), default="64x64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--new", type=int, help="new tokens, in place of the job's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups, samples, width, new = JOBS[options.job]
    new = options.new or new
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    model = smollm2_shape()
    prompts = torch.randint(1, 49152, (groups, width), generator=torch.Generator().manual_seed(1))
    engine = NativeEngine(model, Endless())
    requests = [Request(str(i), tuple(prompt)) for i, prompt in enumerate(prompts.tolist())]
    sampling = SamplingParams(num_generations=samples, max_completion_length=new, ignore_eos=True)
    repeated = prompts.repeat_interleave(samples, 0)
    floor_steps = max(1, new // 8)
    work: dict[str, Callable[[], Any]] = {
        "keel": lambda: engine.generate(requests, sampling),
        "transformers": lambda: model.generate(
            repeated,
            attention_mask=torch.ones_like(repeated),
            do_sample=True,
            top_k=0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        ),
        **{layout: matmul_floor(model, groups * samples, floor_steps, layout) for layout in FLOORS},
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(options.repeats + 1):
        for name, one in work.items():
            taken = seconds(one, clock) * (new / floor_steps if name in FLOORS else 1)
            if turn or not options.repeats:  # the first turn warms up
                times[name].append(taken)
    tokens = groups * samples * new
    median = summarise(times)
    for name, value in median.items():
        print(f"{name:>14} {value:8.2f} s {tokens / value:8.0f} tokens/s")
    result = {f"{name}_s": round(value, 3) for name, value in median.items()}
    result["ratio"] = round(median["transformers"] / median["keel"], 3)
    result["of_floor"] = round(median["floor"] / median["keel"], 3)
    print(json.dumps({"job": options.job, **result}))


if __name__ == "__main__":
    main()
