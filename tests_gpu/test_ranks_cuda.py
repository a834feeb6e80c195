"""One process with NCCL: a sharded policy computes the step of a plain one. More processes need more devices."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from keel.base.world import SINGLE_PROCESS, World
from trainer.ranks import gradients, relative_error

pytestmark = pytest.mark.gpu


NATIVE = ["model.device=cuda", "rollout.engine=native"]
CASES = {
    "fp32": [],
    "exact KL": ["kl.estimator=exact", "kl.level=sequence"],
    "bfloat16 passes": ["optim.precision=bfloat16"],
    "LoRA": ["model.lora.r=4"],
    "recomputed activations, moving reference": [
        "model.gradient_checkpointing=true",
        "reference.kind=ema",
        "reference.alpha=0.5",
        "reference.every=1",
    ],
}


@pytest.fixture
def nccl(tmp_path):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield World(0, 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_policy_computes_the_step_of_a_plain_one(name, nccl):
    overrides = [*NATIVE, *CASES[name]]
    expected, lines, _ = gradients([*overrides, "parallel.sharding=none"], SINGLE_PROCESS)
    updates, sharded, _ = gradients([*overrides, "parallel.sharding=full"], nccl)
    half = "bfloat16" in name  # norms are rounded to half precision in a sharded block, and weight gradients with them
    assert relative_error(updates[0], expected[0]) < (0.1 if half else 1e-4)
    for key in ("loss/total", "grad/norm", "kl/sampler_policy/k3/mean", "reward/mean", "length/mean"):
        assert math.isclose(sharded[0][key], lines[0][key], rel_tol=0.05 if half else 1e-3, abs_tol=1e-3), key
    assert sharded[0]["kl/sampler_policy/k3/mean"] < 1e-3


def test_gradients_travel_by_nccl(nccl, monkeypatch):
    """One process alone, told that it is two: tensors go through NCCL in fp32 and come back as they were."""
    sent, all_reduce = [], dist.all_reduce

    def recorded(flat: torch.Tensor, group: object = None) -> None:
        sent.append((flat.dtype, flat.device.type))
        all_reduce(flat, group=group)

    monkeypatch.setattr(dist, "all_reduce", recorded)
    tensors = [torch.ones(3, device="cuda"), torch.ones(2, device="cuda", dtype=torch.bfloat16)]
    World(0, 2).all_reduce_(tensors)
    assert sent == [(torch.float32, "cuda")] * 2
    assert all(bool((tensor == 1).all()) for tensor in tensors)
