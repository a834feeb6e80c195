"""`keel serve`: a vLLM server process with Keel's routes."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keel.base.errors import KeelError
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.options import VllmOptions
from keel.rollout.serving import bind, serve_and_announce, signals_return
from keel.rollout.vllm import engine_arguments, import_vllm, start_error
from keel.rollout.vllm.direct import loopback_only
from keel.rollout.vllm.engine import Drawing, Row, Sampled, model_facts, sampled, vllm_params, vllm_prompt
from keel.rollout.vllm.service import Backend, Service
from keel.rollout.vllm.transfer import merge_worker_digests


class VllmBackend(Backend):
    """vLLM's asynchronous engine."""

    def __init__(self, engine: Any, tokenizer: Any, facts: dict[str, Any]) -> None:
        self.engine, self.facts = engine, {**facts, "tokenizer": vocabulary_digest(tokenizer)}
        self.salt = ""
        self.numbers = itertools.count()
        self.receiving = False  # during an unfinished weight update

    @classmethod
    async def start(
        cls, folder: str, tokenizer: Any, options: VllmOptions, *, dtype: str, max_lora_rank: int
    ) -> VllmBackend:
        """Start vLLM on a model's folder, or a name that it can load itself."""
        from transformers import AutoConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(
            folder, options, dtype=dtype, context=None, max_lora_rank=max_lora_rank, cuda=torch.cuda.is_available()
        )
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        config = engine.model_config
        facts = {
            "dtype": str(config.dtype),
            "context": config.max_model_len,
            "max_lora_rank": arguments.get("max_lora_rank", 0),
            "model": model_facts(AutoConfig.from_pretrained(folder)),  # vLLM modifies its config
            "transfer": options.transfer,
            "devices": await engine.collective_rpc("keel_device"),
        }
        await engine.collective_rpc("keel_watch", args=(os.getpid(),))
        backend = cls(engine, tokenizer, facts)
        backend.facts["parts"] = sorted({part for parts in await engine.collective_rpc("keel_parts") for part in parts})
        return backend

    def status(self) -> dict[str, Any]:
        import vllm

        return {**self.facts, "vllm": vllm.__version__}

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        prompt, request = vllm_prompt(row, self.salt), f"{next(self.numbers)}"
        results = self.engine.generate(prompt, vllm_params(row, drawing), request, lora_request=self.adapter)
        outputs = [output async for output in results]  # only the final output is requested
        if not outputs:
            raise KeelError("vLLM returned no output for a row")
        return sampled(row.id, outputs[-1].outputs[0])

    async def load(self, folder: Path, adapter: bool) -> None:
        from vllm.lora.request import LoRARequest

        self.salt, self.adapter = secrets.token_hex(8), None
        if adapter:
            await self.engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
            self.adapter = LoRARequest("policy", 1, str(folder))
        else:
            await self.engine.collective_rpc("keel_load", args=(str(folder),))
        await self.engine.reset_prefix_cache()

    async def transfer(self, step: str, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if self.receiving and step in ("init", "start"):  # left by a lost sender
            self.receiving = False
            with suppress(Exception):  # vLLM may have ended it
                await self.engine.finish_weight_update()
        if step == "init":
            await self.engine.shutdown_weight_transfer_engine()
            await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        elif step == "start":
            self.salt, self.adapter = secrets.token_hex(8), None
            await self.engine.start_weight_update()
            self.receiving = True
        elif step == "update":
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        else:
            self.receiving = False
            await self.engine.finish_weight_update()
            await self.engine.reset_prefix_cache()

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        call = ("keel_digests", ()) if ranks is None else ("keel_adapter", (1, ranks))
        workers = await self.engine.collective_rpc(call[0], args=call[1])
        return merge_worker_digests(workers)

    async def alive(self) -> None:
        await self.engine.collective_rpc("keel_alive", timeout=60)

    async def close(self) -> None:
        self.engine.shutdown()


def serve(
    folder: str,
    tokenizer: Any,
    options: VllmOptions,
    *,
    host: str,
    port: int,
    secret: str,
    dtype: str,
    max_lora_rank: int,
    ready: Callable[[str], None],
) -> None:
    """Serve until a signal; `ready` is called with the address when the server accepts requests."""
    import asyncio

    if options.transfer == "nccl":
        loopback_only(host)
    import_vllm(in_process=False, cuda=torch.cuda.is_available())
    start = partial(VllmBackend.start, folder, tokenizer, options, dtype=dtype, max_lora_rank=max_lora_rank)
    share = f"--gpu-memory-utilization {options.gpu_memory_utilization}"
    asyncio.run(_serve(start, share, host, port, secret, ready))


async def _serve(
    start: Callable[[], Awaitable[VllmBackend]],
    share: str,
    host: str,
    port: int,
    secret: str,
    ready: Callable[[str], None],
) -> None:
    import uvicorn

    bind(host, port).close()  # check the port before vLLM starts; its processes must not inherit the socket
    try:
        backend = await start()
    except KeelError:
        raise
    except Exception as error:
        raise start_error(error, share) from error
    service = Service(backend, secret)
    try:
        with bind(host, port) as listener, signals_return():
            server = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning"))
            service.on_end = partial(setattr, server, "should_exit", True)
            await serve_and_announce(server, listener, ready)
        if service.ended:  # a failing exit status, so that a supervisor restarts this process
            raise KeelError(f"vLLM has ended ({service.ended}): see its log, and start keel serve again")
    finally:
        await service.close()
