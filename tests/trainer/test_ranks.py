"""Several processes compute the step of one: gradients, metrics, decisions."""

import math

import pytest

from keel.base.world import SINGLE_PROCESS
from trainer.ranks import gradients, in_processes, relative_error

pytestmark = pytest.mark.processes


FULL, HYBRID = "parallel.sharding=full", ["parallel.sharding=hybrid", "parallel.shard_size=2"]
DISTILLED = ("loss.policy_weight=0", "kl.beta=1", "reference.model=keel.models.tiny:half_model")
LORA, NATIVE = "model.lora.r=4", "rollout.engine=native"
# Clocks, and a share of two terms that may both be rounding: their losses are compared.
NOT_COMPARED = ("time/", "speed/", "memory/", "loss/kl_share")
CASES = {  # each on 2 processes, some on 4; 5 groups of unequal lengths
    "replicated": [],
    "replicated, exact KL, more processes than groups": [
        "rollout.prompts_per_step=1",
        "kl.estimator=exact",
        "kl.level=sequence",
    ],
    "replicated, LoRA, KL in the reward": [LORA, "kl.placement=reward", "kl.estimator=k1", "kl.level=sequence"],
    "replicated, a mixture under a curriculum": [
        "task={name: mixture, tasks: [{name: arithmetic}, {name: arithmetic, skill: sort}], weights: [1, 2]}",
        "data.curriculum={candidates: 3, half_life: 5}",
        "rollout.num_generations=2",
    ],
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
    "replicated, distilled by JSD": [*DISTILLED, "kl.estimator=jsd"],
    "sharded, distilled by top-k, empty shares": [
        *(FULL, *DISTILLED, "kl.estimator=topk_unbiased", "kl.topk=8", "rollout.prompts_per_step=1"),
    ],
    "hybrid": HYBRID,
    "sharded, a teacher beside the reference": [
        *(FULL, "kl.estimator=exact", "kl.teacher.model=keel.models.tiny:half_model"),
        *("kl.teacher.estimator=exact_reverse", "rollout.prompts_per_step=1"),
    ],
    "sharded, native sampling": [FULL, NATIVE],
    "sharded, native sampling, LoRA, a reference that becomes an adapter": [
        FULL,
        NATIVE,
        LORA,
        "reference.kind=snapshot",
        "reference.every=1",
    ],
}


ON_FOUR = [name for name in CASES if any(word in name for word in ("empty", "reward", "advantage", "off", "hybrid"))]


@pytest.fixture(scope="module")
def alone():
    """The same steps in one process; sharding has nothing to spread there."""
    plain = {name: [o for o in overrides if not o.startswith("parallel")] for name, overrides in CASES.items()}
    return {name: gradients(overrides, SINGLE_PROCESS) for name, overrides in plain.items()}


@pytest.mark.parametrize(("size", "names"), [(2, list(CASES)), (4, ON_FOUR)])
def test_the_gradient_and_the_metrics_of_several_processes_are_those_of_one(size, names, alone, tmp_path):
    results = in_processes(size, [(CASES[name], {}) for name in names], tmp_path)
    for name, ranks in zip(names, results, strict=True):
        expected, lines, _ = alone[name]
        for updates, metrics, left in ranks:
            assert len(updates) == len(expected), name
            for number, (got, wanted) in enumerate(zip(updates, expected, strict=True)):
                assert relative_error(got, wanted) < (1e-5 if number == 0 else 1e-3), (name, number)
            for got, wanted in zip(metrics, lines, strict=True):
                assert got.keys() == wanted.keys(), name
                for key, value in wanted.items():
                    if not key.startswith(NOT_COMPARED):
                        assert math.isclose(got[key], value, rel_tol=1e-3, abs_tol=1e-5), (name, key)
            assert left == ranks[0][2], name  # to the last digit: all processes go on from the same


def test_the_kl_term_is_in_what_is_compared():
    """The second step's gradient depends on β: the policy has left its reference by then."""
    weak, strong = (gradients([f"kl.beta={beta}"], SINGLE_PROCESS)[0] for beta in (0.05, 5.0))
    assert relative_error(weak[0], strong[0]) < 1e-6
    assert relative_error(weak[1], strong[1]) > 1e-2
