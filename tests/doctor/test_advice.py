"""Every proposal is applied: it loads, changes the configuration and has the intended effect."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doctor.followed import check_advice, follow
from doctor.schooled import BASE, schooled_config
from doctor.test_checks import FAULTS
from doctor.test_faults_reference import HERE as REFERENCES
from doctor.test_faults_scoring import HERE as PARTS
from keel.api import train
from keel.config import Config, load_config
from keel.config.checks import advice as surprises
from keel.config.peers import tables
from keel.doctor.advice import either, option_of, setting, steered, times
from keel.doctor.checks import check_history
from keel.doctor.examine import examine
from keel.doctor.findings import Diagnosis, propose
from keel.doctor.history import History
from keel.doctor.keel_subject import build_subject
from keel.doctor.names import TRAINERS
from keel.doctor.preflight import MEASURES
from keel.kl import build_controller, controller_from_options

pytestmark = pytest.mark.doctor


OVER = FAULTS["kl/over-budget"]


def with_config(history: History, *overrides: str) -> tuple[Config, History]:
    """The history with a full configuration, as in a Keel run."""
    tree: dict[str, Any] = {**BASE}
    for section, values in history.config.items():
        tree[section] = {**tree.get(section, {}), **values}
    tree["kl"] = {**tree["kl"], "allow_biased": True}
    config = load_config(tree, overrides)
    return config, replace(history, config=config.to_dict())


def proposals(diagnosis: Diagnosis, code: str) -> list[tuple[str, ...]]:
    return [options for finding in diagnosis.findings if finding.code == code for options in finding.options]


# ---- what a log shows


@pytest.mark.parametrize("code", FAULTS)
def test_what_is_proposed_for_a_run_can_be_followed(code: str) -> None:
    config, history = with_config(FAULTS[code])
    diagnosis = check_history(history)
    assert code in [finding.code for finding in diagnosis.findings]
    check_advice(config, diagnosis)


OTHERWISE = {
    "β = 0": ["kl.beta=0"],
    "β = 0 and a pairing without a gradient": ["kl.beta=0", "kl.estimator=k1", "kl.gradient=plain"],
    "its own gradient": ["kl.gradient=plain"],
    "Ziegler's rule": ["kl.controller={name: ziegler, horizon: 500}"],
    "a target far away": ["kl.controller={name: step, target: 3, preset: gentle}"],
    "a target per sequence": ["kl.controller={name: pid, target: 3, unit: per_sequence}"],
    "dr_grpo, steered": ["loss.loss_type=dr_grpo", "kl.controller={name: dual, target: 0.1}"],
    "dapo": ["loss.loss_type=dapo"],
    "no rollbacks": ["guards.max_rollbacks=0"],
    "a budget": ["kl.budget.max=0.1"],
    "dropout": ["model.dropout=true"],
    "dropout of LoRA": ["model.lora={r: 4, dropout: 0.1}"],
    "a moving reference": ["reference={kind: ema, every: 5, alpha: 0.2}"],
    "already warmed up and wide": ["optim.warmup_steps=10", "loss.epsilon_high=0.28", "guards.on_spike=skip"],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_and_under_other_options_too(name: str) -> None:
    for code in (
        "kl/over-budget",
        "kl/explosion",
        "kl/at-start",
        "entropy/collapse",
        "optim/spike",
        "retention/dropping",
    ):
        config, history = with_config(FAULTS[code], *OTHERWISE[name])
        check_advice(config, check_history(history))


# ---- what a preflight finds, and what is left of it once its advice is followed

CURED = {
    "the model's own dropout": ("scoring/dropout", ["model.dropout=true", f"model.name={PARTS}:with_dropout"]),
    "dropout of LoRA": ("scoring/dropout", ["model.lora={r: 4, dropout: 0.2, adapter: null}"]),
    "a filtered sampler": ("sampler/filter", ["rollout.top_p=0.5"]),
    "another checkpoint": ("reference/wrong", [f"reference.kind={REFERENCES}:other_checkpoint"]),
    "weights that are shared": ("reference/moving", [f"reference.kind={REFERENCES}:shared_weights"]),
    "an average that follows": ("reference/follows", ["reference={kind: ema, every: 1, alpha: 0.99}"]),
    "k1 in the loss": ("kl/no-gradient", ["kl.allow_biased=true", "kl.estimator=k1", "kl.gradient=plain"]),
    "k3 in the reward": ("kl/reversed", ["kl.allow_biased=true", "kl.estimator=k3", "kl.placement=reward"]),
    "twice the size": ("kl/scale", ["kl.allow_biased=true", f"kl.estimator={REFERENCES}:doubled_k2"]),
    "a penalty that is divided": ("kl/scale", ["kl.estimator=k1", "kl.placement=reward", "loss.scale_rewards=group"]),
    "a penalty without need": ("kl/unneeded", ["loss.loss_type=dr_grpo", "kl.controller={name: dual, target: 0.1}"]),
    "hardly any spread": ("advantage/amplified", [f"rewards=[{{name: {REFERENCES}:hardly_differing}}]"]),
    "a learning rate too high": ("optim/lr-too-high", ["optim.learning_rate=0.01", "run.max_steps=100"]),
}


@pytest.mark.parametrize("fault", CURED)
def test_a_fault_is_gone_once_its_advice_is_followed(fault: str) -> None:
    code, overrides = CURED[fault]
    config = schooled_config(*overrides)
    diagnosis = tried(config, code)
    check_advice(config, diagnosis)
    offered = proposals(diagnosis, code)
    assert offered, diagnosis.findings
    for proposal in offered:
        after = tried(follow(config, proposal), code)
        assert code not in [finding.code for finding in after.findings], proposal


def tried(config: Config, code: str) -> Diagnosis:
    """The findings of the probe that looks for this code."""
    names = {"scoring": "scoring", "sampler": "sampler", "reference": "reference", "kl": "kl_term"}
    names |= {"advantage": "advantage", "optim": "update", "output": "collection"}
    (measure,) = [measure for measure in MEASURES if measure.name == names[code.partition("/")[0]]]
    return Diagnosis(measure.run(build_subject(config)).findings)


def test_a_limit_that_cuts_is_proposed_wider() -> None:
    config = schooled_config("rollout.max_completion_length=1")
    (proposal,) = proposals(tried(config, "output/truncated"), "output/truncated")
    assert follow(config, proposal).rollout.max_completion_length == 2


# ---- β: in the finding's unit, quick enough, and back again


@pytest.mark.parametrize("name", ["as it is", *OTHERWISE])
def test_a_controller_that_is_proposed_acts_within_the_steps_that_remain(name: str) -> None:
    """At 4 × the target, β at least doubles in 20 steps. With a KL far below it, β falls again."""
    config, history = with_config(OVER, *OTHERWISE.get(name, []))
    offered = proposals(check_history(history), "kl/over-budget")
    assert offered or config.kl.budget is not None
    for proposal in offered:
        if not any(override.startswith("kl.controller") for override in proposal):
            continue
        followed = follow(config, proposal)
        controller = controller_from_options(followed.kl, followed.episodes_per_step)
        assert controller.unit == "per_token"
        target = followed.kl.controller.params["target"]
        assert target <= 0.1  # half of the 0.2 that were exceeded
        state = controller.init()
        start = max(state.beta, 1e-6)
        for _ in range(20):
            state = controller.update(state, 4 * target)
        assert state.beta >= 2 * start, (proposal, start, state.beta)
        high = state.beta
        for _ in range(60):
            state = controller.update(state, 0.1 * target)
        assert state.beta < high / 2


def test_the_old_proposal_would_not_have_passed() -> None:
    """Ziegler's controller at 0.05 per sequence changes β by a hundredth in seven steps."""
    controller = build_controller("ziegler", 0.00997, target=0.05, episodes_per_step=128)
    state = controller.init()
    for _ in range(7):
        state = controller.update(state, 0.2)
    assert controller.unit == "per_sequence"
    assert state.beta < 1.02 * 0.00997


def test_a_real_run_follows_its_own_advice_and_beta_moves(tmp_path: Path) -> None:
    """A run exceeds a small KL budget. It is repeated with the proposed controller, and β changes."""

    def run(name: str, *overrides: str) -> Path:
        base = schooled_config(
            f"run.dir={tmp_path}", f"run.name={name}", "run.max_steps=8", "optim.learning_rate=1e-3", "kl.beta=0.001"
        )
        config = load_config(base.to_dict(), overrides)
        return Path(train(config).directory)

    loosened = ["kl_over_budget=0.0005", "kl_explosion=100", "kl_explosion_floor=100"]
    diagnosis = examine(run("before"), overrides=loosened)
    offered = proposals(diagnosis, "kl/over-budget")
    (steers,) = [options for options in offered if any(override.startswith("kl.controller") for override in options)]
    (stronger,) = [options for options in offered if options[0].startswith("kl.beta=")]
    betas = betas_of(run("steered", *steers))
    assert betas[-1] >= 2 * betas[0]
    assert betas_of(run("stronger", *stronger))[0] == pytest.approx(0.01)


def betas_of(path: Path) -> tuple[float, ...]:
    from keel.doctor.readers import read_history

    return read_history(path, {}).series["kl/beta"].values


# ---- other trainers, and what loading says


@pytest.mark.parametrize("code", FAULTS)
def test_what_is_proposed_to_a_user_of_trl_is_trls(code: str) -> None:
    options = {
        "kl": {"beta": 0.04, "bias_correction": False},
        "loss": {"loss_type": "grpo", "scale_rewards": "group", "num_iterations": 1},
        "optim": {"learning_rate": 1e-5, "max_grad_norm": 1.0},
        "rollout": {"num_generations": 8, "max_completion_length": 64, "top_p": 1.0, "temperature": 1.0},
    }
    diagnosis = check_history(replace(FAULTS[code], source="TRL", config=options))
    names = {alias.name for alias in tables()["TRL"]} | set(TRAINERS["TRL"].options)
    for part in (*diagnosis.findings, *diagnosis.hypotheses):
        for override in (override for proposal in part.options for override in proposal):
            assert override.partition("=")[0] in names, override


def test_a_log_without_options_gets_words() -> None:
    finding = check_history(replace(OVER, source="table", config={})).findings[0]
    assert finding.options == ()
    assert finding.advice == "ten times kl.beta, or half of optim.learning_rate"


def test_what_loading_calls_surprising_goes_away_as_it_says() -> None:
    config = schooled_config(
        "kl.placement=reward", "kl.estimator=k1", "loss.scale_rewards=group", "loss.loss_type=dapo"
    )
    (surprise,) = surprises(config)
    for proposal in ("loss.scale_rewards=none", "kl.placement=advantage"):
        assert proposal in surprise
        assert surprises(follow(config, [proposal])) == []


# ---- the parts


def test_braces_in_words_stay_as_they_are() -> None:
    assert str(either("use {this}", propose("set {}", {"kl.beta": 0.1}))) == "use {this}, or set kl.beta=0.1"
    assert str(either("use {this}", "")) == "use {this}"
    whole_section = propose("{}", {"kl.controller": {"name": "dual", "target": 0.1}, "kl.beta": 0.01})
    assert shlex.split(str(whole_section)) == ["kl.controller={name: dual, target: 0.1}", "kl.beta=0.01"]
    assert setting("set {}", {}, "nothing") == either("nothing")


def test_a_multiple_is_rounded_and_whole_where_the_option_is() -> None:
    tree = {"optim": {"learning_rate": 3e-5}, "rollout": {"num_generations": 3}, "kl": {"beta": 0}}
    assert times(tree, "optim.learning_rate", 0.1, "a tenth of").proposals == ({"optim.learning_rate": 3e-6},)
    assert times(tree, "rollout.num_generations", 2, "twice").proposals == ({"rollout.num_generations": 6},)
    assert times(tree, "kl.beta", 10, "ten times").proposals == ()


def test_a_controller_that_holds_the_limit_is_not_proposed_again() -> None:
    tree = {"kl": {"beta": 0.01, "controller": {"name": "dual", "target": 0.05}}}
    assert steered(tree, 0.2) == {}
    assert steered(tree, 0.05) == {"kl.controller.target": 0.025}
    assert option_of(tree, "kl.controller.name") == "dual"
