"""What a layout costs: figures by hand for a 7B Llama, and what really lies on each of two processes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keel.base.errors import KeelError
from keel.base.world import World
from keel.config import load_config
from keel.models.sharding import local_tensor
from keel.run.build import build_policy, build_run
from keel.run.layout import (
    DeviceLayout,
    ModelShape,
    Parameter,
    RunMemory,
    choose_layout,
    layouts,
    resident_bytes,
    run_memory,
    shape_of,
    transient_bytes,
)
from keel.trainer.state import State
from keel.trainer.step import train_step
from processes import spawn

pytestmark = pytest.mark.processes


H, INNER, LAYERS, VOCABULARY = 4096, 11008, 32, 32000
BLOCK = 4 * H * H + 3 * H * INNER + 2 * H  # 202,383,360
REST = 2 * VOCABULARY * H + H  # 262,148,096
N = LAYERS * BLOCK + REST


def llama_7b(item=4, trained=True, adapters=()):
    """Llama 2 7B."""
    weights = [(H, H)] * 4 + [(INNER, H)] * 2 + [(H, INNER)] + [(H,)] * 2
    block = tuple(Parameter(shape, item, trained) for shape in weights)
    rest = tuple(Parameter(shape, item, trained) for shape in ((VOCABULARY, H), (H,), (VOCABULARY, H)))
    return ModelShape((block,) * LAYERS, rest, adapters)


def test_the_shape_is_llama_7b():
    assert sum(p.numel for p in llama_7b().parameters) == N == 6_738_415_616


def test_whole_weights_on_each_of_8_devices():
    """Weights, gradients, two moments and a frozen reference in fp32, a sampler in bf16: 22 bytes a parameter."""
    parts = resident_bytes(llama_7b(), RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True), DeviceLayout(8))
    assert parts == {"weights": 4 * N, "sampler": 2 * N, "reference": 4 * N, "optimizer": 8 * N, "gradients": 4 * N}


def test_full_sharding_leaves_an_eighth_and_the_sampler():
    parts = resident_bytes(
        llama_7b(), RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True), DeviceLayout(8, "full", 8)
    )
    assert parts == {
        "weights": 4 * N // 8,
        "sampler": 2 * N,
        "reference": 4 * N // 8,
        "optimizer": 8 * N // 8,
        "gradients": 4 * N // 8,
    }
    assert round(sum(parts.values()) / 2**30, 2) == 28.24


def test_hybrid_of_16_devices_in_rows_of_8_holds_what_8_hold():
    job = RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True)
    assert resident_bytes(llama_7b(), job, DeviceLayout(16, "hybrid", 8)) == resident_bytes(
        llama_7b(), job, DeviceLayout(8, "full", 8)
    )


def test_adapters_stay_whole_and_a_frozen_base_has_no_moments():
    adapters = (Parameter((16, H), 4), Parameter((H, 16), 4), Parameter((8, H), 4, trained=False))
    parts = resident_bytes(llama_7b(2, False, adapters), RunMemory(pass_itemsize=2), DeviceLayout(4, "full", 4))
    trained, idle = 4 * 2 * 16 * H, 4 * 8 * H
    assert parts == {
        "weights": 2 * N // 4 + trained + idle,
        "sampler": 2 * N + trained + idle,
        "reference": 0,
        "optimizer": 2 * trained,
        "gradients": trained,
    }


def test_offload_leaves_the_sampler_and_the_reference():
    parts = resident_bytes(
        llama_7b(),
        RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True),
        DeviceLayout(8, "full", 8, offload=True),
    )
    assert parts == {"weights": 0, "sampler": 2 * N, "reference": N // 2, "optimizer": 0, "gradients": 0}
    job = RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True, reference_offload=True)
    assert resident_bytes(llama_7b(), job, DeviceLayout(8, "full", 8, offload=True))["reference"] == 0


def test_experts_are_cut_by_experts():
    """128 experts in one tensor: 256 devices hold no less than 128."""
    experts = Parameter((128, 1536, 2048), 4)
    assert experts.part(64) == 2 * 1536 * 2048
    assert experts.part(128) == experts.part(256) == 1536 * 2048
    assert experts.part(3) == 43 * 1536 * 2048


def test_what_is_gathered_for_a_pass():
    """Two blocks in bf16, embeddings and head in fp32; gradients likewise, of one block; a buffer for their sum."""
    parts = transient_bytes(llama_7b(), RunMemory(pass_itemsize=2), DeviceLayout(8, "full", 8), 1000)
    assert parts["gathered"] == 2 * 2 * BLOCK + 4 * REST + 2 * BLOCK + 4 * REST + 4 * REST
    assert parts["rows"] == 10 * 4 * 1000
    frozen = transient_bytes(llama_7b(2, False), RunMemory(pass_itemsize=2), DeviceLayout(8, "full", 8), 0)
    assert frozen["gathered"] == 2 * 2 * BLOCK + 2 * REST
    assert transient_bytes(llama_7b(), RunMemory(), DeviceLayout(1), 1000) == {
        "gathered": 0,
        "rows": 0,
    }


GIB = 2**30


@pytest.mark.parametrize(
    ("devices", "memory", "expected"),
    [
        (8, 300 * GIB, DeviceLayout(8)),  # 138 GiB for good
        (8, 139 * GIB, DeviceLayout(8, "full", 8)),
        (16, 139 * GIB, DeviceLayout(16, "hybrid", 8)),
        (16, 40 * GIB, DeviceLayout(16, "full", 16)),  # 28 GiB on 8 of them, 20 GiB on 16
        (16, 30 * GIB, DeviceLayout(16, "full", 16)),  # nothing has room
        (12, 139 * GIB, DeviceLayout(12, "full", 12)),  # no rows of 8
        (1, 10 * GIB, DeviceLayout(1)),
        (8, None, DeviceLayout(8)),
    ],
)
def test_auto_takes_the_first_that_leaves_room(devices, memory, expected):
    config = load_config({"task": {"name": "arithmetic", "skill": "max"}})
    job = RunMemory(pass_itemsize=2, sampler_itemsize=2, reference=True)
    assert choose_layout(config, llama_7b(), job, devices, machine=8, memory=memory) == expected


def test_a_layout_that_is_named_is_taken_or_refused():
    base = {"task": {"name": "arithmetic", "skill": "max"}}
    job = RunMemory()
    named = load_config(base, ["parallel.sharding=hybrid", "parallel.shard_size=4", "parallel.offload=true"])
    assert choose_layout(named, llama_7b(), job, 8, machine=8, memory=None) == DeviceLayout(8, "hybrid", 4, True)
    for devices in (2, 6):  # not a multiple of shard_size
        with pytest.raises(KeelError, match=rf"{devices} devices.* 4.*parallel\.shard_size"):
            choose_layout(named, llama_7b(), job, devices, machine=8, memory=None)
    whole = load_config(base, ["parallel.sharding=none"])
    assert choose_layout(whole, llama_7b(), job, 8, machine=8, memory=1) == DeviceLayout(8)
    with pytest.raises(KeelError, match=r"optim\.offload=true does not work with parallel\.sharding=full"):
        choose_layout(
            load_config(base, ["parallel.sharding=full", "optim.offload=true"]), llama_7b(), job, 8, machine=8, memory=1
        )
    assert layouts(load_config(base, ["optim.offload=true"]), llama_7b(), 8, 8) == [DeviceLayout(8)]
    assert layouts(load_config(base), ModelShape((), llama_7b().rest), 8, 8) == [DeviceLayout(8)]


TINY = {
    "model": {"name": "tiny", "device": "cpu"},
    "task": {"name": "arithmetic", "skill": "max"},
    "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
    "kl": {"beta": 0.05},
    "parallel": {"sharding": "full"},
}


def lying_here(built):
    """Bytes of this process's parts."""
    run, bytes_of = built.run, lambda tensors: sum(local_tensor(x).nbytes for x in tensors)
    with run.reference.model() as reference:
        frozen = 0 if reference is run.policy.model else bytes_of(reference.parameters())
    moments = [x for state in run.optimizer.inner.state.values() for x in state.values() if x.dim()]
    return {
        "weights": bytes_of(run.policy.model.parameters()),
        "sampler": bytes_of(run.engine.model.parameters()),
        "reference": frozen,
        "optimizer": bytes_of(moments),
    }


def _process(rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        results = []
        for overrides in ([], ["model.lora={r: 4}"]):
            config = load_config(TINY, overrides)
            loaded = build_policy(config)
            counted = resident_bytes(
                shape_of(loaded.model), run_memory(config, loaded, "cpu"), DeviceLayout(2, "full", 2)
            )
            built = build_run(config, loaded, world=World(rank, 2))
            train_step(built.run, State(kl=built.run.controller.init()))
            results.append((counted, lying_here(built)))
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_counted_bytes_are_those_that_lie_on_two_processes(tmp_path):
    """The first process has exactly what is counted; the second may have less, where a dimension is odd."""
    spawn(_process, (str(tmp_path),), 2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    for (counted, on_first), (_, on_second) in zip(first, second, strict=True):
        assert on_first == {name: counted[name] for name in on_first}
        for name, size in on_second.items():
            assert 0.99 * counted[name] <= size <= counted[name]
