"""A run directory that 0.1 wrote (`run_of_0_1`, its checkpoints left out) is read, shown, judged and gone on from."""

import json
import shutil
from pathlib import Path

import pytest

import keel
from keel.cli import main
from keel.config import load_config

OF_0_1 = Path(__file__).with_name("run_of_0_1")


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(OF_0_1, tmp_path / "old"))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_of_0_1():
    assert json.loads((OF_0_1 / "env.json").read_text())["keel"] == "0.1.0"


def test_report_shows_its_figures(run, capsys):
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "arithmetic/copy-2" in page
    assert "0.3625" in page  # summary.json: the exact KL at its end
    assert "copy 06=" in page  # a prompt of rollouts.jsonl


def test_show_prints_its_rollouts(run, capsys):
    assert main(["show", str(run), "--step", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recorded = [record for record in lines(OF_0_1 / "rollouts.jsonl") if record["step"] == 4]
    assert [record["completion"] for record in shown] == [record["completion"] for record in recorded]
    assert main(["show", str(run), "--no-color"]) == 0
    assert "copy " in capsys.readouterr().out


def test_doctor_finds_what_was_found_in_it(run, capsys):
    assert main(["doctor", str(run), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    recorded = json.loads((OF_0_1 / "findings.json").read_text())
    assert findings[0]["code"] == recorded[0]["code"] == "optim/lr-too-high"


def test_its_configuration_is_taken_as_it_is_and_its_metrics_are_still_written(run, tmp_path):
    small = [
        "warmstart=null",
        "run.max_steps=1",
        "eval.every=0",
        "eval.tasks=[]",
        f"run.dir={tmp_path}",
        "run.name=new",
    ]
    config = load_config(run, small)
    assert config.kl.estimator == "exact"
    result = keel.train(config)
    assert set(lines(result.directory / "metrics.jsonl")[0]) >= set(lines(OF_0_1 / "metrics.jsonl")[0])
