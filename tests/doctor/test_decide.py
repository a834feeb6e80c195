"""Exact and statistical decisions on subjects with known likelihoods and errors, and a user-defined hypothesis."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from doctor.asked import SYSTEM, THOUGHT, WRITTEN, Knowing, asked
from doctor.schooled import schooled_config
from keel.base.types import Group, Problem
from keel.doctor import decide as module
from keel.doctor.asking import TABLES, measure_format
from keel.doctor.decide import Gap, Hypothesis, Table, by_mean, decide, earned_under, matters, of_gains, open_gap, swap
from keel.doctor.findings import Finding
from keel.doctor.keel_subject import build_subject
from keel.doctor.loading import measure_loading
from keel.doctor.measure import Measure, Outcome, Verdict, examine
from keel.doctor.subject import Budget
from keel.models.tiny import CHAT_TEMPLATE
from keel.rollout.render import TEMPLATES


def row(name: str, **parts: Any) -> Hypothesis:
    return Hypothesis(name, "prompt/format", "a cause", "an advice", swap(**parts))


def found(outcome: Outcome) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.severity, finding.evidence) for finding in outcome.findings]


# ------------------------------------------------------------------------ exact


@dataclass(frozen=True)
class Scored:
    """Reported and correct values, as a subject of `open_gap`."""

    reported: torch.Tensor
    right: torch.Tensor


GAP = Gap(
    lambda subject: subject.reported - subject.right,
    lambda subject, errors: bool(errors.abs().max() < 1e-5),
    lambda subject, mean: max(0.02 * mean, 1e-5),
)


def changed(name: str, change: Any) -> Hypothesis:
    return Hypothesis(
        name, "a/code", "", "", lambda subject: nullcontext(replace(subject, right=change(subject.right)))
    )


def test_the_hypothesis_that_closes_a_gap_is_its_cause() -> None:
    right = torch.linspace(-3.0, -0.1, 32)
    hypotheses = [changed("moved", lambda x: x + 0.1), changed("doubled", lambda x: 2 * x), changed("late", torch.flip)]
    assert open_gap(GAP, Scored(right + 1e-7, right), hypotheses) is None
    gap = open_gap(GAP, Scored(2 * right, right), hypotheses)
    assert gap is not None
    assert gap.by is hypotheses[1]
    assert (gap.largest, gap.mean) == (pytest.approx(3.0), pytest.approx(float(right.abs().mean())))
    unexplained = open_gap(GAP, Scored(3 * right, right), hypotheses[:2])
    assert unexplained is not None
    assert unexplained.by is None


# ------------------------------------------------------------------------ statistical


def test_a_gain_matters_by_its_size_or_by_what_it_leaves() -> None:
    """A text of eighteen tokens that loses two thirds of its NLL is e³ times as likely; a single token is not."""
    for length, before, after, expected in (
        (18, -0.27, -0.08, True),
        (2, -0.27, -0.08, False),
        (18, -1.0, -0.85, False),
        (1, -1.0, -0.7, True),
    ):
        subject = asked().swapped(answer=lambda problem, length=length: (2,) * length)
        assert matters(subject, [Problem("a", "")], [before], [after]) is expected


def test_a_gain_in_all_is_no_chance_and_a_scatter_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)  # slow to import, and not needed
    assert by_mean([0.5, 0.6, 0.4, 0.5, 0.55, 0.45] * 2) < 1e-6
    assert by_mean([2.0, -1.5, 0.3, -0.6, 1.0, -1.0] * 2) > 0.1


def test_a_gain_of_a_few_without_a_loss_is_no_chance() -> None:
    """As with ids shifted by one, where only numbers with a nine become other questions."""
    gains = [-0.2] * 30 + [0.1] * 36 + [2.0] * 8 + [30.0] * 8
    assert of_gains(gains) < 1e-4 < by_mean(gains)
    assert of_gains([*gains, *[-11.0] * 8]) > 0.1


def test_what_is_likelier_on_the_problems_that_choose_alone_is_chance() -> None:
    """Prompts that are better for the selection problems and for no others."""
    subject = asked(irritating="=")
    bare = subject.policy.tokenizer.encode("=", add_special_tokens=False)[0]

    def lucky(problem: Problem) -> tuple[int, ...]:
        tokens = subject.prompt(problem)
        return tuple(t for t in tokens if t != bare) if int(problem.key) < module.CHOOSING else tokens

    def always(problem: Problem) -> tuple[int, ...]:
        return tuple(t for t in subject.prompt(problem) if t != bare)

    for prompt, state in ((lucky, "sound"), (always, "found")):
        verdict, _ = decide(Table(lambda _, prompt=prompt: [row("so", prompt=prompt)]), subject, alpha=1e-6)
        assert verdict.state == state


def test_of_hypotheses_that_explain_as_much_the_gentlest_is_chosen_and_a_simpler_one_comes_first() -> None:
    subject = asked(SYSTEM, irritating="F")

    def from_place(start: int) -> Any:
        return lambda problem: subject.prompt(problem)[start:]

    place = next(
        i for i, t in enumerate(subject.prompt(subject.problems(1)[0])) if t == subject.policy.tokenizer.eos_token_id
    )
    gentle, harsh = row("gently", prompt=from_place(place)), row("harshly", prompt=from_place(place + 1))
    verdict, chosen = decide(Table(lambda _: [harsh, gentle]), subject, alpha=1e-6)
    assert verdict.state == "found"
    assert chosen is gentle
    verdict, chosen = decide(Table(lambda _: [harsh]), subject, alpha=1e-6, simpler=[gentle])
    assert verdict.state == "sound"
    assert chosen is harsh


@pytest.mark.parametrize(
    ("own", "other", "sure"), [(0.0, 1.0, True), (1.0, 1.0, False), (1.0, 0.0, False)], ids=["more", "as much", "less"]
)
def test_what_earns_more_is_told(own: float, other: float, sure: bool) -> None:
    edited = row("so", prompt=lambda problem: ())
    subject = asked(earning=lambda prompt: own if prompt else other)
    earned = earned_under(edited, subject)
    assert earned is not None
    assert (earned.own, earned.other, earned.sure) == (own, other, sure)
    assert earned.problems >= 16 if sure else earned.problems == 4  # only what seems to earn more is asked again


def test_nothing_is_asked_of_a_judge_elsewhere() -> None:
    assert earned_under(row("so", prompt=lambda problem: ()), asked()) is None


def test_what_earns_more_by_chance_is_undecided_where_the_budget_ends() -> None:
    subject = asked(earning=lambda prompt: 0.0 if prompt else 1.0)
    vars(subject)["budget"] = Budget(doubt_s=0.0, spent_s=1.0)
    earned = earned_under(row("so", prompt=lambda problem: ()), subject)
    assert earned is not None
    assert not earned.sure
    assert "prompt/format" in subject.budget.undecided


def test_no_problem_stands_twice_in_a_batch_nor_groups_of_two_sizes() -> None:
    sizes = [("a", 1), ("b", 1), ("a", 1), ("c", 2)]
    groups = [Group(Problem(key, ""), (), (WRITTEN,) * size) for key, size in sizes]
    batches = [[group.problem.key for group in batch] for batch in module.batches(groups)]
    assert batches == [["a", "b"], ["a"], ["c"]]


# ------------------------------------------------------------------------ the tables


def without_parts(subject: Any) -> Verdict:
    return decide(TABLES["a part of the template"], subject, alpha=1e-6)[0]


def test_what_irritates_the_model_and_surprises_it_is_found() -> None:
    for template, sign, text in ((THOUGHT, "<", "<think>"), (SYSTEM, "F", "Friday")):
        verdict = without_parts(asked(template, irritating=sign))
        assert verdict.finding is not None
        assert (verdict.finding.code, verdict.finding.severity) == ("prompt/format", "error")
        assert text in verdict.reason
        assert [code for code, *_ in found(measure_format(asked(template, irritating=sign)))] == ["prompt/format"]
    assert found(measure_format(asked(irritating="F"))) == []


def test_a_thought_that_the_model_always_opens_is_its_own() -> None:
    """Answers are more likely without the thought, although the model would write one first."""
    assert without_parts(asked(THOUGHT, "<", ("<|assistant|>", *"<think>"))).state == "sound"


def test_what_is_written_on_both_sides_of_a_message_is_found() -> None:
    quoted = CHAT_TEMPLATE.replace("message['content']", "'{' + message['content'] + '}'")
    verdict = without_parts(asked(quoted, irritating="{}"))
    assert verdict.state == "found"
    assert "'{ … }'" in verdict.reason


def needing(token: str) -> Any:
    """A model that gives its answers only after a token."""

    def model(knowing: Knowing) -> Knowing:
        from keel.models.tiny import tiny_tokenizer

        (needed,) = tiny_tokenizer().encode(token, add_special_tokens=False)
        forward = knowing.forward

        def only_behind(input_ids: Any, **options: Any) -> Any:
            out = forward(input_ids)
            out.logits *= (input_ids == needed).cumsum(-1).clamp_max(1)[..., None]
            return out

        knowing.forward = only_behind  # type: ignore[method-assign]
        return knowing

    return model


def test_marks_that_are_none_are_found_unless_the_model_was_trained_on_them() -> None:
    ((code, _, evidence),) = found(measure_format(asked(TEMPLATES["chatml"])))
    assert code == "prompt/format"
    assert "'<|im_start|>' becomes 12 tokens" in evidence
    assert found(measure_format(asked(TEMPLATES["chatml"], model=needing("|")))) == []


def behind(token: str) -> Any:
    return lambda prompt: float(token in prompt)


@pytest.mark.parametrize(("proven", "severity"), [(True, "error"), (False, "warning"), (None, "warning")])
def test_what_stands_around_all_questions_and_irritates_is_found(proven: bool | None, severity: str) -> None:
    """An error if completions earn more without it; a warning if they earn as much or have no rewards."""
    subject = asked(form="<p>{}</p>", irritating="p", earning=None if proven is None else lambda prompt: 1.0)
    sign = subject.policy.tokenizer.encode("p", add_special_tokens=False)[0]
    if proven:
        subject = asked(form="<p>{}</p>", irritating="p", earning=lambda prompt: float(sign not in prompt))
    ((code, found_severity, evidence),) = found(measure_format(subject))
    assert (code, found_severity) == ("prompt/format", severity)
    assert "<p>" in evidence.replace(" ", "")
    assert found(measure_format(asked(form="<p>{}</p>", irritating="q"))) == []


def test_what_is_meant_to_stand_there_earns_by_it() -> None:
    subject = asked(form="<p>{}</p>", irritating="p")
    sign = subject.policy.tokenizer.encode("p", add_special_tokens=False)[0]
    assert found(measure_format(asked(form="<p>{}</p>", irritating="p", earning=behind(sign)))) == []


@pytest.mark.parametrize("earns", [True, False])
def test_plain_prompts_of_a_model_that_answers_in_its_template_alone(earns: bool) -> None:
    plain = {"messages": False, "model": needing("<|assistant|>")}
    subject = asked(CHAT_TEMPLATE, "", (), "data.chat_template=none", **plain, earning=lambda prompt: 0.0)
    header = subject.policy.tokenizer.convert_tokens_to_ids("<|assistant|>")
    pays = behind(header) if earns else (lambda prompt: 0.0)
    outcome = measure_format(asked(CHAT_TEMPLATE, "", (), "data.chat_template=none", **plain, earning=pays))
    assert [code for code, *_ in found(outcome)] == (["prompt/format"] if earns else [])
    for finding in outcome.findings:
        assert finding.options == (("data.chat_template=default",),)


@pytest.mark.parametrize(
    ("form", "irritating", "name"),
    [("{} please".upper(), "P", "in lower case"), ("{}\n", "\n", ""), ("x|{}", "|", "")],
)
def test_a_wording_has_to_earn(form: str, irritating: str, name: str) -> None:
    form = form.replace("{}", "{}")
    subject = asked(form=form, irritating=irritating)
    sign = subject.policy.tokenizer.encode(irritating, add_special_tokens=False)[-1]
    table = replace(TABLES["the wording"], problems=lambda subject, problem: True)
    verdict, _ = decide(table, asked(form=form, irritating=irritating, earning=lambda prompt: 0.0), alpha=1e-5)
    assert verdict.state == "sound"
    pays = asked(form=form, irritating=irritating, earning=lambda prompt: float(sign not in prompt))
    verdict, chosen = decide(table, pays, alpha=1e-5)
    if name:
        assert verdict.state == "found"
        assert chosen is not None
        assert name in chosen.name


def test_ids_that_are_off_by_one_are_found_and_right_ones_are_not() -> None:
    ((code, severity, evidence),) = found(measure_loading(asked(off=1)))
    assert (code, severity) == ("model/tokenizer", "error")
    assert "1 higher" in evidence
    assert found(measure_loading(asked())) == []


def test_one_answer_to_all_questions_says_nothing() -> None:
    subject = asked(SYSTEM, irritating="F").swapped(answer=lambda problem: (7,))
    assert found(measure_format(subject)) == []


# ------------------------------------------------------------------------ measures


def finding_of(code: str) -> Finding:
    return Finding(code, "error", "e", "c", "a")


def test_a_measure_without_what_it_takes_is_unchecked() -> None:
    made: list[str] = []

    def measure(name: str, *verdicts: Verdict, **how: Any) -> Measure:
        return Measure(name, lambda _: made.append(name) or Outcome.of(name, verdicts, ()), "", ("a/b",), **how)

    outcomes = examine(
        [
            measure("wrong", Verdict.found(finding_of("a/b"))),
            measure("later", after=("wrong",)),
            measure("unable", needs=("rewards",)),
            measure("right", Verdict.sound("nothing", figure=1.0), after=("later in no list",)),
        ],
        asked(),
    )
    assert made == ["wrong", "right"]
    assert [len(outcome.unchecked) for outcome in outcomes] == [0, 1, 1, 0]
    assert "a/b: " in outcomes[1].unchecked[0]
    assert "wrong" in outcomes[1].unchecked[0]
    assert outcomes[2].unchecked == ("a/b: no judge",)
    assert [outcome.sound for outcome in outcomes] == [False, False, False, True]


@pytest.mark.doctor
def test_a_hypothesis_from_outside_is_one_row_and_one_measure() -> None:
    """An engine adds a constant to every log-probability, and a user-defined row that subtracts it closes the gap."""
    subject = build_subject(schooled_config())
    with closing(subject.run):
        shifted = subject.swapped(score=lambda groups=None: subject.score(groups) + 0.25)
        gap = Gap(
            lambda s: (s.score() - s.forward_logp())[s.mask],
            lambda s, errors: bool(errors.abs().max() < 1e-4),
            lambda s, mean: 1e-4,
        )
        less = Hypothesis(
            "less a quarter", "scoring/mismatch", "", "", swap(score=lambda groups=None: subject.score(groups))
        )
        assert open_gap(gap, subject, [less]) is None
        opened = open_gap(gap, shifted, [less])
        assert opened is not None
        assert opened.by is less
        assert opened.mean == pytest.approx(0.25, abs=1e-4)
