"""The loss that verl's workers get: with verl's formula chosen it is verl's, otherwise its KL is that of `keel.kl`."""

import pickle
from dataclasses import replace

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from conftest import Rows, keel_config, verl_config
from keel.base.errors import KeelError
from keel.integrations.verl.loss import KeelLoss, policy_config
from keel.integrations.verl.settings import REDUCTIONS, settle
from keel.kl import KLOptions, advantage_penalty, estimate, importance_ratio, kl_loss

pytestmark = pytest.mark.peers


BETA = 0.3
# verl's kl_loss_type in Keel's words
THEIRS = {
    "kl": ("k1", "plain"),
    "abs": ("abs", "plain"),
    "mse": ("k2", "plain"),
    "low_var_kl": ("k3", "plain"),
    "k1+": ("k1", "k2"),
    "abs+": ("abs", "k2"),
    "k3+": ("k3", "k2"),
}


def keel_loss(mode="token-mean", scale=None, beta=BETA, entropy_coeff=0.0, **kl):
    actor = keel_config(f"actor_rollout_ref.actor.loss_agg_mode={mode}").actor_rollout_ref.actor
    actor.loss_scale_factor, actor.entropy_coeff = scale, entropy_coeff
    options = KLOptions(beta=beta, **kl)
    pairing = options.pairing(REDUCTIONS[mode], off_policy=True)
    return KeelLoss(policy_config(actor), options, pairing, beta)


def verls_loss(kl_loss_type, mode, scale=None, beta=BETA):
    config = verl_config(f"actor_rollout_ref.actor.loss_agg_mode={mode}", "actor_rollout_ref.actor.use_kl_loss=True")
    actor = config.actor_rollout_ref.actor
    actor.kl_loss_coef, actor.kl_loss_type, actor.loss_scale_factor = beta, kl_loss_type, scale
    actor = omega_conf_to_dataclass(actor)
    return lambda output, data: ppo_loss(config=actor, model_output=output, data=data)


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("kl_loss_type", THEIRS)
def test_with_verls_formula_it_is_verls(rows, kl_loss_type, mode):
    estimator, gradient = THEIRS[kl_loss_type]
    scale = 7 if mode.endswith("norm") else None
    ours = keel_loss(mode, scale, estimator=estimator, gradient=gradient, reduction="loss", allow_biased=True)
    output, data = rows.micro([0, 1, 2, 3], ranks=2)
    theirs, metrics = verls_loss(kl_loss_type, mode, scale)(output, data)
    mine, reported = ours(output, data)
    assert mine.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(rows.gradient(mine), rows.gradient(theirs), atol=1e-6, rtol=0)
    assert reported["loss/kl"].aggregate() == pytest.approx(BETA * metrics["kl_loss"].aggregate(), abs=1e-6)
    assert reported["actor/pg_loss"].aggregate() == metrics["actor/pg_loss"].aggregate()
    assert "kl_loss" not in reported  # verl's own term is off


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_at_beta_0_it_is_verls_policy_loss(rows, mode):
    output, data = rows.micro([0, 1, 2, 3])
    theirs, _ = verls_loss("k3", mode, beta=0.0)(output, data)
    mine, reported = keel_loss(mode, beta=0.0)(output, data)
    assert mine.item() == theirs.item()
    torch.testing.assert_close(rows.gradient(mine), rows.gradient(theirs), atol=0, rtol=0)
    assert reported["loss/kl"].aggregate() == 0.0


def test_the_entropy_bonus_is_verls_and_not_in_the_policy_loss(rows):
    output, data = rows.micro([0, 1, 2, 3])
    plain, without = keel_loss()(output, data)
    mine, reported = keel_loss(entropy_coeff=0.5)({**output, "entropy": output["log_probs"].detach() * -1.0}, data)
    entropy = reported["actor/entropy_loss"].aggregate()
    assert mine.item() == pytest.approx(plain.item() - 0.5 * entropy, abs=1e-6)
    assert entropy > 0.5
    assert reported["loss/policy"].aggregate() == pytest.approx(without["loss/policy"].aggregate(), abs=1e-9)
    assert without["loss/policy"].aggregate() == pytest.approx((plain - without["loss/kl"].aggregate()).item())


@pytest.mark.parametrize(("estimator", "gradient"), [("k3", "auto"), ("k2", "auto"), ("k1", "rho"), ("k3", "rho")])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_its_kl_is_keels(rows, estimator, gradient, mode):
    """Under every loss_agg_mode the KL is a mean over all tokens, so that β means the same."""
    loss = keel_loss(mode, estimator=estimator, gradient=gradient)
    output, data = rows.micro([0, 1, 2, 3])
    mine, _ = loss(output, data)
    policy, _ = replace(loss, beta=0.0)(output, data)
    logp, mask = rows.padded(rows.logp), rows.padded(rows.mask).bool()
    per_token = kl_loss(loss.pairing, logp, rows.padded(rows.ref), mask, old_logp=rows.padded(rows.old))
    expected = BETA * per_token.sum() / rows.tokens
    assert (mine - policy).item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(rows.gradient(mine - policy), rows.gradient(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", [mode for mode in REDUCTIONS if mode != "token-sum"])
def test_of_sequences_it_is_divided_by_sequences(rows, mode):
    loss = keel_loss(mode, estimator="k1", level="sequence")
    _, data = rows.micro([0, 1, 2, 3])
    logp, mask = rows.padded(rows.logp), rows.padded(rows.mask).bool()
    values = kl_loss(loss.pairing, logp, rows.padded(rows.ref), mask, old_logp=rows.padded(rows.old))
    penalty, _ = loss.penalty(logp, data)
    assert penalty.item() == pytest.approx(BETA * values.sum().item() / 4, abs=1e-9)


def test_in_the_advantage_its_gradient_is_that_of_the_score(rows):
    """−ρ_t·(−β·k1_t)·s_t over all tokens, by hand."""
    loss = keel_loss(estimator="k1", placement="advantage")
    _, data = rows.micro([0, 1, 2, 3])
    logp, old, mask = rows.padded(rows.logp), rows.padded(rows.old), rows.padded(rows.mask).bool()
    penalty, _ = loss.penalty(logp, data)
    kl = estimate("k1", logp, rows.padded(rows.ref), mask).detach()
    taken = advantage_penalty(kl, mask, BETA)
    by_hand = (-importance_ratio(logp, old, mask).detach() * taken / rows.tokens)[mask]
    gradient = torch.autograd.grad(penalty, logp)[0]
    torch.testing.assert_close(gradient[mask], by_hand, atol=1e-9, rtol=0)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("placement", ["loss", "advantage"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_any_split_gives_the_same_loss(rows, mode, placement):
    """Two microbatches on each of two ranks: sums over microbatches and a mean over ranks, as verl's engines do."""
    loss = keel_loss(mode, estimator="k1", gradient="rho" if placement == "loss" else "auto", placement=placement)
    whole, reported = loss(*rows.micro([0, 1, 2, 3]))
    parts = [loss(*rows.micro([i], ranks=2)) for i in range(4)]
    together = sum(part for part, _ in parts) / 2
    assert together.item() == pytest.approx(whole.item(), abs=1e-9)
    torch.testing.assert_close(rows.gradient(together), rows.gradient(whole), atol=1e-9, rtol=0)
    logged = sum(metrics["loss/kl"].aggregate() for _, metrics in parts) / 2
    assert logged == pytest.approx(reported["loss/kl"].aggregate(), abs=1e-9)


def test_a_token_far_off_is_pulled_back_where_verls_k3_lets_it_go():
    """verl clamps k3's value at 10, which ends its gradient from d = 2.61 on; Keel's grows like d."""
    rows = Rows(lengths=(1, 1))
    rows.ref = [rows.logp[0].detach() + 3.0, rows.logp[1].detach() + 1.0]
    rows.mask = [torch.ones(1, dtype=torch.int64)] * 2
    output, data = rows.micro([0, 1])
    theirs = [verls_loss("low_var_kl", "token-mean", beta=beta)(output, data)[0] for beta in (BETA, 0.0)]
    far, near = rows.gradient(theirs[0] - theirs[1])
    assert far == 0
    assert near < 0
    far, near = rows.gradient(keel_loss(gradient="k2").penalty(rows.padded(rows.logp), data)[0])
    assert far == pytest.approx(-BETA * 3.0 / 2)
    assert near == pytest.approx(-BETA * 1.0 / 2)


def test_it_travels_to_the_workers(rows):
    loss = keel_loss(controller={"name": "dual", "target": 0.1})
    output, data = rows.micro([0, 1, 2, 3])
    assert pickle.loads(pickle.dumps(loss))(output, data)[0].item() == loss(output, data)[0].item()


def test_without_global_counts_it_refuses(rows):
    from verl.utils import tensordict_utils as tu

    _, data = rows.micro([0, 1])
    tu.assign_non_tensor(data, global_batch_size=None)
    with pytest.raises(KeelError, match="global_batch_size"):
        keel_loss().penalty(rows.padded(rows.logp[:2]), data)


def test_one_update_a_batch_is_on_policy():
    assert "on-policy" in settle(keel_config("+keel.kl.beta=0.1")).pairing.note


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.rollout_correction.bypass_mode=True",  # what is called old is then the sampler's
    ],
)
def test_several_updates_a_batch_are_off_policy(override):
    assert "off-policy" in settle(keel_config("+keel.kl.beta=0.1", override)).pairing.note
