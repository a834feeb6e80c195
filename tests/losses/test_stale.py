"""Samples that the old policy did not draw: which of the three policies each ratio is taken against."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.base.errors import KeelError
from keel.base.metrics import merge
from keel.base.types import Batch, Scores
from keel.kl import KLOptions
from keel.losses import LossOptions, MismatchOptions, behaviour_logp, objective

SHAPE = (4, 5)


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(SHAPE, generator=g, dtype=torch.float64)

    logp = -1.0 - normal().abs()
    old, sample, ref = (logp + 0.3 * normal() for _ in range(3))
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 1, 4])[:, None]
    batch = Batch(
        action_mask=mask, advantages=normal()[:, 0], old_logp=old, ref_logp=ref, sample_logp=sample,
        filtered_logp=None,
    )  # fmt: skip
    return Scores(logp.requires_grad_()), batch


def run(scores, batch, kl, loss=None):
    loss = loss or LossOptions(loss_type="dapo", mismatch=MismatchOptions(cap=1.1))
    out = objective(scores, batch, loss, kl, 0.5)
    (gradient,) = torch.autograd.grad(out.loss, scores.logp)
    return out, gradient.numpy()


def numbers(scores, batch):
    names = ("old_logp", "ref_logp", "sample_logp")
    return scores.logp.detach().numpy(), *(getattr(batch, name).numpy() for name in names), batch.action_mask.numpy()


def test_the_logged_penalty_is_the_one_that_acts_under_a_cap():
    scores, batch = tensors()
    batch = replace(batch, advantages=torch.zeros(4), stale=True)
    out, _ = run(scores, batch, KLOptions(estimator="k1", placement="advantage", ratio_cap=1.05))
    logp, _, ref, mu, mask = numbers(scores, batch)
    rho = np.exp(logp - mu)
    assert (rho[mask] > 1.05).any()
    expected = 0.5 * (np.minimum(rho, 1.05) * (logp - ref))[mask].mean()
    assert out.metrics["loss/kl"].value == pytest.approx(expected)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("placement", ["loss", "advantage"])
def test_the_kl_term_of_stale_samples_is_weighed_by_the_policy_over_what_drew_them(placement, filtered):
    """sg(ρ)·k2's gradient and k1's in the advantage are both ρ·u·s, written out in numpy with ρ = π/μ."""
    scores, batch = tensors()
    batch = replace(batch, advantages=torch.zeros(4), stale=True)
    if filtered:
        batch = replace(batch, filtered_logp=batch.sample_logp + 0.2)
    estimator = "k2" if placement == "loss" else "k1"
    out, gradient = run(scores, batch, KLOptions(estimator=estimator, placement=placement))
    logp, _, ref, mu, mask = numbers(scores, batch)
    mu = mu + 0.2 if filtered else mu
    value = (logp - ref) ** 2 / 2 if placement == "loss" else logp - ref
    assert out.metrics["loss/kl"].value == pytest.approx(0.5 * (np.exp(logp - mu) * value)[mask].mean())
    expected = np.where(mask, np.exp(logp - mu) * (logp - ref), 0.0) * 0.5 / mask.sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_the_policy_term_keeps_its_ratio_to_the_old_policy_and_weighs_old_over_mu():
    scores, batch = tensors()
    batch = replace(batch, stale=True)
    loss = LossOptions(loss_type="dapo", epsilon=0.9, epsilon_high=9.0, mismatch=MismatchOptions(cap=1.1))
    _, gradient = run(scores, batch, KLOptions(beta=0.0), loss)
    _, without = run(scores, replace(batch, advantages=torch.zeros(4)), KLOptions(beta=0.0), loss)
    logp, old, _, mu, mask = numbers(scores, batch)
    weights = np.minimum(np.exp(old - mu), 1.1)
    expected = np.where(mask, -np.exp(logp - old) * weights * batch.advantages.numpy()[:, None], 0.0) / mask.sum()
    np.testing.assert_allclose(gradient - without, expected, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("placement", ["loss", "advantage", "reward"])
def test_samples_of_the_old_policy_itself_train_as_ever_whatever_they_are_called(placement, level):
    scores, batch = tensors()
    batch = replace(batch, sample_logp=batch.old_logp)
    if placement == "reward":
        batch = replace(batch, kl_advantages=batch.advantages.flip(0))
    kl = KLOptions(estimator="k1", placement=placement, level=level)
    fresh, stale = (run(scores, replace(batch, stale=flag), kl) for flag in (False, True))
    assert fresh[0].loss.item() == stale[0].loss.item()
    assert np.array_equal(fresh[1], stale[1])


def test_the_weight_of_a_sequence_is_free_of_filters():
    """The kept mass of all its tokens together would vanish with its length."""
    scores, batch = tensors()
    batch = replace(batch, filtered_logp=batch.sample_logp + 0.2)
    assert torch.equal(behaviour_logp(batch, scores.logp, "sequence"), batch.sample_logp)
    assert torch.equal(behaviour_logp(batch, scores.logp), batch.filtered_logp)
    kl, unfiltered = KLOptions(estimator="k1", level="sequence"), replace(batch, filtered_logp=None)
    for level, equal in (("token", False), ("sequence", True)):
        loss = LossOptions(loss_type="dapo", mismatch=MismatchOptions(level=level))
        assert np.array_equal(run(scores, batch, kl, loss)[1], run(scores, unfiltered, kl, loss)[1]) == equal


def test_what_is_not_reported_falls_back_to_what_is():
    _, batch = tensors()
    filtered, sample = (batch.sample_logp + 0.2).clone(), batch.sample_logp.clone()
    filtered[0, :2], sample[0, 0] = math.nan, math.nan
    got = behaviour_logp(replace(batch, sample_logp=sample, filtered_logp=filtered), batch.old_logp)
    assert got[0, 0] == batch.old_logp[0, 0]
    assert got[0, 1] == batch.sample_logp[0, 1]
    assert torch.equal(got[1:], batch.sample_logp[1:] + 0.2)


def test_stale_samples_without_the_samplers_numbers_are_refused():
    scores, batch = tensors()
    with pytest.raises(KeelError, match="stale samples need sample_logp") as caught:
        run(scores, replace(batch, sample_logp=None, stale=True), KLOptions(estimator="k2"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "capped"),
    [
        ({"cap": 1.1}, "above"),
        ({"cap": 1.1, "kind": "none"}, "nowhere"),  # no weight is limited
        ({"cap": 1.1, "kind": "icepop", "floor": 0.9}, "outside"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_effective_sample_size_and_the_share_beyond_the_limits(options, capped, parts):
    """The size is of the weights before any limit; neither number depends on the split into microbatches."""
    scores, batch = tensors()
    _, old, _, mu, mask = numbers(scores, batch)
    loss = LossOptions(loss_type="dapo", mismatch=MismatchOptions(**options))
    metrics = {}
    for rows in torch.arange(4).chunk(parts):
        part = Batch(**{k: v[rows] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)})
        metrics = merge(metrics, objective(Scores(scores.logp[rows]), part, loss, KLOptions(), 0.0).metrics)
    w = np.exp(old - mu)[mask]
    beyond = ((w > 1.1) | ((w < 0.9) if capped == "outside" else False)) & (capped != "nowhere")
    assert metrics["mismatch/ess"].value == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert metrics["mismatch/capped_fraction"].value == pytest.approx(beyond.mean())
    assert (0 < beyond.mean() < 1) == (capped != "nowhere")


def test_without_a_samplers_numbers_every_sample_counts():
    scores, batch = tensors()
    out, _ = run(scores, replace(batch, sample_logp=None), KLOptions(beta=0.0))
    assert (out.metrics["mismatch/ess"].value, out.metrics["mismatch/capped_fraction"].value) == (1.0, 0.0)
