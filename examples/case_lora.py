"""The case of docs/cases.md: GRPOTrainer with LoRA and vLLM, where the adapter never reaches the sampler.

`python case_lora.py sound` and `python case_lora.py faulty` in the environment of `make setup-vllm`. The model is
random and small, the reward is the share of even tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from keel.integrations.trl import DrawnCheck, SyncCheck, TraceRecorder
from keel.lab.traces import check_depth, check_tokens, read_traces
from keel.models.tiny import random_model, tiny_config, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent / "checks"))
import vllm_on_cpu


def even(completion_ids: list[list[int]], **_: Any) -> Any:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def build(folder: Path, faulty: bool) -> Any:
    config = tiny_config(tiny_tokenizer())
    config.update({"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 256})
    model: Any = random_model(LlamaForCausalLM, config, 0)
    with torch.no_grad():  # logits that are spread out, as a trained model's
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    args = GRPOConfig(
        output_dir=str(folder), use_vllm=True, vllm_gpu_memory_utilization=0.1, vllm_max_model_length=128, beta=0.0,
        max_completion_length=96, per_device_train_batch_size=32, num_generations=8, max_steps=40, learning_rate=5e-3,
        lr_scheduler_type="constant", logging_steps=1, save_steps=40, use_cpu=True, bf16=False, report_to="none",
        seed=0, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(64)]})
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer: Any = GRPOTrainer(str(folder / "model"), even, args, rows, peft_config=adapter)
    if faulty:
        trainer.model.merge_adapter = trainer.model.unmerge_adapter = lambda: None
    return trainer


if __name__ == "__main__":
    kind = sys.argv[1]
    folder = Path(f"case-lora-{kind}")
    vllm_on_cpu.load_by_reload()
    trainer = build(folder, kind == "faulty")
    sync, drawn = SyncCheck(trainer, on_mismatch="warn"), DrawnCheck(trainer, keep=2, on_mismatch="warn")
    for callback in (sync, drawn, TraceRecorder(trainer, folder / "traces.jsonl")):
        trainer.add_callback(callback)
    trainer.train()
    log = [line for line in trainer.state.log_history if "reward" in line]
    for line in log[::10] + log[-1:]:
        names = (
            "reward",
            "entropy",
            "sampling/sampling_logp_difference/mean",
            "sampling/importance_sampling_ratio/min",
        )
        print(line["step"], json.dumps({name: round(float(line[name]), 4) for name in names}))
    wrong = [result for result in sync.results if result.wrong]
    print("SyncCheck:", wrong[0] if wrong else sync.results[-1])
    stale = [(step, report) for step, report in enumerate(drawn.reports, 1) if report.stale]
    print("DrawnCheck:", f"step {stale[0][0]}: {stale[0][1]}" if stale else drawn.reports[-1])
    traces = read_traces(folder / "traces.jsonl")
    print("check_depth:", check_depth(traces[-320:]))
    print("check_tokens:", check_tokens(traces, tiny_tokenizer()))
