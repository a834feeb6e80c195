"""What Keel costs inside TRL: steps of `GRPOTrainer` and of `KeelGRPOTrainer` on one job, in turns, and their ratio.

    python bench/trl_bridge.py                     # random Llama of 2M parameters, β = 0.04 on both sides (a minute)
    python bench/trl_bridge.py --exact --rounds 5

Both sides sample, score a reference and update the same way; a step is timed from its end to the next one's, so that
logging and writing are in it. Ratios are of medians over all rounds: of wall time, which needs an idle machine, and of
the process's own CPU time, which does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from random_model import save_random_llama

PROMPT, COMPLETION, ROWS, GROUP = 32, 24, 16, 8
SHAPE = {  # 2M parameters
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each trainer in a round; the first is not counted")
    parser.add_argument("--exact", action="store_true", help="Keel's KL over the whole vocabulary")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_random_llama(model, (), SHAPE)
        times: dict[str, list[tuple[float, float]]] = {"trl": [], "keel": []}
        for turn in range(given.rounds):
            for side in ("trl", "keel") if turn % 2 == 0 else ("keel", "trl"):
                times[side] += step_times(side, model, Path(folder) / f"{side}-{turn}", given.steps, exact=given.exact)
    wall, cpu = ({side: statistics.median(s[kind] for s in steps) for side, steps in times.items()} for kind in (0, 1))
    line = {f"{side}_s": round(value, 4) for side, value in wall.items()}
    ratios = {"ratio": wall["keel"] / wall["trl"], "cpu_ratio": cpu["keel"] / cpu["trl"]}
    print(json.dumps({**line, **{name: round(value, 3) for name, value in ratios.items()}, "exact": given.exact}))


def step_times(side: str, model: Path, out: Path, steps: int, *, exact: bool) -> list[tuple[float, float]]:
    """Seconds of each step but the first: by the clock, and of the CPU."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
    from keel.kl import KLOptions

    ended: list[tuple[float, float]] = []

    class Timer(TrainerCallback):
        def on_step_end(self, *args: Any, **named: Any) -> None:
            ended.append((time.perf_counter(), time.process_time()))

    args = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=COMPLETION,
        generation_kwargs={"min_new_tokens": COMPLETION},
        beta=0.04,
        max_steps=steps + 1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    prompts = [" ".join(f"w{row * PROMPT + word}" for word in range(PROMPT)) for row in range(16)]
    shared: dict[str, Any] = {
        "model": str(model),
        "reward_funcs": lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        "args": args,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }
    if side == "trl":
        trainer = GRPOTrainer(**shared, callbacks=[Timer()])
    else:
        kl = KLOptions(estimator="exact" if exact else "k3")
        trainer = KeelGRPOTrainer(**shared, callbacks=[Timer(), KeelRunCallback(report=False)], kl=kl)
    trainer.train()
    return [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(ended)]


if __name__ == "__main__":
    main()
