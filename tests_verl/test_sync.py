"""SyncCheck on what verl sends: its FSDP engine's export and its bucketed transfer in shared memory, on the CPU.

verl's vLLM worker needs vLLM. In its place the tests' layout of vLLM's weights takes what arrives.
"""

import asyncio
import importlib.util
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
import verl
from peft import LoraConfig, get_peft_model
from test_checks import fused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import fsdp_utils
from verl.workers.engine.fsdp import transformer_impl

from keel.integrations.sync import Sampler
from keel.integrations.verl.checks import SyncCheck

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def transfer(monkeypatch):
    """verl's module of its transfer, whose package imports vLLM."""
    for module in (transformer_impl, fsdp_utils):
        monkeypatch.setattr(module, "get_device_id", lambda: "cpu", raising=False)
        monkeypatch.setattr(module, "get_device_name", lambda: "cpu", raising=False)
        monkeypatch.setattr(module, "log_gpu_memory_usage", lambda *_, **__: None, raising=False)
    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("transfer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(module, "get_torch_device", lambda: device)
    monkeypatch.setattr(module, "is_support_ipc", lambda: False)
    return module


def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **shape))


def engine(model, merge):
    made = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    made.module, made._uses_fsdp2_cpu_offload_policy, made._is_offload_param = model, True, False
    made._qat_enabled = False
    made.model_config = SimpleNamespace(lora={"merge": merge}, hf_config=SimpleNamespace(model_type="llama"))
    return made


def received(transfer, weights, handle):
    """Weights as they arrive at verl's worker."""
    arrived = {}

    def take(bucket, is_last):
        arrived.update((name, tensor.clone()) for name, tensor in bucket)

    receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = Thread(target=receiver.receive_weights, args=(take,))
    thread.start()
    asyncio.run(transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(weights))
    thread.join(30)
    assert not thread.is_alive()
    return arrived


@pytest.mark.parametrize(("lora", "by_layer"), [(False, True), (True, True), (True, False)])
def test_what_verl_sends_against_what_must_be_held(transfer, tmp_path, lora, by_layer):
    """Sharded weights, alone or with a LoRA that verl merges: a sync that is omitted, and one that is not.

    verl merges inside the modules that are sharded on their own. Without any, its sync sends the base alone.
    """
    policy = llama()
    layers, mesh = policy.model.layers, init_device_mesh("cpu", (1,))
    if lora:
        policy = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear"))
    for layer in layers if by_layer else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    layout, held = fused(), llama()
    runner = SimpleNamespace(model=layout.Fused(held, torch.bfloat16), get_model=lambda: runner.model)
    worker = SimpleNamespace(model_runner=runner)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    check = SyncCheck(policy, Sampler.colocated(llm), on_mismatch="warn")
    check.updated(0)
    assert not check.check(0).wrong
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    check.updated(1)
    assert len(check.check(1).wrong) == (14 if lora else 21)
    weights, peft = engine(policy, merge=True).get_per_tensor_param(base_sync_done=True)
    assert peft is None
    held.load_state_dict(received(transfer, weights, f"ipc://{tmp_path}/socket"))
    runner.model = layout.Fused(held, torch.bfloat16)
    assert len(check.check(1).wrong) == (0 if by_layer else 14)
