"""A user's own estimator is audited before it trains: sound ones pass, the others are refused by what they do."""

from dataclasses import replace

import pytest
import torch

from keel.base.errors import KeelError
from keel.config import load_config
from keel.kl import FACTS, Fact, check_pairing, estimate, find_fact, parse_gradient
from keel.run.build import build_policy, build_run
from keel.trainer.state import State
from keel.trainer.step import train_step
from keel.verify import audit, parse_formula
from keel.verify.custom import estimator_facts, rows_of

HERE = __name__


def own_k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def own_k2_of_ratio(d):
    return d * d / 2


def own_k2_in_fp32_of_ratio(d):
    return d.float() ** 2 / 2


def own_weighted(logp, ref_logp, old_logp):
    return (logp - old_logp).exp().detach() * (logp - ref_logp) ** 2 / 2


def own_k1(logp, ref_logp):
    return logp - ref_logp


def own_k3(logp, ref_logp):
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


def reversed_k3(logp, ref_logp):
    return torch.expm1(logp - ref_logp) - (logp - ref_logp)


def without_gradient(logp, ref_logp):
    return ((logp - ref_logp) ** 2 / 2).detach()


def one_number(logp, ref_logp):
    return (logp - ref_logp).mean()


def config(estimator: str, *more: str):
    small = ["rollout.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_completion_length=4"]
    return load_config({}, ["kl.beta=0.05", f"kl.estimator={HERE}:{estimator}", *small, *more])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("own_k2", ("policy||ref", "near policy||ref")),
        ("own_k2_of_ratio", ("policy||ref", "near policy||ref")),
        ("own_weighted", ("policy||ref", "policy||ref")),
        ("own_k3", ("ref||policy", "near ref||policy")),
    ],
)
def test_what_is_sound_trains_without_a_permit(estimator, expected):
    config(estimator)
    name = f"{HERE}:{estimator}"
    facts = estimator_facts(name)
    rows = [find_fact(name, "loss", sampling, "plain", facts=facts) for sampling in ("on", "off")]
    assert tuple(row.expected_gradient for row in rows) == expected


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        ("own_k1", "is zero"),
        ("without_gradient", "is zero"),
        ("reversed_k3", "no divergence"),
        ("one_number", "one value per token"),
    ],
)
def test_what_is_not_is_refused_by_what_it_does(estimator, words):
    with pytest.raises(KeelError, match=words):
        config(estimator)


def test_a_permit_lets_it_through_and_the_reward_takes_k1():
    config("reversed_k3", "kl.allow_biased=true")
    config("own_k1", "kl.placement=reward")
    with pytest.raises(KeelError, match="no divergence"):
        config("own_k2", "kl.placement=reward")
    with pytest.raises(KeelError, match=r"level=sequence has no form"):
        config("own_k2", "kl.level=sequence")


def test_values_and_steps_are_those_of_the_formula():
    own = config("own_k2", "guards.on_step0_kl=warn")
    settings = [own, load_config(own, ["kl.estimator=k2", "kl.gradient=plain"])]
    torch.manual_seed(0)
    logp, ref = -torch.rand(3, 4), -torch.rand(3, 4)
    mask = torch.tensor([[True, True, False, False]] * 3)
    torch.testing.assert_close(estimate(f"{HERE}:own_k2", logp, ref, mask), estimate("k2", logp, ref, mask))
    lines = []
    for setting in settings:
        loaded = build_policy(setting)
        run = build_run(setting, loaded).run
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.mul_(1.05)  # away from the reference, so that the term is not zero
        lines.append(train_step(run, State(kl=run.controller.init())).metrics)
    assert lines[0]["loss/kl"] > 0
    for name in ("loss/kl", "loss/total", "grad/norm"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-5), name


def scaled_k2(logp, ref_logp, *, scale=1.0):
    return scale * (logp - ref_logp) ** 2 / 2


def bent(d, power, scale: float = 0.5):
    return scale * d**power


def kl_of(estimator):
    return load_config({"kl": {"beta": 0.1, "estimator": estimator}}).kl


def test_an_estimator_has_parameters_of_its_own_and_is_audited_with_them():
    logp, ref_logp = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
    name = f"{HERE}:bent(power=2)"
    assert kl_of(name).estimator == name
    assert torch.equal(estimate(name, logp, ref_logp), own_k2(logp, ref_logp))
    assert torch.equal(estimate(f"{HERE}:scaled_k2(scale=3)", logp, ref_logp), 3 * own_k2(logp, ref_logp))
    verdicts = [
        [fact.expected_gradient for fact in estimator_facts(n)]
        for n in (name, f"{HERE}:own_k2_of_ratio", f"{HERE}:own_k2_in_fp32_of_ratio")
    ]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    with pytest.raises(KeelError, match="no divergence's gradient"):  # three times the gradient
        kl_of(f"{HERE}:scaled_k2(scale=3)")
    assert kl_of(f"{HERE}:scaled_k2(scale=1.0)").estimator.endswith("(scale=1.0)")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("scaled_k2(scal=3)", r"unknown kl.estimator .*:scaled_k2 parameter 'scal': did you mean 'scale'"),
        ("scaled_k2(3)", r"write parameters as module:attr\(name=value, …\)"),
        ("scaled_k2(scale=)", r"write parameters as module:attr\(name=value, …\)"),
    ],
)
def test_parameters_of_an_estimator_are_refused_in_one_line(written, says):
    with pytest.raises(KeelError, match=says):
        kl_of(f"{HERE}:{written}")


# -- the built-in estimators, written as formulas -------------------------------------------------------------------

WRITTEN = {"k1": "logp - ref", "k2": "(logp - ref)**2 / 2", "k3": "expm1(ref - logp) - (ref - logp)"}
WRITTEN["abs"] = "abs(logp - ref)"
RHO = {None: "1", "rho": "exp(logp - old)", "sg_rho": "detach(exp(logp - old))"}


def written(estimator: str, gradient: str) -> str:
    """An estimator in a gradient form as a formula."""
    form = parse_gradient(gradient)
    value = f"{RHO[form.weight]} * ({WRITTEN[estimator]})"
    if form.carrier is None:
        return value
    carrier = f"{RHO[form.weight]} * ({WRITTEN[form.carrier]})"
    return f"detach({value}) + {carrier} - detach({carrier})"


def facts_of(name: str, formula: str) -> dict[tuple[str, ...], Fact]:
    rows = rows_of(name, audit(parse_formula(formula), formula))
    return {(row.placement, row.sampling, row.gradient, row.level): row for row in rows}


@pytest.mark.parametrize("estimator", WRITTEN)
def test_a_built_in_estimator_as_a_formula_has_the_facts_of_the_built_in_one(estimator):
    name = f"mine:{estimator}"
    own = facts_of(name, WRITTEN[estimator])
    for fact in FACTS:
        if fact.estimator == estimator and fact.gradient in ("score", "plain"):
            row = own.pop((fact.placement, fact.sampling, fact.gradient, fact.level))
            assert (row.value, row.expected_gradient) == (fact.value, fact.expected_gradient), fact
    assert not own


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    sorted(
        {
            (f.estimator, f.gradient)
            for f in FACTS
            if f.placement == "loss" and f.estimator in WRITTEN and f.level == "token"
        }
    ),
)
def test_every_gradient_form_in_the_loss_as_a_formula_has_the_facts_of_the_built_in_one(estimator, gradient):
    own = facts_of("mine:own", written(estimator, gradient))
    for sampling in ("on", "off"):
        fact, row = find_fact(estimator, "loss", sampling, gradient), own["loss", sampling, "plain", "token"]
        assert replace(row, estimator=estimator, gradient=gradient) == fact


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("estimator", WRITTEN)
def test_pairings_of_a_formula_are_those_of_the_built_in_estimator(estimator, reduction, off_policy):
    rows = rows_of("mine:own", audit(parse_formula(WRITTEN[estimator]), estimator))
    options = {"off_policy": off_policy, "reduction": reduction, "allow_biased": True}
    for placement, level in (("loss", "token"), ("advantage", "token"), ("advantage", "sequence"), ("reward", "token")):
        pairings = [
            check_pairing(name, placement, "plain", level=level, facts=rows, **options)
            for name in (estimator, "mine:own")
        ]
        assert pairings[0].expected_gradient == pairings[1].expected_gradient, (placement, level)


def k1_with_a_constant(logp, ref_logp):
    return logp - ref_logp + 0.1


def own_weighted_k1(logp, ref_logp, old_logp):
    return (logp - old_logp).exp() * (logp - ref_logp)


def three_k1_in_half_precision(logp, ref_logp):
    return (3 * (logp - ref_logp)).bfloat16()


def test_a_constant_per_token_is_a_length_penalty():
    """A reward sums it over the completion. A mean over each completion weights its score by 1/length."""
    with pytest.raises(KeelError, match="no divergence"):
        config("k1_with_a_constant", "kl.placement=reward")
    with pytest.raises(KeelError, match="no divergence"):
        config("k1_with_a_constant", "kl.placement=advantage", "kl.level=sequence")
    config("k1_with_a_constant", "kl.placement=advantage", "loss.loss_type=dapo")
    with pytest.raises(KeelError, match="no divergence"):
        config("k1_with_a_constant", "kl.placement=advantage", "loss.loss_type=grpo")


def test_the_bare_score_of_ones_own_weighted_k1_is_found_under_a_mean_over_each_completion():
    config("own_weighted_k1", "loss.loss_type=grpo")
    config("own_weighted_k1", "loss.loss_type=dapo", "kl.reduction=loss")
    with pytest.raises(KeelError, match="no divergence"):
        config("own_weighted_k1", "loss.loss_type=grpo", "kl.reduction=loss")


def test_half_precision_is_too_coarse_for_a_verdict():
    with pytest.raises(KeelError, match="bfloat16"):
        config("three_k1_in_half_precision", "kl.placement=reward")
