"""A sampler behind HTTP: generate, and weights under a shared secret. JSON and safetensors only, nothing is unpickled.

The routes know nothing of vLLM: what samples is a `Backend`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from keel.base.errors import KeelError, first_line
from keel.rollout.vllm.rows import HEARTBEAT_S, PROTOCOL, Drawing, Row, Sampled, from_json

_FILE = re.compile(r"weights-\d{5}\.safetensors|adapter_model\.safetensors|adapter_config\.json")


STEPS = {  # of a transfer from GPU to GPU, and what each may say: nothing that vLLM would fetch or unpickle
    "init": {"nccl_unique_id_b64", "rank_offset", "world_size", "packed", "packed_buffer_size_bytes"}
    | {"packed_num_buffers"},
    "start": set(),
    "update": {"names", "dtype_names", "shapes", "tensors"},
    "finish": set(),
}


class Backend:
    """What samples behind the routes."""

    def status(self) -> dict[str, Any]:
        """What the model is: see `client._STATUS`."""
        raise NotImplementedError

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        """One completion."""
        raise NotImplementedError

    async def load(self, folder: Path, adapter: bool) -> None:
        """Take over the weights, or the adapter, that lie in a folder."""
        raise NotImplementedError

    async def transfer(self, step: str, info: dict[str, Any]) -> None:
        """A step of a transfer from GPU to GPU: init once, then start, update and finish."""
        raise NotImplementedError

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        """The digests of the weights in effect; with `ranks` those of the adapter."""
        raise NotImplementedError

    async def alive(self) -> None:
        """Return once it has done something; raise where it is gone."""

    async def close(self) -> None:
        """End it."""


class Service:
    """The routes around a backend. `weights` is the sync that it samples with: rows of another are refused."""

    def __init__(self, backend: Backend, secret: str) -> None:
        self.backend, self.secret = backend, secret
        self.boot, self.weights, self.received = secrets.token_hex(8), "", ""
        self.folder = Path(tempfile.mkdtemp(prefix="keel-serve-"))
        self.loading = asyncio.Lock()
        self.ended = ""  # what the backend died of
        self.on_end: Callable[[], None] = lambda: None

    def app(self) -> Starlette:
        """The application, for uvicorn."""
        routes = [
            Route("/health", self._health),
            Route("/keel/status", self._status),
            Route("/keel/generate", self._generate, methods=["POST"]),
            Route("/keel/weights/{sync}/{name}", self._put, methods=["PUT"]),
            Route("/keel/weights/{sync}", self._commit, methods=["POST"]),
            Route("/keel/transfer/{sync}/{step}", self._transfer, methods=["POST"]),
            Route("/keel/digests", self._digests, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        app.add_middleware(BaseHTTPMiddleware, dispatch=self._guard)
        return app

    async def close(self) -> None:
        """End the backend, and remove what was received."""
        await self.backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _guard(self, request: Request, call_next: Any) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.url.path != "/health" and not secrets.compare_digest(given.encode(), self.secret.encode()):
            return JSONResponse({"error": "the secret is missing or another one"}, 401)
        try:
            response: Response = await call_next(request)
        except Exception as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return response

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _status(self, request: Request) -> Response:
        return JSONResponse({"protocol": PROTOCOL, "boot": self.boot, "weights": self.weights, **self.backend.status()})

    async def _generate(self, request: Request) -> Response:
        try:
            data = await request.json()
            rows, drawing = from_json(data)
        except (KeelError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        if data.get("weights") != self.weights or self.loading.locked():
            return JSONResponse({"error": "these are other weights", "weights": self.weights}, 409)
        return StreamingResponse(self._lines(rows, drawing), media_type="application/x-ndjson")

    async def _lines(self, rows: list[Row], drawing: Drawing) -> AsyncIterator[str]:
        """A line for each row as it ends; an empty one at every heartbeat, so that silence means something."""
        tasks = {asyncio.ensure_future(self.backend.generate(row, drawing)) for row in rows}
        for task in tasks:  # of several that fail one is told
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield json.dumps(asdict(task.result())) + "\n"
                if not done:
                    await self.backend.alive()
                    yield "\n"
        except Exception as error:
            yield json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n"
            await self._check_backend()
        finally:
            for task in tasks:
                task.cancel()

    async def _check_backend(self) -> None:
        """End with a backend that has died: a server that only answers for it would never be started again."""
        try:
            await self.backend.alive()
        except Exception as error:
            self.ended = first_line(error)
            self.on_end()

    async def _put(self, request: Request) -> Response:
        sync, name = request.path_params["sync"], request.path_params["name"]
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or not _FILE.fullmatch(name):
            return JSONResponse({"error": f"no file of this name is taken: {name}"}, 400)
        folder = self.folder / sync
        for other in self.folder.iterdir():
            if other != folder:  # a sync that was given up
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        digest, incoming = hashlib.sha256(), folder / f"{secrets.token_hex(8)}.part"  # others may send the same file
        with incoming.open("wb") as file:
            async for chunk in request.stream():
                digest.update(chunk)
                await asyncio.to_thread(file.write, chunk)
        incoming.replace(folder / name)
        return JSONResponse({"sha256": digest.hexdigest()})

    async def _commit(self, request: Request) -> Response:
        """Load what was put, and answer with the digests of what is then in effect."""
        sync, data = request.path_params["sync"], await request.json()
        folder, ranks = self.folder / sync, data.get("ranks")
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or not (folder.is_dir() or self.received == sync):
            return JSONResponse({"error": "no weights were put for this sync"}, 400)
        async with self.loading:
            known, self.weights = self.weights, ""  # half loaded is nothing
            try:
                if sync not in (known, self.received):  # another process of the same training may have been first
                    await self.backend.load(folder, ranks is not None)
                digests = await self.backend.digests(ranks)
            except Exception as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 422)
            finally:
                if ranks is None:  # an adapter's files are read again when vLLM needs them
                    shutil.rmtree(folder, ignore_errors=True)
            self.weights = sync
        return JSONResponse({"digests": digests})

    async def _transfer(self, request: Request) -> Response:
        """A step of a transfer from GPU to GPU; what was received is in effect once it is committed."""
        sync, step = request.path_params["sync"], request.path_params["step"]
        info = await request.json()
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or step not in STEPS or not set(info) <= STEPS[step]:
            return JSONResponse({"error": f"no step of a transfer: {step}"}, 400)
        async with self.loading:
            self.weights, self.received = "", ""  # half loaded is nothing
            try:
                await self.backend.transfer(step, info)
            except Exception as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 422)
            self.received = sync if step == "finish" else ""
        return JSONResponse({"step": step})

    async def _digests(self, request: Request) -> Response:
        """The digests of the weights in effect now."""
        return JSONResponse({"digests": await self.backend.digests((await request.json()).get("ranks"))})
