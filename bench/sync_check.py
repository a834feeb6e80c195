"""What a comparison of a sampler's weights with the policy's takes: `python bench/sync_check.py`, one thread.

The policy has the shape of SmolLM2-135M in fp32, the sampler holds it in bfloat16 in one piece, fused as vLLM does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.integrations.sync import Sampler, SyncLedger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from integrations.fused import Fused

torch.set_num_threads(1)
shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
policy = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True))
runner: Any = SimpleNamespace(model=Fused(policy, torch.bfloat16), get_model=lambda: runner.model)
engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
ledger = SyncLedger(Sampler.colocated(SimpleNamespace(llm_engine=engine)), policy)
for step in range(3):
    began = time.perf_counter()
    ledger.note(step)
    noted = time.perf_counter()
    result = ledger.compare(step)
    print(f"note {noted - began:.2f} s, compare {time.perf_counter() - noted:.2f} s: {result}")
