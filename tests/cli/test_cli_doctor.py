"""`keel doctor` as it is typed: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli import main
from lab.report.synthetic import make_run

FIELDS = {"code", "severity", "evidence", "cause", "advice", "options"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text("step,kl,reward\n" + "".join(f"{s},{0 if s == 1 else 15},0.{s}\n" for s in range(1, 9)))
    return path


def test_findings_are_a_table_and_exit_status_1(log, capsys):
    assert main(["doctor", str(log)]) == 1
    out = capsys.readouterr().out
    assert out.index("optim/lr-too-high") < out.index("kl/explosion")
    assert "not checked" in out


def test_json_is_the_contracts(log, capsys):
    assert main(["doctor", str(log), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert {"findings", "hypotheses", "unchecked", "raised_thresholds"} <= set(data)
    assert all(set(finding) == FIELDS for finding in data["findings"])
    assert data["findings"][0]["severity"] == "error"


def test_a_raised_threshold_is_said(log, capsys):
    words = ["doctor", str(log), "--threshold", "kl_explosion=50", "--threshold", "kl_over_budget=50"]
    assert main([*words, "--threshold", "kl_per_update=50"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "threshold kl_explosion raised from 10 to 50" in out
    assert "healthy" in out


def test_columns_by_name(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text('{"t": 1, "divergence": 3.0}\n{"t": 2, "divergence": 3.0}\n')
    assert main(["doctor", str(path), "--map", "step=t,kl=divergence", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "kl/at-start"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.csv"], "nowhere.csv"),
        (["LOG", "--map", "kl=no_such"], "there are: step, kl, reward"),
        (["LOG", "kl.beta=1"], "kl.beta=1"),
        (["LOG", "--threshold", "kl_explosio=3"], "kl_explosion"),
        (["LOG", "--write"], "--write"),
        (["LOG", "other"], "other"),
        (["default", "--map", "kl=a"], "--map"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_status_2(log, capsys, words, said):
    assert main(["doctor", *(str(log) if word == "LOG" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_keel_run_is_left_as_it_was_unless_asked(tmp_path, capsys):
    path = tmp_path / "run"
    make_run(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    status = main(["doctor", str(path), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert main(["doctor", str(path), "--write"]) == status
    assert json.loads((path / "findings.json").read_text()) == findings


def test_help_names_the_exit_statuses(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "2 could not run" in " ".join(capsys.readouterr().out.split())
