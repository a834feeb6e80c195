"""A step never waits for the GPU between its rollout and its end, except where the guard decides on an update."""

import sys
from pathlib import Path

import pytest
import torch

from keel.base import world
from keel.models import prefix_attention
from keel.run.build import build_policy, build_run
from keel.trainer.optim import Optimizer
from keel.trainer.options import OptimOptions, WarmstartOptions
from keel.trainer.sft import make_example, sft_step
from keel.trainer.state import State
from keel.trainer.step import train_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trainer.small import small_config
from trainer.waits import MADE_UP, fixed_groups

pytestmark = pytest.mark.gpu


GPU = ("model.device=cuda", "rollout.prompts_per_step=4", "rollout.num_generations=2", "optim.microbatch_tokens=24")
CASES = {
    "grpo, k3": (),
    "exact": ("kl.exact=true", "kl.estimator=exact"),
    "in the reward": ("kl.estimator=k1", "kl.placement=reward"),
    "in the advantage": ("kl.estimator=k1", "kl.placement=advantage"),
    "sequence": ("loss.loss_type=gspo", "kl.estimator=k1", "kl.level=sequence"),
    "dr_grpo": ("loss.loss_type=dr_grpo", "loss.entropy_coef=0.01"),
    "too far, truncated, no signal": (
        "kl.collect_max=1e-3",
        "loss.mask_truncated_completions=true",
        "loss.dynamic_sampling=true",
        "loss.dynamic_sampling_rounds=1",
    ),
    "moving reference": ("reference.kind=ema", "reference.every=1", "kl.controller.name=pid", "kl.controller.target=1"),
    "two iterations of two minibatches": ("loss.num_iterations=2", "optim.minibatches=2"),
    "lora": ("model.lora.r=2", "model.lora.alpha=4"),
    "bfloat16 passes": ("optim.precision=bfloat16",),
}


@pytest.fixture
def waits(monkeypatch):
    """The number of times that the guard has waited; every other wait is an error while it is forbidden."""
    count, inner = [], world.to_host

    def to_host(metrics):
        if not any(isinstance(x, torch.Tensor) for metric in metrics.values() for x in vars(metric).values()):
            return inner(metrics)  # the host's own numbers: nothing to wait for
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        count.append(len(metrics))
        numbers = inner(metrics)
        torch.cuda.set_sync_debug_mode(mode)
        return numbers

    monkeypatch.setattr(world, "to_host", to_host)
    yield count
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("long_rows", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_once_an_update(case, long_rows, waits, monkeypatch):
    if long_rows:
        monkeypatch.setattr(prefix_attention, "LONG_ROW", 1)
    config = small_config(*GPU, MADE_UP, *CASES[case])
    run = build_run(config, build_policy(config)).run

    def collect(problems, **_):
        groups = fixed_groups()[: len(problems)]
        torch.cuda.set_sync_debug_mode("error" if waits else "default")  # the first step may look at the model
        return groups

    monkeypatch.setattr(run, "collect", collect)
    monkeypatch.setattr(run.engine, "sync", lambda *_: torch.cuda.set_sync_debug_mode("default"))
    state = State(kl=run.controller.init())
    for number in (1, 2, 3):
        step = train_step(run, state)
        state = step.state
        assert len(waits) == number * run.loss.num_iterations * run.optim.minibatches
    assert len(step.batch.micros) > 1
    assert step.metrics["guard/skipped"] == 0.0
    assert step.metrics["time/score_s"] >= 0.0


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_a_supervised_step_waits_once(precision, waits):
    loaded = build_policy(small_config("model.device=cuda"))
    texts = [("1+2=", "3"), ("10+20=", "30"), ("4+4=", "8"), ("17+1=", "18")]
    examples = [make_example(loaded.tokenizer.encode(p), c, loaded.tokenizer) for p, c in texts]
    options, optimizer = WarmstartOptions(entropy_coef=0.1), Optimizer(loaded.model, OptimOptions())
    for number in (1, 2, 3):
        torch.cuda.set_sync_debug_mode("error" if waits else "default")
        sft_step(loaded, examples, optimizer, options, OptimOptions(microbatch_tokens=16, precision=precision))
        assert len(waits) == number
