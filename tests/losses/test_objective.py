"""The objective: what goes into each term, what stays out, and that any split gives the same."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.metrics import merge, values
from keel.base.types import Batch, Scores
from keel.kl import KLOptions, check_pairing
from keel.losses import LOSSES, LossOptions, MismatchOptions, global_denominators, objective, with_policy_mask

LENGTH = 7


def make(seed=0, rows=5, width=6, *, advantages=True, old=True):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logp = -normal(rows, width).abs() - 0.1
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[0, 0] = True
    batch = Batch(
        action_mask=mask,
        advantages=normal(rows) if advantages else torch.zeros(rows, dtype=torch.float64),
        old_logp=logp + 0.2 * normal(rows, width) if old else None,
        ref_logp=logp + 0.5 * normal(rows, width),
        sample_logp=logp + 0.1 * normal(rows, width),
    )
    return Scores(logp, normal(rows, width).abs(), normal(rows, width).abs()), batch


def plain(loss="grpo", **options):
    """A loss without the correction of the sampler's mismatch, unless it is asked for."""
    return LossOptions(loss_type=loss, **{"mismatch": MismatchOptions(kind="none"), **options})


def run(scores, batch, loss="grpo", kl=None, beta=0.1, **options):
    logp = scores.logp.clone().requires_grad_()
    loss = loss if isinstance(loss, LossOptions) else plain(loss)
    options.setdefault("max_completion_length", LENGTH)
    result = objective(replace(scores, logp=logp), batch, loss, kl or KLOptions(), beta, **options)
    result.loss.backward()
    return result.loss.item(), logp.grad.numpy(), values(result.metrics)


def test_policy_plus_beta_times_kl_by_hand():
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    batch = Batch(
        action_mask=torch.tensor([[True, True]]),
        advantages=torch.tensor([3.0], dtype=torch.float64),
        ref_logp=torch.tensor([[-1.5, -1.0]], dtype=torch.float64),
    )
    loss, grad, metrics = run(Scores(logp), batch, beta=0.1, kl=KLOptions(gradient="plain"))
    kl = ((math.exp(-0.5) - 0.5) + (math.e - 2)) / 2
    assert loss == pytest.approx(-3 + 0.1 * kl, abs=1e-12)
    slopes = np.array([1 - math.exp(-0.5), 1 - math.e]) / 2
    np.testing.assert_allclose(grad[0], -1.5 + 0.1 * slopes, atol=1e-12)
    assert metrics["loss/policy"] == pytest.approx(-3)
    assert metrics["loss/kl"] == pytest.approx(0.1 * kl)
    assert metrics["loss/total"] == pytest.approx(loss)
    assert metrics["loss/kl_share"] == pytest.approx(0.1 * kl / (3 + 0.1 * kl))
    assert (metrics["ratio/max"], metrics["ratio/ess"]) == (1.0, 1.0)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_default_kl_gradient_is_rho_u_per_token(loss, old):
    """auto: ρ·u on every action token over all action tokens, whatever the policy loss."""
    scores, batch = make(advantages=False, old=old)
    _, grad, _ = run(scores, batch, loss, beta=0.3)
    rho = (scores.logp - batch.old_logp).exp() if old else torch.ones_like(scores.logp)
    expected = 0.3 * rho * (scores.logp - batch.ref_logp) * batch.action_mask / batch.action_mask.sum()
    np.testing.assert_allclose(grad, expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_zero_variance_groups_keep_their_kl_term(loss):
    scores, batch = make(advantages=False)
    _, grad, metrics = run(scores, batch, loss)
    assert metrics["loss/policy"] == 0
    assert metrics["loss/kl"] > 0
    assert (grad[batch.action_mask.numpy()] != 0).all()


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_policy_mask_drops_tokens_from_the_policy_term_only(loss):
    scores, batch = make()
    keep = torch.tensor([True, False, True, True, False])
    masked = replace(batch, policy_mask=with_policy_mask(batch.action_mask, keep))
    _, grad, metrics = run(scores, masked, loss)
    _, kl_only, bare = run(scores, replace(batch, advantages=torch.zeros(5, dtype=torch.float64)), loss)
    np.testing.assert_allclose(grad[~keep], kl_only[~keep], atol=1e-14)
    assert np.abs(kl_only[~keep]).max() > 0
    assert metrics["loss/kl"] == pytest.approx(bare["loss/kl"], abs=1e-14)
    _, policy_only, _ = run(scores, masked, loss, beta=0.0)
    assert (policy_only[~keep] == 0).all()
    assert np.abs(policy_only[keep]).max() > 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_beta_zero_has_no_kl_term_and_needs_no_reference(loss):
    scores, batch = make()
    with_reference = run(scores, batch, loss, beta=0.0)
    without = run(scores, replace(batch, ref_logp=None), loss, beta=0.0)
    assert with_reference[0] == without[0] == with_reference[2]["loss/policy"]
    assert with_reference[2]["loss/kl"] == 0
    assert np.array_equal(with_reference[1], without[1])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("placement", ["reward", "advantage", "to go"])
def test_a_penalty_in_reward_or_advantage_is_what_the_first_update_of_shaped_advantages_is(loss, placement):
    """At ratio 1 the term of its own adds what A − β·KL in the loss's own term would."""
    scores, batch = make()
    batch = replace(batch, old_logp=None)
    logp = torch.as_tensor(scores.logp)
    kl = torch.where(batch.action_mask, (logp - batch.ref_logp).detach(), 0.0)
    level = "sequence" if placement == "to go" else "token"
    if placement == "reward":
        taken = -0.3 * kl.sum(-1)
        spec, penalized = KLOptions(estimator="k1", placement="reward"), replace(batch, kl_advantages=taken)
        taken = taken.unsqueeze(-1).expand_as(kl)
    else:
        spec, penalized = KLOptions(estimator="k1", placement="advantage", level=level), batch
        taken = -0.3 * (kl if placement == "advantage" else kl.flip(-1).cumsum(-1).flip(-1))
    term = replace(batch, advantages=batch.advantages.unsqueeze(-1) + torch.where(batch.action_mask, taken, 0.0))
    reduction = LOSSES[loss].reduction
    token_loss = next(name for name in ("grpo", "bnpo", "dr_grpo", "dapo") if LOSSES[name].reduction == reduction)
    plain, shaped = run(scores, batch, token_loss, beta=0.0), run(scores, term, token_loss, beta=0.0)
    alone, together = run(scores, batch, loss, beta=0.0), run(scores, penalized, loss, spec, beta=0.3)
    assert np.abs(shaped[1] - plain[1]).max() > 1e-3
    np.testing.assert_allclose(together[1] - alone[1], shaped[1] - plain[1], atol=1e-12)
    by = kl.sum() / (batch.action_mask.sum() if placement == "advantage" else len(kl))
    assert together[2]["loss/kl"] == pytest.approx(0.3 * float(by), abs=1e-12)  # β × KL, a token's or a sequence's


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("placement", ["loss", "reward", "advantage"])
def test_the_penalty_does_not_see_the_policy_mask(loss, placement):
    """Completions that leave the policy term (collect_max, truncated, no signal) keep their whole penalty."""
    scores, batch = make(advantages=False)
    spec = KLOptions(estimator="k1", placement=placement)
    if placement == "reward":
        batch = replace(batch, kl_advantages=torch.linspace(-1, 1, len(batch.action_mask), dtype=torch.float64))
    whole = run(scores, batch, loss, spec, beta=0.5)
    nobody = torch.zeros(len(batch.action_mask), dtype=torch.bool)
    for keep in (nobody, torch.arange(len(nobody)) % 2 == 0):
        masked = run(
            scores, replace(batch, policy_mask=with_policy_mask(batch.action_mask, keep)), loss, spec, beta=0.5
        )
        np.testing.assert_allclose(masked[1], whole[1], atol=1e-14)
        assert masked[2]["loss/kl"] == pytest.approx(whole[2]["loss/kl"], abs=1e-14)
    assert np.abs(whole[1]).max() > 1e-3


@given(st.integers(0, 10_000), st.sampled_from(["k1", "k2", "k3", "exact"]), st.sampled_from(["token", "sequence"]))
def test_token_mean_makes_beta_mean_the_same_under_every_loss(seed, estimator, level):
    scores, batch = make(seed, advantages=False)
    kl = KLOptions(estimator=estimator, level=level)
    seen = [run(scores, batch, loss, kl) for loss in sorted(LOSSES)]
    for loss, grad, metrics in seen:
        assert loss == seen[0][0]
        assert metrics["loss/kl"] == seen[0][2]["loss/kl"]
        assert np.array_equal(grad, seen[0][1])
    assert seen[0][0] != 0


def test_loss_reduction_ties_the_kl_to_the_policy_loss():
    scores, batch = make(advantages=False)
    kl = KLOptions(gradient="plain", reduction="loss")
    mask = batch.action_mask
    d = batch.ref_logp - scores.logp
    k3 = torch.where(mask, d.exp() - 1 - d, 0.0)
    expected = {
        "grpo": (k3.sum(-1) / mask.sum(-1).clamp_min(1)).mean().item(),
        "dapo": (k3.sum() / mask.sum()).item(),
        "bnpo": (k3.sum() / mask.sum()).item(),
        "dr_grpo": (k3.sum() / (5 * LENGTH)).item(),
    }
    for loss, value in expected.items():
        assert run(scores, batch, loss, kl, beta=1.0)[0] == pytest.approx(value, abs=1e-12)


def test_sequence_level_is_a_mean_over_sequences():
    scores, batch = make(advantages=False, old=False)
    loss, _, _ = run(scores, batch, kl=KLOptions(estimator="k1", level="sequence"), beta=1.0)
    u = torch.where(batch.action_mask, scores.logp - batch.ref_logp, 0.0)
    assert loss == pytest.approx(u.sum(-1).mean().item(), abs=1e-12)


def test_exact_kl_enters_as_given():
    scores, batch = make(advantages=False)
    loss, _, _ = run(scores, replace(batch, ref_logp=None), kl=KLOptions(estimator="exact"), beta=1.0)
    assert loss == pytest.approx(scores.exact_kl[batch.action_mask].mean().item(), abs=1e-12)


def test_entropy_bonus_by_hand():
    scores, batch = make()
    without = run(scores, batch)[0]
    entropy = scores.entropy.clone().requires_grad_()
    result = objective(replace(scores, entropy=entropy), batch, plain(entropy_coef=0.25), KLOptions(), 0.1)
    tokens = batch.action_mask.sum().item()
    mean = scores.entropy[batch.action_mask].sum().item() / tokens
    assert result.loss.item() == pytest.approx(without - 0.25 * mean, abs=1e-12)
    result.loss.backward()
    np.testing.assert_allclose(entropy.grad, -0.25 / tokens * batch.action_mask, atol=1e-14)
    assert result.metrics["entropy/mean"].value == pytest.approx(mean)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_mismatch_weights_scale_the_policy_term_and_not_the_kl(loss):
    scores, batch = make()
    constant = replace(batch, sample_logp=batch.old_logp - math.log(1.5))
    unweighted = run(scores, batch, loss)
    weighted = run(scores, constant, plain(loss, mismatch=MismatchOptions(kind="truncate", cap=2.0)))
    assert weighted[2]["loss/policy"] == pytest.approx(1.5 * unweighted[2]["loss/policy"], abs=1e-12)
    assert weighted[2]["loss/kl"] == pytest.approx(unweighted[2]["loss/kl"], abs=1e-14)
    without = run(scores, replace(constant, sample_logp=None), LossOptions(loss_type=loss))
    assert without[2]["loss/policy"] == unweighted[2]["loss/policy"]


def cut(batch, rows):
    fields = {k: v for k, v in vars(batch).items() if v is not None}
    return Batch(**{k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


@given(
    st.integers(0, 10_000),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([("token_mean", "token"), ("loss", "token"), ("token_mean", "sequence")]),
    st.integers(1, 4),
)
def test_any_split_into_microbatches_is_the_same_update(seed, loss, how, at):
    reduction, level = how
    scores, batch = make(seed)
    keep = torch.rand(5, generator=torch.Generator().manual_seed(seed)) < 0.7
    batch = replace(batch, policy_mask=with_policy_mask(batch.action_mask, keep))
    kl, spec = (
        KLOptions(estimator="k1", reduction=reduction, level=level),
        LossOptions(loss_type=loss, entropy_coef=0.02),
    )
    counts = global_denominators(batch, LENGTH)
    whole = run(scores, batch, spec, kl, counts=counts)
    pieces, merged = [], {}
    for rows in (slice(0, at), slice(at, 5)):
        part = Scores(scores.logp[rows].clone().requires_grad_(), scores.entropy[rows])
        result = objective(part, cut(batch, rows), spec, kl, 0.1, counts)
        result.loss.backward()
        pieces.append((result.loss.item(), part.logp.grad.numpy()))
        merged = merge(merged, result.metrics)
    assert sum(loss for loss, _ in pieces) == pytest.approx(whole[0], abs=1e-12)
    np.testing.assert_allclose(np.concatenate([grad for _, grad in pieces]), whole[1], atol=1e-12)
    split = values(merged)
    for name in set(whole[2]) - {"loss/kl_share", "ratio/max"}:  # these two have their own tests below
        assert split[name] == pytest.approx(whole[2][name], abs=1e-9), name


def halves(logp, batch):
    counts = global_denominators(batch)
    merged = {}
    for rows in (slice(0, 1), slice(1, 2)):
        merged = merge(
            merged, objective(Scores(logp[rows]), cut(batch, rows), LossOptions(), KLOptions(), 0.1, counts).metrics
        )
    return values(merged), values(objective(Scores(logp), batch, LossOptions(), KLOptions(), 0.1, counts).metrics)


def test_an_empty_microbatch_does_not_raise_the_largest_ratio():
    logp = torch.tensor([[-1.0], [-1.0]])
    mask, old = torch.tensor([[True], [False]]), torch.tensor([[-0.5], [-0.5]])
    split, whole = halves(logp, Batch(mask, torch.ones(2), old, logp))
    assert split["ratio/max"] == pytest.approx(whole["ratio/max"]) == pytest.approx(math.exp(-0.5))


def test_kl_share_does_not_depend_on_the_split():
    """Policy terms of opposite signs cancel over the minibatch: its share must not depend on how it was cut."""
    logp = torch.tensor([[-1.0], [-1.0]])
    batch = Batch(torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, -0.5]), logp, logp - 1)
    split, whole = halves(logp, batch)
    assert split["loss/kl_share"] == pytest.approx(whole["loss/kl_share"])


def test_metrics_by_hand():
    logp = torch.tensor([[0.0, 0.0, 0.0, 0.0]], dtype=torch.float64) - 1
    rho = torch.tensor([[0.5, 1.0, 2.0, 100.0]], dtype=torch.float64)
    batch = Batch(
        action_mask=torch.tensor([[True, True, True, False]]),
        advantages=torch.tensor([1.0], dtype=torch.float64),
        old_logp=logp - rho.log(),
    )
    _, _, metrics = run(Scores(logp), batch, beta=0.0)
    assert metrics["ratio/max"] == pytest.approx(2.0)
    assert metrics["ratio/ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert metrics["ratio/clip_high_fraction"] == pytest.approx(1 / 3)
    assert metrics["ratio/clip_low_fraction"] == 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_empty_masks_and_holes_give_zero_not_nan(loss):
    hole = torch.full((2, 3), math.nan)
    batch = Batch(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2), hole, hole, hole)
    scores = Scores(hole, entropy=hole)
    total, grad, metrics = run(scores, batch, LossOptions(loss_type=loss, entropy_coef=0.1))
    assert total == 0
    assert (grad == 0).all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_half_precision_is_computed_in_fp32(loss, dtype):
    scores, batch = make()
    given = {k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    low = Batch(**{k: v.to(dtype).float() if v.is_floating_point() else v for k, v in given.items()})
    half = Batch(
        **{k: v.to(dtype) if v.is_floating_point() and k != "advantages" else getattr(low, k) for k, v in given.items()}
    )
    logp = scores.logp.to(dtype)
    got = objective(Scores(logp), half, plain(loss), KLOptions(), 0.1, max_completion_length=LENGTH).loss
    expected = objective(Scores(logp.float()), low, plain(loss), KLOptions(), 0.1, max_completion_length=LENGTH).loss
    assert got.dtype == torch.float32
    assert got.item() == expected.item()


def test_pairing_can_be_handed_in():
    scores, batch = make()
    given_in = run(scores, batch, pairing=check_pairing("k3", gradient="plain"))
    assert given_in[0] == run(scores, batch, kl=KLOptions(gradient="plain"))[0]
    assert given_in[1][0, 0] != run(scores, batch)[1][0, 0]


def test_mistakes_are_one_line():
    scores, batch = make()
    cases = [
        (lambda: run(scores, replace(batch, advantages=None)), "needs batch.advantages"),
        (lambda: run(scores, replace(batch, action_mask=batch.action_mask.float())), "action_mask must be boolean"),
        (lambda: run(scores, replace(batch, policy_mask=batch.action_mask.int())), "policy_mask must be boolean"),
        (lambda: run(scores, replace(batch, ref_logp=None)), "needs ref_logp"),
        (lambda: run(replace(scores, exact_kl=None), batch, kl=KLOptions(estimator="exact")), "exact_kl=True"),
        (lambda: run(replace(scores, entropy=None), batch, plain(entropy_coef=0.1)), "needs the entropy"),
        (lambda: run(scores, batch, kl=KLOptions(estimator="k1", gradient="plain")), "pushes the policy away"),
        (lambda: run(scores, batch, kl=KLOptions(placement="reward")), "estimator=k1"),
        (
            lambda: run(scores, batch, kl=KLOptions(reduction="loss", level="sequence")),
            "kl.reduction=loss does not apply",
        ),
        (lambda: run(scores, replace(batch, policy_mask=torch.ones_like(batch.action_mask))), "policy_mask contains"),
        (lambda: run(scores, batch, "dr_grpo", max_completion_length=None), "max_completion_length"),
        (lambda: run(scores, replace(batch, kl_advantages=torch.ones(5))), "kl_advantages needs kl.placement=reward"),
        (lambda: with_policy_mask(batch.action_mask, torch.ones(5)), "keep must be boolean [B]"),
    ]
    for call, says in cases:
        with pytest.raises(KeelError) as caught:
            call()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
