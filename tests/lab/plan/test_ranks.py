"""A plan of several devices: one of them is the dry run itself, and the others follow from it."""

import json

import pytest

from keel.cli import main
from keel.config import load_config
from keel.lab.plan.plan import fewest, plan
from keel.lab.plan.shapes import find_hardware

BASE = {
    "task": {"name": "arithmetic", "skill": "max"},
    "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 24},
    "optim": {"microbatch_tokens": 256},
    "kl": {"beta": 0.01},
}
JOBS = {
    "full weights": [],
    "bf16 passes, exact KL": ["optim.precision=bfloat16", "kl.estimator=exact"],
    "LoRA": ["model.lora={r: 4}"],
    "offloaded": ["reference.offload=true", "optim.offload=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_one_device_is_the_dry_run(job):
    estimate = plan(load_config(BASE, JOBS[job]), find_hardware("h100"), 12)
    alone = estimate.ranks[0]
    assert (alone.layout.devices, alone.layout.sharding, alone.chosen) == (1, "none", True)
    assert alone.phases == estimate.phases
    assert alone.parts == {**estimate.parts, "gathered": 0, "rows": 0}
    spread = [rank for rank in estimate.ranks if rank.layout.sharded]
    assert [rank.layout.devices for rank in spread] == ([] if job == "offloaded" else [2, 4, 8])
    for rank in spread:
        smaller = ("weights",) if job == "LoRA" else ("weights", "reference", "optimizer", "gradients")
        for name in smaller:
            assert estimate.parts[name] / rank.layout.devices <= rank.parts[name] < estimate.parts[name]


@pytest.mark.slow
def test_a_device_that_is_too_small_for_whole_weights():
    """Weights and moments that two devices share leave room where one has none."""
    config = load_config(BASE, ["rollout.dtype=bfloat16", "rollout.prompts_per_step=2"])
    estimate = plan(config, find_hardware("h100:0.1"), 12, devices=(2,))
    none, full = estimate.ranks
    assert full.peak < none.peak
    tight = find_hardware(f"h100:{(none.peak + full.peak) / 2 / 2**30}")
    none, full = plan(config, tight, 12, devices=(2,)).ranks
    assert full.fits
    assert not none.fits
    assert fewest([none, full]) == full
    assert fewest([none]) is None


def test_processes_on_a_cpu_share_its_memory():
    estimate = plan(load_config(BASE), find_hardware("cpu:8"), 12)
    assert {rank.layout.devices: rank.limit for rank in estimate.ranks} == {n: 2**33 // n for n in (1, 2, 4, 8)}


def test_the_command_answers_for_a_number_of_devices(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    asked = ["train", str(path), "--plan", "--prompt-tokens", "12"]
    assert main([*asked, "--hardware", "h100", "--nproc", "16", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(rank["layout"]["sharding"], rank["layout"]["shards"]) for rank in ranks] == [
        ("none", 1),
        ("hybrid", 8),
        ("full", 16),
    ]
    assert [rank["chosen"] for rank in ranks] == [True, False, False]
    assert main([*asked, "--hardware", "h100:0.001", "--nproc", "2"]) == 1
    shown = capsys.readouterr().out
    assert "this run uses parallel.sharding=full, which does not fit" in shown
    assert "no layout fits: use more devices" in shown
    assert main([*asked, "--nproc", "0"]) == 2
    assert "--nproc is 0: a run has at least one process" in capsys.readouterr().err
