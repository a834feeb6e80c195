"""`.ci/run` on a `make` that only prints: what fails it, and what it then shows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PHASES = (
    *("setup", "lint", "lint-workflows", "verify", "docs", "test-wheel", "setup-vllm", "test-vllm", "test", "test-all"),
    *(LAST := ("test-verl", "test-envs", "test-verifiers", "soak")),
)
MAKE = """#!/bin/sh
for name; do target=$name; done
if [ "$target" = test-list ]; then
  for phase in test test-all test-envs test-verifiers test-verl test-vllm $UNRUN; do
    echo "tests/test_it.py::$phase"
  done
  exit
fi
echo "begin of $target"
seq 20
echo $$ >"$PIDS.$target"
if [ "$target" = "$HANGS" ]; then exec sleep 60; fi
case "$target" in "$SKIPS") skip="<skipped/>"; esac
case "$target" in test-wheel) ;; test*)
  test="<testcase classname='tests.test_it' name='$target'>$skip</testcase>"
  echo "<testsuite>$test</testsuite>" >"${PYTEST_ADDOPTS#*=}"
esac
test "$target" != "$FAILS"
"""


def start(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    """`.ci/run` in a process group of its own."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "each_ran_once.py", tmp_path / "scripts")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("make", "stockfish", "chromium", "bwrap"):
        (programs / name).write_text(MAKE)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [tmp_path / ".ci" / "run"],
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "PIDS": str(tmp_path / "pid"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell ignores SIGINT in what it starts in the background, the tests among it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(tmp_path: Path, process: subprocess.Popen[str]) -> tuple[int, str, dict[str, str]]:
    """Exit status, what was printed, and the table at its end."""
    printed, _ = process.communicate(timeout=50)
    assert not list(tmp_path.glob("tmp.*"))
    return process.returncode, printed, dict(re.findall(r"^  ([a-z-]+) +\d+:\d\d  (.+)$", printed, re.M))


def run(tmp_path: Path, **environment: str) -> tuple[int, str, dict[str, str]]:
    return ended(tmp_path, start(tmp_path, **environment))


def test_every_phase_is_run_and_timed(tmp_path: Path) -> None:
    status, printed, table = run(tmp_path)
    assert status == 0
    assert sorted(table) == sorted(PHASES)
    assert {end.partition(",")[0] for end in table.values()} == {"sound"}
    assert "begin of soak" not in printed  # of what runs beside another the end is shown
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{phase}:" in targets for phase in PHASES)


# In each lane, the first and the last.
@pytest.mark.parametrize("phase", ["lint", "test-vllm", "test", "soak", "test-verifiers"])
def test_a_phase_that_fails_ends_the_run_and_is_shown_whole(tmp_path: Path, phase: str) -> None:
    status, printed, table = run(tmp_path, FAILS=phase)
    assert status == 1
    assert f"begin of {phase}" in printed
    assert [name for name, end in table.items() if end.startswith("FAILED")] == [phase]
    assert phase in LAST or not set(LAST) & set(table)
    later = {"lint": "lint-workflows", "test": "test-all"}.get(phase)
    assert later is None or later not in table


@pytest.mark.parametrize(
    ("how", "test", "fault"),
    [("SKIPS", "test-vllm", "skipped"), ("SKIPS", "test", "skipped"), ("UNRUN", "test_new", "ran 0 times")],
)
def test_a_test_that_did_not_run_fails_the_run(tmp_path: Path, how: str, test: str, fault: str) -> None:
    status, printed, table = run(tmp_path, **{how: test})
    assert status == 1
    assert sorted(table) == sorted(PHASES)
    assert f"tests.test_it.{test}: {fault}" in printed


@pytest.mark.parametrize(
    ("phase", "beside", "sent", "status"),
    [
        ("test-vllm", "test-wheel", signal.SIGTERM, 143),
        ("test-all", "test-all", signal.SIGINT, 130),
        ("soak", "test-verifiers", signal.SIGTERM, 143),
    ],
)
def test_a_signal_leaves_nothing_running_and_says_where_it_was(
    tmp_path: Path, phase: str, beside: str, sent: signal.Signals, status: int
) -> None:
    process, pid, last = start(tmp_path, HANGS=phase), tmp_path / f"pid.{phase}", tmp_path / f"pid.{beside}"
    deadline = time.monotonic() + 40
    while not (pid.exists() and last.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)  # until only the phase that hangs is left
    os.killpg(process.pid, sent)
    returned, printed, table = ended(tmp_path, process)
    assert returned == status
    assert table[phase] == "NOT ENDED"
    assert f"begin of {phase}" in printed
    while (proc := Path(f"/proc/{pid.read_text().strip()}")).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not proc.exists()
