"""A sampler with the routes of `keel serve` but without vLLM, on loopback, and faulty backends for it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from torch import Tensor, nn

from keel.models.tokenizer import vocabulary_digest
from keel.rollout import EngineWrapper
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import vllm
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel
from keel.rollout.vllm.engine import Drawing, Row, Sampled, model_facts
from keel.rollout.vllm.service import Backend, Service
from keel.rollout.vllm.transfer import Part, adapter_of, read_weights

SECRET = "a secret of the tests"


class TorchBackend(Backend):
    """The model's own forward with Keel's sampling. Concurrent rows share a forward."""

    def __init__(self, model: Any, tokenizer: Any, dtype: torch.dtype = torch.float32) -> None:
        self.base = self.model = copy.deepcopy(model).to(dtype).eval()
        self.dtype, self.tokenizer = dtype, tokenizer
        self.waiting: list[tuple[Row, Drawing, asyncio.Future[Sampled]]] = []

    def status(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype),
            "context": self.base.config.max_position_embeddings,
            "max_lora_rank": 8,
            "model": model_facts(self.base.config),
            "tokenizer": vocabulary_digest(self.tokenizer),
            "parts": list(self.weights()),
        }

    def weights(self) -> Mapping[str, Tensor]:
        return {
            name.replace(".base_layer.", "."): p for name, p in self.base.named_parameters() if ".lora_" not in name
        }

    async def load(self, folder: Path, adapter: bool) -> None:
        if adapter:
            from peft import PeftModel

            self.base = self.model.unload() if self.model is not self.base else self.base
            self.model = PeftModel.from_pretrained(self.base, str(folder)).eval()
            return
        with torch.no_grad():
            for name, tensor in read_weights(str(folder)):
                self.weights()[name].copy_(tensor)

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        if ranks is not None and self.model is self.base:
            return {}
        if ranks is not None:
            return adapter_of(self.model, self.dtype).digests()
        return {name: Part(name).digest(tensor.detach()) for name, tensor in self.weights().items()}

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(lambda: loop.call_soon(self.flush))
        future: asyncio.Future[Sampled] = loop.create_future()
        self.waiting.append((row, drawing, future))
        return await future

    def flush(self) -> None:
        """Sample all waiting requests, with rows of equal length in one batch."""
        alike: dict[tuple[int, int, Drawing], list[tuple[Row, asyncio.Future[Sampled]]]] = {}
        for row, drawing, future in self.waiting:
            alike.setdefault((len(row.tokens), row.max_new, drawing), []).append((row, future))
        self.waiting = []
        for (_, _, drawing), pairs in alike.items():
            for (_, future), sampled in zip(pairs, self.sampled([row for row, _ in pairs], drawing), strict=True):
                future.set_result(sampled)

    @torch.no_grad()
    def sampled(self, rows: list[Row], drawing: Drawing) -> list[Sampled]:
        tokens = torch.tensor([row.tokens for row in rows])
        keys, starts = (torch.tensor([getattr(row, name) for row in rows]) for name in ("key", "start"))
        columns: list[tuple[Tensor, ...]] = []
        ends, ended = torch.tensor(sorted(drawing.eos_ids)), torch.zeros(len(rows), dtype=torch.bool)
        for position in range(rows[0].max_new):
            if ended.all():
                break
            logits = self.model(input_ids=tokens).logits[:, -1].float()
            noise = gumbel(keys, starts + position, sum(block_shape(logits.shape[-1])))
            columns.append(self.drawn(logits, drawing.sampling, None if drawing.sampling.greedy else noise))
            tokens = torch.cat((tokens, columns[-1][0][:, None]), 1)
            ended |= torch.isin(tokens[:, -1], ends)
        results = []
        for number, row in enumerate(rows):
            drawn = [int(column[0][number]) for column in columns]
            length = next((i + 1 for i, token in enumerate(drawn) if token in drawing.eos_ids), len(drawn))
            before, after = ([float(column[i][number]) for column in columns[:length]] for i in (1, 2))
            results.append(Sampled(row.id, tuple(drawn[:length]), tuple(before), tuple(after)))
        return results

    def drawn(self, logits: Tensor, params: SamplingParams, noise: Tensor | None) -> tuple[Tensor, ...]:
        return draw(logits, params, noise)


class HalfPrecision(TorchBackend):
    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, torch.bfloat16)


class LoadsNothing(TorchBackend):
    """Accepts weight files but keeps its old weights. Its digests are correct."""

    async def load(self, folder: Path, adapter: bool) -> None:
        pass


class LoadsNothingAndDenies(LoadsNothing):
    """Accepts weight files but keeps its old weights, and reports the digests of the new ones."""

    files: Mapping[str, Tensor] | None = None

    async def load(self, folder: Path, adapter: bool) -> None:
        self.files = dict(read_weights(str(folder)))

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        assert self.files is not None
        return {name: Part(name).digest(tensor) for name, tensor in self.files.items()}


class Hotter(TorchBackend):
    """Samples at another temperature and reports log-probabilities at the requested one."""

    def drawn(self, logits, params, noise):
        token, *_ = draw(logits, replace(params, temperature=1.6), noise)
        logp = (logits / params.temperature).log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        return token, logp, logp


class ReportsOtherTemperature(TorchBackend):
    """Samples at the requested temperature and reports log-probabilities at temperature 1."""

    def drawn(self, logits, params, noise):
        token, *_ = draw(logits, params, noise)
        logp = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        return token, logp, logp


class HiddenTopK(TorchBackend):
    def drawn(self, logits, params, noise):
        token, before, _ = draw(logits, replace(params, top_k=2), noise)
        return token, before, before


class ReportsFiltered(TorchBackend):
    """Samples with top_p=0.7 and reports the filtered log-probabilities as unfiltered ones."""

    def drawn(self, logits, params, noise):
        token, _, after = draw(logits, replace(params, top_p=0.7), noise)
        return token, after, after


class OmitsSync(EngineWrapper):
    """Increases its version without sending weights."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, url: str) -> None:
        options = rollout.vllm.model_copy(update={"mode": "server", "url": url, "secret": SECRET})
        super().__init__(vllm(model, tokenizer, rollout=rollout.model_copy(update={"vllm": options})))

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        self.version = version


@contextmanager
def serving(backend: Backend) -> Iterator[str]:
    """The address of a loopback server for a backend."""
    service = Service(backend, SECRET)
    server = uvicorn.Server(uvicorn.Config(service.app(), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        asyncio.run(service.close())
