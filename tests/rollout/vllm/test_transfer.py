"""Full weights from GPU to GPU, by stand-ins that move tensors: they arrive, are proven, and go as files otherwise."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from starlette.testclient import TestClient

from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS
from keel.rollout.engine import StaleWeights
from keel.rollout.options import RolloutOptions, VllmOptions
from keel.rollout.registry import check_vllm
from keel.rollout.vllm import client, direct, engine_arguments, start_error
from keel.rollout.vllm.client import ServerSampler
from keel.rollout.vllm.connection import ServerLost
from keel.rollout.vllm.engine import VllmEngine
from keel.rollout.vllm.serve import VllmBackend
from keel.rollout.vllm.service import Service
from keel.rollout.vllm.transfer import merge_worker_digests, process_folder, save_shards
from rollout import shapes

from . import fake_vllm
from .servers import PASSWORD, REQUESTS, SAMPLING, Hosted, PlainBackend, assert_same, hosted, native, options


class Receiver(PlainBackend):
    """Receives as vLLM's workers do; what it was given stays untouched until the update ends."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(transfer="nccl", devices=["another"], **facts)
        self.steps: list[str] = []
        self.fail, self.loads, self.received = "", 0, {}  # type: str, int, dict[str, torch.Tensor]

    async def load(self, folder: Path, adapter: bool) -> None:
        self.loads += 1
        await super().load(folder, adapter)

    async def transfer(self, step: str, info: dict[str, Any]) -> None:
        self.steps.append(step)
        await asyncio.to_thread(self.step, step, info)

    def step(self, step: str, info: dict[str, Any]) -> None:
        if step == self.fail:
            raise RuntimeError("no such device")
        if step == "init" and info:
            identity = base64.b64decode(info["nccl_unique_id_b64"])
            self.group = fake_vllm.Group(identity, info["rank_offset"], info["world_size"], None)
        elif step == "update":
            self.received = {name: self.group.receive() for name in info["names"]}
        elif step == "finish":
            own = dict(self.base.named_parameters())
            with torch.no_grad():
                for name, tensor in self.received.items():
                    own[name].copy_(tensor)
            self.received = {}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's classes, and files small enough to be several."""
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(client, "check_transfer", lambda *arguments: None)
    monkeypatch.setattr(client, "save_shards", functools.partial(save_shards, limit=20_000))


def engine_of(model: Any, url: str) -> VllmEngine:
    sampler = ServerSampler(model, shapes.tokenizer(), options(url, transfer="nccl"), SINGLE_PROCESS)
    return VllmEngine(sampler, model, shapes.tokenizer())


def changed(model: Any, factor: float = 1.05) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def test_full_weights_arrive_without_files() -> None:
    model, backend = shapes.model("llama"), Receiver()
    with hosted(backend) as (server,):
        engine = engine_of(model, server.url)
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
        engine.sync(changed(model), 3)
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
        updates = ["start", "update", "finish"]
        assert backend.steps == ["init", *updates, *updates]
        assert (backend.loads, engine.events()) == (0, [])
        assert engine.notes == (direct.NOT_RUN,)
        engine.close()


def test_a_transfer_that_breaks_goes_on_as_files() -> None:
    model, backend = shapes.model("llama"), Receiver()
    with hosted(backend) as (server,):
        engine = engine_of(model, server.url)
        backend.fail, backend.steps = "update", []
        engine.sync(changed(model))
        ((code, message),) = engine.events()
        assert code == "sampler/transfer"
        assert "by nccl (" in message
        assert "no such device" in message
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
        backend.fail, tried = "", list(backend.steps)
        engine.sync(changed(model))  # not tried again before the server is started again
        assert (backend.steps, backend.loads, engine.events()) == (tried, 2, [])
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))


@pytest.mark.slow
def test_a_server_that_comes_back_gets_the_last_sync_again() -> None:
    model = shapes.model("llama")
    first, second = Receiver(), Receiver()
    server = Hosted(Service(first, PASSWORD).app())
    engine = engine_of(model, server.url)
    old = native(model)
    server.stop()
    back = Hosted(Service(second, PASSWORD).app(), server.port)
    try:
        changed(model)  # the policy has moved on: what comes again are the weights of the sync
        assert_same(engine.generate(REQUESTS, SAMPLING), old)
        assert second.steps[:2] == ["init", "start"]
        assert second.loads == 0
        assert [code for code, _ in engine.events()] == ["sampler/lost", "sampler/back"]
        engine.sync(model)
        assert second.steps.count("init") == 1
        assert_same(engine.generate(REQUESTS, SAMPLING), native(model))
    finally:
        back.stop()


def test_what_arrives_is_proven() -> None:
    class Wrong(Receiver):
        def step(self, step: str, info: dict[str, Any]) -> None:
            if step == "finish":
                self.received["model.norm.weight"] += 1e-3
            super().step(step, info)

    with hosted(Wrong()) as (server,), pytest.raises(KeelError, match="does not have the policy's weights"):
        engine_of(shapes.model("llama"), server.url)


@pytest.mark.parametrize("step", ["init", "start", "update", "finish"])
def test_a_first_transfer_that_fails_is_one_line(step: str) -> None:
    backend = Receiver()
    backend.fail = step
    line = r"weights cannot be sent to the sampler at .* by nccl \(.*no such device\): .*transfer=http"
    with hosted(backend) as (server,), pytest.raises(KeelError, match=line):
        engine_of(shapes.model("llama"), server.url)


def test_adapters_go_as_files() -> None:
    backend = Receiver()
    backend.base = backend.model = shapes.model("llama")
    adapted = get_peft_model(shapes.model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    with hosted(backend) as (server,):
        engine = engine_of(adapted, server.url)
        assert_same(engine.generate(REQUESTS, SAMPLING), native(adapted))
    assert (backend.steps, backend.loads) == ([], 1)


def test_a_broadcast_ends_when_nobody_receives(tmp_path: Path) -> None:
    save_shards(shapes.model("llama").named_parameters(), tmp_path)

    def call(step: str, info: dict[str, Any]) -> None:
        if step == "init":
            fake_vllm.Group(base64.b64decode(info["nccl_unique_id_b64"]), 1, 2, None)
        if step == "update":
            raise ServerLost("it has ended")

    sender = direct.NcclSender(call, torch.device("cpu"), 1, 20.0)
    with pytest.raises(ServerLost, match="it has ended"):
        sender.send(tmp_path)


def test_of_two_that_wait_for_each_other_the_first_error_counts() -> None:
    never = threading.Event()

    def refused() -> None:
        raise KeelError("refused")

    with pytest.raises(KeelError, match="refused"):
        direct.run_concurrently(never.wait, refused, timeout_s=20.0)
    with pytest.raises(direct.TransferBroken, match="did not connect within 0 s"):
        direct.run_concurrently(never.wait, lambda: None, timeout_s=0.1)
    assert direct.run_concurrently(lambda: 1, lambda: 2, timeout_s=20.0) == [1, 2]
    never.set()


def test_the_time_limit_is_for_all_calls_together() -> None:
    """Each call ends within the limit after the one before it, but the last one ends after the limit."""
    with pytest.raises(direct.TransferBroken):
        direct.run_concurrently(*(partial(time.sleep, 0.3 * n) for n in (1, 2, 3)), timeout_s=0.5)


@pytest.mark.parametrize(
    ("status", "device", "line"),
    [
        ({}, "cpu", "transfer=nccl sends from a GPU, but the policy is on the cpu"),
        ({"transfer": "http", "devices": ["b"]}, "cuda:0", "start keel serve with --transfer nccl"),
        ({"transfer": "nccl", "devices": ["b", "a"]}, "cuda:0", "on the policy's own GPU.*use http"),
    ],
)
def test_what_a_transfer_cannot_reach_is_refused(
    status: dict[str, Any], device: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "device_id", lambda device: "a")
    with pytest.raises(KeelError, match=line):
        direct.check_transfer(status, torch.device(device), "the sampler")
    sound = {"transfer": "nccl", "devices": ["b", "c"]}
    direct.check_transfer(sound, torch.device("cuda:0"), "the sampler")


def test_the_routes_take_no_more_than_they_need() -> None:
    backend = Receiver()
    routes = TestClient(Service(backend, PASSWORD).app())
    where, secret = "/keel/transfer/ab12", {"authorization": f"Bearer {PASSWORD}"}
    assert routes.post(f"{where}/start", json={}).status_code == 401
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for step, info in (
        ("init", meeting),
        ("update", {"ipc_handles_pickled": "gASV"}),
        ("update", {"tensors": []}),
        ("shutdown", {}),
        ("start", [1]),
    ):
        assert routes.post(f"{where}/{step}", json=info, headers=secret).status_code == 400
    assert routes.post("/keel/transfer/..%2f/start", json={}, headers=secret).status_code in (400, 404)
    assert routes.post("/keel/weights/ab12", json={}, headers=secret).status_code == 400
    assert backend.steps == []


def test_half_a_transfer_is_no_weights() -> None:
    backend = Receiver()
    service = Service(backend, PASSWORD)
    routes = TestClient(service.app(), headers={"authorization": f"Bearer {PASSWORD}"})
    service.weights = "00"
    for step in ("init", "start"):
        assert routes.post(f"/keel/transfer/ab12/{step}", json={}).status_code == 200
        assert service.weights == ""
        assert routes.post("/keel/weights/ab12", json={}).status_code == 400
    backend.fail = "update"
    assert routes.post("/keel/transfer/ab12/update", json={"names": []}).status_code == 422
    backend.fail = ""
    assert routes.post("/keel/transfer/ab12/finish", json={}).status_code == 200
    assert service.weights == ""
    assert routes.post("/keel/weights/ab12", json={}).status_code == 200
    assert service.weights == "ab12"


class Calls:
    """vLLM's asynchronous engine: it notes what it is asked."""

    def __init__(self, *fail: str) -> None:
        self.calls: list[Any] = []
        self.fail = fail

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> None:
            self.calls.append((name, *(getattr(a, "init_info", getattr(a, "update_info", a)) for a in arguments)))
            if name in self.fail:
                raise RuntimeError(f"{name} is not possible now")

        return call


def steps_of(backend: VllmBackend, *steps: tuple[str, dict[str, Any]]) -> Any:
    async def run() -> None:
        for step, info in steps:
            await backend.transfer(step, info)

    asyncio.run(run())
    return backend.engine.calls


def test_vllm_is_asked_in_the_order_that_it_documents() -> None:
    init, names = {"rank_offset": 1}, {"names": ["a"]}
    backend = VllmBackend(Calls(), shapes.tokenizer(), {})
    calls = steps_of(backend, ("init", init), ("start", {}), ("update", names), ("finish", {}))
    assert calls == [
        ("shutdown_weight_transfer_engine",),
        ("init_weight_transfer_engine", init),
        ("start_weight_update",),
        ("update_weights", names),
        ("finish_weight_update",),
        ("reset_prefix_cache",),
    ]


def test_full_weights_after_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sampled without it, and nothing of its keys and values is read."""
    request = SimpleNamespace(LoRARequest=lambda *a, **b: "an adapter")
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    backend = VllmBackend(Calls(), shapes.tokenizer(), {})
    salts = {backend.salt}

    async def run() -> None:
        for steps in (("load",), ("start", "finish")):
            await backend.load(Path("a"), True)
            assert backend.adapter == "an adapter"
            salts.add(backend.salt)
            for step in steps:
                await (backend.load(Path("b"), False) if step == "load" else backend.transfer(step, {}))
            assert backend.adapter is None
            salts.add(backend.salt)

    asyncio.run(run())
    assert len(salts) == 5


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    own = process_folder("sync")
    pid = str(os.getpid())
    dead, living = (own.with_name(own.name.replace(f"-{pid}-", f"-{p}-")) for p in (ended.pid, os.getppid()))
    other = tmp_path / f"keel-sync-elsewhere-1-{ended.pid}-abc"
    for folder in (dead, living, other):
        folder.mkdir()
    again = process_folder("sync")
    assert {*tmp_path.iterdir()} == {own, again, living, other}


def test_workers_that_hold_different_weights() -> None:
    same = {"a": "1", "b|0|0|4": "2"}
    assert merge_worker_digests([same, {"a": "1", "b|0|4|4": "3"}]) == {**same, "b|0|4|4": "3"}
    with pytest.raises(StaleWeights, match="two workers of the sampler hold different weights of a"):
        merge_worker_digests([same, {**same, "a": "4"}])


def test_an_update_that_a_lost_trainer_has_left_open_is_ended() -> None:
    backend = VllmBackend(Calls("finish_weight_update"), shapes.tokenizer(), {})
    calls = steps_of(backend, ("start", {}), ("start", {}), ("init", {}))
    start, finish = ("start_weight_update",), ("finish_weight_update",)
    renewed = [("shutdown_weight_transfer_engine",), ("init_weight_transfer_engine", {})]
    assert calls == [start, finish, start, finish, *renewed]


def test_a_lack_of_memory_names_the_option() -> None:
    short = "Free memory on device cuda:0 (3/80 GiB) on startup is less than desired"
    message = str(start_error(ValueError(short), "the.option=0.3"))
    assert short in message
    assert "the.option=0.3" in message
    assert "the.option" not in str(start_error(ValueError("no such model"), "the.option=0.3"))


def test_adapters_on_several_gpus_are_refused_before_vllm_starts() -> None:
    common: dict[str, Any] = {"dtype": "float32", "context": 8, "cuda": True}
    options = VllmOptions(tensor_parallel_size=2)
    assert engine_arguments("m", options, max_lora_rank=0, **common)["tensor_parallel_size"] == 2
    with pytest.raises(KeelError, match=r"adapters .* cannot be read back from a model on several GPUs"):
        engine_arguments("m", options, max_lora_rank=8, **common)


def test_the_option() -> None:
    assert VllmOptions().transfer == "http"
    with pytest.raises(KeelError, match=r"rollout\.vllm\.transfer is for a server"):
        check_vllm(RolloutOptions(engine="vllm", vllm=VllmOptions(transfer="nccl")))
    common: dict[str, Any] = {"dtype": "float32", "context": 8, "max_lora_rank": 0, "cuda": True}
    arguments = engine_arguments("m", VllmOptions(transfer="nccl"), **common)
    assert arguments["weight_transfer_config"] == {"backend": "nccl"}
    assert "weight_transfer_config" not in engine_arguments("m", VllmOptions(), **common)


def test_nccl_stays_on_this_machine_where_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    direct.loopback_only("http://10.0.0.4:8000")
    assert "NCCL_SOCKET_IFNAME" not in direct.os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    direct.loopback_only("http://127.0.0.1:8000")
    assert direct.os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    direct.loopback_only("http://localhost:8000")
    assert direct.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
