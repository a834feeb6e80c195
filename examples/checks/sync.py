"""GRPOTrainer with vLLM, whose weights are compared at every generation. `python sync.py faulty`: the LoRA is lost."""

import os
import sys
from typing import Any

import vllm_on_cpu  # vLLM for CPUs loads weights in another way than TRL does; leave it out on a GPU
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from keel.integrations.trl import SyncCheck

MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")


def even(completion_ids: list[list[int]], **_: Any) -> Any:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


if __name__ == "__main__":
    vllm_on_cpu.load_by_reload()
    sampling: Any = {"vllm_gpu_memory_utilization": 0.1, "max_completion_length": 16, "num_generations": 4}
    options: Any = {"learning_rate": 0.05, "max_steps": 3, "save_strategy": "no", "use_cpu": True, "bf16": False}
    args = GRPOConfig(use_vllm=True, **options, **sampling)
    rows = Dataset.from_dict({"prompt": [f"{n} + 1 =" for n in range(16)]})
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer: Any = GRPOTrainer(MODEL, even, args, rows, peft_config=adapter)
    if sys.argv[1:] == ["faulty"]:  # as where a wrapper hides the adapter from the sync
        trainer.model.merge_adapter = trainer.model.unmerge_adapter = lambda: None
    check = SyncCheck(trainer, on_mismatch="warn")
    trainer.add_callback(check)
    trainer.train()
    print(check.results[-1])
    sys.exit(bool(check.results[-1].wrong))
