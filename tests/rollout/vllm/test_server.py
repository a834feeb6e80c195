"""A sampler behind a server: rows, weights and turns as the native engine has them, also when a server is lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from starlette.testclient import TestClient

from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS, World
from keel.rollout import Request, SamplingParams, Turn
from keel.rollout.native.engine import NativeEngine
from keel.rollout.vllm.client import ServerSampler
from keel.rollout.vllm.engine import TRAINING, Drawing, Row, VllmEngine, to_json
from keel.rollout.vllm.service import Service
from keel.rollout.vllm.transfer import checkpoint_weights, save_shards
from rollout import shapes
from rollout.test_converse import Guess, groups, tokens_of

from .servers import PASSWORD, REQUESTS, SAMPLING, Hosted, PlainBackend, assert_same, hosted, native, options, until

pytestmark = pytest.mark.processes


def engine_of(
    model: Any, *urls: str, world: World = SINGLE_PROCESS, silence_s: float = 30.0, **changes: Any
) -> VllmEngine:
    sampler = ServerSampler(model, shapes.tokenizer(), options(*urls, **changes), world, silence_s=silence_s)
    return VllmEngine(sampler, model, shapes.tokenizer())


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_batch": 2, "temperature": 0.7}, {"top_p": 0.8, "top_k": 40, "min_p": 0.01}, {"stop": ("e", "a")}],
)
def test_completions_are_the_native_engines(changes: dict[str, Any]) -> None:
    model, sampling = shapes.model("llama"), SamplingParams(num_generations=3, max_completion_length=8, **changes)
    with hosted(PlainBackend()) as (server,):
        engine = engine_of(model, server.url)
        for seed in (1, 2):
            assert_same(engine.generate(REQUESTS, sampling, seed=seed), native(model, sampling, seed=seed))
        assert engine.events() == []


def test_episodes_are_the_native_engines() -> None:
    model = shapes.model("llama")
    with hosted(PlainBackend(), PlainBackend()) as servers:
        collected = groups(engine_of(model, *(server.url for server in servers)), Guess())
    assert tokens_of(collected) == tokens_of(groups(NativeEngine(model, shapes.tokenizer()), Guess()))


def test_weights_are_those_of_the_last_sync() -> None:
    model = shapes.model("llama")
    with hosted(PlainBackend()) as (server,):
        engine = engine_of(model, server.url)
        old = native(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        assert_same(engine.generate(REQUESTS, SAMPLING), old)
        engine.sync(model, 4)
        assert engine.version == 4
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))


def test_an_adapter_goes_beside_a_base_that_is_checked_once() -> None:
    base = shapes.model("llama")
    backend, checks = PlainBackend(shapes.model("llama")), []
    digests = backend.digests

    async def counted(ranks: Any) -> Any:
        checks.append(ranks)
        return await digests(ranks)

    backend.digests = counted  # type: ignore[method-assign]
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, rank_pattern={"q_proj": 2}, target_modules=["q_proj"]))
    with hosted(backend) as (server,):
        engine = engine_of(adapted, server.url)
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(0, 0.5 * version)
            engine.sync(adapted, version)
            assert_same(engine.generate(REQUESTS, SAMPLING), native(adapted))
    assert [ranks is None for ranks in checks] == [True, False, False, False]
    assert set(checks[-1].values()) == {2}


class Held(PlainBackend):
    """Rows wait until they may go on."""

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self.free = asyncio.Event()

    async def before(self, row: Row) -> None:
        await super().before(row)
        if self.rows > 5:
            await self.free.wait()


def in_background(call: Any) -> Any:
    """Run a call in a thread; the function returned waits for its result, or its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return wait


def test_a_server_killed_in_a_rollout_and_started_again_gives_the_same_rows() -> None:
    model, first = shapes.model("llama"), Held()
    server = Hosted(Service(first, PASSWORD).app())
    engine = engine_of(model, server.url)
    wait = in_background(lambda: engine.generate(REQUESTS, SAMPLING, seed=3))
    until(lambda: first.rows > 5)
    server.stop()
    again = Hosted(Service(second := PlainBackend(), PASSWORD).app(), server.port)
    try:
        assert_same(wait(), native(model, seed=3))
    finally:
        again.stop()
    (lost, message), (back, _) = engine.events()
    assert (lost, back) == ("sampler/lost", "sampler/back")
    assert f"{second.rows} rows are sampled again" in message
    assert engine.events() == []


def test_a_server_killed_between_sync_and_sampling_gets_the_weights_again() -> None:
    model = shapes.model("llama")
    server = Hosted(Service(PlainBackend(), PASSWORD).app())
    engine = engine_of(model, server.url)
    server.stop()
    again = Hosted(Service(PlainBackend(), PASSWORD).app(), server.port)
    try:
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
    finally:
        again.stop()
    assert [code for code, _ in engine.events()] == ["sampler/lost", "sampler/back"]


def test_others_draw_the_rows_of_a_lost_server_which_is_back_at_the_next_sync() -> None:
    model, first, second = shapes.model("llama"), Held(), PlainBackend()
    lost, other = (Hosted(Service(backend, PASSWORD).app()) for backend in (first, second))
    engine = engine_of(model, lost.url, other.url, wait_s=0.5)
    first.rows = 5
    wait = in_background(lambda: engine.generate(REQUESTS, SAMPLING, seed=3))
    until(lambda: first.rows > 5)
    lost.stop()
    assert_same(wait(), native(model, seed=3))
    engine.sync(model, 1)  # without it
    assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
    assert [code for code, _ in engine.events()] == ["sampler/lost"]
    back = Hosted(Service(third := PlainBackend(), PASSWORD).app(), lost.port)
    try:
        engine.sync(model, 2)
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
    finally:
        back.stop()
        other.stop()
    assert third.rows == 6
    assert [code for code, _ in engine.events()] == ["sampler/back"]


class Mute(PlainBackend):
    """Gives no sign of life until it is asked for the rows again."""

    async def before(self, row: Row) -> None:
        await super().before(row)
        if self.rows <= 12:
            await asyncio.sleep(3600)

    async def alive(self) -> None:
        await asyncio.sleep(3600)


def test_a_server_that_falls_silent_is_lost() -> None:
    model = shapes.model("llama")
    with hosted(Mute()) as (server,):
        engine = engine_of(model, server.url, silence_s=1.5)
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
        (event,) = engine.events()
    assert event[0] == "sampler/lost"


def test_rows_given_up_end_on_the_server_and_never_turn_up_again() -> None:
    model, backend = shapes.model("llama"), Held()

    def answer(turns: list[Turn]) -> list[Request]:
        raise RuntimeError("the task fails")

    with hosted(backend) as (server,):
        engine = engine_of(model, server.url)
        with pytest.raises(RuntimeError, match="the task fails"):
            engine.converse(REQUESTS, SAMPLING, answer, seed=1)
        until(lambda: backend.cancelled >= 7)
        backend.rows = -100  # nothing waits any more
        assert_same(engine.generate(REQUESTS, SAMPLING, seed=2), native(model, seed=2))
        assert engine.events() == []


def test_rows_that_always_lose_the_server_are_an_error() -> None:
    class Poisoned(PlainBackend):
        async def before(self, row: Row) -> None:
            raise RuntimeError("no memory left")

    with hosted(Poisoned()) as (server,):
        engine = engine_of(shapes.model("llama"), server.url)
        with pytest.raises(KeelError, match=r"lost 5 times .*no memory left"):
            engine.generate(REQUESTS, SAMPLING)


@pytest.mark.parametrize("dead", [False, True])
def test_a_server_ends_with_its_backend(dead: bool) -> None:
    """A row that fails is no reason: the next may not."""

    class Dying(PlainBackend):
        async def before(self, row: Row) -> None:
            raise RuntimeError("no memory left")

        async def alive(self) -> None:
            if dead:
                raise RuntimeError("the engine is dead\nsee above")

    service = Service(Dying(), PASSWORD)
    server = Hosted(service.app())
    service.on_end = lambda: setattr(server.server, "should_exit", True)
    engine = engine_of(shapes.model("llama"), server.url, wait_s=0.5)
    with pytest.raises(KeelError, match="has not answered" if dead else "lost 5 times"):
        engine.generate(REQUESTS, SAMPLING)
    assert service.ended == ("the engine is dead" if dead else "")
    assert server.server.should_exit == dead
    server.stop()


def asked(service: Service, training: str = "") -> TestClient:
    """A client of a service's routes."""
    return TestClient(service.app(), headers={"authorization": f"Bearer {PASSWORD}", TRAINING: training})


def put(routes: TestClient, sync: str, seed: int, tmp_path: Path) -> None:
    (path,) = save_shards(checkpoint_weights(shapes.model("llama", seed=seed), torch.float32), tmp_path)
    assert routes.put(f"/keel/weights/{sync}/{path.name}", content=path.read_bytes()).status_code == 200


DRAWING = Drawing.of(SAMPLING, [257], stop_is_special=False, vocabulary=shapes.VOCABULARY)
ROWS = to_json([Row(str(i), (1, 2), 4, i, 0) for i in range(2)], DRAWING)


def test_rows_that_a_load_overtakes_are_not_answered_as_the_old_weights(tmp_path: Path) -> None:
    class Slow(PlainBackend):
        begun = threading.Event()

        async def before(self, row: Row) -> None:
            self.begun.set()
            await asyncio.sleep(1.5)

    service = Service(backend := Slow(), PASSWORD)
    with asked(service) as routes:
        for sync, seed in (("aa", 1), ("bb", 2)):
            put(routes, sync, seed, tmp_path)
            if sync == "aa":
                assert routes.post("/keel/weights/aa", json={}).status_code == 200
        wait = in_background(lambda: routes.post("/keel/generate", json={**ROWS, "weights": "aa"}).text.split("\n"))
        assert backend.begun.wait(20)
        assert routes.post("/keel/weights/bb", json={}).status_code == 200
        lines = [json.loads(line) for line in wait() if line]
        assert [line.get("error") for line in lines] == [
            "KeelError: other weights were loaded while these rows were running"
        ]
        assert len(routes.post("/keel/generate", json={**ROWS, "weights": "bb"}).text.split()) > 2
    assert service.streams == {}


def test_a_sync_waits_for_rows_of_another_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rollout.vllm.service.BUSY_TIMEOUT_S", 0.2)
    service = Service(backend := Held(), PASSWORD)
    backend.rows = 5
    with asked(service, "one") as routes:
        for sync in ("aa", "bb"):
            put(routes, sync, 1, tmp_path)
            if sync == "aa":
                assert routes.post("/keel/weights/aa", json={}).status_code == 200
        wait = in_background(lambda: routes.post("/keel/generate", json={**ROWS, "weights": "aa"}).text.split("\n"))
        until(lambda: backend.rows > 6)
        other = {TRAINING: "another"}
        busy = routes.post("/keel/weights/bb", json={}, headers=other)
        assert (busy.status_code, busy.json()["error"]) == (409, "it is busy: another training uses this server")
        assert service.weights == "aa"
        monkeypatch.setattr("keel.rollout.vllm.service.BUSY_TIMEOUT_S", 20)
        commit = in_background(lambda: routes.post("/keel/weights/bb", json={}, headers=other))
        routes.portal.call(backend.free.set)  # type: ignore[union-attr]
        assert commit().status_code == 200
        assert ["error" in json.loads(line) for line in wait() if line] == [False, False]


def test_a_sync_that_is_loaded_is_not_loaded_again_under_rows_that_run(tmp_path: Path) -> None:
    service = Service(backend := Held(), PASSWORD)
    backend.rows = 5
    with asked(service) as routes:
        put(routes, "aa", 1, tmp_path)
        first = routes.post("/keel/weights/aa", json={}).json()
        wait = in_background(lambda: routes.post("/keel/generate", json={**ROWS, "weights": "aa"}).text.split("\n"))
        until(lambda: backend.rows > 6)
        again = routes.post("/keel/weights/aa", json={})
        assert (again.status_code, again.json(), service.weights) == (200, first, "aa")
        routes.portal.call(backend.free.set)  # type: ignore[union-attr]
        assert ["error" in json.loads(line) for line in wait() if line] == [False, False]


def test_files_on_their_way_outlast_the_commit_of_another_rank(tmp_path: Path) -> None:
    service = Service(PlainBackend(), PASSWORD)
    committed = threading.Event()
    server = Hosted(service.app())
    headers = {"authorization": f"Bearer {PASSWORD}"}

    def slowly() -> Iterator[bytes]:
        yield b"half"
        assert committed.wait(20)
        yield b"whole"

    try:
        with httpx2.Client(base_url=server.url, headers=headers, timeout=20) as client:
            where = "/keel/weights/aa/weights-00000.safetensors"
            wait = in_background(lambda: httpx2.put(server.url + where, headers=headers, content=slowly(), timeout=20))
            until(lambda: service.arriving["aa"])
            (path,) = save_shards(checkpoint_weights(shapes.model("llama"), torch.float32), tmp_path)
            assert client.put(where, content=path.read_bytes()).status_code == 200
            assert client.post("/keel/weights/aa", json={}).status_code == 200
            committed.set()
            assert wait().status_code == 200
            assert client.post("/keel/weights/aa", json={}).status_code == 200
            assert list(service.folder.iterdir()) == []
    finally:
        server.stop()


def test_a_load_longer_than_any_wait_sends_heartbeats_and_rows_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share the server: the one that did not load asks for rows while the weights are loaded."""

    class Slow(PlainBackend):
        begun, free = threading.Event(), threading.Event()

        async def load(self, folder: Path, adapter: bool) -> None:
            self.begun.set()
            while not self.free.is_set():
                await asyncio.sleep(0.02)
            await super().load(folder, adapter)

    monkeypatch.setattr("keel.rollout.vllm.service.HEARTBEAT_S", 0.05)
    model, backend = shapes.model("llama"), Slow()
    with hosted(backend) as (server,):
        backend.free.set()
        engine = engine_of(model, server.url, silence_s=1.0, wait_s=0.1)
        backend.free.clear()
        backend.begun.clear()
        sampler: Any = engine.sampler
        sync = in_background(lambda: engine.sync(model, 1))
        assert backend.begun.wait(20)
        rows = in_background(lambda: engine.generate(REQUESTS, SAMPLING))
        time.sleep(1.5)
        backend.free.set()
        sync()
        assert_same(rows(), native(model))
        assert (sampler.events(), sampler._tries) == ([], {})


@pytest.mark.parametrize("call", ["load", "digests"])
def test_a_backend_that_dies_between_rollouts_ends_the_server_which_is_waited_for(call: str) -> None:
    class Dying(PlainBackend):
        dead = False

        async def alive(self) -> None:
            if self.dead:
                raise RuntimeError("the engine is dead")

    model, backend = shapes.model("llama"), Dying()
    service = Service(backend, PASSWORD)
    server = Hosted(service.app())
    engine = engine_of(model, server.url)

    async def dies(*arguments: Any) -> Any:
        await backend.alive()

    setattr(backend, call, dies)
    backend.dead = True
    revived: list[Hosted] = []

    def end() -> None:
        server.server.should_exit = True
        threading.Thread(target=lambda: [server.stop(), revived.append(revive())]).start()

    def revive() -> Hosted:
        return Hosted(Service(PlainBackend(), PASSWORD).app(), server.port)

    service.on_end = end
    try:
        engine.sync(model, 1)
        assert service.ended == "the engine is dead"
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
    finally:
        until(lambda: revived)
        revived[0].stop()
    assert "sampler/lost" in [code for code, _ in engine.events()]


class Ranks:
    """Two ranks as threads of this process."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2), [None, None]

    def world(self, rank: int) -> World:
        ranks = self

        class Threaded(World):
            def all_gather(self, value: Any) -> list[Any]:
                ranks.values[rank] = value
                ranks.barrier.wait(30)
                values = list(ranks.values)
                ranks.barrier.wait(30)
                return values

            def broadcast(self, value: Any) -> Any:
                return self.all_gather(value)[0]

            def barrier(self) -> None:
                self.all_gather(None)

        return Threaded(rank, 2)


def test_ranks_that_share_a_server_each_bring_it_back() -> None:
    model, ranks = shapes.model("llama"), Ranks()
    server = Hosted(Service(first := PlainBackend(), PASSWORD).app())
    loads: list[Any] = []
    load = first.load
    first.load = lambda *a: [loads.append(a), load(*a)][1]  # type: ignore[method-assign]
    waits = [in_background(lambda rank=rank: engine_of(model, server.url, world=ranks.world(rank))) for rank in (0, 1)]
    engines = [wait() for wait in waits]
    assert len(loads) == 1, "one of them sends"
    server.stop()
    again = Hosted(Service(PlainBackend(), PASSWORD).app(), server.port)
    try:
        assert_same(engines[1].generate(REQUESTS, SAMPLING), native(model))
        together = [in_background(lambda e=e: e.generate(REQUESTS, SAMPLING, seed=2)) for e in engines]
        for wait in together:
            assert_same(wait(), native(model, seed=2))
    finally:
        again.stop()
    assert [code for code, _ in engines[1].events()] == ["sampler/lost", "sampler/back"]
    assert engines[0].events() == []


def test_each_rank_has_its_own_server_where_there_are_enough() -> None:
    model, ranks = shapes.model("llama"), Ranks()
    with hosted(PlainBackend(), PlainBackend()) as servers:
        urls = [server.url for server in servers]
        waits = [in_background(lambda r=rank: engine_of(model, *urls, world=ranks.world(r))) for rank in (0, 1)]
        assert [[server.url for server in wait().sampler.servers] for wait in waits] == [[url] for url in urls]
