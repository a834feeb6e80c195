"""The one-file example: its quick tests, a short run, its logs."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"


def run_example(*arguments):
    return subprocess.run([sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("grpo_one_file", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_one_file"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["grpo_one_file"]


QUICK_TESTS = ["test_reward passed", "test_compute_kl_divergence passed", "test_compute_loss_with_kl passed"]


def test_it_fits_in_under_270_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 270


@pytest.mark.parametrize("flags", [["--test"], ["--test", "--skip-tests"]])
def test_its_quick_tests_run_alone(example, monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    example.main()
    assert capsys.readouterr().out.splitlines() == QUICK_TESTS


def test_the_kl_divergence_is_per_token_and_leaves_the_rest_out(example):
    logp, ref_logp = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, -9.0]])
    kl = example.compute_kl_divergence(logp, ref_logp, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(kl, torch.tensor([[math.exp(-0.5) - 1 + 0.5, 0.0, 0.0]]))


@pytest.mark.slow
def test_it_learns_and_logs(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run_example("--use-kl-penalty", "--steps", "80", "--logdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == QUICK_TESTS, "the quick tests come first"
    assert re.search(r"Step 1 \| Loss: -?\d\.\d+ \| Grad norm: \d+\.\d+ .* \| KL penalty: 0\.0000", done.stdout)
    before, after = map(float, re.search(r"accuracy (\d\.\d+) -> (\d\.\d+)", done.stdout).groups())
    assert after > before + 0.15
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/loss", "train/kl_penalty"} <= set(events.Tags()["scalars"])
    assert events.Scalars("train/kl_penalty")[0].value == 0.0, "at the first step the policy is its reference"
    assert events.Scalars("train/kl_penalty")[-1].value > 0.0
