"""What the guards and the measurements cost: their share of a whole step, besides the reference's pass.

    python bench/guards.py                  # the default job, and one with completions of 512 tokens
    python bench/guards.py --job long --steps 5

Timed inside real steps of `train_step`: the guards (spike limit, budget, memory of the run, the step's violation)
and the measurements (KL of every pair with its spread, rewards, lengths). What the update needs anyway (the gradient's
norm for clipping, the policy's own pass) is not counted, and neither is the reference's pass. Medians over the steps
after a warm-up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from keel.config import load_config
from keel.models.tiny import tiny_tokenizer
from keel.run.build import build_policy, build_run
from keel.trainer import guards
from keel.trainer import step as step_module
from keel.trainer.state import State

ROOT = Path(__file__).resolve().parents[1]
GUARDS = ("spike_limit", "over_budget", "update_guard_state")
MEASUREMENTS = ("describe_groups", "measure")


def long_model(seed: int = 0) -> tuple[Any, Any]:
    """Four layers of width 128 with a context of 1024, and an EOS that is never drawn: completions of full length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    head = torch.nn.Linear(128, len(tokenizer))
    with torch.no_grad():
        head.bias.zero_()
        head.bias[tokenizer.eos_token_id] = -100.0
    model.lm_head = head
    return model, tokenizer


JOBS: dict[str, list[str]] = {
    "default": ["warmstart=null"],
    "long": [
        "warmstart=null",
        "model.name=guards:long_model",
        "rollout.prompts_per_step=4",
        "rollout.max_completion_length=512",
        "kl.estimator=k3",
        "kl.level=token",
    ],
}


def timed(spent: dict[str, float], name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its seconds added up under `name`."""

    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*given, **named)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    return call


def measure(job: str, steps: int) -> dict[str, float]:
    """Medians of a step's seconds, in all and for each part, and the shares in per cent."""
    config = load_config(ROOT / "configs" / "default.yaml", [*JOBS[job], "kl.budget.max=1000", "model.device=cpu"])
    run = build_run(config, build_policy(config)).run
    state = State(kl=run.controller.init(), norms=(1.0,) * guards.NORM_WINDOW)
    spent: dict[str, float] = {}
    for name in (*GUARDS, *MEASUREMENTS):
        setattr(step_module, name, timed(spent, name, getattr(step_module, name)))
    find = timed(spent, "find_violation", guards.find_violation)
    lines: list[dict[str, float]] = []
    for number in range(steps + 1):
        spent.clear()
        state, metrics, _ = step_module.train_step(run, state)
        find(state, metrics, run.guards, run.kl.budget)
        if number:
            guarding = sum(spent[name] for name in (*GUARDS, "find_violation"))
            measuring = sum(spent[name] for name in MEASUREMENTS)
            besides = metrics["time/total_s"]
            lines.append({"step_s": besides, "guards_s": guarding, "measure_s": measuring})
    found = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
    shares = [100 * (line["guards_s"] + line["measure_s"]) / line["step_s"] for line in lines]
    only = [100 * line["guards_s"] / line["step_s"] for line in lines]
    return {**found, "guards_percent": statistics.median(only), "all_percent": statistics.median(shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after one that does not")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "bench"))
    result = {}
    for job in given.job or JOBS:
        result[job] = measure(job, given.steps)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result[job].items())
        print(f"{job}: {shown}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
