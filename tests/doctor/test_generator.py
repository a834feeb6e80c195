"""The generator of faults: counts, the split into halves, and the effect of operators."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from doctor.schooled import BASE
from faults import healthy, school
from faults.base import OPENED, edited
from keel.config import load_config

BENCH = Path(__file__).parents[2] / "bench" / "doctor.py"  # a module of the same name as this package
spec = importlib.util.spec_from_file_location("bench_doctor", BENCH)
assert spec is not None
assert spec.loader is not None
doctor = sys.modules["bench_doctor"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(doctor)

OPERATORS = doctor.register()
LORA = edited(BASE, {"model.lora": {"r": 4}})


def subject(operator: Any) -> Any:
    """A configuration that fits the operator; for speed, it is not measured."""
    draws = Random(operator.name)
    config = next(config for _ in range(2000) if operator.fits(config := healthy.draw(draws)))
    school.schooled(healthy.school_of(config))
    return config


def result(kind: str, codes: str, *findings: tuple[str, str], half: str = "seen", **more: str) -> Any:
    operator = None if kind in doctor.HEALTHY_KINDS else f"{kind}/broken"
    return doctor.Result(doctor.Case(kind, operator, 1), tuple(codes.split()), half if codes else "", findings, **more)


RESULTS = [
    result("option", "a/cause", ("a/cause", "error"), ("b/symptom", "error")),
    result("option", "a/cause c/other", ("n/note", "note"), ("c/other", "warning")),
    result("option", "a/cause", ("b/symptom", "error"), ("a/cause", "warning"), half="held"),
    result("option", "a/cause", ("a/cause", "note")),
    result("option", "a/cause", refused="optim.betas is 1: lower it", half="held"),
    result("log", "d/cause", ("b/symptom", "error")),
    result("log", "d/cause", error="Traceback"),
    result("healthy", "", ("n/note", "note")),
    result("healthy", "", ("b/symptom", "warning")),
    result("healthy log", ""),
    result("look-alike", "", error="Traceback"),
]


def test_recall_is_counted_by_hand() -> None:
    rows = {row.kind: row for row in doctor.recall(RESULTS)}
    assert rows["option"] == doctor.Row("option", 5, 3, 1, 4, 1, 0)
    assert rows["log"] == doctor.Row("log", 2, 0, 0, 0, 0, 1)
    assert rows["all"] == doctor.Row("all", 7, 3, 1, 4, 1, 1)
    assert doctor.recall(r for r in RESULTS if r.half == "held")[-1] == doctor.Row("all", 2, 1, 0, 2, 1, 0)


def test_operators_are_counted_by_all_of_their_draws() -> None:
    """option/broken is named in three of five draws, log/broken in none of two. Single draws are not counted."""
    assert doctor.by_operator(RESULTS) == ["  of 2 operators 0 are named first in all draws, 1 in none"]
    assert doctor.by_operator([*RESULTS[:1], RESULTS[0]])[0].endswith("1 are named first in all draws, 0 in none")
    assert doctor.by_operator([RESULTS[0], RESULTS[5]]) == []


def test_a_note_accuses_nobody_and_a_traceback_does() -> None:
    assert doctor.accusations(RESULTS) == [("healthy", 2, 1), ("healthy log", 1, 0), ("look-alike", 1, 1)]


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(row.line() + "\n" for row in RESULTS) + '{"case": {"kind"')
    assert doctor.read(str(file)) == RESULTS
    doctor.cut_half_line(str(file))
    with file.open("a") as again:
        again.write(RESULTS[0].line() + "\n")
    assert doctor.read(str(file)) == [*RESULTS, RESULTS[0]]
    assert "option/broken#1: missed → first" in doctor.comparison(RESULTS[3:4], RESULTS[:1])


def test_the_table_shows_both_halves_and_the_accused() -> None:
    lines = doctor.table(RESULTS).splitlines()
    whole = [line for line in lines if line.startswith("  all ")][-1]
    assert " ".join(whole.split()) == "all 7 3 (43 %) 2 (33 %) 1 (17 %) 4 (57 %) 1 1"
    assert "healthy runs accused         1 of 2" in lines
    assert "healthy#1 [-]: b/symptom" in doctor.misses(RESULTS)


def test_a_refusal_counts_where_it_names_what_was_broken() -> None:
    before = {"optim": {"eps": 1e-8}, "model": {"name": "/folder/one"}}
    after = {"optim": {"eps": 1e-8, "warmup_steps": 7}, "model": {"name": "/folder/two"}}
    assert list(doctor.changes(before, after)) == [("optim.warmup_steps", 7), ("model.name", "/folder/two")]
    assert doctor.names_change("optim.warmup_steps is 7: lower it", before, after)
    assert not doctor.names_change("the tokenizer of '/folder/two' has no EOS", before, after)
    assert not doctor.names_change("give warmup_steps: optim.warmup_steps_of is none", before, after)
    lora = {"model": {"lora": {"targets": ["none"]}}}
    assert doctor.names_change("lora.targets=('none',) does not fit the model", {"model": {"lora": {}}}, lora)
    assert not doctor.names_change("optim.eps is odd", before, after)


def test_the_halves_are_decided_by_the_names() -> None:
    digests = {name: hashlib.sha256(name.encode()).digest() for name in (*OPERATORS, *OPENED)}
    for operator in OPERATORS.values():
        assert operator.held_back == (digests[operator.name][0] % 2 == 1 and operator.name not in OPENED)
    odd = sum(digests[name][0] % 2 for name in OPERATORS)
    assert 0.4 < odd / len(OPERATORS) < 0.6
    assert sum(operator.held_back for operator in OPERATORS.values()) >= 150


def test_what_was_opened_was_held_back_and_is_the_hash_s_choice() -> None:
    """OPENED: 96, 82 and 43 opened operators, 14 that a probe author saw by mistake, and 97 never held back."""
    digests = [hashlib.sha256(name.encode()).digest() for name in OPENED]
    assert set(OPERATORS) >= OPENED
    assert all(digest[0] % 2 for digest in digests)
    chosen = [
        digest for digest in digests if digest[1] % 2 or digest[0] >> 2 & 1 or digest[2] % 4 == 3
    ]  # the first time, the second, the third
    assert len(OPENED) == 96 + 82 + 43 + 14 + 97
    assert len(chosen) >= 96 + 82 + 43


def test_the_names_are_the_ones_that_were_split() -> None:
    """Renamed, removed or added operators could change the halves after the probes were written."""
    names = hashlib.sha256("\n".join(sorted(OPERATORS)).encode()).hexdigest()
    assert names == "330e7f48b652e45aeca7b70899803ccd996bf16764c295529f5bf3c1d9f4f481"


def test_limits_are_kept_or_named() -> None:
    named = [result("option", "a/cause", ("a/cause", "error"), half="held")] * 8
    missed = [result("option", "a/cause", half="held")] * 2
    silent = [result("healthy", "")] * 19 + [result("healthy", "", ("b/symptom", "warning"))]
    assert doctor.shortfalls([*named, *missed, *silent]) == []
    assert [line.split(":")[0] for line in doctor.shortfalls([*named, *missed, *missed[:1]])] == ["below the floor"]
    assert [line.split(":")[0] for line in doctor.shortfalls([*named, *silent[1:]])] == ["above the ceiling"]


def test_results_of_another_version_are_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = doctor.Case("log", "log/rate-zero", doctor.seed_of(0, "log/rate-zero", 0))
    looked_at = list[Any]()

    def run(todo: list[Any], *_: Any) -> list[Any]:
        looked_at.extend(todo)
        return [doctor.Result(case, version=doctor.version()) for case in todo]

    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.setattr(doctor, "_prepare", lambda: None)
    out = tmp_path / "results.jsonl"
    out.write_text(doctor.Result(case, version="another").line() + "\n")
    for _ in range(2):
        assert doctor.main(["--only", "log/rate-zero", "--out", str(out)]) == 0
        assert looked_at == [case]


def test_the_default_is_150_faults_and_60_healthy_runs_beside_60_logs() -> None:
    cases = doctor.cases(doctor.parse([]))
    assert len(set(cases)) == len(cases)
    assert sum(not case.healthy for case in cases) >= 150
    healthy_kinds = Counter(case.kind for case in cases if case.healthy)
    assert healthy_kinds == {"healthy": 60, "healthy log": 60, "look-alike": len(doctor.LOOKALIKES)}
    seen = doctor.cases(doctor.parse(["--half", "seen", "--kind", "option"]))
    assert seen
    assert all(OPERATORS[case.operator].kind == "option" and not OPERATORS[case.operator].held_back for case in seen)


def test_draws_load_and_reach_small_groups_and_few_prompts() -> None:
    draws = Random(1)
    rollouts = [load_config(healthy.draw(draws)).rollout for _ in range(120)]
    assert {1, 2, 4} <= {rollout.prompts_per_step for rollout in rollouts}
    assert {2, 3, 16} <= {rollout.num_generations for rollout in rollouts}
    assert 1.2 in {rollout.temperature for rollout in rollouts}
    assert 0.95 in {rollout.top_p for rollout in rollouts}


def test_parts_that_draw_from_global_generators_draw_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.doctor.preflight.preflight", lambda config: (random.random(), torch.rand(3).tolist()))
    first, again = doctor._preflight(BASE), doctor._preflight(BASE)
    assert first == again != doctor._preflight(edited(BASE, {"run.seed": 7}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in doctor.KINDS if kind != "log"])
def test_an_operator_leaves_its_subject_and_gives_another(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(school, "teach", school.fresh)
    monkeypatch.setattr(school, "VERSION", "untaught")  # another key in the cache than that of the taught
    for operator in OPERATORS.values():
        if operator.kind == kind:
            whole = subject(operator)
            before = copy.deepcopy(whole)
            broken = operator.apply(whole, Random(1))
            assert whole == before != broken, operator.name


# A sample of the table, on subjects that cost next to nothing

SAMPLE = (
    "engine/end-stripped",
    "sync/never",
    "scorer/temperature-applied-wrong",
    "reference/layer-missing",
    "kl/wrong-way-round",
    "loss/sign-flipped",
    "reward/sign-reversed",
    "option/rate-tiny",
)
SILENT = (
    "engine that only counts",
    "loss of one's own, equal to grpo",
    "reference of one's own",
    "scorer of one's own",
)
LOGS = ("log/kl-negative", "log/rate-zero", "log/accuracy-falls", "log/length-explodes")


@pytest.fixture
def on_schooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthy, "healthy", lambda seed, fits: next(base for base in (BASE, LORA) if fits(base)))


@pytest.mark.slow
@pytest.mark.usefixtures("on_schooled")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_named_first(name: str) -> None:
    assert not OPERATORS[name].held_back
    looked_at = doctor.look(doctor.Case(OPERATORS[name].kind, name, 0))
    assert looked_at.first, looked_at


@pytest.mark.slow
@pytest.mark.usefixtures("on_schooled")
@pytest.mark.parametrize("name", SILENT)
def test_what_only_looks_odd_is_not_accused(name: str) -> None:
    looked_at = doctor.look(doctor.Case("look-alike", name, 0))
    assert (looked_at.accused, looked_at.refused, looked_at.error) == ((), "", "")


@pytest.mark.parametrize("name", LOGS)
def test_a_fault_of_a_log_is_named_first(name: str) -> None:
    assert not OPERATORS[name].held_back
    looked_at = doctor.look(doctor.Case("log", name, 1))
    assert looked_at.first, looked_at


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_log_is_not_accused(seed: int) -> None:
    looked_at = doctor.look(doctor.Case("healthy log", None, seed))
    assert (looked_at.accused, looked_at.refused, looked_at.error) == ((), "", "")
