"""A stand-in for the interpreter that starts `keel serve`: the same routes, secret and protocol around a model of
transformers, a row at a time. It is killed with -9 when the rows named in KEEL_TEST_KILLS have been sampled, itself or
(`actor`) what started it; the rows of all servers are counted in KEEL_TEST_ROWS.

python -m run.native_server -m MODULE serve MODEL --host HOST --port PORT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import uvicorn
import yaml

from keel.base.alive import end_with_parent
from keel.base.imports import import_object
from keel.models.head import causal_lm
from keel.models.load import context_length
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.sampling import block_shape, draw, gumbel
from keel.rollout.vllm.rows import Drawing, Row, Sampled
from keel.rollout.vllm.samplers import model_facts
from keel.rollout.vllm.service import Backend, Service
from keel.rollout.vllm.transfer import Part, checkpoint_weights, read_weights


class NativeBackend(Backend):
    """A model of transformers, drawn from by Keel's noise."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = causal_lm(model).eval()
        names = [name for name, _ in checkpoint_weights(model, torch.float32)]
        self.facts = {
            "dtype": "torch.float32",
            "context": context_length(self.model),
            "max_lora_rank": 0,
            "model": model_facts(self.model.config),
            "parts": names,
            "tokenizer": vocabulary_digest(tokenizer),
        }

    def status(self) -> dict[str, Any]:
        return self.facts

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        await asyncio.sleep(0.001)  # so that rows are answered one by one
        _die_if_due()
        return self._decode(row, drawing)

    @torch.no_grad()
    def _decode(self, row: Row, drawing: Drawing) -> Sampled:
        tokens, numbers = list(row.tokens), []
        for position in range(row.start, row.start + row.max_new):
            logits = self.model(torch.tensor([tokens])).logits[:, -1].float()
            at, width = torch.tensor([position]), sum(block_shape(logits.shape[-1]))
            noise = None if drawing.sampling.greedy else gumbel(torch.tensor([row.key]), at, width)
            token, before, after = (float(number) for number in draw(logits, drawing.sampling, noise))
            tokens.append(int(token))
            numbers.append((before, after))
            if int(token) in drawing.eos_ids:
                break
        before, after = zip(*numbers, strict=True)
        return Sampled(row.id, tuple(tokens[len(row.tokens) :]), before, after)

    async def load(self, folder: Path, adapter: bool) -> None:
        self.model.load_state_dict(dict(read_weights(str(folder))), strict=False)

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        return {name: Part(name).digest(tensor) for name, tensor in checkpoint_weights(self.model, torch.float32)}


def _die_if_due() -> None:
    if "KEEL_TEST_KILLS" not in os.environ:
        return
    rows = Path(os.environ["KEEL_TEST_ROWS"])
    with rows.open("ab") as file:
        file.write(b".")
    victim = json.loads(os.environ["KEEL_TEST_KILLS"]).get(str(rows.stat().st_size))
    if victim is not None:
        os.kill(os.getppid() if victim == "actor" else os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    name = yaml.safe_load(Path(arguments.model).read_text())["model"]["name"]
    app = Service(NativeBackend(*import_object(name, "model.name")()), os.environ["KEEL_SERVE_SECRET"]).app()
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="error")


if __name__ == "__main__":
    main()
