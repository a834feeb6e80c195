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


def half_a_step_away(estimator):
    """k3 is never negative; its sum with half the log-ratio is neither that nor right on average."""
    return lambda logp, ref_logp, mask=None: estimator(logp, ref_logp, mask) + 0.5 * (logp - ref_logp)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("reward", lambda whole: lambda rollouts, answers: torch.ones(len(answers))),
        ("compute_kl_divergence", half_a_step_away),
        ("compute_kl_divergence", lambda whole: lambda logp, ref_logp, mask=None: whole(ref_logp, logp, mask)),
        ("compute_loss", lambda whole: lambda logp, batch, kl_coef: whole(logp, batch, 2 * kl_coef)),
        ("frozen_reference", lambda whole: lambda model: model),
    ],
)
def test_a_broken_piece_fails_them_before_training(example, monkeypatch, name, broken):
    monkeypatch.setattr(example, name, broken(getattr(example, name)))
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it trained all the same"))
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(AssertionError):
        example.main()


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


def test_without_the_flag_there_is_no_reference(example, monkeypatch, capsys, tmp_path):
    def refuse(model):
        raise AssertionError("a reference was built")

    monkeypatch.setattr(example, "frozen_reference", refuse)
    flags = ["--skip-tests", "--steps", "2", "--warm-start-steps", "1", "--logdir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    example.main()
    assert "passed" not in capsys.readouterr().out, "--skip-tests trains at once"


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
