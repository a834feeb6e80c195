"""What a program calls is what the commands do."""

import json
from pathlib import Path
from typing import Any

import keel
from keel import api
from keel.cli import main
from keel.config import load_config
from trainer.small import BASE


def test_evaluate_is_keel_eval_as_data(tmp_path: Any, capsys: Any) -> None:
    run = keel.train(BASE, overrides=[f"run.dir={tmp_path}", "run.max_steps=1"]).directory
    capsys.readouterr()
    small = ["eval.samples=4", "eval.k=[1]"]
    assert main(["eval", str(run), *small, "--baseline", f"{run}@start", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert keel.evaluate(str(run), overrides=small, baseline=f"{run}@start") == printed


def test_the_last_lines_of_training_begin_with_the_worst_finding(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    summary = {
        "task": "sort",
        "wall_s": 1.0,
        "accuracy": {"before": None, "after": None},
        "kl": {},
        "findings": ["b/y"],
    }
    monkeypatch.setattr(api, "train", lambda *_, **__: api.TrainResult(summary, tmp_path, 3))
    for severity, first in (
        ("error", "error b/y: it is 3."),
        ("warning", "warning b/y: it is 3."),
        ("note", "sort, 3"),
    ):
        found = [{"code": "a/x", "severity": "note"}, {"code": "b/y", "severity": severity, "evidence": "it is 3"}]
        (tmp_path / "findings.json").write_text(json.dumps(found))
        assert main(["train", "default", f"run.dir={tmp_path}"]) == 0
        assert capsys.readouterr().out.startswith(first)


def test_a_run_without_hooks_has_neither_findings_of_the_doctor_nor_a_report(tmp_path: Any) -> None:
    from keel.run.train import run_training

    bare = run_training(load_config(BASE, [f"run.dir={tmp_path / 'bare'}", "run.max_steps=1"]))
    full = keel.train(BASE, overrides=[f"run.dir={tmp_path / 'full'}", "run.max_steps=1"])
    assert not bare.report.exists()
    assert full.report.exists()
    assert json.loads((bare.directory / "findings.json").read_text()) is None  # not judged
