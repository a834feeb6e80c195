"""The HTTP service of a sampler: generation and weight updates, with a shared secret. JSON and safetensors only.

The routes do not depend on vLLM: a `Backend` samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from keel.base.errors import KeelError, first_line
from keel.rollout.vllm.engine import HEARTBEAT_S, PROTOCOL, TRAINING, Drawing, Row, Sampled, from_json
from keel.rollout.vllm.transfer import process_folder

BUSY_TIMEOUT_S = 10.0  # seconds that a sync waits for rows of another training run
_FILE = re.compile(r"weights-\d{5}\.safetensors|adapter_model\.safetensors|adapter_config\.json")


STEPS = {  # allowed keys of each step of an NCCL transfer; keys that make vLLM fetch or unpickle data are left out
    "init": {"nccl_unique_id_b64", "rank_offset", "world_size", "packed", "packed_buffer_size_bytes"}
    | {"packed_num_buffers"},
    "start": set(),
    "update": {"names", "dtype_names", "shapes"},
    "finish": set(),
}


class Backend:
    """The sampler behind the routes."""

    adapter: Any = None  # the adapter in use

    def status(self) -> dict[str, Any]:
        """The model's properties: see `client._STATUS`."""
        raise NotImplementedError

    async def generate(self, row: Row, drawing: Drawing) -> Sampled:
        """Sample one row."""
        raise NotImplementedError

    async def load(self, folder: Path, adapter: bool) -> None:
        """Load the weights, or the adapter, from a folder."""
        raise NotImplementedError

    async def transfer(self, step: str, info: dict[str, Any]) -> None:
        """Run a step of an NCCL transfer: init once, then start, update and finish."""
        raise NotImplementedError

    async def digests(self, ranks: dict[str, int] | None) -> dict[str, str]:
        """The digests of the weights in effect; with `ranks` those of the adapter."""
        raise NotImplementedError

    async def alive(self) -> None:
        """Check that the backend responds; raise if it does not."""

    async def close(self) -> None:
        """Close the backend."""


class ServerBusy(Exception):
    """Rows of another training run are being sampled."""


class Service:
    """The routes of a backend. `weights` is the id of the loaded sync; requests for another sync are refused.

    Each change of weights starts an epoch; running rows of an older epoch are cancelled.
    """

    def __init__(self, backend: Backend, secret: str) -> None:
        self.backend, self.secret = backend, secret
        self.boot, self.weights, self.received = secrets.token_hex(8), "", ""
        self.folder = process_folder("serve")
        self.loading, self.epoch = asyncio.Lock(), 0
        self.streams: dict[object, str] = {}  # running requests and their training id
        self.arriving = Counter[str]()  # open PUTs by sync
        self.work = set[asyncio.Task[tuple[dict[str, Any], int]]]()
        self.ended = ""  # the error that ended the backend
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
        """Close the backend and remove received files."""
        await self.backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _guard(self, request: Request, call_next: Any) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.url.path != "/health" and not secrets.compare_digest(given.encode(), self.secret.encode()):
            return JSONResponse({"error": "the secret is missing or does not match"}, 401)
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
        if not self.weights or data.get("weights") != self.weights:
            loading = self.loading.locked()
            reason = "weights are being loaded" if loading else "the server has other weights"
            return JSONResponse({"error": reason, "loading": loading}, 409)
        lines = self._lines(rows, drawing, self.epoch, request.headers.get(TRAINING, ""))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _lines(self, rows: list[Row], drawing: Drawing, epoch: int, training: str) -> AsyncIterator[str]:
        """Yield a JSON line for each finished row, and an empty line as heartbeat."""
        stream = object()
        tasks = set[asyncio.Task[Sampled]]()
        try:
            self.streams[stream] = training
            self._check_epoch(epoch)
            tasks = {asyncio.ensure_future(self.backend.generate(row, drawing)) for row in rows}
            for task in tasks:  # only one of several errors is reported
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            while tasks:
                done, tasks = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                self._check_epoch(epoch)
                for task in done:
                    yield json.dumps(asdict(task.result())) + "\n"
                if not done:
                    await self.backend.alive()
                    yield "\n"
        except Exception as error:
            yield json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n"
            await self._check_backend()
        finally:
            self.streams.pop(stream, None)
            for task in tasks:
                task.cancel()

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise KeelError("other weights were loaded while these rows were running")

    async def _begin(self, training: str) -> None:
        """Start a change of weights, after rows of another training have ended."""
        end = time.monotonic() + BUSY_TIMEOUT_S
        while any(owner != training for owner in self.streams.values()):
            if time.monotonic() >= end:
                raise ServerBusy("it is busy: another training uses this server")
            await asyncio.sleep(0.05)
        self.epoch += 1
        self.weights = ""

    async def _answer(self, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        """Answer with the result of `work`, which continues if the client disconnects; newlines are heartbeats."""
        task = asyncio.ensure_future(self._outcome(work))
        self.work.add(task)
        task.add_done_callback(self.work.discard)
        await asyncio.wait({task}, timeout=HEARTBEAT_S)
        if task.done():
            return JSONResponse(*task.result())

        async def heartbeats() -> AsyncIterator[str]:
            while not task.done():
                yield "\n"
                await asyncio.wait({task}, timeout=HEARTBEAT_S)
            data, code = task.result()
            yield json.dumps({**data, "code": code})

        return StreamingResponse(heartbeats(), media_type="application/json")

    async def _outcome(self, work: Coroutine[Any, Any, dict[str, Any]]) -> tuple[dict[str, Any], int]:
        """The result and HTTP status of `work`; 503 if the backend has died."""
        try:
            return await work, 200
        except ServerBusy as error:
            return {"error": str(error), "busy": True}, 409
        except Exception as error:
            await self._check_backend()
            return {"error": f"{type(error).__name__}: {error}"}, 503 if self.ended else 422

    async def _check_backend(self) -> None:
        """Stop the server if the backend has died, so that a supervisor restarts it."""
        try:
            await self.backend.alive()
        except Exception as error:
            self.ended = first_line(error)
            self.on_end()

    async def _put(self, request: Request) -> Response:
        sync, name = request.path_params["sync"], request.path_params["name"]
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or not _FILE.fullmatch(name):
            return JSONResponse({"error": f"invalid file name: {name}"}, 400)
        folder = self.folder / sync
        self.arriving[sync] += 1
        try:
            self._sweep(sync, self.weights)
            folder.mkdir(exist_ok=True)
            # A unique name, because other processes may upload the same file.
            digest, incoming = hashlib.sha256(), folder / f"{secrets.token_hex(8)}.part"
            with incoming.open("wb") as file:
                async for chunk in request.stream():
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
            incoming.replace(folder / name)
        finally:
            self.arriving[sync] -= 1
        return JSONResponse({"sha256": digest.hexdigest()})

    def _sweep(self, *keep: str) -> None:
        """Remove the files of old syncs, unless they are being uploaded."""
        for folder in self.folder.iterdir():
            if folder.name not in keep and not self.arriving[folder.name]:
                shutil.rmtree(folder, ignore_errors=True)

    async def _commit(self, request: Request) -> Response:
        """Load the uploaded weights, and answer with the digests of the weights in effect."""
        sync, data = request.path_params["sync"], await request.json()
        known = (self.folder / sync).is_dir() or sync in (self.weights, self.received)
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or not known:
            return JSONResponse({"error": "no weights were uploaded for this sync"}, 400)
        return await self._answer(self._load(sync, data.get("ranks"), request.headers.get(TRAINING, "")))

    async def _load(self, sync: str, ranks: dict[str, int] | None, training: str) -> dict[str, Any]:
        async with self.loading:
            if sync != self.weights:  # another process of this training may have loaded it
                await self._begin(training)
                if sync != self.received:
                    await self.backend.load(self.folder / sync, ranks is not None)
            digests = await self.backend.digests(ranks)
            self.weights = sync
            self._sweep(*([] if ranks is None else [sync]))  # vLLM may read an adapter's files again
        return {"digests": digests, "adapter": self.backend.adapter is not None}

    async def _transfer(self, request: Request) -> Response:
        """A step of an NCCL transfer; the received weights take effect when committed."""
        sync, step = request.path_params["sync"], request.path_params["step"]
        info = await request.json()
        if not re.fullmatch(r"[0-9a-f]{1,64}", sync) or step not in STEPS or not set(info) <= STEPS[step]:
            return JSONResponse({"error": f"invalid transfer step: {step}"}, 400)
        return await self._answer(self._receive(sync, step, info, request.headers.get(TRAINING, "")))

    async def _receive(self, sync: str, step: str, info: dict[str, Any], training: str) -> dict[str, Any]:
        async with self.loading:
            await self._begin(training)
            self.received = ""
            await self.backend.transfer(step, info)
            self.received = sync if step == "finish" else ""
        return {"step": step}

    async def _digests(self, request: Request) -> Response:
        """The digests of the weights in effect."""
        ranks = (await request.json()).get("ranks")

        async def digests() -> dict[str, Any]:
            return {"digests": await self.backend.digests(ranks)}

        return await self._answer(digests())
