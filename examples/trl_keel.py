"""Keel inside TRL's GRPOTrainer: a tiny model learns to answer in even digits, held near its start by an adaptive β.

    python examples/trl_keel.py                    # on a CPU in under a minute; writes runs/trl-keel
    python examples/trl_keel.py --steps 60 --target 0.05 --out runs/closer

Needs TRL: pip install 'keel-rl[trl]'. Three lines differ from a script of TRL's; docs/other-trainers.md explains what
they change. The model's weights are random, and as training ends the doctor says so (output/random-weights).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from keel.base.errors import KeelError
from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback  # 1: in the place of trl.GRPOTrainer
from keel.models.tiny import tiny_model


def even_digits(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are even digits."""
    return [sum(character in "02468" for character in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--target", type=float, default=0.2, help="KL(policy‖reference) that β is steered to")
    parser.add_argument("--out", default="runs/trl-keel")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: use 1 or more")

    model, tokenizer = tiny_model()
    args = GRPOConfig(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        save_steps=10,
        logging_steps=10,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    kl = {  # 2: the section `kl` of a Keel configuration, or a keel.kl.KLOptions
        "beta": 0.3,
        "estimator": "exact",
        "controller": {"name": "step", "preset": "gentle", "target": given.target},
        "budget": {"max": 5 * given.target},
    }
    trainer = KeelGRPOTrainer(
        model=model,
        reward_funcs=even_digits,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]}),
        processing_class=tokenizer,
        callbacks=[KeelRunCallback(if_exists="replace")],
        kl=kl,  # 3
    )
    trainer.train()
    measured = trainer.keel_state.last_kl
    print(
        f"KL(policy‖reference) {measured['kl/policy_ref/exact/mean']:.4f} ± {measured['kl/policy_ref/exact/se']:.4f} "
        f"nats per token, steered to {given.target}; β is {trainer.keel_state.beta:.4g}"
    )
    print(f"keel doctor {given.out}; keel report {given.out}; keel show {given.out}; keel kl {given.out}")


if __name__ == "__main__":
    try:
        main()
    except KeelError as error:  # a mistake in the options: one line that names it
        print(f"trl_keel.py: error: {error}", file=sys.stderr)
        sys.exit(2)
