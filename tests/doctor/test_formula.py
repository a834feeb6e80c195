"""H03: the KL formula decides it, equally for configurations and logs, and its advice can be applied."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from doctor.histories import configured, healthy
from doctor.schooled import schooled_config
from keel.config import Config, load_config
from keel.doctor.checks import check_history
from keel.doctor.checks.kl import DR_GRPO
from keel.doctor.findings import SuspectVerdict
from keel.doctor.formula import formula_of
from keel.doctor.keel_subject import KeelSubject, build_subject
from keel.doctor.measure import Outcome
from keel.doctor.preflight import preflight
from keel.doctor.probes.kl_term import probe_kl_term
from keel.doctor.suspects import judge_suspects, preflight_figures
from keel.doctor.thresholds import load_thresholds
from keel.kl.facts import CORRECT_GRADIENTS, FACTS, NEAR, PAPERS, POLICY_REF, Fact, check_pairing, suggest_pairing
from keel.losses import LOSSES

pytestmark = pytest.mark.doctor


LIMITS = load_thresholds()
FREELY = ("loss.scale_rewards=none", "kl.allow_biased=true")
FORMULAS = [
    fact
    for fact in FACTS
    # a penalty in the reward is one number a completion, whatever kl.level says: the token rows have no configuration
    if not (fact.placement == "reward" and fact.level == "token")
]

NAMES = ["-".join((f.estimator, f.placement, f.gradient, f.sampling, f.level)) for f in FORMULAS]


def overrides_of(fact: Fact) -> list[str]:
    gradient = fact.gradient if fact.placement == "loss" and fact.level == "token" else "plain"
    return [
        f"kl.estimator={fact.estimator}",
        f"kl.placement={fact.placement}",
        f"kl.gradient={gradient}",
        f"kl.level={fact.level}",
        f"loss.num_iterations={2 if fact.sampling == 'off' else 1}",
        *FREELY,
    ]


@cache
def _bench() -> KeelSubject:
    return build_subject(schooled_config("rollout.prompts_per_step=2", "rollout.num_generations=2"))


def on_the_bench(config: Config) -> KeelSubject:
    """The schooled setup with another KL term; model, batch and reference are shared."""
    setup = _bench()
    run = replace(setup.run, kl=config.kl, pairing=config.kl.pairing(off_policy=config.off_policy))
    return replace(setup, config=config, built=replace(setup.built, run=run))


def before(config: Config) -> SuspectVerdict:
    """The decision of `preflight`, from the KL probe only."""
    kl = config.kl
    outcome = _probed(kl.estimator, kl.placement, kl.gradient, kl.level)
    figures = {**preflight_figures([outcome]), "reference/kl_at_start": 0.0}
    return h03(judge_suspects(outcome.findings, figures, LIMITS, outcome.unchecked, formula_of(config.to_dict())))


@cache
def _probed(*pairing: str) -> Outcome:
    """The experiment sums over the policy's own samples, so several updates per batch do not change it."""
    options = zip(("kl.estimator", "kl.placement", "kl.gradient", "kl.level"), pairing, strict=True)
    return probe_kl_term(on_the_bench(schooled_config(*map("=".join, options), *FREELY)))


def after(config: Config) -> SuspectVerdict:
    """The decision of `keel doctor RUN`, from a log and its configuration."""
    return h03(check_history(healthy(config=config.to_dict())).hypotheses)


def h03(hypotheses: tuple[SuspectVerdict, ...]) -> SuspectVerdict:
    return next(hypothesis for hypothesis in hypotheses if hypothesis.name == "H03")


@pytest.mark.parametrize("fact", FORMULAS, ids=NAMES)
def test_every_formula_is_decided_alike_before_and_after_and_its_advice_makes_it_right(fact: Fact) -> None:
    config = schooled_config(*overrides_of(fact))
    decided, then = before(config), after(config)
    right = fact.expected_gradient in (POLICY_REF, NEAR)
    assert decided.verdict == then.verdict == ("ruled out" if right else "confirmed"), (decided, then)
    for hypothesis in (decided, then):
        if right:
            assert hypothesis.options == ()
            continue
        assert hypothesis.options, hypothesis
        for proposal in hypothesis.options:
            mended = load_config(config.to_dict(), proposal)
            for override in proposal:
                name, _, value = override.partition("=")
                assert str(option(config, name)) != value, f"{override} is set already"
            assert after(mended).verdict == before(mended).verdict == "ruled out"


def option(config: Config, dotted: str) -> Any:
    value: Any = config.to_dict()
    for part in dotted.split("."):
        value = value[part]
    return value


def test_plain_k3_is_the_forward_kl_and_its_code_is_measured_against_that() -> None:
    """The most common formula: its cosine to ∇KL(policy‖ref) is 0.9, and to its own gradient 1."""
    config = schooled_config("kl.gradient=plain")
    diagnosis = preflight(config)
    row = h03(diagnosis.hypotheses)
    assert diagnosis.findings == ()
    assert row.verdict == "confirmed"
    assert "∇KL(ref‖policy)" in row.figure
    assert "measured on this batch is 1.000" in row.figure
    assert row.action.startswith("set kl.gradient=auto for ∇KL(policy‖ref), or keep it")
    assert h03(check_history(configured(kl__gradient="plain")).hypotheses).action == row.action
    figures = probe_kl_term(on_the_bench(config)).figures
    assert 0.5 < figures["cosine"] < LIMITS["kl_gradient_cosine"]
    assert figures["cosine_expected"] == pytest.approx(1.0, abs=1e-6)


def test_code_that_does_not_do_what_the_formula_says_is_found() -> None:
    """Both KL directions are accepted, but the code must have the direction of the formula."""
    plain = check_pairing("k3", gradient="plain")
    setup = on_the_bench(schooled_config())
    broken = replace(setup.run, pairing=replace(setup.run.pairing, form=plain.form))
    setup = replace(setup, built=replace(setup.built, run=broken))
    (finding,) = probe_kl_term(setup).findings
    assert finding.code == "kl/reversed"
    assert "the configured formula has ∇KL(policy‖ref)" in finding.cause
    assert finding.options == ()


def absolute(d: Tensor) -> Tensor:
    """A user's estimator with the gradient of the total variation."""
    return d.abs()


def test_the_total_variation_is_right_only_for_who_asks_for_it() -> None:
    own, named = (
        [finding.code for finding in _probed(name, "loss", "plain", "token").findings]
        for name in ("doctor.test_formula:absolute", "abs")
    )
    assert own == ["kl/reversed"]
    assert not named


def test_no_penalty_is_no_wrong_one() -> None:
    for overrides in (["kl.beta=0"], ["kl.beta=0", "kl.measure_every=0"], ["kl.beta=0", "kl.gradient=plain"]):
        assert after(schooled_config(*overrides)).verdict == "ruled out"
    unmeasured = preflight(schooled_config("kl.beta=0", "kl.measure_every=0"))
    assert h03(unmeasured.hypotheses).verdict == "ruled out"
    assert "kl.beta is 0" in h03(unmeasured.hypotheses).figure


def test_a_pairing_without_a_row_is_measured_and_not_called_reversed() -> None:
    for level in ("token", "sequence"):
        reverse = ("kl.estimator=exact_reverse", "kl.placement=reward", f"kl.level={level}")
        config = schooled_config(*reverse, "kl.allow_biased=true")
        formula = formula_of(config.to_dict())
        assert formula is not None
        assert formula.expected in ("zero", "wrong")
        assert before(config).verdict == after(config).verdict == ("ruled out" if formula.right else "confirmed")


def test_a_kl_that_does_not_start_at_zero_confirms_it_whatever_the_formula() -> None:
    history = healthy()
    series = history.series["kl/policy_ref/k3/mean"]
    lifted = replace(series, values=(0.2, *series.values[1:]))
    row = h03(check_history(healthy(series={**history.series, "kl/policy_ref/k3/mean": lifted})).hypotheses)
    assert row.verdict == "confirmed"
    assert "kl/at_start is 0.2" in row.figure


@pytest.mark.parametrize(("corrected", "verdict"), [(True, "ruled out"), (False, "confirmed")])
def test_a_run_of_trl_is_decided_by_its_bias_correction(corrected: bool, verdict: str) -> None:
    options = {"kl": {"beta": 0.04, "bias_correction": corrected}, "loss": {"num_iterations": 1}}
    row = h03(check_history(healthy(source="TRL", config=options)).hypotheses)
    assert row.verdict == verdict
    assert row.options == (() if corrected else (("use_bias_correction_kl=True",),))


def test_what_a_log_does_not_say_stays_open() -> None:
    row = h03(check_history(healthy(source="table", config={})).hypotheses)
    assert row.verdict == "not testable here"
    assert "estimator and placement are not in the log" in row.figure


@pytest.mark.parametrize("fact", FORMULAS, ids=NAMES)
def test_the_nearest_right_pairing_changes_as_little_as_it_can(fact: Fact) -> None:
    gradient = fact.gradient if fact.placement == "loss" and fact.level == "token" else "plain"
    change = suggest_pairing(fact.estimator, fact.placement, gradient, fact.level, off_policy=fact.sampling == "off")
    assert len(change) <= 1
    assert "kl.placement" not in change


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo"])
def test_what_is_kept_of_trls_term_is_what_is_proven(corrected, iterations, loss_type):
    options = {"kl": {"beta": 0.1, "bias_correction": corrected}}
    formula = formula_of({**options, "loss": {"loss_type": loss_type, "num_iterations": iterations}}, "TRL")
    proven = check_pairing(
        estimator="k3",
        placement="loss",
        gradient="rho" if corrected else "plain",
        level="token",
        off_policy=iterations > 1,
        reduction=LOSSES[loss_type].reduction,
        allow_biased=True,
    )
    assert formula is not None
    assert formula.expected == proven.expected_gradient
    assert formula.note.endswith(proven.note.partition(": ")[2])
    assert formula.right == (proven.expected_gradient in CORRECT_GRADIENTS)


def test_the_recipe_without_a_kl_term_is_named_as_in_the_table_of_papers():
    assert PAPERS["dr_grpo"].paper == DR_GRPO
