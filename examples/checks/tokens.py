"""Are tokens those that were sampled? `python tokens.py faulty`: a template drops the reasoning of earlier turns."""

import sys
from typing import Any

from keel.lab.traces import Trace, check_tokens
from keel.models.tiny import tiny_tokenizer

tokenizer: Any = tiny_tokenizer()  # yours: AutoTokenizer.from_pretrained(…)
if sys.argv[1:] == ["faulty"]:
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'].split('#')[-1]")

messages = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "a sum #4"},
    {"role": "user", "content": "and 3 more?"},
    {"role": "assistant", "content": "4+3 #7"},
]
# What a sampler drew: recorded by TraceRecorder, or read by read_traces("rollouts.jsonl").
prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
first = tokenizer.encode("a sum #4<eos>", add_special_tokens=False)
between = tokenizer.encode("<|user|>and 3 more?<eos><|assistant|>", add_special_tokens=False)
second = tokenizer.encode("4+3 #7<eos>", add_special_tokens=False)
action = [True] * len(first) + [False] * len(between) + [True] * len(second)
trace = Trace(tuple(prompt), tuple(first + between + second), tuple(action), messages=tuple(messages))

report = check_tokens([trace], tokenizer)
print(report)
sys.exit(not report.exact)
