"""The one-file example: its self-tests, a short run, its logs."""

import importlib.util
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


def test_it_fits_in_under_250_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 250


def test_its_self_tests_pass():
    done = run_example("--test")
    assert done.returncode == 0, done.stderr
    assert "all self-tests passed" in done.stdout


def test_its_self_tests_can_fail(example, monkeypatch):
    monkeypatch.setattr(example, "reward", lambda rollouts, answers: torch.ones(len(answers)))
    with pytest.raises(AssertionError):
        example.self_test()


def test_it_learns_and_logs(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run_example("--use-kl-penalty", "--steps", "120", "--logdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"Step 1 \| Loss: -?\d\.\d+ \| Grad norm: \d+\.\d+ .* \| KL penalty: 0\.0000", done.stdout)
    before, after = map(float, re.search(r"accuracy (\d\.\d+) -> (\d\.\d+)", done.stdout).groups())
    assert after > before + 0.15
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/loss", "train/kl_penalty"} <= set(events.Tags()["scalars"])
    assert events.Scalars("train/kl_penalty")[0].value == 0.0, "at the first step the policy is its reference"
    assert events.Scalars("train/kl_penalty")[-1].value > 0.0


def test_without_the_flag_there_is_no_reference(example, monkeypatch, tmp_path):
    def refuse(model):
        raise AssertionError("a reference was built")

    monkeypatch.setattr(example, "frozen_reference", refuse)
    monkeypatch.setattr(sys, "argv", ["x", "--steps", "2", "--warm-start-steps", "1", "--logdir", str(tmp_path)])
    example.main()


def test_splitting_a_batch_changes_nothing(example):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = example.TinyTransformer().double()
    prompts, _ = example.sample_problems(12, generator)
    rollouts = example.rollout(model, prompts, generator)
    advantage = torch.randn(12, generator=generator, dtype=torch.float64)
    reference = example.token_logps(example.TinyTransformer().double(), rollouts.ids).detach()
    gradients = []
    for parts in (1, 3, 12):
        model.zero_grad()
        counts = example.global_denominators(example.Batch(rollouts.action_mask))
        for rows in torch.arange(12).chunk(parts):
            part = example.Batch(rollouts.action_mask[rows], advantage[rows], ref_logp=reference[rows])
            example.grpo_microbatch_step(model, rollouts.ids[rows], part, counts, 0.1)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-10, atol=1e-12)
