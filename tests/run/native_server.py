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

from keel.base.parts import import_object
from keel.base.watchdog import exit_with_parent
from keel.models.tokenizer import context_length, vocabulary_digest
from keel.rollout.vllm.engine import Drawing, Row, Sampled
from keel.rollout.vllm.service import Service
from rollout.vllm.servers import PlainBackend


class NativeBackend(PlainBackend):
    """A model that answers its rows one by one, in order."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        facts = {"context": context_length(model), "max_lora_rank": 0, "tokenizer": vocabulary_digest(tokenizer)}
        super().__init__(model, **facts)

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        await asyncio.sleep(0.001)
        _die_if_due()
        return self.sample(row, drawing)


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
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    name = yaml.safe_load(Path(arguments.model).read_text())["model"]["name"]
    app = Service(NativeBackend(*import_object(name, "model.name")()), os.environ["KEEL_SERVE_SECRET"]).app()
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="error")


if __name__ == "__main__":
    main()
