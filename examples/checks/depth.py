"""Does the sampler's gap grow with the context? `python depth.py faulty`: the sampler has another rotary base."""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.lab.traces import Trace, check_depth

torch.manual_seed(0)
shape: Any = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=512, initializer_range=0.3)
policy = LlamaForCausalLM(config).eval()
if sys.argv[1:] == ["faulty"]:
    config.rope_parameters = {"rope_type": "linear", "factor": 1.02, "rope_theta": 10000.0}
sampler = LlamaForCausalLM(config).eval()
sampler.load_state_dict(policy.state_dict())

with torch.no_grad():  # of a run: TraceRecorder(trainer, "traces.jsonl") and read_traces("traces.jsonl")
    ids = torch.randint(0, 64, (8, 8))
    for _ in range(376):
        logits = sampler(ids).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    drawn, own = (
        model(ids).logits[:, 7:-1].log_softmax(-1).gather(-1, ids[:, 8:, None])[..., 0] for model in (sampler, policy)
    )
rows = zip(ids.tolist(), drawn.tolist(), own.tolist(), strict=True)
traces = [Trace(tuple(row[:8]), tuple(row[8:]), (True,) * 376, tuple(x), tuple(y)) for row, x, y in rows]

report = check_depth(traces)
print(report)
report.plot("depth.png")
sys.exit(report.finding is not None)
