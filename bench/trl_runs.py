"""Runs of TRL's own GRPOTrainer on a small model, healthy and broken, and what `keel doctor` says of their logs.

    python bench/trl_runs.py --out tests/doctor/trl_runs      # makes the logs that the tests read (some minutes)
    python bench/trl_runs.py --only good-reference --steps 20     # one of them, into a temporary folder

Kept of each run are TRL's trainer_state.json and training_args.bin. A broken run has one thing wrong that users of TRL
meet; which code names it is in tests/doctor/test_trl_runs.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

Reward = Callable[..., list[float]]


def accuracy(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def is_number(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.strip().isdecimal()) for text in completions]


def nearness(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    texts = [text.strip() for text in completions]
    return [
        max(0.0, 1 - abs(int(text) - int(right)) / 9) if text.isdecimal() and len(text) < 4 else 0.0
        for text, right in zip(texts, answer, strict=True)
    ]


def boxed(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Wants a form that the prompt never asks for."""
    return [float(rf"\boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


def length(completions: list[str], **columns: Any) -> list[float]:
    return [len(text) / 4 for text in completions]


def thousands(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [5000 * total for total in accuracy(completions, answer)]


def coin(completions: list[str], **columns: Any) -> list[float]:
    return [float(_COIN.random() < 0.5) for _ in completions]


_COIN = Random(0)


@dataclass(frozen=True)
class Run:
    """Options of GRPOConfig that differ from the base, the rewards, and what is done to the model."""

    args: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[Reward, ...] = (accuracy,)
    dropout: float = 0.0
    lora: bool = False
    other_reference: bool = False  # the name in the model's config, from which TRL loads the reference, is another's


RUNS: dict[str, Run] = {
    "good-reference": Run({"beta": 0.04}),
    "good-dapo": Run({"beta": 0.0, "loss_type": "dapo"}, rewards=(nearness,)),
    "good-two-rewards": Run({"beta": 0.01, "loss_type": "dr_grpo", "scale_rewards": "none"}, (accuracy, is_number)),
    "good-lora": Run({"beta": 0.02, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}, lora=True),
    "good-one-spike": Run({"beta": 0.04, "learning_rate": 1e-3}),
    "good-two-iterations": Run({"beta": 0.02, "num_iterations": 2, "lr_scheduler_type": "cosine"}, rewards=(nearness,)),
    "rate-0": Run({"beta": 0.04, "learning_rate": 0.0}),
    "rate-too-high": Run({"beta": 0.04, "learning_rate": 3e-2, "max_grad_norm": 100.0}),
    "form-never-asked-for": Run({"beta": 0.04}, rewards=(boxed,)),
    "cut-after-one-token": Run({"beta": 0.04, "max_completion_length": 1}),
    "length-paid": Run({"beta": 0.0, "max_completion_length": 12, "learning_rate": 3e-3}, rewards=(accuracy, length)),
    "beta-5": Run({"beta": 5.0, "learning_rate": 1e-3}),
    "dropout-on": Run({"beta": 0.04, "disable_dropout": False}, dropout=0.2),
    "reference-of-another-checkpoint": Run({"beta": 0.04}, other_reference=True),
    "reward-by-chance": Run({"beta": 0.04, "learning_rate": 1e-3}, rewards=(coin,)),
    "good-warm-up": Run(
        {"beta": 0.02, "seed": 7, "warmup_steps": 12, "lr_scheduler_type": "linear"}, rewards=(nearness, accuracy)
    ),
    "good-bnpo": Run({"beta": 0.0, "seed": 3, "loss_type": "bnpo", "num_generations": 16}),
    "clipped-to-nothing": Run({"beta": 0.04, "seed": 8, "max_grad_norm": 1e-9}),
    "temperature-0.05": Run({"beta": 0.04, "seed": 9, "temperature": 0.05}),
    "reference-synced": Run(
        {"beta": 0.04, "seed": 4, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0},
        rewards=(nearness,),
    ),
    "weight-decay-10": Run({"beta": 0.04, "seed": 14, "weight_decay": 10.0}),
    "temperature-4": Run({"beta": 0.04, "seed": 15, "temperature": 4.0}),
    "epsilon-of-adam": Run({"beta": 0.04, "seed": 17, "adam_epsilon": 100.0}),
    "reward-of-thousands": Run({"beta": 0.04, "seed": 18, "scale_rewards": "none"}, rewards=(thousands,)),
}
# Not made yet: what the doctor says of them is what it says of a run that nobody has seen.
FRESH: dict[str, Run] = {
    "good-truncated-masked": Run(
        {"beta": 0.04, "seed": 12, "mask_truncated_completions": True, "loss_type": "dr_grpo"}
    ),
    "good-small-groups": Run(
        {"beta": 0.01, "seed": 13, "num_generations": 4, "gradient_accumulation_steps": 2}, (nearness,)
    ),
    "warm-up-of-another-run": Run({"beta": 0.04, "seed": 16, "warmup_steps": 1_000_000, "lr_scheduler_type": "linear"}),
    "clipped-at-once": Run({"beta": 0.0, "seed": 19, "epsilon": 1e-9, "num_iterations": 4}),
}
RUNS.update(FRESH)


def make_run(name: str, run: Run, steps: int, into: Path) -> None:
    """Trains in a temporary folder, whose relative paths are the only ones in the files that are kept."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from doctor.schooled import TASK, fresh_model, taught
    from keel.envs.registry import build_task

    work = tempfile.mkdtemp()
    home = Path.cwd()
    os.chdir(work)
    try:
        model, tokenizer = copy.deepcopy(taught(90))
        model.config.attention_dropout = run.dropout
        for part in (model, tokenizer):
            part.save_pretrained("model")
        for part in fresh_model(seed=1):
            part.save_pretrained("other")
        policy: Any = AutoModelForCausalLM.from_pretrained("model")
        if run.other_reference:
            policy.config._name_or_path = "other"
        task = build_task(str(TASK["name"]), **{key: value for key, value in TASK.items() if key != "name"})
        problems = [
            problem for step in range(16) for problem in task.sample(16, seed=11 + run.args.get("seed", 0), step=step)
        ]
        rows = {
            "prompt": [str(problem.prompt) for problem in problems],
            "answer": [str(problem.answer) for problem in problems],
        }
        options = {
            "learning_rate": 7e-4,
            "max_completion_length": 6,
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "lr_scheduler_type": "constant",
            "max_steps": steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "seed": 0,
            "disable_tqdm": True,
            **run.args,
        }
        adapter: dict[str, Any] = {}
        if run.lora:
            from peft import LoraConfig

            adapter = {
                "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            }
        trainer = GRPOTrainer(
            model=policy,
            processing_class=tokenizer,
            reward_funcs=list(run.rewards),
            args=GRPOConfig(output_dir="out", **options),
            train_dataset=Dataset.from_dict(rows),
            **adapter,
        )
        trainer.train()
        trainer.save_state()
        folder = into / name
        folder.mkdir(parents=True, exist_ok=True)
        state = json.loads(Path("out/trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(_slim(state))
        import torch

        torch.save(trainer.args, folder / "training_args.bin")
    finally:
        os.chdir(home)
        shutil.rmtree(work)


# Times, and what no check reads.
_UNREAD = re.compile(
    r"step_time|epoch|num_tokens|clip_ratio/(low|high)_.*|rewards/.*/std|completions/(min|max)_.*|completions/mean_term.*"
)


def _slim(state: dict[str, Any]) -> str:
    """Four digits of every figure that is read, a step a line."""
    lines = [
        {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in line.items() if not _UNREAD.fullmatch(key)}
        for line in state["log_history"]
        if "train_runtime" not in line
    ]
    head = {"global_step": state["global_step"], "max_steps": state["max_steps"]}
    rows = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    return f'{json.dumps(head)[:-1]}, "log_history": [\n{rows}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the logs (a temporary one otherwise)")
    parser.add_argument("--only", choices=RUNS, help="one run")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    from keel.doctor.examine import examine

    into = (args.out or Path(tempfile.mkdtemp())).resolve()
    for name in [args.only] if args.only else RUNS:
        make_run(name, RUNS[name], args.steps, into)
        findings = examine(into / name).findings
        print(f"{name}: {', '.join(f'{f.code} ({f.severity})' for f in findings) or 'healthy'}", flush=True)


if __name__ == "__main__":
    main()
