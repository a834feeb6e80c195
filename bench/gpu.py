"""The parts of a step on one GPU: rollout, the reference's pass, the update's passes, on random weights of two shapes.

    python bench/gpu.py                                # all jobs
    python bench/gpu.py --job h200 --job h200-ragged --steps 4

`h200` is a Llama shape of 1.54B parameters in bfloat16, 16 prompts of 512 tokens × 8 completions of 256, in batches
of 4 groups; `h200-ragged` the same with completions of 64 to 256 tokens; `h200-1024` with completions of 1,024, in
batches of 2; `smollm2` is SmolLM2-135M's shape in fp32 with bfloat16 passes and a bfloat16 sampler, 32 prompts of 60
to 180 tokens × 16 completions of 40 to 150, in batches of 8. Every step has new lengths. The first step is shown
beside the median of the others. Not in it: tasks, judges, records, the optimizer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.base.types import Batch, Completion, Group, Problem
from keel.kl import KLOptions
from keel.losses import LossOptions, advantages, objective
from keel.models.fuse import fuse_modules
from keel.models.logprobs import score_tokens
from keel.models.pack import pack
from keel.rollout import NativeEngine, Request, SamplingParams

LARGE = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
LARGE |= {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096}
PARTS = ("rollout", "reference", "update")
SMALL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}


@dataclass(frozen=True)
class Job:
    """What a step has to do; lengths are drawn between two bounds."""

    shape: dict[str, int]
    dtype: torch.dtype
    prompts: int
    group: int
    prompt: tuple[int, int]
    completion: tuple[int, int]
    microbatch: int  # groups


JOBS = {
    "h200": Job(LARGE, torch.bfloat16, 16, 8, (512, 512), (256, 256), 4),
    "h200-ragged": Job(LARGE, torch.bfloat16, 16, 8, (512, 512), (64, 256), 4),
    "h200-1024": Job(LARGE, torch.bfloat16, 16, 8, (512, 512), (1024, 1024), 2),
    "smollm2": Job(SMALL, torch.float32, 32, 16, (60, 180), (40, 150), 8),
}


class Tokens:
    """Just enough of a tokenizer."""

    eos_token_id = 2

    def decode(self, tokens: Any, **_: Any) -> str:
        return ""


def groups_of(job: Job, rng: random.Random) -> list[Group]:
    """A step's groups, of random tokens."""

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(job.shape["vocab_size"]) for _ in range(rng.randint(*bounds)))

    def completion() -> Completion:
        drawn = tokens(job.completion)
        zeros = (0.0,) * len(drawn)
        return Completion(drawn, (True,) * len(drawn), zeros, zeros, "", "length")

    return [
        Group(Problem(str(i), ""), tokens(job.prompt), tuple(completion() for _ in range(job.group)))
        for i in range(job.prompts)
    ]


def passes(model: torch.nn.Module, job: Job, groups: list[Group], *, update: bool) -> None:
    """Score all microbatches, with the loss and its gradient where `update`."""
    for start in range(0, len(groups), job.microbatch):
        packed = pack(groups[start : start + job.microbatch], 0).to("cuda")
        mixed = torch.autocast("cuda", torch.bfloat16, enabled=job.dtype == torch.float32)
        with mixed, torch.set_grad_enabled(update):
            scores = score_tokens(model, packed, entropy=update)
        if update:
            rewards = advantages(torch.randn(len(packed.tokens), device="cuda"), packed.group)
            batch = Batch(packed.action_mask, rewards, ref_logp=scores.logp.detach() - 0.01)
            objective(scores, batch, LossOptions(loss_type="grpo"), KLOptions(), 0.04).loss.backward()
    model.zero_grad(set_to_none=True)


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(job: Job, steps: int) -> dict[str, float]:
    """Seconds by part, of the first step and as the median of the others, and peak GiB."""
    torch.manual_seed(0)
    torch.set_default_dtype(job.dtype)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**job.shape, tie_word_embeddings=True)).eval()
    torch.set_default_dtype(torch.float32)
    fuse_modules(model)
    torch.backends.cuda.enable_cudnn_sdp(False)
    engine = NativeEngine(model, Tokens(), dtype=torch.bfloat16)
    rng = random.Random(0)
    sampling = SamplingParams(max_completion_length=job.completion[1], num_generations=job.group, ignore_eos=True)
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for step in range(steps):
        groups = groups_of(job, rng)
        requests = [
            Request(group.problem.key, group.prompt_tokens, (i,), max_new=len(completion.tokens))
            for group in groups
            for i, completion in enumerate(group.completions)
        ]
        parts["rollout"].append(seconds(lambda: engine.generate(requests, sampling, step=step)))  # noqa: B023
        parts["reference"].append(seconds(lambda: passes(model, job, groups, update=False)))  # noqa: B023
        parts["update"].append(seconds(lambda: passes(model, job, groups, update=True)))  # noqa: B023
    result = {f"{name}_first_s": taken[0] for name, taken in parts.items()}
    result |= {f"{name}_s": statistics.median(taken[1:]) for name, taken in parts.items()}
    return {**result, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=sorted(JOBS), help="may be given several times")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: bench/step.py measures a CPU")
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is not counted")
    results = {}
    for name in options.job or list(JOBS):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = results[name] = measure(JOBS[name], options.steps)
        parts = "  ".join(f"{p} {found[f'{p}_s']:.2f} s (first {found[f'{p}_first_s']:.2f})" for p in PARTS)
        print(f"{name:>12}  {parts}  peak {found['peak_gib']:.1f} GiB", flush=True)
    print(json.dumps({name: {key: round(value, 3) for key, value in r.items()} for name, r in results.items()}))


if __name__ == "__main__":
    main()
