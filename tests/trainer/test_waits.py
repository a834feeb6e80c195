"""A step waits for its device once an update, however many microbatches it has; so does a supervised one."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from keel.kl import CONTROLLERS
from keel.losses import LOSSES
from keel.run.build import build_policy, build_run
from keel.trainer.optim import Optimizer
from keel.trainer.options import OptimOptions, WarmstartOptions
from keel.trainer.sft import make_example, sft_step
from keel.trainer.state import State
from keel.trainer.step import train_step
from trainer.small import small_config
from trainer.waits import MADE_UP, Waits, fixed_groups

TARGETS = {"step": "target=0.01", "ziegler": "target=0.01", "dual": "target=0.01", "pid": "target=0.01"}
COURSES = {"warmup": ("steps=3",), "linear": ("end=0", "steps=3"), "cosine": ("end=0", "steps=3")}
LORA = ("model.lora.r=2", "model.lora.alpha=4")
CONTROLLED = {
    name: (
        f"kl.controller.name={name}",
        *(f"kl.controller.{part}" for part in (*COURSES.get(name, ()), *filter(None, [TARGETS.get(name)]))),
    )
    for name in CONTROLLERS
}
# A wait that any of them adds is one too many: what has nothing to do with each other shares a case.
CASES: dict[str, tuple[str, ...]] = {
    **{
        f"loss {loss or 'grpo'}, controller {name or 'fixed'}": (
            *([f"loss.loss_type={loss}"] if loss else []),
            *CONTROLLED.get(name, ()),
        )
        for loss, name in zip_longest(LOSSES, CONTROLLERS)
    },
    "k1, reference ema": ("kl.estimator=k1", "reference.kind=ema", "reference.every=1"),
    "k2, reference snapshot": (
        *("kl.estimator=k2", "reference.kind=snapshot", "reference.every=1", "reference.reset_optimizer=true"),
    ),
    "k3, reference kl_triggered": (*("kl.estimator=k3", "reference.kind=kl_triggered", "reference.threshold=1e-9"),),
    "estimator abs": ("kl.estimator=abs", "kl.allow_biased=true"),
    "exact": ("kl.exact=true", "kl.estimator=exact"),
    "exact, reverse": ("kl.exact=true", "kl.estimator=exact_reverse"),
    "exact, of a sequence": ("kl.exact=true", "kl.estimator=exact", "kl.level=sequence"),
    "sequence": ("kl.estimator=k1", "kl.level=sequence"),
    "in the advantage": ("kl.estimator=k1", "kl.placement=advantage"),
    "in the reward": ("kl.estimator=k1", "kl.placement=reward"),
    "exact in the reward": ("kl.exact=true", "kl.estimator=exact", "kl.placement=reward", "kl.allow_biased=true"),
    "lora": LORA,
    "lora, reference ema": (*LORA, "reference.kind=ema", "reference.every=1"),
    "no reference": ("kl.beta=0", "kl.measure_every=0"),
    "too far, truncated, no signal": (
        "kl.collect_max=1e-3",
        "loss.mask_truncated_completions=true",
        "loss.dynamic_sampling=true",
        "loss.dynamic_sampling_rounds=1",
    ),
    "leave one out, entropy": ("loss.baseline=leave_one_out", "loss.scale_rewards=batch", "loss.entropy_coef=0.01"),
    "icepop, spikes are skipped": (
        *("loss.mismatch.kind=icepop", "loss.mismatch.floor=0.5", "loss.mismatch.level=sequence"),
        "guards.on_spike=skip",
    ),
    "filters, budget": ("rollout.top_k=3", "kl.budget={max: 0.5, unit: per_sequence, action: warn}"),
    **{f"stale, {k}": ("kl.estimator=k1", f"kl.placement={k}") for k in ("loss", "reward", "advantage")},
    "two iterations of two minibatches": ("loss.num_iterations=2", "optim.minibatches=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_once_an_update(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("rollout.prompts_per_step=4", "rollout.num_generations=2", MADE_UP, *CASES[case])
    run = build_run(config, build_policy(config)).run
    updates = run.loss.num_iterations * run.optim.minibatches
    if case.startswith("stale"):
        monkeypatch.setattr(run, "rollout", run.rollout.model_copy(update={"max_staleness": 1}))
    monkeypatch.setattr(run, "collect", lambda problems, **_: fixed_groups()[: len(problems)])
    state = State(kl=run.controller.init(), norms=(1e-3,) * 10)
    state = train_step(run, state).state  # what is measured on a model once, is
    for parts, budget in ((1, 48), (2, 24), (4, 12)):
        monkeypatch.setattr(run, "optim", run.optim.model_copy(update={"microbatch_tokens": budget}))
        with monkeypatch.context() as patched, Waits(patched, run.policy.model) as waits:
            step = train_step(run, state)
        state = step.state
        assert len(step.batch.micros) >= max(parts, run.optim.minibatches)
        assert waits.reads == ["tolist"] * updates


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_once_a_supervised_step(entropy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build_policy(small_config())
    monkeypatch.setattr("keel.trainer.sft.uses_structured_mask", lambda loaded: loaded.shared_prefix)  # as on a GPU
    texts = [("1+2=", "3"), ("10+20=", "30"), ("4+4=", "8"), ("17+1=", "18")]
    examples = [make_example(loaded.tokenizer.encode(p), c, loaded.tokenizer) for p, c in texts]
    options, optimizer = WarmstartOptions(entropy_coef=entropy), Optimizer(loaded.model, OptimOptions())
    for budget in (100, 16, 1):
        optim = OptimOptions(microbatch_tokens=budget)
        with monkeypatch.context() as patched, Waits(patched, loaded.model) as waits:
            line = sft_step(loaded, examples, optimizer, options, optim)
        assert line["guard/skipped"] == 0.0
        assert waits.reads == ["tolist"]


def test_what_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build_policy(small_config())
    with monkeypatch.context() as patched, Waits(patched, loaded.model) as waits:
        weight = next(loaded.model.parameters()).detach()
        assert float(weight.sum()) == float(weight.sum())
        weight[weight > 0].unique()
        bool(weight.isnan().any())
        sum([1.0, 2.0], start=float(weight.new_zeros(()))), (weight > 0).nonzero(), weight.cpu()
    assert len(waits.reads) >= 8
