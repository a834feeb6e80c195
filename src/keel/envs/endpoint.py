"""The HTTP endpoint of a model: token ids and sampling parameters in, token ids and log-probabilities out.

It implements the part of vLLM's `/inference/v1/generate` that the client of the package `renderers` uses. The caller's
function `answer` samples the completion.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError, first_line
from keel.base.options import (
    Flag,
    Float,
    Fraction,
    Int,
    NonNegativeInt,
    Options,
    PositiveInt,
    Temperature,
    read_options,
)
from keel.base.types import Completion

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

SECRET = "KEEL_SERVE_SECRET"  # environment variable of the secret
MAX_BODY = 16 * 2**20  # bytes of a request, enough for a million token ids


class Noise(Options):
    """The key of a request's noise; `position` is the number of tokens already drawn with this key."""

    seed: Int = 0
    attempt: Int = 0
    step: Int = 0
    problem: str = ""
    sample: NonNegativeInt = 0
    position: NonNegativeInt = 0


class SamplingBody(Options):
    """`sampling_params` of a request."""

    max_tokens: PositiveInt | None = None
    temperature: Temperature = 1.0
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1)] = 0
    min_p: Fraction = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | str | None = ()
    stop_token_ids: tuple[NonNegativeInt, ...] | None = ()
    ignore_eos: Flag = False
    seed: Int | None = None
    keel: Noise | None = None
    # Options that clients send and for which only one value is supported.
    n: Literal[1] = 1
    logprobs: Literal[0, 1] = 1
    skip_special_tokens: Flag = False
    routed_experts_prompt_start: NonNegativeInt = 0

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def noise(self) -> Noise:
        """The noise key in the request, else a key of its seed, else one of a random seed."""
        if self.keel is not None and self.seed is not None:
            raise KeelError("request.sampling_params has both seed and keel.seed: leave seed out")
        return self.keel or Noise(seed=secrets.randbits(62) if self.seed is None else self.seed)


class GenerateBody(Options):
    """The body of a request."""

    token_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    sampling_params: SamplingBody = SamplingBody()
    model: str | None = None
    stream: Literal[False] = False


Answer = Callable[[GenerateBody], Awaitable[Completion]]


class Unavailable(Exception):
    """The endpoint cannot answer now, because it is full or shutting down."""


@dataclass(frozen=True)
class ModelAccess:
    """A model behind an endpoint, for a task that plays its own episodes.

    `sampling` are the sampling parameters of each request. `renderer` turns messages into tokens, as
    `keel.rollout.render.Renderer` does.
    """

    url: str
    secret: str
    renderer: Any
    sampling: dict[str, Any]
    noise: dict[str, int]
    max_turns: int


@dataclass(frozen=True)
class Endpoint:
    """The routes. `context` is the model's maximum length, `vocabulary` its number of tokens; None if unknown."""

    answer: Answer
    secret: str
    model: str = "keel"
    context: int | None = None
    vocabulary: int | None = None

    def app(self) -> Starlette:
        """The application, for uvicorn."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port of the loopback interface, in this event loop; yields the address."""
        import uvicorn

        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(self.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started and not running.done():
                    await asyncio.sleep(0.005)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await running

    async def _health(self, request: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        length = {} if self.context is None else {"max_model_len": self.context}
        return self._refused(request) or _json({"object": "list", "data": [{"id": self.model, **length}]})

    async def _generate(self, request: HttpRequest) -> Response:
        if refused := self._refused(request):
            return refused
        try:
            body = read_options(GenerateBody, await _content(request), "request")
            self._check_tokens(body)
            completion = await self.answer(body)
        except TooLarge as error:
            return _json({"error": str(error)}, 413)
        except KeelError as error:
            return _json({"error": str(error)}, 400)
        except Unavailable as error:
            return _json({"error": str(error)}, 503)
        except Exception as error:
            return _json({"error": f"{type(error).__name__}: {first_line(error)}"}, 500)
        if not all(map(math.isfinite, completion.sample_logp)):
            return _json({"error": "the engine reports no log-probabilities"}, 500)
        content = [
            {"token": f"token_id:{token}", "logprob": logp}
            for token, logp in zip(completion.tokens, completion.sample_logp, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": list(completion.tokens),
            "logprobs": {"content": content},
            "finish_reason": "length" if completion.stop_reason == "length" else "stop",
        }
        return _json({"request_id": secrets.token_hex(8), "choices": [choice]})

    def _refused(self, request: HttpRequest) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if secrets.compare_digest(given.encode(), self.secret.encode()):
            return None
        return _json({"error": f"the secret is missing or does not match: send {SECRET} as the bearer token"}, 401)

    def _check_tokens(self, body: GenerateBody) -> None:
        sampling = body.sampling_params
        for name, tokens in (
            ("token_ids", body.token_ids),
            ("sampling_params.stop_token_ids", sampling.stop_token_ids or ()),
        ):
            if self.vocabulary is not None and (largest := max(tokens, default=0)) >= self.vocabulary:
                raise KeelError(
                    f"request.{name} has the token {largest}, but the model's largest token is {self.vocabulary - 1}"
                )


class TooLarge(KeelError):
    """The body of a request is too large."""


def context_exceeded(tokens: int, context: int) -> KeelError:
    """The error for a context that is too long; clients recognise it by the words of the message."""
    return KeelError(f"request.token_ids has {tokens} tokens: the maximum context length is {context}")


async def _content(request: HttpRequest) -> dict[str, Any]:
    """The JSON object in a request's body."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise TooLarge(f"the request has more than {MAX_BODY} bytes: send fewer tokens")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise KeelError(f"the request is not JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise KeelError(f"the request is a JSON {type(content).__name__}: send an object with token_ids")
    return content


def _json(content: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)
