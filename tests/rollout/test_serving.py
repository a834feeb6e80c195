"""The endpoint in front of an engine: what comes back is what a direct call gives, and bad requests are one line."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from keel.base.types import Completion
from keel.envs import endpoint as protocol
from keel.envs.endpoint import Endpoint
from keel.rollout import Engine, Request, SamplingParams
from keel.rollout import serving as waiting
from keel.rollout.native.engine import NativeEngine
from keel.rollout.serving import EngineServer
from rollout import shapes

SECRET = "of these tests alone"
PROMPTS = shapes.prompts(6)
NOISE = {"seed": 3, "attempt": 1, "step": 7}
Post = Callable[..., Awaitable[httpx2.Response]]


def engine() -> NativeEngine:
    return NativeEngine(shapes.model("llama"), shapes.tokenizer())


def body(prompt: int, **sampling: Any) -> dict[str, Any]:
    """A request for the completion `prompt` of the problem of that number."""
    noise = {**NOISE, "problem": str(prompt), "sample": prompt}
    return {"token_ids": list(PROMPTS[prompt]), "sampling_params": {"max_tokens": 12, "keel": noise, **sampling}}


def direct(plain: NativeEngine, prompt: int, sampling: SamplingParams, max_new: int = 12) -> Completion:
    """The same completion by the engine itself, alone in its batch."""
    request = Request(str(prompt), PROMPTS[prompt], samples=(prompt,), max_new=max_new)
    ((completion,),) = plain.generate([request], sampling, **NOISE)
    return completion


@pytest.fixture(scope="module")
def plain() -> NativeEngine:
    return engine()


@asynccontextmanager
async def served(sampler: Any, max_batch: int = 4, **facts: Any) -> AsyncIterator[Post]:
    """A client of an engine's endpoint."""
    server = EngineServer(sampler, max_batch)
    try:
        async with Endpoint(server.answer, SECRET, context=sampler.context, vocabulary=260, **facts).serving() as url:
            headers = {"authorization": f"Bearer {SECRET}"}
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as client:

                async def post(content: Any, **options: Any) -> httpx2.Response:
                    return await client.post("/inference/v1/generate", json=content, **options)

                post.client, post.server = client, server  # type: ignore[attr-defined]
                yield post
    finally:
        await asyncio.to_thread(server.close)


def assert_same(response: httpx2.Response, expected: Completion) -> None:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert tuple(choice["token_ids"]) == expected.tokens
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in expected.tokens]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected.sample_logp, abs=1e-5)
    assert choice["finish_reason"] == ("length" if expected.stop_reason == "length" else "stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}, {"stop": ("e", "a")}, {"temperature": 0.0}],
    ids=str,
)
def test_single_concurrent_and_repeated_requests_get_the_engines_own_completions(
    changes: dict[str, Any], plain: NativeEngine
) -> None:
    expected = [direct(plain, number, SamplingParams(**changes)) for number in range(len(PROMPTS))]

    async def ask() -> None:
        async with served(engine()) as post:
            for number, completion in enumerate(expected):
                assert_same(await post(body(number, **changes)), completion)
            together = [0, 1, 2, 3, 4, 5, 1, 1, 0]  # more than there are slots, and equal ones beside each other
            answers = await asyncio.gather(*(post(body(number, **changes)) for number in together))
            for number, answer in zip(together, answers, strict=True):
                assert_same(answer, expected[number])

    asyncio.run(ask())


def slowed(sampler: NativeEngine, seconds: float) -> threading.Event:
    """Slow an engine down; the event is set at each token."""
    record, drawn = sampler._record, threading.Event()

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        drawn.set()
        time.sleep(seconds)

    sampler._record = recorded  # type: ignore[method-assign]
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8}], ids=["equal", "others"])
def test_a_late_request_joins_the_running_batch(changes: dict[str, float], plain: NativeEngine) -> None:
    """With equal parameters it is answered before the long one that was there first, with others after it."""
    whole = [direct(plain, n, SamplingParams(), max_new=60) for n in range(len(PROMPTS))]
    longest = max(range(len(PROMPTS)), key=lambda number: len(whole[number].tokens))
    assert len(whole[longest].tokens) > 30
    late, sampler = (longest + 1) % len(PROMPTS), engine()
    drawn = slowed(sampler, 0.02)

    async def ask() -> None:
        async with served(sampler) as post:
            long = asyncio.create_task(post(body(longest, max_tokens=60)))
            await asyncio.to_thread(drawn.wait)
            assert_same(await post(body(late, **changes)), direct(plain, late, SamplingParams(**changes)))
            assert long.done() == bool(changes)
            assert_same(await long, whole[longest])

    asyncio.run(ask())


def test_a_stop_token_of_the_request_ends_it(plain: NativeEngine) -> None:
    whole = direct(plain, 0, SamplingParams())
    token = whole.tokens[2]

    async def ask() -> None:
        async with served(engine()) as post:
            answer = (await post(body(0, stop_token_ids=[token]))).json()["choices"][0]
            assert tuple(answer["token_ids"]) == whole.tokens[: whole.tokens.index(token) + 1]
            assert answer["finish_reason"] == "stop"

    asyncio.run(ask())


def test_noise_continues_at_a_position_and_a_seed_is_enough(plain: NativeEngine) -> None:
    """Two parts of one completion are the whole; equal seeds give equal tokens, no seed others."""
    whole = direct(plain, 0, SamplingParams())

    async def ask() -> None:
        async with served(engine()) as post:
            rest = body(0, max_tokens=8)
            rest["token_ids"] += whole.tokens[:4]
            rest["sampling_params"]["keel"]["position"] = 4
            assert tuple((await post(rest)).json()["choices"][0]["token_ids"]) == whole.tokens[4:]

            async def drawn(**sampling: Any) -> list[int]:
                content = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8, **sampling}}
                return list((await post(content)).json()["choices"][0]["token_ids"])

            assert await drawn(seed=4) == await drawn(seed=4)
            assert len({tuple(await drawn()) for _ in range(3)}) == 3

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ([], ("list", "token_ids")),
        ({}, ("token_ids",)),
        ({"token_ids": []}, ("token_ids",)),
        ({"token_ids": [1.5]}, ("token_ids", "1.5")),
        ({"token_ids": [-1]}, ("token_ids", "-1")),
        ({"token_ids": [5, 260]}, ("token_ids", "260")),
        ({"token_ids": [5] * 96}, ("96", "maximum context length")),
        ({"token_ids": [5] * 90, "sampling_params": {"max_tokens": 7}}, ("90", "7", "96")),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, ("max_tokens", "0")),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, ("temperature", "-1")),
        ({"token_ids": [5], "sampling_params": {"temperature": "NaN"}}, ("temperature",)),
        ({"token_ids": [5], "sampling_params": {"topp": 0.5}}, ("topp", "top_p")),
        ({"token_ids": [5], "sampling_params": {"n": 2}}, ("sampling_params.n", "2")),
        ({"token_ids": [5], "sampling_params": {"stop": [""]}}, ("stop",)),
        ({"token_ids": [5], "sampling_params": {"stop_token_ids": [999]}}, ("stop_token_ids", "999")),
        ({"token_ids": [5], "sampling_params": {"seed": 1, "keel": {"seed": 2}}}, ("seed", "keel")),
        ({"token_ids": [5], "sampling_params": {"keel": {"sede": 2}}}, ("sede", "seed")),
        ({"token_ids": [5], "stream": True}, ("stream",)),
    ],
    ids=str,
)
def test_a_bad_request_is_one_line(content: Any, names: Sequence[str], client: Any) -> None:
    response = client(json.dumps(content).encode())
    assert response.status_code == 400
    (error,) = response.json().values()
    assert "\n" not in error
    assert all(name in error for name in names), error


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000], ids=["nothing", "half", "bytes", "deep"])
def test_what_is_no_json_is_one_line(content: bytes, client: Any) -> None:
    response = client(content)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": SECRET[:-1]}])
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/models"])
def test_without_the_secret_there_is_no_answer(header: dict[str, str], path: str, client: Any) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    response = client(b"{}", path=path, headers=header, method=method)
    assert response.status_code == 401
    assert protocol.SECRET in response.json()["error"]


def test_the_model_says_its_context(client: Any) -> None:
    assert client(b"", path="/v1/models", method="GET").json()["data"] == [{"id": "keel", "max_model_len": 96}]


def test_a_body_over_the_limit_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BODY", 1000)
    response = client(json.dumps({"token_ids": [5] * 1000}).encode())
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]


@pytest.fixture
def client(plain: NativeEngine) -> Any:
    """Send bytes to an endpoint, without a network."""
    from starlette.testclient import TestClient

    async def answer(given: Any) -> Completion:
        server = EngineServer.__new__(EngineServer)
        server.engine, server.max_batch = plain, 4
        call = server.call_of(given)
        plain.check(call.request, call.sampling)
        raise AssertionError("the request was not refused")

    test = TestClient(Endpoint(answer, SECRET, context=96, vocabulary=260).app())

    def send(content: bytes, path: str = "/inference/v1/generate", headers: Any = None, method: str = "POST") -> Any:
        given = {"authorization": f"Bearer {SECRET}"} if headers is None else headers
        return test.request(method, path, content=content, headers=given)

    return send


def test_more_than_fits_in_the_queue_is_refused_and_the_rest_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 2)
    free, sampling = threading.Event(), threading.Event()

    class Held(Engine):
        context = 96

        def generate(self, requests: Any, params: SamplingParams, **noise: int) -> list[list[Completion]]:
            sampling.set()
            free.wait(20)
            return [[Completion((7,), (True,), (-1.0,), (-1.0,), "", "eos")] for _ in requests]

    async def ask() -> None:
        async with served(Held()) as post:
            answers = [asyncio.create_task(post({"token_ids": [5]}))]
            while not sampling.is_set():
                await asyncio.sleep(0.01)
            answers += [asyncio.create_task(post({"token_ids": [5]})) for _ in range(4)]
            while sum(answer.done() for answer in answers) < 2:
                await asyncio.sleep(0.01)
            free.set()
            codes = sorted([(await answer).status_code for answer in answers])
            assert codes == [200, 200, 200, 503, 503]

    asyncio.run(ask())


def test_an_engine_that_fails_answers_its_requests_and_goes_on(plain: NativeEngine) -> None:
    class Failing(NativeEngine):
        def converse(self, requests: Any, *arguments: Any, **noise: int) -> None:
            if any(request.tokens[0] == 9 for request in requests):
                raise RuntimeError("out of\nmemory")
            super().converse(requests, *arguments, **noise)

    async def ask() -> None:
        async with served(Failing(shapes.model("llama"), shapes.tokenizer())) as post:
            failed = await post({"token_ids": [9, 5]})
            assert failed.status_code == 500
            assert failed.json()["error"] == "RuntimeError: out of"
            assert_same(await post(body(1)), direct(plain, 1, SamplingParams()))

    asyncio.run(ask())


def test_at_the_end_running_and_later_requests_are_refused() -> None:
    sampler = engine()
    drawn = slowed(sampler, 0.05)

    async def ask() -> None:
        async with served(sampler) as post:
            running = asyncio.create_task(post(body(0, ignore_eos=True, max_tokens=60)))
            await asyncio.to_thread(drawn.wait)
            begun = time.monotonic()
            post.server.stop()  # type: ignore[attr-defined]
            assert (await running).status_code == 503
            assert (await post(body(1))).status_code == 503
            assert time.monotonic() - begun < 2
        assert not post.server._thread.is_alive()  # type: ignore[attr-defined]

    asyncio.run(ask())
