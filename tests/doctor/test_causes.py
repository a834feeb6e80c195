"""Causes and symptoms: symptoms become notes of their cause, other findings do not, and the graph has no cycles."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from keel.doctor import CODES, Finding, causes, ranked
from keel.doctor.causes import CAUSES, covered, explain, symptoms
from keel.doctor.checks import CHECKS
from keel.doctor.findings import Diagnosis, Severity
from keel.doctor.suspects import SUSPECTS

# what no other finding causes, and what causes none
ALONE = {"doctor/threshold-raised", "kl/unneeded", "sampler/unreported"}


def found(code: str, severity: Severity = "error", cause: str = "c") -> Finding:
    return Finding(code, severity, f"evidence of {code}", cause, "change this", (("a=1",),))


def judged(*codes: str, log: bool = False, from_start: tuple[str, ...] = ()) -> dict[str, str]:
    """{code: severity} in listed order."""
    return {f.code: f.severity for f in explain([found(code) for code in codes], log=log, from_start=from_start)}


@pytest.mark.parametrize("log", [False, True])
def test_no_cause_leads_back_to_itself(log):
    for code in CAUSES:
        assert code not in symptoms(code, covered(), log=log)


def test_every_code_has_a_place():
    assert set(CODES) ^ covered() == ALONE
    assert all(row.why and not row.why.endswith(".") for row in CAUSES.values())


def test_every_code_and_prefix_that_the_tables_name_exists():
    rows = [code for row in CAUSES.values() for code in (*row.explains, *row.in_logs, *row.later)]
    suspects = [code for row in SUSPECTS for code in (*row.codes, *row.codes_if_measured, *row.needs)]
    checked = [code for _, codes in CHECKS.values() for code in codes]
    named = {*CAUSES, *rows, *suspects, *checked, *chain.from_iterable(causes._MERE_EFFECTS.items()), *ALONE}
    assert named <= set(CODES)
    for prefix in (*causes._OF_THE_POLICY_TERM, *causes._OF_THE_START):
        assert any(code.startswith(prefix) if prefix.endswith("/") else code == prefix for code in CODES), prefix


def test_a_symptom_is_a_note_that_names_its_cause_and_keeps_what_it_said():
    cause, symptom = explain([found("output/unparseable"), found("reward/constant")], log=False)
    assert cause == found("output/unparseable")
    assert symptom.severity == "note"
    why = CAUSES["output/unparseable"].why
    assert symptom.evidence == f"explained by output/unparseable: {why}; evidence of reward/constant"
    assert symptom.cause == "c"
    assert symptom.advice == "fix output/unparseable first; if this stays, change this"
    assert symptom.options == (("a=1",),)


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        ("prompt/double-bos", "sampler/filter"),
        ("sampler/other-prompt", "sampler/stale"),
        ("model/missing-weights", "output/random-weights"),
        ("output/random-weights", "output/unparseable"),
        ("output/truncated", "reward/constant"),
        ("reward/gold", "reward/constant"),
        ("reward/failed", "reward/constant"),
        ("data/misaligned", "reward/gold"),
        ("reward/cliff", "advantage/amplified"),
        ("scoring/dropout", "kl/at-start"),
        ("scoring/dropout", "scoring/nondeterministic"),
        ("rollout/temperature", "sampler/noise"),
        ("reference/wrong", "kl/at-start"),
    ],
)
def test_causes_of_a_preflight(cause, symptom):
    assert judged(symptom, cause) == {cause: "error", symptom: "note"}


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        ("optim/no-update", "kl/not-learning"),
        ("optim/lr-too-high", "kl/explosion"),
        ("kl/explosion", "reward/collapse"),
        ("kl/explosion", "output/unparseable"),
        ("scoring/dropout", "sampler/precision"),
        ("scoring/temperature", "sampler/temperature"),
        ("entropy/too-strong", "entropy/rising"),
        ("reward/constant", "kl/not-learning"),
    ],
)
def test_causes_in_a_log(cause, symptom):
    assert judged(symptom, cause, log=True) == {cause: "error", symptom: "note"}


def test_a_chain_is_explained_by_its_beginning():
    chain = ["model/missing-weights", "output/random-weights", "output/unparseable", "reward/constant"]
    listed = explain([found(code) for code in reversed(chain)], log=False)
    assert [f.code for f in listed if f.severity == "error"] == chain[:1]
    assert all(f.evidence.startswith("explained by model/missing-weights: ") for f in listed[1:])


def test_a_chain_holds_only_through_what_was_found():
    assert judged("sampler/noise", "optim/lr-too-high") == {"sampler/noise": "error", "optim/lr-too-high": "error"}


@pytest.mark.parametrize(
    "codes",
    [
        ("reward/gold", "sampler/stale"),
        ("scoring/dropout", "reward/constant"),
        ("loss/sign", "reference/wrong"),
        ("scoring/temperature", "sampler/temperature"),  # a preflight measures each against the model's own forward
        ("output/unparseable", "optim/lr-too-high"),
        ("output/random-weights", "reward/cliff"),  # the penalty is the task's own choice
        ("optim/no-update", "reward/constant"),
        ("prompt/double-bos", "sampler/stale"),
        ("reward/constant", "kl/too-strong"),
        ("reward/constant", "optim/weight-decay"),
    ],
)
def test_two_faults_are_two_findings(codes):
    assert judged(*codes) == dict.fromkeys([f.code for f in ranked(map(found, codes))], "error")


def test_updates_have_not_caused_what_the_first_step_shows():
    codes = ("optim/lr-too-high", "kl/explosion", "output/unparseable")
    assert judged(*codes, log=True) == {
        "optim/lr-too-high": "error",
        "output/unparseable": "note",
        "kl/explosion": "note",
    }
    at_start = judged(*codes, log=True, from_start=("output/unparseable",))
    assert at_start == {"output/unparseable": "error", "optim/lr-too-high": "error", "kl/explosion": "note"}


def test_a_note_and_a_guess_explain_nothing():
    symptom = found("reward/constant")
    assert symptom in explain([symptom, found("output/unparseable", "note")], log=False)
    guess = replace(found("output/unparseable"), guess=True)
    assert symptom in explain([symptom, guess], log=False)
    assert symptom not in explain([symptom, found("output/unparseable", cause="it may be the template")], log=False)
    chain = explain([symptom, guess, found("output/random-weights")], log=False)  # a guess passes nothing on
    assert [f.code for f in chain if f.severity == "note"] == ["output/unparseable", "reward/constant"]


def test_a_cause_explains_nothing_broader_or_graver_than_itself():
    symptom = replace(found("reward/constant"), share=1.0)
    for share, severity in ((0.96, "note"), (0.5, "error")):
        listed = explain([replace(found("output/truncated"), share=share), symptom], log=False)
        assert {f.code: f.severity for f in listed} == {"output/truncated": "error", "reward/constant": severity}
    mild = found("output/truncated", "warning")
    assert explain([mild, found("reward/constant")], log=True) == (found("reward/constant"), mild)


def test_a_mere_effect_is_explained_by_a_mild_cause_which_stays_mild():
    effect = found("advantage/amplified")
    listed = explain([found("data/misaligned", "warning"), effect], log=False)
    assert [(f.code, f.severity) for f in listed] == [("data/misaligned", "warning"), ("advantage/amplified", "note")]
    assert effect in explain([found("tool/failing", "warning"), effect], log=False)


def test_what_is_for_the_doctor_alone_is_not_in_its_data():
    names = {"code", "severity", "evidence", "cause", "advice", "options"}
    (_, symptom) = explain([found("output/unparseable"), found("reward/constant")], log=False)
    assert symptom.explained_by == "output/unparseable"
    assert set(Diagnosis((symptom,)).as_dict()["findings"][0]) == names


def test_a_mild_cause_is_as_grave_as_what_it_causes_and_comes_first():
    listed = explain([found("sampler/filter"), found("prompt/double-bos", "warning")], log=False)
    assert [(f.code, f.severity) for f in listed] == [("prompt/double-bos", "error"), ("sampler/filter", "note")]
    alone = found("prompt/double-bos", "warning")
    assert explain([alone, found("reward/cliff")], log=False)[-1] == alone


def test_a_code_that_is_not_in_the_table_stays_as_it_is():
    unknown = replace(found("reward/constant"), code="a/new-one")
    assert explain([unknown], log=True) == (unknown,)
