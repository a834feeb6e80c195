"""What Keel costs inside TRL: steps of `GRPOTrainer` and of `KeelGRPOTrainer` on one job, in turns, and their ratio.

    python bench/trl_bridge.py                     # random Llama of 2M parameters, β = 0.04 on both sides (a minute)
    python bench/trl_bridge.py --exact --pairs 80

Both sides sample, score a reference and update the same way. They live in one process and take turns step by step, each
in a thread that waits while the other works; a step is timed from its end to the next one's, so that logging and
writing are in it. A pair is a step of each, the order changes from pair to pair, and the result is the median of the
pairs' ratios with an interval of 95 % (order statistics: nothing is assumed of the noise). What slows the machine for
longer than a step is in both halves of a pair. `load` is that of the last one and five minutes: wall time is to be
believed where nobody else was at work. CPU time is the process's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binom

from random_model import save_random_llama

PROMPT, COMPLETION, ROWS, GROUP = 32, 24, 16, 8
WARM_UP = 2  # steps of each side that are not counted
SIDES = ("trl", "keel")
SHAPE = {  # 2M parameters
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


class Turns:
    """Hands one turn at a time to a side: its thread waits in `wait` until `run` lets it make its next step."""

    def __init__(self) -> None:
        self.go = {side: threading.Semaphore(0) for side in SIDES}
        self.done = threading.Semaphore(0)
        self.failed: BaseException | None = None

    def wait(self, side: str) -> None:
        """The end of a side's step, or of its start: the other may work now."""
        self.done.release()
        self.go[side].acquire()

    def run(self, side: str) -> tuple[float, float]:
        """One step of a side: seconds by the clock, and of the CPU."""
        before = time.perf_counter(), time.process_time()
        self.go[side].release()
        self.done.acquire()
        if self.failed is not None:
            raise self.failed
        return time.perf_counter() - before[0], time.process_time() - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="steps of each side that are counted, at least 6")
    parser.add_argument("--exact", action="store_true", help="Keel's KL over the whole vocabulary")
    given = parser.parse_args()
    if given.pairs < 6:
        parser.error(f"--pairs {given.pairs}: an interval of 95 % needs 6 or more")

    with tempfile.TemporaryDirectory() as folder:
        times = timed(Path(folder), given.pairs, exact=given.exact)
    line: dict[str, Any] = {}
    for kind, name in enumerate(("wall", "cpu")):
        seconds = {side: [step[kind] for step in times[side]] for side in SIDES}
        line |= {f"{side}_{name}_s": round(statistics.median(values), 4) for side, values in seconds.items()}
        ratios = [keel / trl for trl, keel in zip(seconds["trl"], seconds["keel"], strict=True)]
        line[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        line[f"{name}_ratio_ci95"] = [round(end, 3) for end in median_interval(ratios)]
    load = [round(value, 1) for value in os.getloadavg()[:2]]
    print(json.dumps({**line, "pairs": given.pairs, "exact": given.exact, "load": load}))


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The ranks between which the median lies at least that often, whatever the values are drawn from."""
    ordered, count = sorted(values), len(values)
    below = max(0, int(binom.ppf((1 - level) / 2, count, 0.5)) - 1)
    return ordered[below], ordered[count - 1 - below]


def timed(folder: Path, pairs: int, *, exact: bool) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the counted steps of each side, the same place in both lists being one pair."""
    model, turns = folder / "model", Turns()
    save_random_llama(model, (), SHAPE)
    trainers = {side: build(side, model, folder / side, WARM_UP + pairs, turns, exact=exact) for side in SIDES}

    def train(side: str) -> None:
        try:
            turns.wait(side)
            trainers[side].train()
        except BaseException as error:
            turns.failed = error
        turns.done.release()

    threads = [threading.Thread(target=train, args=(side,), daemon=True) for side in SIDES]
    for thread in threads:
        thread.start()
        turns.done.acquire()  # it waits now
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for pair in range(WARM_UP + pairs):
        for side in SIDES if pair % 2 == 0 else reversed(SIDES):
            seconds = turns.run(side)
            if pair >= WARM_UP:
                times[side].append(seconds)
    for side, thread in zip(SIDES, threads, strict=True):
        turns.run(side)  # what follows the last step
        thread.join()
    return times


def build(side: str, model: Path, out: Path, steps: int, turns: Turns, *, exact: bool) -> Any:
    """A trainer of one side, which gives its turn away at the end of each step."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
    from keel.kl import KLOptions

    class GivesWay(TrainerCallback):
        def on_step_end(self, *args: Any, **named: Any) -> None:
            turns.wait(side)

    args = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=COMPLETION,
        generation_kwargs={"min_new_tokens": COMPLETION},
        beta=0.04,
        max_steps=steps,
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
        return GRPOTrainer(**shared, callbacks=[GivesWay()])
    kl = KLOptions(estimator="exact" if exact else "k3")
    return KeelGRPOTrainer(**shared, callbacks=[GivesWay(), KeelRunCallback(report=False)], kl=kl)


if __name__ == "__main__":
    main()
