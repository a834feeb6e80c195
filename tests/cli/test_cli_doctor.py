"""`keel doctor` as it is typed: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from keel.cli import main
from keel.doctor import Diagnosis, Finding
from keel.lab.report.html import write_diagnosis
from lab.report.synthetic import make_run

FIELDS = {"code", "severity", "evidence", "cause", "advice", "options"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text("step,kl,reward\n" + "".join(f"{s},{0 if s == 1 else 15},0.{s}\n" for s in range(1, 9)))
    return path


def test_findings_come_first_and_exit_status_1(log, capsys):
    assert main(["doctor", str(log)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("log.csv: 1 error, ")
    assert out.splitlines()[1].startswith("error optim/lr-too-high")
    assert out.index("optim/lr-too-high") < out.index("explains kl/explosion")
    assert len(out.splitlines()) <= 10
    assert "could not be checked" in out
    assert err == ""


def test_the_rest_is_behind_verbose(log, capsys):
    assert main(["doctor", str(log), "--verbose"]) == 1
    out = capsys.readouterr().out
    for part in ("explained by", "H05 weak reward", "not checked", "read 8 rows"):
        assert part in out


def test_a_page_of_its_own_holds_all_of_it(log, tmp_path, capsys):
    page = tmp_path / "pages" / "doctor.html"
    assert main(["doctor", str(log), "--json", "--html", str(page)]) == 1
    out, err = capsys.readouterr()
    assert str(page) in err
    data, text = json.loads(out), page.read_text()
    assert text.index("optim/lr-too-high") < text.index("Hypotheses") < text.index("read 8 rows")
    for part in (*(f["evidence"] for f in data["findings"]), *data["unchecked"]):
        assert escape(part) in text
    assert "http://" not in text
    assert "https://" not in text


def test_the_colour_of_a_page_is_that_of_its_worst_finding(tmp_path):
    for severity, tone in (("error", "bad"), ("warning", "warn"), ("note", "good")):
        page = write_diagnosis(Diagnosis((Finding("kl/at-start", severity, "e", "c", "a"),)), "found", tmp_path / "x")
        assert f"<li class='{tone}'><b>found</b>" in page.read_text()


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
        (["nowhere.csv"], "no run, log or configuration at nowhere.csv"),
        (["nowhere/at-all"], "no run, log or configuration at nowhere/at-all"),
        (["nowhere.yaml"], "no configuration at nowhere.yaml"),
        (["LOG", "--verbose", "--json"], "give one of them"),
        (["LOG", "--map", "kl=no_such"], "there are: step, kl, reward"),
        (["LOG", "kl.beta=1"], "kl.beta=1"),
        (["LOG", "--threshold", "kl_explosio=3"], "kl_explosion"),
        (["LOG", "--write"], "--write"),
        (["LOG", "other"], "other"),
        (["default", "--map", "kl=a"], "--map"),
        (["LOG", "--quick"], "--quick"),
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


def steps(path: Path, age: int) -> Path:
    """A folder with a log of Keel's, written `age` seconds ago."""
    path.mkdir(parents=True)
    file = path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward/mean": 0.5}\n')
    os.utime(file, (1e9 - age, 1e9 - age))
    return path


def trl(path: Path) -> Path:
    """A folder with TRL's state in a checkpoint."""
    (path / "checkpoint-5").mkdir(parents=True)
    (path / "checkpoint-5" / "trainer_state.json").write_text('{"log_history": [{"step": 1, "reward": 0.5}]}')
    return path


def events(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "events.out.tfevents.1").write_bytes(b"")
    return path


@pytest.mark.parametrize("kind", [steps, trl, events])
def test_a_folder_of_runs_asks_which_one(tmp_path, capsys, kind):
    for age, name in enumerate("ab"):
        kind(tmp_path / "all" / "deep" / name, *([age] if kind is steps else []))
    assert main(["doctor", str(tmp_path / "all")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{tmp_path / 'all'} is not a run, but contains 2 runs, newest first: deep/" in error
    assert "deep/a" in error
    assert "deep/b" in error
    assert "give one of them" in error


def test_the_newest_runs_are_listed_first_and_not_all_of_them(tmp_path, capsys):
    runs = [steps(tmp_path / f"run-{age:02}", age).name for age in range(12)]
    assert main(["doctor", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"newest first: {', '.join(runs[:10])} and 2 older; " in error
    assert runs[10] not in error


def test_the_only_run_below_is_asked_for_too_and_what_lies_in_a_run_is_part_of_it(tmp_path, capsys):
    run = steps(tmp_path / "runs" / "one", 0)
    events(run / "tensorboard")
    assert main(["doctor", str(tmp_path / "runs")]) == 2
    assert f"contains one run: one; give one of them, such as {run}" in " ".join(capsys.readouterr().err.split())
    assert main(["doctor", str(run)]) == 0


def test_help_names_what_is_read_and_the_exit_statuses(capsys):
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("2 could not run", "W&B", "verl, OpenRLHF, NeMo-RL and prime-rl", "keel doctor verl.log"):
        assert part in text


def test_a_log_of_another_trainer_is_examined_without_torch_and_without_the_configuration(tmp_path):
    code = (
        "import sys\nfrom keel.cli import main\n"
        f"main(['doctor', {str(trl(tmp_path / 'output'))!r}])\n"
        "print(sorted({'torch', 'transformers', 'keel.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == "[]"
