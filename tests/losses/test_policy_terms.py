"""Per-token policy losses by hand, their gradients, limits and what is refused."""

import inspect
import math

import numpy as np
import pytest
import torch

from keel.base.errors import KeelError
from keel.losses import LOSSES, LossOptions, policy, policy_term, resolve_limits

ON = torch.ones(1, 4, dtype=torch.bool)
RATIOS = [0.5, 0.9, 1.1, 2.0]


def term(spec, advantage, ratios=RATIOS, mask=None):
    """The term where logp = log ρ − 1 and old = −1 on every token, and its gradient in logp."""
    logp = (torch.tensor([ratios], dtype=torch.float64).log() - 1).requires_grad_()
    mask = torch.ones(1, len(ratios), dtype=torch.bool) if mask is None else mask
    result = policy_term(
        spec, logp, torch.full_like(logp, -1.0).detach(), torch.tensor([advantage], dtype=torch.float64), mask
    )
    result.loss.sum().backward()
    return result, result.loss.detach()[0].numpy(), logp.grad[0].numpy()


CLIPS = [
    ("grpo", {}, 2.0, [-1.0, -1.8, -2.2, -2.4], [-1.0, -1.8, -2.2, 0.0]),
    ("grpo", {}, -2.0, [1.6, 1.8, 2.2, 4.0], [0.0, 1.8, 2.2, 4.0]),
    ("grpo", {"epsilon": 0.05}, 1.0, [-0.5, -0.9, -1.05, -1.05], [-0.5, -0.9, 0.0, 0.0]),
    ("grpo", {"epsilon_high": 1.5}, 1.0, [-0.5, -0.9, -1.1, -2.0], [-0.5, -0.9, -1.1, -2.0]),
    ("grpo", {"epsilon_high": 0.05}, -1.0, [0.8, 0.9, 1.1, 2.0], [0.0, 0.9, 1.1, 2.0]),
    ("grpo", {"delta": 1.5}, -2.0, [1.6, 1.8, 2.2, 3.0], [0.0, 1.8, 2.2, 0.0]),
    ("grpo", {"delta": 1.5}, 2.0, [-1.0, -1.8, -2.2, -2.4], [-1.0, -1.8, -2.2, 0.0]),
    ("dapo", {}, 1.0, [-0.5, -0.9, -1.1, -1.28], [-0.5, -0.9, -1.1, 0.0]),
    ("dapo", {}, -1.0, [0.8, 0.9, 1.1, 2.0], [0.0, 0.9, 1.1, 2.0]),
]


@pytest.mark.parametrize(("name", "options", "advantage", "loss", "gradient"), CLIPS)
def test_clipped_surrogate(name, options, advantage, loss, gradient):
    _, values, grads = term(LossOptions(loss_type=name, **options), advantage)
    np.testing.assert_allclose(values, loss, atol=1e-12)
    np.testing.assert_allclose(grads, gradient, atol=1e-12)


@pytest.mark.parametrize(("advantage", "low", "high"), [(1.0, [0] * 4, [0, 0, 0, 1]), (-1.0, [1, 0, 0, 0], [0] * 4)])
def test_what_the_clip_held_back(advantage, low, high):
    result, _, _ = term(LossOptions(loss_type="grpo"), advantage)
    assert result.clipped_low[0].int().tolist() == low
    assert result.clipped_high[0].int().tolist() == high


def test_zero_advantage_is_zero_and_counts_no_clip():
    result, values, grads = term(LossOptions(loss_type="grpo"), 0.0)
    assert (values == 0).all()
    assert (grads == 0).all()
    assert not (result.clipped_low | result.clipped_high).any()


def test_policy_gradient_is_minus_advantage_times_logp():
    _, values, grads = term(LossOptions(loss_type="policy_gradient"), 3.0)
    np.testing.assert_allclose(values, -3 * (np.log(RATIOS) - 1), atol=1e-12)
    np.testing.assert_allclose(grads, [-3.0] * 4)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_gradient(advantage):
    result, values, grads = term(LossOptions(loss_type="cispo", epsilon_high=1.5), advantage)
    weight = np.minimum(RATIOS, 1.5)
    np.testing.assert_allclose(values, -weight * advantage * (np.log(RATIOS) - 1), atol=1e-12)
    np.testing.assert_allclose(grads, -weight * advantage, atol=1e-12)
    assert result.clipped_high[0].int().tolist() == ([0, 0, 0, 1] if advantage > 0 else [0] * 4)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_soft_gate(advantage, tau):
    _, values, grads = term(LossOptions(loss_type="sapo"), advantage)
    rho = np.array(RATIOS)
    gate = 1 / (1 + np.exp(-tau * (rho - 1)))
    np.testing.assert_allclose(values, -gate * 4 / tau * advantage, atol=1e-7)
    np.testing.assert_allclose(grads, -4 * gate * (1 - gate) * rho * advantage, atol=1e-7)


def test_sapo_is_the_plain_gradient_on_policy():
    _, _, grads = term(LossOptions(loss_type="sapo", sapo_temperature_pos=3.0), 2.0, [1.0])
    np.testing.assert_allclose(grads, [-2.0], atol=1e-7)


def test_gspo_uses_the_geometric_mean_of_the_ratios():
    """(½·0.9·1.1·2)^¼ = 0.99^¼, far outside 1 ± 3e-4 on the low side."""
    rho = 0.99**0.25
    result, values, grads = term(LossOptions(loss_type="gspo", epsilon=0.1), 2.0)
    np.testing.assert_allclose(result.ratio.detach()[0], [rho] * 4, atol=1e-12)
    np.testing.assert_allclose(values, [-2 * rho] * 4, atol=1e-12)
    np.testing.assert_allclose(grads, [-2 * rho] * 4, atol=1e-12)  # 4 tokens × ρ·¼ each
    _, held, still = term(LossOptions(loss_type="gspo"), -2.0)
    np.testing.assert_allclose(held, [2 * (1 - 3e-4)] * 4, atol=1e-12)
    assert (still == 0).all()


def test_gspo_counts_only_the_masked_length():
    mask = torch.tensor([[True, True, False, False]])
    result, _, grads = term(LossOptions(loss_type="gspo", epsilon=0.5), 1.0, mask=mask)
    np.testing.assert_allclose(result.ratio.detach()[0], [0.45**0.5] * 4, atol=1e-12)
    assert (grads[2:] == 0).all()


@pytest.mark.parametrize(
    ("advantage", "held"),
    [
        (2.0, [math.log(0.5), math.log(0.9), math.log(1.1), 0.4]),
        (-2.0, [-0.4, math.log(0.9), math.log(1.1), math.log(2)]),
    ],
)
def test_gmpo_clips_log_ratios_on_the_side_the_advantage_favours(advantage, held):
    result, values, grads = term(LossOptions(loss_type="gmpo"), advantage)
    weight = math.exp(sum(held) / 4)
    np.testing.assert_allclose(values, [-advantage * weight] * 4, atol=1e-12)
    free = np.isclose(held, np.log(RATIOS))
    np.testing.assert_allclose(grads, -advantage * weight * free, atol=1e-12)
    assert (result.clipped_low | result.clipped_high)[0].tolist() == (~free).tolist()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_without_old_the_gradient_is_the_policy_gradient(name):
    """On the first update ρ = 1, and every loss has gradient −A on each token (gspo and gmpo: −A/|o|, summed −A)."""
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = policy_term(LossOptions(loss_type=name), logp, None, torch.tensor([1.5], dtype=torch.float64), mask).loss
    loss.sum().backward()
    np.testing.assert_allclose(logp.grad[0], [-1.5, -1.5], atol=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("hole", [-math.inf, math.nan])
def test_masked_tokens_carry_no_gradient(name, hole):
    logp = torch.tensor([[-1.0, hole, -2.0], [hole, hole, hole]], requires_grad=True)
    old = torch.tensor([[-0.9, hole, -1.9], [hole, hole, hole]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    loss = policy_term(LossOptions(loss_type=name), logp, old, torch.tensor([1.0, -1.0]), mask).loss
    torch.where(mask, loss, 0.0).sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~mask] == 0).all()
    assert (logp.grad[mask] != 0).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_advantages_per_token_and_per_row_agree(name):
    logp, old = torch.tensor([[-1.0, -2.0], [-0.3, -0.4]]), torch.tensor([[-1.2, -1.9], [-0.2, -0.6]])
    mask, per_row = torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, -2.0])
    spread = per_row[:, None].expand(2, 2)
    left, right = (policy_term(LossOptions(loss_type=name), logp, old, a, mask).loss for a in (per_row, spread))
    assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_impossible_tokens_do_not_make_a_sequence_ratio_nan(name):
    logp = torch.tensor([[-math.inf, -math.inf, -1.0]], requires_grad=True)
    loss = policy_term(LossOptions(loss_type=name), logp, torch.full((1, 3), -1.0), torch.tensor([1.0]), ON[:, :3]).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()


DEFAULTS = {
    "grpo": (0.2, 0.2, "token", "sequence_mean", "group"),
    "bnpo": (0.2, 0.2, "token", "token_mean", "group"),
    "dr_grpo": (0.2, 0.2, "token", "constant", "none"),
    "dapo": (0.2, 0.28, "token", "token_mean", "group"),
    "gspo": (3e-4, 4e-4, "sequence", "sequence_mean", "group"),
    "gmpo": (0.4, 0.4, "token", "sequence_mean", "group"),
}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_each_papers_defaults(name):
    limits, recipe = resolve_limits(LossOptions(loss_type=name)), LOSSES[name]
    assert (limits.low, limits.high, limits.level, recipe.reduction, recipe.scale_rewards) == DEFAULTS[name]


def test_all_nine_losses_are_there():
    assert set(LOSSES) == {*DEFAULTS, "cispo", "sapo", "policy_gradient"}


MISTAKES = [
    (LossOptions(loss_type="grop"), "unknown loss_type 'grop': did you mean 'grpo'?"),
    (LossOptions(loss_type="cispo", epsilon=0.2), "loss.epsilon does not apply to cispo"),
    (LossOptions(loss_type="cispo", epsilon_high=0.2), "must be at least 1, got 0.2"),
    (LossOptions(loss_type="sapo", epsilon=0.2), "loss.epsilon does not apply to sapo"),
    (
        LossOptions(loss_type="policy_gradient", epsilon_high=0.2),
        "loss.epsilon_high does not apply to policy_gradient",
    ),
    (LossOptions(loss_type="grpo", delta=1.1), "loss.delta must be above 1 + epsilon_high = 1.2, got 1.1"),
    (LossOptions(loss_type="gmpo", delta=2.0), "loss.delta does not apply to gmpo"),
    (
        LossOptions(loss_type="gmpo", importance_sampling_level="sequence"),
        "importance_sampling_level=sequence does not apply",
    ),
    (LossOptions(loss_type="grpo", sapo_temperature_pos=2.0), "loss.sapo_temperature_pos does not apply to grpo"),
    (
        LossOptions(loss_type="grpo", epsilom=0.2),
        "unknown option loss.epsilom: did you mean loss.epsilon?",
    ),
]


@pytest.mark.parametrize(("spec", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line(spec, says):
    with pytest.raises(KeelError) as caught:
        policy_term(spec, torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1), ON)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2,), (1, 3), (2, 4)])
def test_advantages_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(KeelError, match=r"give \[B\] or \[B, T\]"):
        policy_term(LossOptions(), torch.zeros(1, 4), None, torch.zeros(shape), ON)


@pytest.mark.parametrize("recipe", LOSSES.values(), ids=LOSSES)
def test_a_surrogate_names_a_function_that_takes_its_options(recipe):
    _, second = inspect.signature(getattr(policy, recipe.term.name), eval_str=True).parameters.values()
    assert issubclass(recipe.term.options, second.annotation)
