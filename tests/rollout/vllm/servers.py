"""Servers on loopback in threads of the test: Keel's routes around a model that is sampled by plain forwards."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from peft import PeftModel

from keel.models.tokenizer import vocabulary_digest
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine
from keel.rollout.options import RolloutOptions
from keel.rollout.sampling import block_shape, draw, gumbel
from keel.rollout.vllm.engine import Drawing, Row, Sampled, model_facts
from keel.rollout.vllm.service import Backend, Service
from keel.rollout.vllm.transfer import Part, adapter_of, checkpoint_weights, read_weights
from rollout import shapes

PASSWORD = "between the two of us"


class PlainBackend(Backend):
    """A transformers model, one token after the other: nothing of an engine's in it."""

    def __init__(self, model: Any = None, /, **facts: Any) -> None:
        self.base = model or shapes.model("llama", seed=5)
        self.model, self.rows, self.cancelled = self.base, 0, 0
        self.facts = {
            "dtype": "torch.float32",
            "context": 96,
            "max_lora_rank": 8,
            "model": model_facts(self.base.config),
            "tokenizer": vocabulary_digest(shapes.tokenizer()),
            "parts": list(dict(checkpoint_weights(self.base, torch.float32))),
            **facts,
        }
        self.lock = threading.Lock()

    def status(self) -> dict[str, Any]:
        return self.facts

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        try:
            await self.before(row)
            return await asyncio.to_thread(self.sample, row, drawing)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def before(self, row: Row) -> None:
        """What a test does with a row first."""
        self.rows += 1

    @torch.no_grad()
    def sample(self, row: Row, drawing: Drawing) -> Sampled:
        tokens, before, after = list(row.tokens), [], []
        key = torch.tensor([row.key])
        with self.lock:
            while len(before) < row.max_new and not (before and tokens[-1] in drawing.eos_ids):
                logits = self.model.eval()(input_ids=torch.tensor([tokens])).logits[:, -1]
                noise = gumbel(key, torch.tensor([row.start + len(before)]), sum(block_shape(logits.shape[-1])))
                token, *numbers = (float(number) for number in draw(logits, drawing.sampling, noise))
                tokens.append(int(token))
                before.append(numbers[0])
                after.append(numbers[1])
        return Sampled(row.id, tuple(tokens[len(row.tokens) :]), tuple(before), tuple(after))

    async def load(self, folder: Path, adapter: bool) -> None:
        if adapter:
            base = self.base.get_base_model() if isinstance(self.base, PeftModel) else self.base
            base = getattr(self.model, "unload", lambda: base)()
            self.model = PeftModel.from_pretrained(base, str(folder))
            return
        with torch.no_grad():
            own = dict(self.base.named_parameters())
            for name, tensor in read_weights(str(folder)):
                own[name].copy_(tensor)

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        if ranks is not None:
            return adapter_of(self.model, torch.float32).digests()
        return {name: Part(name).digest(tensor) for name, tensor in checkpoint_weights(self.model, torch.float32)}


class Hosted:
    """An application at a port, until it is stopped: at once, like a process that is killed."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self.server.force_exit = True
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()


def until(holds: Any, seconds: float = 20.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


@contextmanager
def hosted(*backends: Backend) -> Iterator[list[Hosted]]:
    """A server around each backend."""
    services = [Service(backend, PASSWORD) for backend in backends]
    servers = [Hosted(service.app()) for service in services]
    try:
        yield servers
    finally:
        for server, service in zip(servers, services, strict=True):
            server.stop()
            asyncio.run(service.close())


def options(*urls: str, **changes: Any) -> RolloutOptions:
    """How a training names servers."""
    settings = {"mode": "server", "url": urls, "secret": PASSWORD, "wait_s": 20.0, **changes}
    return RolloutOptions(engine="vllm", vllm=settings)  # type: ignore[arg-type]


SAMPLING = SamplingParams(num_generations=3, max_completion_length=8)
REQUESTS = [Request(f"p{i}", prompt) for i, prompt in enumerate(shapes.prompts(4))]


def native(model: Any, sampling: SamplingParams = SAMPLING, **noise: int) -> Any:
    """What the native engine samples."""
    return NativeEngine(model, shapes.tokenizer()).generate(REQUESTS, sampling, **noise)


def assert_same(one: Any, other: Any) -> None:
    """The same completions, log-probabilities up to rounding."""
    for a, b in zip((c for group in one for c in group), (c for group in other for c in group), strict=True):
        assert (a.tokens, a.text, a.stop_reason) == (b.tokens, b.text, b.stop_reason)
        for kind in ("sample_logp", "filtered_logp"):
            torch.testing.assert_close(*(torch.tensor(getattr(c, kind)) for c in (a, b)), atol=1e-4, rtol=0)
