"""The printed diagnosis: verdict and findings first, in twenty lines, without cut sentences."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from doctor.histories import healthy
from keel.doctor import Diagnosis, Finding, ranked
from keel.doctor.causes import explain
from keel.doctor.checks import check_history
from keel.doctor.display import show_diagnosis
from keel.doctor.findings import SuspectVerdict

EVIDENCE = (
    "one update at optim.learning_rate=0.1 takes the policy 2.09 nats per token from where it was (over 0.05); " * 3
)
ADVICE = "set optim.learning_rate=0.0007, or a warm-up, optim.warmup_steps=10, and keep loss.scale_rewards as it is"
ERROR = Finding("optim/lr-too-high", "error", EVIDENCE, "the step is too long for what was measured; " * 4, ADVICE)
PROBES = ("collection", "masks", "scoring", "sampler", "weight sync", "reference", "advantage", "objective", "kl_term")
HYPOTHESIS = SuspectVerdict(
    "H01", "advantage scaling", "ruled out", "at most 5.06", "high", "amplifies H03", "leave it"
)
ONE = Diagnosis((ERROR,), (HYPOTHESIS,), ("kl/negative: not recorded",), ("a figure of 0.123",), sound=PROBES)


def shown(
    diagnosis: Diagnosis, width: int = 80, *, name: str = "preflight of x", verbose: bool = False, colours: bool = False
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colours, color_system="standard" if colours else None)
    show_diagnosis(diagnosis, console, name, verbose=verbose)
    return file.getvalue()


@pytest.mark.parametrize("verbose", [False, True])
def test_a_warm_start_that_was_cut_is_said(verbose):
    cut = "37 of 200 steps of its warm start (60 s)"
    assert cut in " ".join(shown(replace(ONE, cut=cut), verbose=verbose).split())
    assert len(shown(replace(ONE, cut=cut)).splitlines()) <= 20


@pytest.mark.parametrize("width", [60, 80, 120])
def test_one_finding_is_at_most_twenty_lines_within_the_terminal(width):
    lines = shown(ONE, width).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width
    assert lines[0] == "preflight of x: 1 error"
    assert lines[1] == "error optim/lr-too-high"
    assert "2.09 nats" in " ".join(lines[2:4])
    assert ADVICE in " ".join(" ".join(lines).split())
    assert lines[-2].startswith("tried and found sound: collection, masks")
    assert lines[-1] == "1 could not be checked; more: --verbose"
    assert all(line == line.rstrip() for line in lines)


def test_no_text_is_cut():
    for width in (40, 60, 80, 120):
        text = " ".join(shown(ONE, width).split())
        assert "…" not in text
        assert EVIDENCE.strip() in text
        assert ADVICE in text
        assert (ERROR.cause.strip() in text) == ("the step is" in text)  # whole or not at all
    longer = " ".join(shown(ONE, 2000, verbose=True).split())
    assert "…" not in longer
    for text in (EVIDENCE, ERROR.cause, ADVICE, "H01 advantage scaling", "kl/negative: not recorded", "of 0.123"):
        assert text.strip() in longer
    short = shown(ONE, 2000)
    for text in ("H01", "kl/negative", "0.123"):
        assert text not in short


def test_the_findings_come_before_everything_else_in_the_long_form_too():
    text = shown(ONE, verbose=True)
    places = [text.index(part) for part in ("1 error", "optim/lr-too-high", "Hypotheses", "not checked", "0.123")]
    assert places == sorted(places)


def test_a_cause_names_what_it_explains_in_one_line():
    symptoms = [Finding(code, "error", "e", "c", "a") for code in ("reward/constant", "reward/weak")]
    findings = explain([*symptoms, Finding("output/truncated", "error", "e", "c", "a")], log=False)
    text = shown(Diagnosis(findings))
    assert text.splitlines()[0] == "preflight of x: 1 error, 2 notes"
    assert "explains reward/constant, reward/weak" in text
    assert "notes:" not in text


def test_a_healthy_diagnosis_names_its_notes_and_what_was_raised():
    note = Finding("kl/unneeded", "note", "e", "c", "a")
    text = shown(Diagnosis((note,), raised_thresholds=("threshold a raised from 1 to 2",), sound=("reward",)))
    assert text.splitlines() == [
        "preflight of x: healthy (1 note)",
        "! threshold a raised from 1 to 2",
        "tried and found sound: reward",
        "notes: kl/unneeded; more: --verbose",
    ]


def test_many_findings_are_counted():
    codes = ["mask/end", "loss/sign", "loss/scale", "kl/reversed", "reward/gold", "reward/cliff", "kl/at-start"]
    lines = shown(Diagnosis(tuple(Finding(code, "error", "e", "c", "a") for code in codes))).splitlines()
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("error")] == codes[:3]
    assert lines[-2] == f"and 4 more: {', '.join(codes[3:])}; --verbose"
    assert len(lines) <= 20


@pytest.mark.parametrize(("width", "count"), [(60, 1), (80, 2), (120, 3)])
def test_of_three_long_findings_as_many_are_shown_in_full_as_have_room(width, count):
    advice = "set rollout.temperature=1, or another that draws as it scores"
    codes = ("sampler/temperature", "optim/lr-too-high", "reward/constant")
    notes = tuple(Finding(code, "note", "e", "c", "a") for code in ("kl/unneeded", "optim/spike", "length/drift"))
    findings = tuple(Finding(code, "error", EVIDENCE, "a cause of some length; " * 5, advice) for code in codes)
    diagnosis = Diagnosis((*findings, *notes), unchecked=("kl/negative: not shown",) * 13, sound=PROBES)
    lines = shown(diagnosis, width, name=f"a-run-{'of-a-long-name-' * 4}").splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width
    assert lines[0].endswith("of-a-long-name-: 3 errors, 3 notes")
    text = " ".join(" ".join(lines).split())
    assert text.count(f"→ {advice}") == sum(line.startswith("error") for line in lines) == count
    assert text.count(EVIDENCE.strip()) == count
    rest = ", ".join(finding.code for finding in ranked(findings)[count:])
    assert (f"and {3 - count} more: {rest}; --verbose" in text) == (count < 3)
    assert [text.count(finding.code) for finding in ranked(findings)] == [1] * 3
    assert "13 could not be checked; more: --verbose" in lines[-1]


def test_what_to_change_is_whole_even_where_it_takes_more_than_twenty_lines():
    advice = " ".join(f"option{n}=1" for n in range(60))
    text = shown(Diagnosis((Finding("mask/end", "error", "e", "c", advice),), sound=PROBES), 60)
    assert advice in " ".join(text.split())


@pytest.mark.parametrize("verbose", [False, True])
def test_colours_are_for_terminals(verbose):
    coloured = Diagnosis((ERROR,), notes=("\x1b[32mgreen\x1b[0m",))
    assert "\x1b" not in shown(coloured, verbose=verbose)
    assert "\x1b" in shown(coloured, verbose=verbose, colours=True)


def test_the_data_has_the_fields_it_had():
    assert set(ONE.as_dict()) == {"findings", "hypotheses", "unchecked", "notes", "raised_thresholds"}


def test_an_area_is_sound_if_half_of_it_was_decided_and_nothing_was_found():
    history = healthy()
    whole = check_history(history)
    assert {"output", "kl", "sampler", "reward (7 of 9)"} <= set(whole.sound)
    assert "episodes" not in whole.sound  # it had none
    few = {name: series for name, series in history.series.items() if name in ("reward/mean", "grad/norm")}
    partly = {name.partition(" ")[0] for name in check_history(replace(history, series=few)).sound}
    assert not {"output", "kl", "sampler", "reward"} & partly


def test_an_area_with_a_note_is_not_sound():
    history = healthy()
    norms = history.series["grad/norm"]
    spike = replace(norms, values=(*norms.values[:40], 1000.0, *norms.values[41:]))
    noted = check_history(replace(history, series={**history.series, "grad/norm": spike}))
    assert [(f.code, f.severity) for f in noted.findings] == [("optim/spike", "note")]
    areas = [{name.partition(" ")[0] for name in d.sound} for d in (check_history(history), noted)]
    assert areas[0] - areas[1] == {"gradients"}
