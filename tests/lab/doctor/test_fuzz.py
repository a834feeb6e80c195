"""A sample of bench/fuzz_doctor.py: whatever is handed in ends in a diagnosis, a configuration, or one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    try:
        import fuzz_doctor

        yield fuzz_doctor
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.parametrize(("kind", "count"), [("log", 120), ("config", 150)])
def test_nothing_that_is_mutated_ends_in_a_traceback(bench: Any, kind: str, count: int, tmp_path: Path) -> None:
    outcomes = [bench.try_case(bench.Case(kind, 0, number), tmp_path / str(number)) for number in range(count)]
    assert [(outcome.case.name, outcome.failure) for outcome in outcomes if outcome.failure] == []
    results = {outcome.result for outcome in outcomes}
    assert results == {"refused", "diagnosis" if kind == "log" else "configuration"}  # both ways are gone


def test_a_traceback_counts_as_a_failure(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(error: Exception) -> Any:
        def fail(random: Any, folder: Path) -> str:
            raise error

        monkeypatch.setitem(bench.KINDS, "log", fail)
        return bench.try_case(bench.Case("log", 0, 0), tmp_path)

    assert of(IndexError("no such\nthing")).failure.startswith("IndexError: no such thing")
    assert of(KeelError("two\nlines")).failure == "a KeelError of 2 lines"
    assert of(KeelError("one line")).result == "refused"
