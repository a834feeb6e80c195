"""Servers that are wrong: each is one line that names it, and the run can be resumed."""

from __future__ import annotations

import ast
import asyncio
import json
import pickle
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoConfig

import keel
import keel.rollout.vllm
from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS
from keel.cli import main
from keel.envs.endpoint import SECRET
from keel.models.tiny import tiny_tokenizer
from keel.models.tokenizer import vocabulary_digest
from keel.rollout.engine import ModelMismatch
from keel.rollout.vllm import client, connection
from keel.rollout.vllm.client import ServerSampler
from keel.rollout.vllm.engine import Row, VllmEngine, first_difference, model_facts
from keel.rollout.vllm.service import PROTOCOL, Service
from ranks import free_port
from rollout import shapes
from run.test_resume import assert_same as assert_same_run
from trainer.small import BASE, small_model

from .servers import PASSWORD, REQUESTS, SAMPLING, Hosted, PlainBackend, assert_same, hosted, native, options

pytestmark = pytest.mark.processes


def connect(*urls: str, model: Any = None, **changes: Any) -> VllmEngine:
    model = model or shapes.model("llama")
    sampler = ServerSampler(model, shapes.tokenizer(), options(*urls, **changes), SINGLE_PROCESS)
    return VllmEngine(sampler, model, shapes.tokenizer())


def assert_one_line(error: pytest.ExceptionInfo[KeelError]) -> None:
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model": {**PlainBackend().facts["model"], "hidden_size": 64}}, "another model: its hidden_size is 64"),
        ({"model": {}}, "another model: its model_type is None"),
        ({"tokenizer": vocabulary_digest(tiny_tokenizer())}, "another tokenizer"),
        ({"protocol": PROTOCOL + 1}, "another version of Keel"),
        ({"dtype": "tensor"}, "type 'tensor'"),
        ({"dtype": 32}, "dtype=32"),
        ({"parts": None}, "parts=None"),
        ({"context": "long"}, "context='long'"),
    ],
)
def test_a_server_of_something_else(facts: dict[str, Any], message: str) -> None:
    with hosted(PlainBackend(**facts)) as (server,), pytest.raises(KeelError, match=message) as error:
        connect(server.url)
    assert_one_line(error)
    assert server.url in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "rope_parameters.rope_theta",
            "rms_norm_eps",
            "head_dim",
            "hidden_act",
            "attention_bias",
            "num_hidden_layers",
        ),
        *("max_position_embeddings", "sliding_window", "rope_parameters.factor"),
    ],
)
def test_an_option_that_changes_logits(name: str) -> None:
    """Of the same weights other logits are made."""
    facts = {**PlainBackend().facts["model"], name: 123}
    with (
        hosted(PlainBackend(model=facts)) as (server,),
        pytest.raises(ModelMismatch, match=f"its {name} is 123 ") as error,
    ):
        connect(server.url)
    assert_one_line(error)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_a_model_that_was_saved_has_the_same_facts(kind: str, tmp_path: Path) -> None:
    model = shapes.model(kind)
    model.bfloat16().save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    model.config.use_cache, model.config.pad_token_id = False, 7
    facts = model_facts(model.config)
    assert model_facts(saved) == facts == json.loads(json.dumps(facts))
    assert "vocab_size" in facts
    assert first_difference(facts, {**facts, "of_a_newer_version": False}) is None


def test_a_rank_above_the_servers_limit() -> None:
    adapted = get_peft_model(shapes.model("llama"), LoraConfig(r=16, target_modules=["q_proj"]))
    limit = "up to rank 8, but the policy's has 16.*--max-lora-rank 16"
    with hosted(PlainBackend()) as (server,), pytest.raises(KeelError, match=limit) as error:
        connect(server.url, model=adapted)
    assert_one_line(error)


def test_an_adapter_on_another_base() -> None:
    """Each step would sample from another policy than is trained."""
    adapted = get_peft_model(shapes.model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    other = PlainBackend(shapes.model("llama", seed=1))
    with hosted(other) as (server,), pytest.raises(KeelError, match="than the one under the policy's adapter"):
        connect(server.url, model=adapted)


def test_servers_that_differ() -> None:
    differs, backends = "in its dtype: start all", (PlainBackend(), PlainBackend(dtype="half"))
    with hosted(*backends) as (one, other), pytest.raises(KeelError, match=differs) as error:
        connect(one.url, other.url)
    assert_one_line(error)


def test_an_address_where_nothing_listens() -> None:
    with pytest.raises(KeelError, match=r"http://127.0.0.1:\d+ has not answered for 0 s .*start keel serve") as error:
        connect(f"http://127.0.0.1:{free_port()}", wait_s=0.1)
    assert_one_line(error)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://", "http://here:port", "http://a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(KeelError, match=r"rollout\.vllm\.url is") as error:
        connect(url)
    assert_one_line(error)


def test_the_same_address_twice() -> None:
    with pytest.raises(KeelError, match="names the same server twice, http://a:80/ and HTTP://A/: leave one") as error:
        connect("http://b:80", "http://a:80/", "HTTP://A/")
    assert_one_line(error)


def test_a_secret_that_the_environment_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    with pytest.raises(KeelError, match=r"^rollout\.vllm\.secret names \$MISSING, which is not set") as error:
        connect("http://127.0.0.1:1", secret="$MISSING")
    assert_one_line(error)


def test_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(KeelError, match=SECRET):
        connect("http://127.0.0.1:1", secret=None)


def test_another_secret() -> None:
    with hosted(PlainBackend()) as (server,), pytest.raises(KeelError, match="does not match") as error:
        connect(server.url, secret="something else")
    assert_one_line(error)
    assert "something" not in str(error.value)


def answering(**answers: Any) -> Starlette:
    """A server that answers as told: status, generate; and hangs where nothing is."""

    async def answer(request: Any) -> Response:
        name = request.url.path.rpartition("/")[2]
        if name not in answers:
            await asyncio.sleep(3600)
        return answers[name]

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "PUT", "POST"])])


PAGE = HTMLResponse("<html>\n<body>It works!</body></html>")


@pytest.mark.parametrize("page", [PAGE, PlainTextResponse("{"), JSONResponse([1]), Response(b"\x80\x04\x95")])
def test_a_server_of_another_kind(page: Response) -> None:
    server = Hosted(answering(status=page))
    try:
        with pytest.raises(KeelError, match="start keel serve there") as error:
            connect(server.url)
    finally:
        server.stop()
    assert_one_line(error)


def test_a_server_that_fails() -> None:
    server = Hosted(answering(status=JSONResponse({"error": "out of order"}, 500)))
    try:
        with pytest.raises(KeelError, match="refused the request: out of order"):
            connect(server.url)
    finally:
        server.stop()


class Trickling:
    """Content that never ends, and is never silent."""

    def __init__(self, then: bytes) -> None:
        self.then = then

    async def __aiter__(self) -> Any:
        yield b"{"
        while True:
            yield self.then
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("then", "message"), [(b" ", "has not answered .*no complete answer in"), (b" " * 2**16, "an answer of more than")]
)
def test_an_answer_without_an_end(then: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STATUS_S", 0.5)
    monkeypatch.setattr(connection, "ANSWER_BYTES", 2**18)
    server = Hosted(answering(status=StreamingResponse(Trickling(then))))
    try:
        with pytest.raises(KeelError, match=message) as error:
            connect(server.url, wait_s=0.1)
    finally:
        server.stop()
    assert_one_line(error)


def test_rows_without_an_end_of_line() -> None:
    service = Odd(PlainBackend(), PASSWORD)
    service.answer = StreamingResponse(Trickling(b" "))
    server = Hosted(service.app())
    try:
        engine = connect(server.url)
        sampler: Any = engine.sampler
        sampler._silence_s = 0.2
        with pytest.raises(KeelError, match=r"lost 5 times .*a line of its answer"):
            engine.generate(REQUESTS[:1], SAMPLING)
    finally:
        server.stop()


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with hosted(PlainBackend()) as (server,):
        assert connect(server.url).generate(REQUESTS[:1], SAMPLING)


class Odd(Service):
    """Answers to rows as told."""

    answer: Response

    async def _generate(self, request: Any) -> Response:
        return self.answer


def line(**changes: Any) -> str:
    whole = {"id": "0", "tokens": [1, 2], "sample_logp": [-1.0, -1.0], "filtered_logp": [-1.0, -1.0]}
    return json.dumps({**whole, **changes}) + "\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (PAGE, "which is not a completion"),
        (PlainTextResponse('{"id": "0", "tok'), "which is not a completion"),
        (PlainTextResponse("[]\n"), "which is not a completion"),
        (PlainTextResponse(line(tokens="ab")), "which is not a completion"),
        (PlainTextResponse(line(tokens=[1])), "1 tokens with 2 .* 2 .*log-probabilities"),
        (PlainTextResponse(line(filtered_logp=[-1.0])), "2 tokens with 2 .* 1 .*log-probabilities"),
        (PlainTextResponse(line(tokens=[1, 999])), "the token 999 of 260"),
        (PlainTextResponse(line(sample_logp=[-1.0, float("nan")])), "a log-probability that is not finite"),
        (PlainTextResponse(line(tokens=[], sample_logp=[], filtered_logp=[])), "no token for problem 'p0'"),
        (PlainTextResponse(""), "lost 5 times .*its answer is incomplete"),
        (PlainTextResponse(line(id="77")), "lost 5 times .*its answer is incomplete"),
        (PlainTextResponse("busy", 503), "answers b'busy'"),
        (JSONResponse({"error": "no such row"}, 400), "refused the request: no such row"),
    ],
)
def test_rows_answered_wrongly(answer: Response, message: str) -> None:
    service = Odd(PlainBackend(), PASSWORD)
    service.answer = answer
    server = Hosted(service.app())
    try:
        engine = connect(server.url)
        with pytest.raises(KeelError, match=message) as error:
            engine.generate(REQUESTS, SAMPLING)
    finally:
        server.stop()
    assert_one_line(error)


class Liar(PlainBackend):
    """Says that it holds what it was sent, and holds something else."""

    changed = staticmethod(lambda digests: digests)

    async def digests(self, ranks: Any) -> dict[str, str]:
        return self.changed(await super().digests(ranks))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda d: {**d, "model.norm.weight": "0"}, "1 of 21 tensors differ, the first is model.norm.weight"),
        (lambda d: {name: d[name] for name in list(d)[1:]}, "other tensors .*such as model.embed_tokens.weight"),
        (lambda d: {**d, "more": "0"}, "other tensors than the policy, such as more"),
        (lambda d: {}, "has other tensors"),
        (lambda d: None, "answers 'None' instead of digests"),
    ],
)
def test_weights_that_are_not_held(changed: Any, message: str) -> None:
    backend = Liar()
    with hosted(backend) as (server,):
        engine = connect(server.url)
        backend.changed = changed
        with pytest.raises(KeelError, match=message) as error:
            engine.sync(shapes.model("llama"), 1)
        assert_one_line(error)
        backend.changed = lambda digests: digests
        engine.sync(shapes.model("llama"), 1)


def test_an_adapter_that_stays_active_beside_full_weights() -> None:
    backend = PlainBackend()
    backend.adapter = "of another run"
    with hosted(backend) as (server,), pytest.raises(KeelError, match="still samples with an adapter") as error:
        connect(server.url)
    assert_one_line(error)


class Forgetful(PlainBackend):
    """Loads all tensors but one."""

    forgets = ""

    async def load(self, folder: Path, adapter: bool) -> None:
        before = self.base.get_parameter(self.forgets).clone() if self.forgets else None
        await super().load(folder, adapter)
        if before is not None:
            self.base.get_parameter(self.forgets).data.copy_(before)


def test_a_tensor_that_is_not_loaded() -> None:
    backend = Forgetful()
    with hosted(backend) as (server,):
        engine = connect(server.url)
        backend.forgets = "model.layers.1.mlp.up_proj.weight"
        with pytest.raises(KeelError, match=f"1 of 21 tensors differ, the first is {backend.forgets}"):
            engine.sync(shapes.model("llama", seed=3), 1)


class Damaging(Service):
    """Receives something else than was sent."""

    async def _put(self, request: Any) -> Response:
        answer = await super()._put(request)
        for path in self.folder.rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
        return JSONResponse({"sha256": "0" * 64}) if self.honest else answer

    honest = True


@pytest.mark.parametrize(
    ("honest", "message"),
    [(True, "weights-00000.safetensors was changed in transit"), (False, "tensors differ, the first is")],
)
def test_weights_that_arrive_damaged(honest: bool, message: str) -> None:
    service = Damaging(PlainBackend(), PASSWORD)
    service.honest = honest
    server = Hosted(service.app())
    try:
        with pytest.raises(KeelError, match=message) as error:
            connect(server.url, wait_s=0.2)
    finally:
        server.stop()
    assert_one_line(error)


# The routes themselves: what anybody could send.


def call(server: Hosted, method: str, path: str, secret: str = PASSWORD, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {secret}".strip().encode()}
    return httpx2.request(method, server.url + path, headers=headers, timeout=20, **body)


def test_every_route_but_health_wants_the_secret() -> None:
    with hosted(PlainBackend()) as (server,):
        assert call(server, "GET", "/health", secret="").status_code == 200
        for method, path in (
            *(
                ("GET", "/keel/status"),
                ("POST", "/keel/generate"),
                ("PUT", "/keel/weights/ab/weights-00000.safetensors"),
            ),
            *(("POST", "/keel/weights/ab"), ("POST", "/keel/digests"), ("GET", "/nothing")),
        ):
            for secret in ("", PASSWORD[:-1], PASSWORD + "x", "é"):
                assert call(server, method, path, secret=secret).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        *("..%2f..%2fevil.safetensors", "evil.py", "weights-1.safetensors", "weights-00000.safetensors.py", "%2e%2e"),
        *("weights-00000.safetensors%00.py", "weights-00000.bin", ".safetensors"),
    ],
)
def test_other_files_are_not_taken(path: str, tmp_path: Path) -> None:
    service = Service(PlainBackend(), PASSWORD)
    server = Hosted(service.app())
    try:
        assert call(server, "PUT", f"/keel/weights/ab/{path}", content=b"x").status_code in (400, 404)
        assert call(server, "PUT", f"/keel/weights/..%2f{path}/x", content=b"x").status_code in (400, 404)
        assert call(server, "PUT", "/keel/weights/%2e%2e/adapter_config.json", content=b"x").status_code in (400, 404)
        assert call(server, "POST", "/keel/weights/%2e%2e", json={}).status_code in (400, 404)
        assert call(server, "POST", "/keel/weights/abcd", json={}).status_code == 400
        assert list(service.folder.iterdir()) == []
    finally:
        server.stop()


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["weights-00000.safetensors", "adapter_model.safetensors"])
def test_nothing_is_unpickled(name: str, tmp_path: Path) -> None:
    torch.save({"w": Evil(tmp_path / "opened")}, tmp_path / "evil.bin")
    bodies = (pickle.dumps(Evil(tmp_path / "opened")), (tmp_path / "evil.bin").read_bytes())
    with hosted(PlainBackend()) as (server,):
        for body in bodies:
            assert call(server, "PUT", f"/keel/weights/ab/{name}", content=body).status_code == 200
            ranks = {"ranks": {}} if name.startswith("adapter") else {}
            refused = call(server, "POST", "/keel/weights/ab", json=ranks)
            assert refused.status_code == 422
            assert call(server, "POST", "/keel/generate", content=body).status_code == 400
            assert call(server, "GET", "/keel/status").json()["weights"] == ""
    assert not (tmp_path / "opened").exists()


def test_no_module_here_can_unpickle() -> None:
    (folder,) = keel.rollout.vllm.__path__
    for path in Path(folder).glob("*.py"):
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        imported = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        imported |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not {name for name in imported if re.match(r"pickle|cloudpickle|dill|marshal|shelve|joblib", name)}, path
        assert not re.search(r"torch\.load\b|allow_pickle=True|INSECURE_SERIALIZATION", source), path


def test_a_file_that_was_loaded_by_a_rank_before_is_not_loaded_twice() -> None:
    backend = PlainBackend()
    loads: list[Path] = []
    load = backend.load
    backend.load = lambda *a: [loads.append(a[0]), load(*a)][1]  # type: ignore[method-assign]
    with hosted(backend) as (server,):
        engine = connect(server.url)
        sampler: Any = engine.sampler
        sampler._send(sampler.servers[0])
        assert len(loads) == 1
        assert_same(engine.generate(REQUESTS, SAMPLING), native(shapes.model("llama")))


# A whole run.


class Failing(PlainBackend):
    """Fails after some rows."""

    left = 10**9

    async def before(self, row: Row) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device is gone")


def small_backend(**facts: Any) -> Failing:
    model, tokenizer = small_model(seed=9)
    return Failing(model, context=64, tokenizer=vocabulary_digest(tokenizer), **facts)


def settings(folder: Path, server: str, wait_s: float = 5.0) -> list[str]:
    where = ["rollout.vllm.mode=server", f"rollout.vllm.url={server}", f"rollout.vllm.wait_s={wait_s}"]
    return [f"run.dir={folder}", "run.max_steps=5", "checkpoint.every=1", "rollout.engine=vllm", *where]


def test_a_run_that_lost_its_server_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, PASSWORD)
    backend = small_backend()
    with hosted(backend) as (server,):
        whole = keel.train(BASE, overrides=settings(tmp_path / "whole", server.url)).directory
        backend.left = 30
        with pytest.raises(KeelError, match="the device is gone") as error:
            keel.train(BASE, overrides=settings(tmp_path, server.url))
        assert_one_line(error)
        nobody = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(KeelError, match="has not answered"):
            keel.train(BASE, overrides=settings(tmp_path, nobody, wait_s=0.1), resume=True)
        backend.left = 10**9
        run = keel.train(BASE, overrides=settings(tmp_path, server.url), resume=True).directory
    assert_same_run(run, whole)


def test_the_command_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET, PASSWORD)
    (tmp_path / "small.yaml").write_text(json.dumps(BASE))
    arguments = settings(tmp_path, f"http://127.0.0.1:{free_port()}", wait_s=0.1)
    assert main(["train", str(tmp_path / "small.yaml"), *arguments]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("keel: error:")]
    assert "has not answered" in error
