"""Log-probabilities and gradients of whole models, in the shapes that people train, against fp32 transformers.

`KEEL_SHAPES_TABLE=file` keeps a line of figures a test, from which the table of docs/performance.md is made.
"""

from __future__ import annotations

import gc
import json
import os

import pytest
import shapes
import torch

from keel.trainer.batch import pack_step, score_micro, score_policy, score_reference
from keel.trainer.state import State
from keel.trainer.step import train_step

pytestmark = pytest.mark.gpu


SLACK = 1.2  # how much larger than transformers' own error in bfloat16 that of a pass may be
NAMES = [name for name in shapes.SHAPES if name != "tiny"]


def keep(**figures):
    path = os.environ.get("KEEL_SHAPES_TABLE")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(figures) + "\n")


def scored(setting):
    """A sampled step's batch, with the policy's and the reference's scores, and its tokens' log-probabilities."""
    run = setting.run
    groups = run.collect(run.task.sample(4, seed=run.seed, step=0), attempt=0, step=0)
    batch = score_policy(score_reference(pack_step(groups, run), run), run)
    return groups, batch


def check_scores(name, *, lora=False, trained=False, updates=0, device="cuda", dtype=torch.bfloat16, seed=0):
    setting = shapes.build(name, device=device, dtype=dtype, seed=seed, lora=lora, trained=trained)
    train(setting.run, updates)
    trained = trained or updates > 0
    groups, batch = scored(setting)
    rows, mask = batch.rows, batch.rows.action_mask
    if not trained:  # equal weights, dtype and microbatches
        assert torch.equal(rows.old_logp[mask], rows.ref_logp[mask])
    with torch.no_grad():
        truth = shapes.own_logp(setting.exact(adapters=trained), groups)
        theirs = shapes.own_logp(setting.plain(adapters=trained), groups)
    errors = {
        "transformers": shapes.rms(theirs - truth),
        "policy": shapes.rms(rows.old_logp[mask] - truth),
        "sampler": shapes.rms(rows.sample_logp[mask] - truth),
    }
    if not trained:
        errors["reference"] = shapes.rms(rows.ref_logp[mask] - truth)
    keep(
        test="scores", shape=name, notes=setting.notes, seed=seed, lora=lora, trained=trained, updates=updates, **errors
    )
    limit = max(SLACK * errors["transformers"], 1e-5)
    assert all(error <= limit for error in errors.values()), errors


def train(run, updates):
    """So many steps; afterwards every adapter has moved."""
    state = State(kl=run.controller.init())
    for _ in range(updates):
        state = train_step(run, state).state
    if updates:
        moved = [bool(p.any()) for n, p in run.policy.model.named_parameters() if "lora_B" in n]
        assert len(moved) > 20
        assert all(moved)


def check_gradients(name, *, lora=False, checkpointing=False, device="cuda", dtype=torch.bfloat16, seed=0):
    options = {"lora": lora, "trained": lora, "checkpointing": checkpointing}
    setting = shapes.build(name, device=device, dtype=dtype, seed=seed, **options)
    run = setting.run
    groups = run.collect(run.task.sample(4, seed=seed, step=0), attempt=0, step=0)
    batch = score_reference(pack_step(groups, run), run)
    rows, generator = batch.rows, torch.Generator().manual_seed(seed)
    weights = torch.randn(rows.action_mask.shape, generator=generator).to(device)
    for micro in batch.micros:
        part = (micro.rows, slice(micro.width))
        mask, logp = rows.action_mask[part], score_micro(micro, batch, run).logp
        if not lora:  # the pass that learns equals the reference's, which has no gradients
            assert torch.equal(logp[mask], rows.ref_logp[part][mask])
        torch.where(mask, logp * weights[part], 0.0).sum().backward()
    mine = gradients_of(run.policy.model)
    results = []
    for model in (setting.exact(adapters=lora), setting.plain(adapters=lora)):
        (shapes.own_logp(model, groups) * weights[rows.action_mask]).sum().backward()
        results.append({n: g for n, g in gradients_of(model).items() if n in mine})
    truth, theirs = results
    assert mine.keys() == truth.keys()
    assert len(mine) > 10

    def error(gradients):
        total = sum(float(truth[n].double().square().sum()) for n in truth)
        return (sum(float((gradients[n].float() - truth[n]).double().square().sum()) for n in truth) / total) ** 0.5

    errors = {"transformers": error(theirs), "policy": error(mine)}
    keep(test="gradients", shape=name, notes=setting.notes, seed=seed, **options, **errors)
    assert errors["policy"] <= max(SLACK * errors["transformers"], 1e-5), errors


def gradients_of(model):
    """The gradients by name, taken off the model."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


@pytest.fixture(autouse=True)
def no_memory_kept():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_as_near_to_fp32_as_transformers(name, seed):
    check_scores(name, seed=seed)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_exact_kl_of_equal_weights_is_zero(name, lora):
    _, batch = scored(shapes.build(name, lora=lora, estimator="exact"))
    rows, mask = batch.rows, batch.rows.action_mask
    assert float(batch.scores.exact_kl[mask].abs().max()) == 0.0
    assert float((rows.old_logp - rows.ref_logp)[mask].abs().max()) < 1e-4  # one sum over the vocabulary, in two orders


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_those_under_adapters_too(name, trained):
    check_scores(name, lora=True, trained=trained)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B"])
def test_those_under_adapters_after_a_hundred_updates(name):
    check_scores(name, lora=True, updates=100)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_as_near_to_fp32_as_those_of_transformers(name, checkpointing, lora):
    check_gradients(name, lora=lora, checkpointing=checkpointing)
