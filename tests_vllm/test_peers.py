"""SyncCheck on GRPOTrainer with vLLM, in its process or a server: syncs that are omitted, partial or without the LoRA.

vLLM for CPUs packs weights, so that TRL's own way of loading them fails there: they are loaded by vLLM's reload, in
the names and with the values that TRL sends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import trl.generation.vllm_client as client
import trl.generation.vllm_generation as generation
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

from conftest import llama
from keel.base.errors import KeelError
from keel.integrations.sync import Sampler, SyncLedger
from keel.integrations.trl import KeelGRPOTrainer, SyncCheck
from keel.models.tiny import tiny_tokenizer
from keel.rollout.engine import StaleWeights
from keel.rollout.vllm.transfer import save_adapter
from keel.rollout.vllm.worker import KeelWorker

pytestmark = pytest.mark.peers
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # as the vLLM of this process has it
Skips = Callable[[str, int], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    """One vLLM, as TRL starts it and with a slot for an adapter."""
    import vllm

    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        patch.setenv(name, value)
    generation.ensure_master_addr_port()
    made = vllm.LLM(
        model=str(folder), max_model_len=64, gpu_memory_utilization=0.1, enforce_eager=True, enable_lora=True,
        max_lora_rank=8, distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip
    yield made
    made.llm_engine.engine_core.shutdown()
    patch.undo()


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


ADAPTER: Any = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def arguments(out: Path, **more: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(out), use_vllm=True, max_completion_length=16, max_steps=4, per_device_train_batch_size=8,
        num_generations=4, learning_rate=0.05, beta=0.0, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        save_strategy="no", gradient_checkpointing=False, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        **more,
    )  # fmt: skip


@pytest.fixture
def build(folder: Path, llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GRPOTrainer]:
    """A trainer around that vLLM; `skips` are the tensors that a sync, counted from 1, leaves out."""
    monkeypatch.setattr(generation, "LLM", lambda **_: llm)
    monkeypatch.setattr(llm, "generate", llm.generate)  # what a check puts around it goes with the test
    monkeypatch.setattr(generation, "is_vllm_available", lambda: True)

    def sync_weights(self: Any) -> None:
        self.syncs = getattr(self, "syncs", 0) + 1
        named = [(name, p.clone()) for name, p in self._iter_named_params() if not self.skips(name, self.syncs)]
        worker = llm.llm_engine.model_executor.driver_worker
        held = dict(self.last) | dict(named)
        KeelWorker.keel_load(worker, list(held.items()))
        self.last = held
        llm.reset_prefix_cache()

    monkeypatch.setattr(generation.VLLMGeneration, "sync_weights", sync_weights)

    def make(
        skips: Skips = lambda name, sync: False, lora: bool = False, kind: type[GRPOTrainer] = GRPOTrainer, **more: Any
    ) -> GRPOTrainer:
        rows = Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(16)]})
        more["peft_config"] = LoraConfig(**ADAPTER) if lora else None
        args = arguments(tmp_path, vllm_mode="colocate")
        trainer = kind(str(folder), reward, args, rows, processing_class=tiny_tokenizer(), **more)
        trainer.vllm_generation.skips = skips
        trainer.vllm_generation.last = [(name, p.clone()) for name, p in trainer.vllm_generation._iter_named_params()]
        return trainer

    return make


KEELS: Any = {"lora": True, "kind": KeelGRPOTrainer, "kl": {"beta": 0.1}}


@pytest.mark.parametrize("options", [{}, {"lora": True}, KEELS])
def test_sound_syncs_are_silent(build: Callable[..., GRPOTrainer], options: dict[str, Any]) -> None:
    trainer = build(**options)
    trainer.add_callback(check := SyncCheck(trainer))
    trainer.train()
    assert [(result.step, result.wrong, result.compared) for result in check.results] == [(n, (), 21) for n in range(4)]


def test_an_omitted_sync(build: Callable[..., GRPOTrainer]) -> None:
    trainer = build(lambda name, sync: sync > 2)
    trainer.add_callback(check := SyncCheck(trainer))
    with pytest.raises(StaleWeights, match=r"at step 2, \d+ of 21 tensors.*since step 2.*of step 1"):
        trainer.train()
    assert check.results[-1].weights_of == 1


def test_a_partial_sync(build: Callable[..., GRPOTrainer]) -> None:
    trainer = build(lambda name, sync: sync > 1 and "layers.1.mlp.up_proj" in name)
    trainer.add_callback(check := SyncCheck(trainer, on_mismatch="warn"))
    trainer.train()
    assert [result.wrong for result in check.results] == [(), *[("model.layers.1.mlp.up_proj.weight",)] * 3]


def test_a_sync_of_the_base_without_its_adapter(
    build: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(lora=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    monkeypatch.setattr(model, "merge_adapter", lambda: None)
    monkeypatch.setattr(model, "unmerge_adapter", lambda: None)
    trainer.add_callback(check := SyncCheck(trainer, on_mismatch="warn"))
    trainer.train()
    assert not check.results[0].wrong
    assert all(len(result.wrong) == 14 for result in check.results[1:])  # seven matrices a layer
    assert all(result.weights_of == 0 for result in check.results[1:])


def test_an_adapter_in_a_slot(build: Callable[..., GRPOTrainer], llm: Any, tmp_path: Path) -> None:
    """A sampler that keeps LoRA beside its base, as verl's does: not loaded, of an earlier step, and in time."""
    from vllm.lora.request import LoRARequest

    trainer = build(lora=True)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    worker = llm.llm_engine.model_executor.driver_worker
    with policy.disable_adapter():
        KeelWorker.keel_load(worker, list(trainer.vllm_generation.last))
    ledger = SyncLedger(Sampler.colocated(llm), policy, slot=7)

    def moved(step: int) -> None:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.01 * torch.randn_like(parameter))
        ledger.note(step)

    def load() -> None:
        path = save_adapter(policy, tmp_path / "adapter")
        llm.llm_engine.add_lora(LoRARequest("policy", 7, str(path), load_inplace=True))

    moved(0)
    never = ledger.compare(0)
    assert len(never.wrong) == 2 * 14
    assert never.wrong[0].startswith("adapter model.layers.0")
    load()
    assert not ledger.compare(0).wrong
    moved(1)
    assert ledger.compare(1).weights_of == 0
    load()
    assert not ledger.compare(1).wrong


@pytest.mark.parametrize(("kind", "status", "said"), [("sound", 0, "all 21 tensors"), ("faulty", 1, "sampler/stale")])
def test_the_example(folder: Path, tmp_path: Path, kind: str, status: int, said: str) -> None:
    """In a process of its own, with vLLM as TRL starts it."""
    script = Path(__file__).parents[1] / "examples" / "checks" / "sync.py"
    assert len(script.read_text().splitlines()) <= 40
    own = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
    environment = {**own, "MODEL": str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(script), kind]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    assert said in done.stdout


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` with Keel's worker extension."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
    options = ["--enforce-eager", "--max-model-len", "64", "--gpu-memory-utilization", "0.1", "--host", "127.0.0.1"]
    extension = ["--worker-extension-cls", "keel.rollout.vllm.worker.KeelWorker", "--port", str(port)]
    server_of = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]  # the command asks for a package `vllm`
    said = tmp_path_factory.mktemp("server") / "log"
    with said.open("w") as log:
        server = subprocess.Popen(
            [*server_of, "--model", str(folder), *options, *extension],
            env={**own, "VLLM_SERVER_DEV_MODE": "1"}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while True:
            assert server.poll() is None, said.read_text()[-3000:]
            assert time.monotonic() < deadline, said.read_text()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    with pytest.raises(KeelError, match="is the server up"):
        Sampler.served(address)


def test_a_served_vllm(url: str) -> None:
    policy = llama()
    ledger = SyncLedger(Sampler.served(url), policy)
    ledger.note(0)
    assert not ledger.compare(0).wrong
    with torch.no_grad():
        policy.model.layers[0].mlp.down_proj.weight.add_(1)
    ledger.note(1)
    assert ledger.compare(1).wrong == ("model.layers.0.mlp.down_proj.weight",)


@pytest.mark.parametrize("omitted", [False, True])
def test_trl_with_a_served_vllm(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omitted: bool
) -> None:
    """TRL's client, but for its transfer over NCCL, which needs a GPU; `omitted`: that of steps 2 and 3."""
    sent = []

    def send(self: Any, metadata: Any, named: Any) -> None:
        tensors = {name: tensor.clone() for name, tensor in named}
        sent.append(tensors)
        if omitted and len(sent) > 2:
            return
        path = tmp_path / str(len(sent))
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        load = {"method": "keel_load", "args": [str(path)]}
        httpx2.post(f"{self.base_url}/collective_rpc", json=load, timeout=60).raise_for_status()

    for module in (generation, client):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    monkeypatch.setattr(client.VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(client.VLLMClient, "update_named_params", send)
    rows = Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(16)]})
    args = arguments(tmp_path, vllm_mode="server", vllm_server_base_url=url)
    trainer = GRPOTrainer(
        str(folder), reward, args, rows, processing_class=tiny_tokenizer(), peft_config=LoraConfig(**ADAPTER)
    )
    trainer.add_callback(check := SyncCheck(trainer, on_mismatch="warn"))
    trainer.train()
    assert len(sent) == 4
    assert [len(result.wrong) for result in check.results] == ([0, 0, 14, 14] if omitted else [0, 0, 0, 0])
