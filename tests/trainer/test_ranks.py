"""Several processes compute the step of one: gradients, metrics, decisions."""

import math

import pytest

from keel.base.world import ALONE
from trainer.ranks import gradients, in_processes, relative_error

FULL, HYBRID = "parallel.sharding=full", ["parallel.sharding=hybrid", "parallel.shard_size=2"]
LORA = "model.lora.r=4"
CASES = {  # each on 2 and on 4 processes; 5 groups of unequal lengths
    "replicated": [],
    "replicated, exact KL, more processes than groups": [
        "rollout.prompts_per_step=1",
        "kl.estimator=exact",
        "kl.level=sequence",
    ],
    "replicated, LoRA, KL in the reward": [LORA, "kl.placement=reward", "kl.estimator=k1", "kl.level=sequence"],
    "sharded": [FULL],
    "sharded, exact KL, empty shares": [
        FULL,
        "rollout.prompts_per_step=1",
        "kl.estimator=exact",
        "kl.level=sequence",
    ],
    "sharded, KL in the advantage, two minibatches, two iterations": [
        FULL,
        "kl.placement=advantage",
        "kl.estimator=k1",
        "kl.level=sequence",
        "optim.minibatches=2",
        "loss.num_iterations=2",
    ],
    "sharded, LoRA, adapters off": [FULL, LORA, "loss.loss_type=dr_grpo"],
    "sharded, moving reference, checkpointing": [
        FULL,
        "reference.kind=ema",
        "reference.alpha=0.5",
        "reference.every=1",
        "model.gradient_checkpointing=true",
    ],
    "hybrid": HYBRID,
}


@pytest.fixture(scope="module")
def alone():
    """The same steps in one process; sharding has nothing to spread there."""
    return [gradients([o for o in overrides if not o.startswith("parallel")], ALONE) for overrides in CASES.values()]


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_and_the_metrics_of_several_processes_are_those_of_one(size, alone, tmp_path):
    results = in_processes(size, [(overrides, {}) for overrides in CASES.values()], tmp_path)
    for (name, _), (expected, lines), ranks in zip(CASES.items(), alone, results, strict=True):
        for updates, metrics in ranks:
            assert len(updates) == len(expected), name
            for got, wanted in zip(updates[:1], expected[:1], strict=True):  # later ones have Adam's signs of 0
                assert relative_error(got, wanted) < 1e-5, name
            for got, wanted in zip(metrics[:1], lines[:1], strict=True):
                assert got.keys() == wanted.keys(), name
                for key, value in wanted.items():
                    if not key.startswith(("time/", "speed/", "memory/")):
                        assert math.isclose(got[key], value, rel_tol=1e-4, abs_tol=1e-6), (name, key)
        assert all(_decided(metrics) == _decided(ranks[0][1]) for _, metrics in ranks), name


def _decided(lines):
    """All that a process could decide by, to the last digit."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines]
