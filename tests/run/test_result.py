"""The last lines of a run: what became of it, and commands that work where the reader stands."""

import sys
from pathlib import Path

import pytest

from keel.run.result import RunOutcome, next_steps, program, result_line, resume_command

SUMMARY = {"task": "sort", "wall_s": 61.2, "accuracy": {"before": 0.25, "after": 0.5}, "kl": {"exact": {"mean": 0.03}}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<p>")
    return folder


def test_a_finished_run_says_what_to_look_at_next(run):
    result = RunOutcome(SUMMARY, run, 200)
    assert result_line(result) == (
        "sort, 200 steps in 61 s; accuracy 25.0% → 50.0%; KL(policy‖reference) 0.0300 nats per token (exact); "
        "report: runs/mine/report.html"
    )
    assert next_steps(result) == [
        "next: open runs/mine/report.html in a browser",
        "  keel show runs/mine                                completions, token by token",
        "  keel doctor runs/mine                              what is wrong with it, worst first",
        "  keel train runs/mine run.name=tighter kl.beta=0.1  the same with an option changed",
    ]


def test_a_run_stopped_by_a_guard_has_a_report_and_an_interrupted_one_goes_on(run):
    assert next_steps(RunOutcome(SUMMARY, run, 3, 1, stopped="the KL budget"))
    assert next_steps(RunOutcome({}, run, 3, 130)) == []  # the report is that of an earlier stretch
    (run / "report.html").unlink()
    assert next_steps(RunOutcome(SUMMARY, run, 3)) == []


def test_commands_name_the_environment_where_the_shell_does_not_find_keel(tmp_path, monkeypatch):
    installed = tmp_path / ".venv" / "bin" / "keel"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(installed.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "keel"  # nothing better is known
    installed.write_text("")
    assert program() == str(installed)
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/keel"
    assert resume_command(Path("runs/x")) == ".venv/bin/keel train --resume runs/x"
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", str(installed.parent))
    assert program() == "keel"
