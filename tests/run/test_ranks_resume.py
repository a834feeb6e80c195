"""Checkpoints of several processes: exact at the same number of them, equal to rounding at another."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from keel.base.world import SINGLE_PROCESS
from trainer.ranks import in_processes, training

pytestmark = pytest.mark.processes


FULL = "parallel.sharding=full"
STEPS, HALF = 4, 2


def options(folder, name, steps, *more):
    return [
        f"run.dir={folder}",
        f"run.name={name}",
        f"run.max_steps={steps}",
        "checkpoint.every=2",
        "optim.eps=0.01",  # updates follow the gradient's size: rounding does not flip the sign of a zero
        *more,
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run left alone and its first half in two processes, sharded and replicated; the halves gone on with."""
    folder, resume = tmp_path_factory.mktemp("runs"), {"resume": True}
    layouts = {"sharded": [FULL], "replicated": []}
    begun = [
        (options(folder, f"{layout}-{name}", steps, *more), {})
        for layout, more in layouts.items()
        for name, steps in (("alone", STEPS), ("on-two", HALF), ("on-one", HALF))
    ]
    gone_on = [(options(folder, f"{layout}-on-two", STEPS, *more), resume) for layout, more in layouts.items()]
    results = in_processes(2, [*begun, *gone_on], folder / "results", training)
    assert all(status == 0 for ranks in results for status in ranks)
    for layout in layouts:
        assert training(options(folder, f"{layout}-on-one", STEPS), SINGLE_PROCESS, resume=True) == 0
    return folder


def lines(run):
    numbers = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "speed/", "memory/"))} for line in numbers]


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_resume_on_as_many_processes_is_exact(runs, layout):
    alone, resumed = runs / f"{layout}-alone", runs / f"{layout}-on-two"
    assert lines(resumed) == lines(alone)
    weights = [load_file(run / "checkpoints" / f"step-{STEPS}" / "model.safetensors") for run in (alone, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_resume_on_another_number_of_processes_is_equal_to_rounding(runs, layout):
    for got, wanted in zip(lines(runs / f"{layout}-on-one"), lines(runs / f"{layout}-alone"), strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, float):
                assert math.isclose(got[name], value, rel_tol=1e-3, abs_tol=1e-4), (got["step"], name)


def test_a_sharded_checkpoint_is_an_ordinary_folder_with_moments_by_torch(runs):
    from transformers import AutoModelForCausalLM

    checkpoint = runs / "sharded-alone" / "checkpoints" / f"step-{STEPS}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (checkpoint / "trainer" / "optimizer" / ".metadata").is_file()
    assert not (runs / "replicated-alone" / "checkpoints" / f"step-{STEPS}" / "trainer" / "optimizer").exists()
