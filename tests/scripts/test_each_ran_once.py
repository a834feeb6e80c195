"""`scripts/each_ran_once.py` against pytest itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "scripts" / "each_ran_once.py"
TESTS = """
import pytest

class TestKind:
    def test_in_a_class(self): ...

@pytest.mark.slow
@pytest.mark.parametrize("value", ["a::b", "x[0] y", "\\n<&>", "ü", ""])
def test_with_names_that_need_care(value): ...

def test_a(): ...
def test_b(): ...
"""


@pytest.fixture
def check(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Collect the tests above, run some of them in phases, and return the check's exit status and output."""
    (tmp_path / "tests" / "inner").mkdir(parents=True)
    (tmp_path / "tests" / "inner" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = -q\n")

    def pytest_of(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    def run(*phases: str) -> tuple[int, str]:
        (tmp_path / "collected").write_text(pytest_of("--collect-only"))
        for number, chosen in enumerate(phases):
            pytest_of(f"--junitxml={number}.xml", *chosen.split(";"))
        files = [f"{number}.xml" for number in range(len(phases))]
        command = [sys.executable, str(SCRIPT), "collected", *files]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


def test_each_in_one_phase(check) -> None:  # type: ignore[no-untyped-def]
    assert check("-m;slow", "-m;not slow") == (0, "8 tests collected, 0 faults\n")


@pytest.mark.parametrize(
    ("phases", "fault"),
    [
        (("-m;slow", "-m;not slow;-k;not test_a"), "tests.inner.test_it.test_a: ran 0 times"),
        (("", "-k;test_b"), "tests.inner.test_it.test_b: ran 2 times"),
    ],
)
def test_none_or_two_is_a_fault(check, phases: tuple[str, ...], fault: str) -> None:  # type: ignore[no-untyped-def]
    status, printed = check(*phases)
    assert status == 1
    assert fault in printed
