"""A run as a notebook has it: tables equal to the files, HTML that is only shown."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys

import pytest

import keel
from keel.base.errors import KeelError
from keel.loggers import JsonlLogger, RunDirectory
from lab.report.synthetic import make_run
from lab.report.test_report import ATTACK, Page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return keel.Run(make_run(tmp_path_factory.mktemp("runs") / "run", total=40))


def framed(shown):
    """The document in a frame: what stands around it, and the page."""
    frame = re.fullmatch(r"<iframe sandbox='allow-scripts' style='[^']*' srcdoc='([^']*)'></iframe>", shown)
    assert frame is not None
    return Page(html.unescape(frame[1]))


def test_metrics_are_the_file_as_a_table(run):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    table = run.metrics
    assert table.index.name == "step"
    assert list(table.index) == [line["step"] for line in lines]
    assert set(table.columns) == {name for line in lines for name in line} - {"step", "nonfinite"}
    assert list(table["reward/mean"]) == [line["reward/mean"] for line in lines]
    assert math.isnan(table["grad/norm"][20])  # the skipped update
    assert table.dtypes.map(str).unique().tolist() == ["float64"]


def test_a_run_that_goes_on_is_read_anew(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        directory.write_text("config.yaml", "run: {max_steps: 9}\n")
        going = keel.Run(directory.path)
        assert going.metrics.empty
        JsonlLogger(directory).step(1, {"reward/mean": 0.5})
        assert going.metrics.loc[1, "reward/mean"] == 0.5
        assert repr(going).endswith("still running, 1 of 9 steps")


def test_evaluations_have_their_intervals(run):
    table = run.evaluations
    assert list(table["task"].unique()) == ["add", "subtract", "copy", "reverse"]
    row = json.loads((run.path / "eval.jsonl").read_text().splitlines()[0])
    assert tuple(table.loc[0, ["step", "pass@1", "ci95/low", "ci95/high"]]) == (0, row["pass@1"], *row["ci95"])


def test_rollouts_are_the_records(run):
    rollouts = run.rollouts()
    lines = [json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts == [line for line in lines if line["step"] == 40]
    assert {record["step"] for record in run.rollouts(1)} == {1}
    with pytest.raises(KeelError, match=r"step 3 of .* has no rollouts"):
        run.rollouts(3)


def test_nothing_of_a_run_leaves_its_frame(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        texts = {"evidence": ATTACK, "cause": ATTACK + "\ud83d", "advice": ATTACK}
        finding = {"code": "kl/explosion", "severity": "error", **texts}
        directory.write_text("findings.json", json.dumps([finding]))
        log = JsonlLogger(directory)
        log.step(1, {"reward/mean": 0.5})
    run = keel.Run(directory.path)
    shown = run._repr_html_()
    shown.encode()  # half a character too can be written to the notebook's file
    assert Page(shown).tags == ["iframe"]
    page = framed(shown)
    assert "img" not in page.tags
    assert len(page.scripts) == 2
    assert "<img src=http://evil.example/x" in page.text


def test_mistakes_are_one_line(run, tmp_path, monkeypatch):
    with pytest.raises(KeelError, match="no run directory at"):
        keel.Run(tmp_path / "none")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(KeelError, match=r"Run.metrics needs pandas: pip install 'keel-rl\[notebook\]'"):
        _ = run.metrics


def test_looking_at_a_run_loads_neither_torch_nor_pandas(run):
    code = (
        "import keel, sys\nprint('completed' in keel.Run(sys.argv[1])._repr_html_())\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, run.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["True", "[]", ""]


def test_a_line_whose_step_is_no_number_belongs_to_no_step(tmp_path, caplog):
    folder = make_run(tmp_path / "run", total=4)
    before = keel.Run(folder)
    good, evaluated = before.metrics, before.evaluations
    assert not caplog.records
    for name, key in (("metrics.jsonl", "reward/mean"), ("eval.jsonl", "pass@1")):
        odd = [{"step": "3", key: 0.5}, {"step": None, key: 0.5}, {key: 0.5}, {"step": True, key: 0.5}]
        lines = "".join(json.dumps(line) + "\n" for line in odd)
        (folder / name).write_text(lines + (folder / name).read_text())
    run = keel.Run(folder)
    assert run.metrics.equals(good)
    assert run.evaluations.equals(evaluated)
    said = [record.getMessage() for record in caplog.records]
    assert any("4 line(s) of metrics.jsonl" in line and "step" in line for line in said)
    assert any("4 line(s) of eval.jsonl" in line and "step" in line for line in said)
    assert run.record.series("reward/mean") == before.record.series("reward/mean")
