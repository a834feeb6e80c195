"""A sample of bench/fuzz_doctor.py: any input gives a diagnosis, a configuration or a one-line error."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import fuzz_doctor as bench
from doctor.schooled import BASE
from faults import school
from keel.base.errors import KeelError
from keel.doctor import preflight
from keel.doctor.measure import Measure


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("log", 120), ("config", 150)])
def test_nothing_that_is_mutated_ends_in_a_traceback(kind: str, count: int, tmp_path: Path) -> None:
    outcomes = [bench.try_case(bench.Case(kind, 0, number), tmp_path / str(number)) for number in range(count)]
    assert [(outcome.case.name, outcome.failure) for outcome in outcomes if outcome.failure] == []
    results = {outcome.result for outcome in outcomes}
    assert results == {"refused", "diagnosis" if kind == "log" else "configuration"}  # both ways are gone


def test_a_traceback_counts_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(error: Exception) -> Any:
        def fail(random: Any, folder: Path) -> str:
            raise error

        monkeypatch.setitem(bench.KINDS, "log", fail)
        return bench.try_case(bench.Case("log", 0, 0), tmp_path)

    assert of(IndexError("no such\nthing")).failure.startswith("IndexError: no such thing")
    assert of(KeelError("two\nlines")).failure == "a KeelError of 2 lines"
    assert of(KeelError("one line")).result == "refused"


def test_a_case_that_is_not_done_fails_although_exceptions_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(random: Any, folder: Path) -> str:
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception:
            return "diagnosis"
        return "diagnosis"

    monkeypatch.setitem(bench.KINDS, "log", hang)
    assert bench.try_case(bench.Case("log", 0, 0), tmp_path).failure.startswith("NotDone: not done after 30 s")


def of_keel(*_: Any) -> Any:
    return preflight._softened(None, "")  # type: ignore[arg-type]


def of_a_part(*_: Any) -> Any:
    return school.larger("no numbers")


def refusing(*_: Any) -> Any:
    raise KeelError("no such thing")


@pytest.mark.parametrize(("probe", "failure"), [(of_keel, "AttributeError"), (of_a_part, ""), (refusing, "")])
def test_a_probe_that_fails_by_keels_own_code_is_a_failure(
    probe: Any, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faults.healthy.healthy", lambda seed: {**BASE, "run": {"name": "fuzzed"}})
    monkeypatch.setattr(bench, "SMALL", (1,))
    monkeypatch.setattr(bench, "_options", lambda: ("run.seed",))
    monkeypatch.setattr(preflight, "MEASURES", [Measure("collection", probe, "")])
    outcome = bench.try_case(bench.Case("preflight", 0, 0), tmp_path)
    assert outcome.failure.split(":")[0] == failure
    assert outcome.result == ("failed" if failure else "diagnosis with a failed probe")
