"""Gold answers that earn nothing, answers of other rows, and exploits: each is named, with what would earn."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from doctor import faults_gold
from doctor.followed import check_named_first, preflight_of
from doctor.schooled import schooled_config
from keel.base.types import Group, Problem, Reward, RewardFailure
from keel.doctor import evidence
from keel.doctor.keel_subject import build_subject
from keel.doctor.pairing import association
from keel.doctor.probes.collection import _cliff, _failed, _spread, empty_cliff_findings, probe_collection
from keel.doctor.probes.exploits import exploit_findings, nearly_all
from keel.doctor.probes.gold_rewards import (
    JudgedGold,
    _lacking,
    _whatever_is_said,
    gold_findings,
    judged_golds,
    unpaid_golds,
)
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.envs import Episode
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.rewards import as_reward

pytestmark = pytest.mark.doctor


HERE = "doctor.faults_gold"
OWN = "rewards=[{name: task}]"


def reward(name: str) -> str:
    return f"rewards=[{{name: '{HERE}:{name}'}}]"


def task(name: str) -> list[str]:
    return [f"task={{name: '{HERE}:{name}'}}", OWN]


def collected(*overrides: str):
    setup = build_subject(schooled_config(*overrides))
    try:
        return probe_collection(setup)
    finally:
        setup.run.close()


FAULTS = {
    "a tag": ("reward/gold", [reward("tagged")], "in the form <answer>…</answer> earns a reward on 8 of 8"),
    "a worked solution where a value is compared": (
        "reward/gold",
        task("WorkedSolutions"),
        "last number earns a reward on 8",
    ),
    "answers of the next row": ("data/misaligned", task("NextRow"), "1 before their own in the batch"),
    "one answer for all": ("reward/exploit", task("OneAnswer"), "have the same gold answer, '7'"),
    "pay for the prompt": ("reward/exploit", [reward("judges_the_prompt")], "wrong and empty answers earn the same"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_collection_names_it_and_what_would_have_earned(fault: str) -> None:
    code, overrides, evidence = FAULTS[fault]
    findings = {finding.code: finding for finding in collected(*overrides).findings}
    assert code in findings
    assert evidence in findings[code].evidence


@pytest.mark.parametrize("fault", ["a tag", "answers of the next row"])
def test_it_is_the_first_finding_of_a_preflight_though_completions_earn_nothing_too(fault: str) -> None:
    code, overrides, _ = FAULTS[fault]
    check_named_first(code, overrides)


def test_differences_of_a_ten_thousandth_are_no_judgement_of_answers() -> None:
    """The code that scales such differences up is the more severe problem and comes first."""
    findings = {finding.code: finding.severity for finding in collected(reward("trifles")).findings}
    assert findings["reward/gold"] == "warning"


class Lasting(Episode):
    """An environment that ends after a number of turns."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def step(self, text: str) -> str | None:
        self.left -= 1
        return "go on" if self.left else None


@pytest.mark.parametrize(("turns", "named"), [(1, ("answer/unusable", "error")), (2, ("reward/gold", "note"))])
def test_an_episode_that_is_over_before_the_answer_is_no_fault_of_the_reward(
    turns: int, named: tuple[str, str]
) -> None:
    built = build_subject(schooled_config())
    task = SimpleNamespace(multi_turn=True, start=lambda problem: Lasting(turns))
    setup = replace(built, built=replace(built.built, run=replace(built.run, task=task)))
    judged = [JudgedGold(Problem(str(i), "2 3", "3"), ("<ask/>", "3"), 0.0, 0.0, (0.0, 0.5)) for i in range(16)]
    with closing(built.run):
        (found,) = gold_findings(setup, judged, unpaid_golds(judged, load_thresholds()))
    assert (found.code, found.severity) == named


def test_a_reward_of_the_call_before_is_the_cause_of_gold_answers_that_do_not_earn() -> None:
    diagnosis = check_named_first("reward/nondeterministic", [reward("call_before")])
    assert "reward/gold" in [finding.code for finding in diagnosis.findings if finding.severity == "note"]


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_of_two_operands_that_is_right_half_of_the_time_is_luck(seed: int) -> None:
    assert not collected(reward("last_number_earns"), f"run.seed={seed}").findings


def test_an_attack_must_pay_on_nearly_all_problems_and_on_more_than_luck_explains() -> None:
    thresholds = load_thresholds()
    assert nearly_all([1.0] * 16, thresholds)
    assert nearly_all([1.0] * 30 + [0.0] * 2, thresholds)
    assert not nearly_all([1.0] * 12, thresholds)
    assert not nearly_all([1.0] * 50 + [0.0] * 14, thresholds)


def judged(*totals: tuple[float, float, float]) -> list[JudgedGold]:
    """Rewards of a gold, an empty and a wrong answer on each problem."""
    return [JudgedGold(Problem(str(i), ""), ("7",), *row[:2], row[2:]) for i, row in enumerate(totals)]


def test_gold_answers_that_trifles_outrank_on_most_problems_are_lacking() -> None:
    trifles = judged((0.5, 0.4999, 0.5001), (0.9, 0.8999, 0.9001), (0.2, 0.2001, 0.1999), (0.7, 0.6999, 0.6999))
    assert _lacking(trifles, 0.07, 1e-9) == trifles[:3]
    sound = judged((1.0, 0.0, 1.01), (1.0, 0.0, 0.0), (1.0, 0.0, 0.2), (1.0, 0.0, 0.0))
    assert not _lacking(sound, 0.1, 1e-9)


def test_problems_on_which_every_text_earns_the_full_reward_are_told_from_gold_that_earns_nothing() -> None:
    full, sound, none = (1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    open_, unpaid = judged(full, full, sound), judged(none, none, sound)
    assert _whatever_is_said(open_[:2], [*full, *sound], 1e-9) == open_[:2]
    assert not _whatever_is_said(unpaid[:2], [*none, *sound], 1e-9)
    assert not _whatever_is_said(judged(none), none, 1e-9)


def test_a_gold_answer_without_the_form_that_pays_a_little_is_no_fault() -> None:
    assert not collected(reward("form_and_answer")).findings


def spread(values: list[float], gold: float | None):
    """The spread findings for 64 groups of four completions with these rewards."""
    rewards = [tuple(Reward(value) for value in values)] * 64
    groups = [Group(Problem(str(i), ""), (), (), earned) for i, earned in enumerate(rewards)]
    config = schooled_config()
    setup = SimpleNamespace(
        thresholds=load_thresholds(),
        failures=(),
        groups=groups[:4],
        budget=Budget(further=groups[4:]),
        config=config,
        built=SimpleNamespace(sampling=SimpleNamespace(num_generations=4), judge=SimpleNamespace(remote=[])),
    )
    return [(f.code, f.severity, f.cause) for f in _spread(setup, 1.0, gold)]


def test_what_is_constant_because_all_is_solved_is_told_from_what_always_fails() -> None:
    ((code, severity, cause),) = spread([1.0] * 4, 1.0)
    assert (code, severity) == ("reward/constant", "warning")
    assert "already solves" in cause
    ((code, severity, _),) = spread([0.0] * 4, 1.0)
    assert (code, severity) == ("reward/constant", "error")
    ((code, severity, _),) = spread([0.5, 0.5, 0.5, 0.52], 1.0)
    assert (code, severity) == ("reward/weak", "warning")
    assert not spread([0.0, 0.0, 0.0, 1.0], 1.0)


TASKS = [
    {"name": "arithmetic"},
    {"name": "arithmetic", "skill": "add"},
    {"name": "capitals"},
    {"name": "countdown"},
]


@pytest.mark.parametrize("options", TASKS, ids=lambda options: " ".join(map(str, options.values())))
def test_gold_answers_of_our_own_tasks_are_sound(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The schooled setup with another task's problems. No model is used."""
    setup = build_subject(schooled_config(OWN))
    try:
        other = build_task(**options)
        monkeypatch.setattr(setup.run, "task", other)
        collector = replace(setup.built.collector, judge=Judge.of(other, on_error="zero"))
        object.__setattr__(setup.built, "collector", collector)
        object.__setattr__(setup.batch, "groups", ())  # problems of another task
        judged = judged_golds(setup)
        assert len(judged) == 18
        assert not unpaid_golds(judged, load_thresholds())
        assert not list(exploit_findings(setup, judged))
    finally:
        setup.run.close()


def test_a_shift_of_answers_is_a_diagonal_and_no_skill_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    knows = noise + 4 * torch.eye(16, dtype=torch.float64) + 10 * torch.randn(16, 1, generator=generator).double()
    own, after = range(16), [*range(1, 16), 0]
    assert association(knows, own) > 6
    assert association(knows.roll(1, dims=1), after) == pytest.approx(association(knows, own))
    assert all(abs(association(noise, partners)) < 4 for partners in (own, after, own[::-1]))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [2, 3])
def test_small_groups_of_a_healthy_run_are_no_alarm(seed: int, size: int) -> None:
    config = schooled_config(f"run.seed={seed}", f"rollout.num_generations={size}", OWN, "rollout.prompts_per_step=4")
    diagnosis = preflight_of(config, "reward")
    assert diagnosis.healthy, diagnosis.findings


def test_a_reward_of_the_wrong_sign_is_not_one_that_pays_for_anything() -> None:
    problem = Problem("1", "1", "1")
    against = [JudgedGold(problem, ("1",), gold=-1.0, empty=0.0, others=(0.0, 0.0))] * 4
    for_all = [JudgedGold(problem, ("1",), gold=1.0, empty=1.0, others=(1.0, 1.0))] * 4
    assert _whatever_is_said(against, [-1.0, 0.0], 1e-9) == []
    assert _whatever_is_said(for_all, [0.0, 1.0], 1e-9) == for_all


@pytest.mark.parametrize(
    ("gold", "lowest", "named"),
    [(-19.0, -19.0, False), (1.0, -19.0, True), (1.0, -100.0, True), (1.0, 0.0, False)],
    ids=["a right answer earns the same", "all lie there", "one would dwarf it", "nothing is lost"],
)
def test_a_cliff_lies_below_what_a_right_answer_earns(
    gold: float, lowest: float, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "more_groups", lambda setup, code, doubtful: setup.groups)
    setup = SimpleNamespace(thresholds=load_thresholds(), groups=[SimpleNamespace(rewards=[Reward(lowest)] * 8)] * 16)
    found = [*_cliff(setup, [gold])]
    assert [finding.code for finding in found] == ["reward/cliff"] * named


@pytest.mark.parametrize(
    ("gold", "empty", "aggregate", "named"),
    [
        (1.0, [-200.0] * 4, "sum", True),
        (10.0, [-1e6, -2000.0, -1e30, -1001.0], "sum", True),
        (1.0, [-100.0] * 4, "sum", True),
        (1.0, [-50.0] * 4, "sum", False),  # costly, and not beyond what rounding leaves of the rest
        (1.0, [-200.0, -200.0, -1.0, -200.0], "sum", False),  # of some problems alone
        (0.0, [-200.0] * 4, "sum", False),  # a distance has no best to compare with
        (1.0, [-200.0] * 4, "normalised_sum", False),
    ],
)
def test_a_fall_that_no_completion_has_taken_yet(gold: float, empty: list[float], aggregate: str, named: bool) -> None:
    judged = [JudgedGold(Problem("a", ""), ("7",), gold, value, ()) for value in empty]
    setup = SimpleNamespace(
        thresholds=load_thresholds(), groups=[], config=schooled_config(f"reward.aggregate={aggregate}")
    )
    found = [*empty_cliff_findings(setup, judged)]
    assert [(f.code, f.severity) for f in found] == [("reward/cliff", "warning")] * named


@pytest.mark.parametrize(
    ("gold", "other", "empty", "lowest", "named"),
    [
        (1.0, 0.0, -200.0, 0.0, True),
        (1.0, 0.0, -200.0, -200.0, False),  # a completion lies there, which is the cliff's own matter
        (0.01, -3.0, -5.0, 0.0, False),  # wrong answers cost about as much
        (1.2e-7, -0.5, -1.0, 0.0, False),  # a best of nothing but rounding
    ],
)
def test_a_fall_is_deep_beside_what_answers_differ_by(
    gold: float, other: float, empty: float, lowest: float, named: bool
) -> None:
    judged = [JudgedGold(Problem("a", ""), ("7",), gold, empty, (other, other))] * 4
    groups = [SimpleNamespace(rewards=[Reward(lowest), Reward(gold)])]
    setup = SimpleNamespace(thresholds=load_thresholds(), groups=groups, config=schooled_config())
    assert bool([*empty_cliff_findings(setup, judged)]) == named


def test_a_gold_answer_without_a_number_is_named_though_no_completion_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = build_subject(schooled_config(reward("nan_beyond_the_batch")))
    asked = {group.problem.key for group in setup.groups}
    monkeypatch.setattr(faults_gold, "NUMBERS", asked)
    try:
        found = probe_collection(setup).findings
    finally:
        setup.run.close()
    assert not setup.failures
    assert found[0].code == "reward/non-finite"
    assert "gold answers of" in found[0].evidence


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (float("nan"), "reward/non-finite"),
        ({"length": 1.0, "style": -math.inf}, "reward/non-finite"),
        ({"inference": None, "final": 1.0}, "reward/failed"),  # names that contain "inf", "nan" and "fin"
        ({"nan_penalty": "none"}, "reward/failed"),
        (None, "reward/failed"),
    ],
)
def test_the_value_and_not_a_part_s_name_makes_a_reward_not_finite(value: object, code: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        as_reward(value)
    failure = RewardFailure("mine", "a", 0, "invalid", str(refused.value))
    setup = SimpleNamespace(failures=[failure], shared={}, batch=SimpleNamespace(completions=[None] * 4))
    assert [found.code for found in _failed(setup)] == [code]
