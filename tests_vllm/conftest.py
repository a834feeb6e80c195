"""These tests need vLLM: `make test-vllm`. Without it they fail rather than be skipped.

One engine of a kind at a time, since starting vLLM takes long and it takes memory: native, in the process, and behind
`keel serve` in a process of its own.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.models.tiny import random_model, tiny_config, tiny_tokenizer
from keel.rollout import Engine
from keel.rollout.native.engine import NativeEngine
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import build_engine

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KEEL_SERVE_SECRET", secrets.token_urlsafe(24))
KINDS = ("native", "process", "server")


def llama(seed: int = 0, *, tied: bool = False) -> Any:
    """A small random model whose logits are spread out."""
    from transformers import LlamaForCausalLM

    config = tiny_config(tiny_tokenizer())
    config.update({"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 128})
    config.tie_word_embeddings = tied
    model = random_model(LlamaForCausalLM, config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if parameter.shape[0] == config.vocab_size else 4.0)
    return model.eval()


class Server:
    """`keel serve` on a free port of loopback, until it is killed."""

    def __init__(self, model: str, port: int = 0, *options: str) -> None:
        command = [sys.executable, "-m", "keel.cli", "serve", model, "--port", str(port), *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if address := re.search(r"rollout.vllm.url=(http://127.0.0.1:(\d+))", line):
                self.url, self.port = address[1], int(address[2])
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        raise AssertionError("".join(said))

    def kill(self) -> None:
        """SIGKILL, also to the processes that vLLM has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Servers:
    """The servers of a session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[Server]()

    def start(self, model: Any, *options: str, port: int = 0) -> Server:
        """A server for a model."""
        folder = self.folder / str(len(self.started))
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        self.started.append(Server(str(folder), port, *options))
        return self.started[-1]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("served"))
    yield made
    for server in made.started:
        if server.process.poll() is None:
            server.kill()


def engine_for(kind: str, model: Any, url: str | None = None) -> Engine:
    """An engine of a kind with a copy of the model's weights."""
    if kind == "native":
        return NativeEngine(model, tiny_tokenizer(), copy=True)
    settings = {"mode": "colocate" if url is None else "server", "url": url, "wait_s": 300.0}
    return build_engine(RolloutOptions(engine="vllm", vllm=settings), model, tiny_tokenizer())


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model() -> Any:
    return llama()


@pytest.fixture(scope="session")
def engine(kind: str, model: Any, servers: Servers) -> Iterator[Engine]:
    made = engine_for(kind, model, servers.start(model).url if kind == "server" else None)
    yield made
    made.close()
