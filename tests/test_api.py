"""What a program calls is what the commands do."""

import json
from typing import Any

import keel
from keel.cli import main
from trainer.small import BASE


def test_evaluate_is_keel_eval_as_data(tmp_path: Any, capsys: Any) -> None:
    run = keel.train(BASE, overrides=[f"run.dir={tmp_path}", "run.max_steps=1"]).directory
    capsys.readouterr()
    small = ["eval.samples=4", "eval.k=[1]"]
    assert main(["eval", str(run), *small, "--baseline", f"{run}@start", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert keel.evaluate(str(run), overrides=small, baseline=f"{run}@start") == printed


def test_a_run_without_hooks_has_neither_findings_of_the_doctor_nor_a_report(tmp_path: Any) -> None:
    from keel.run.train import train

    bare = train(BASE, overrides=[f"run.dir={tmp_path / 'bare'}", "run.max_steps=1"])
    full = keel.train(BASE, overrides=[f"run.dir={tmp_path / 'full'}", "run.max_steps=1"])
    assert not bare.report.exists()
    assert full.report.exists()
    assert json.loads((bare.directory / "findings.json").read_text()) == []
