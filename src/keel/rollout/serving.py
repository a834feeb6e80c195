"""Serve an engine at an endpoint. Calls arrive one by one, wait in a queue, and join the running batch."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from types import FrameType
from typing import Any

from keel.base.errors import KeelError, first_line
from keel.base.types import Completion
from keel.envs.endpoint import Endpoint, GenerateBody, Noise, Unavailable, context_exceeded
from keel.rollout.engine import Engine, Interrupted
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams, row_key

MAX_WAITING = 1024  # limit of calls that wait to join a batch; more are refused


@dataclass(eq=False)
class Call:
    """A request and the future of its completion. `owner` is the episode that made it, if known."""

    request: Request
    sampling: SamplingParams
    owner: Any = None
    done: Future[Completion] = field(default_factory=Future)


class CallQueue:
    """A queue of calls in the order of arrival. Calls with equal sampling parameters share a batch."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[Call] = []
        self.closed = False

    def submit(self, call: Call) -> None:
        with self.changed:
            if self.closed:
                raise Unavailable("the endpoint is shutting down")
            if len(self.waiting) >= MAX_WAITING:
                raise Unavailable(f"{MAX_WAITING} requests are already waiting: send this one again later")
            self._add(call)
            self.changed.notify_all()

    def next_sampling(self) -> SamplingParams | None:
        """Wait for a call and return its sampling parameters; None if the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._ready())
            return None if self.closed else self.waiting[0].sampling

    def take(self, sampling: SamplingParams) -> list[Call]:
        """Remove and return the calls at the head of the queue that have these parameters."""
        with self.changed:
            joining = list(takewhile(lambda call: call.sampling == sampling, self.waiting))
            del self.waiting[: len(joining)]
            return [call for call in joining if not call.done.cancelled()]

    def finish(self, call: Call, completion: Completion) -> None:
        """Answer a call."""
        with suppress(InvalidStateError):  # the client has disconnected
            call.done.set_result(completion)

    def fail(self, calls: Iterable[Call], error: BaseException) -> None:
        """Answer calls with an error."""
        for call in calls:
            with suppress(InvalidStateError):
                call.done.set_exception(error)

    def close(self) -> None:
        """Refuse waiting and later calls."""
        with self.changed:
            self.closed = True
            waiting, self.waiting = self.waiting, []
            self.changed.notify_all()
        self.fail(waiting, Unavailable("the endpoint is shutting down"))

    def _ready(self) -> bool:
        return bool(self.waiting)

    def _add(self, call: Call) -> None:
        self.waiting.append(call)


def drive(engine: Engine, queue: CallQueue, converse: Callable[..., None], **noise: int) -> None:
    """Sample the calls of a queue until it is closed. An engine error fails the running calls and is raised."""
    while (sampling := queue.next_sampling()) is not None:
        running: dict[int, Call] = {}

        def started(calls: list[Call], running: dict[int, Call] = running) -> list[Request]:
            running.update({id(call.request): call for call in calls})
            return [call.request for call in calls]

        def answer(
            turns: list[Turn], sampling: SamplingParams = sampling, running: dict[int, Call] = running
        ) -> list[Request]:
            for turn in turns:
                queue.finish(running.pop(id(turn.request)), turn.completion)
            return started(queue.take(sampling))

        try:
            if requests := started(queue.take(sampling)):
                converse(requests, sampling, answer, **noise)
        except BaseException as error:
            queue.fail(running.values(), error)
            raise


class EngineServer:
    """Samples the calls of an endpoint in a thread; at most `max_batch` rows at a time."""

    def __init__(self, engine: Engine, max_batch: int) -> None:
        self.engine, self.max_batch, self.queue = engine, max_batch, CallQueue()
        self._thread = threading.Thread(target=self._run, name="keel-serve", daemon=True)
        self._thread.start()

    async def answer(self, body: GenerateBody) -> Completion:
        """The completion of a request."""
        call = self.call_of(body)
        self.engine.check(call.request, call.sampling)
        self.queue.submit(call)
        try:
            return await asyncio.wrap_future(call.done)
        except Interrupted:
            raise Unavailable("the endpoint is shutting down") from None
        except KeelError as error:  # an engine error, because the request has already been checked
            raise RuntimeError(str(error)) from error

    def call_of(self, body: GenerateBody) -> Call:
        """Convert a request to a call."""
        context, noise, tokens = self.engine.context, body.sampling_params.noise, body.token_ids
        room = None if context is None else context - len(tokens)
        if context is not None and context <= len(tokens):
            raise context_exceeded(len(tokens), context)
        limit = body.sampling_params.max_tokens or room
        if limit is None:
            raise KeelError("request.sampling_params.max_tokens is required, because the model's context has no limit")
        return Call(request_of(body, noise, start=noise.position, limit=limit), sampling_of(body, self.max_batch))

    def stop(self) -> None:
        """End sampling soon. Running and waiting calls are refused."""
        self.queue.close()
        self.engine.interrupt()

    def close(self) -> None:
        """End sampling, and close the engine."""
        self.stop()
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        while not self.queue.closed:
            with suppress(Exception):  # the running calls have received the error
                drive(self.engine, self.queue, self.engine.converse)


def request_of(body: GenerateBody, noise: Noise, *, start: int, limit: int) -> Request:
    """The engine's request: one sample, with the noise key of the HTTP request."""
    key = row_key(noise.seed, noise.attempt, noise.step, noise.problem, noise.sample)
    return Request(noise.problem, body.token_ids, samples=(noise.sample,), start=start, max_new=limit, noise=key)


def sampling_of(body: GenerateBody, max_batch: int) -> SamplingParams:
    """The engine's sampling parameters. The token limit is part of the request."""
    given = body.sampling_params
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
        min_p=given.min_p,
        num_generations=1,
        stop=given.stops,
        ignore_eos=given.ignore_eos,
        stop_ids=tuple(sorted(set(given.stop_token_ids or ()))),
        max_batch=max_batch,
    )


def serve(
    engine: Engine,
    *,
    name: str,
    vocabulary: int,
    max_batch: int,
    host: str,
    port: int,
    secret: str,
    ready: Callable[[str], None],
) -> None:
    """Serve an engine until a signal arrives. `ready` is called with the address when requests are accepted."""
    with bind(host, port) as listener, signals_return():
        asyncio.run(_serve(engine, name, vocabulary, max_batch, listener, secret, ready))


async def _serve(
    engine: Engine,
    name: str,
    vocabulary: int,
    max_batch: int,
    listener: socket.socket,
    secret: str,
    ready: Callable[[str], None],
) -> None:
    import uvicorn

    loop, sampler = asyncio.get_running_loop(), EngineServer(engine, max_batch)
    endpoint = Endpoint(sampler.answer, secret, name, engine.context, vocabulary)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(sampler.stop)  # end requests now, so that the server need not wait for them
            super().handle_exit(sig, frame)

    try:
        config = uvicorn.Config(endpoint.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
        await serve_and_announce(Server(config), listener, ready)
    finally:
        sampler.close()


@contextmanager
def signals_return() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again when it exits, so that vLLM's processes are shut down."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket; raises a KeelError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise KeelError(
            f"cannot listen at {host}:{port} ({first_line(error)}): give another --host or --port"
        ) from None


async def serve_and_announce(server: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve, and call `ready` when requests are accepted."""
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.05)
    if server.started:
        host, port = listener.getsockname()[:2]
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    await task
