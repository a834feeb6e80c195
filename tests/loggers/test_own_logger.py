"""A logger from outside, in one file that declares its own parameters: the one that docs/extending.md shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import keel
from keel.base.errors import KeelError
from keel.config import load_config
from trainer.small import BASE

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
METRIC = "length/mean"


@pytest.fixture(autouse=True)
def _alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "class Alarms" in block]
    (tmp_path / "alarms.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("alarms", None)


def settings(**params: object) -> dict:
    log = {**BASE["log"], "extra": [{"name": "alarms:Alarms", **params}]}
    return {**BASE, "run": {"name": "own", "dir": "runs", "max_steps": 3}, "log": log}


def test_it_is_told_every_step_and_reads_its_parameters(tmp_path: Path) -> None:
    run = keel.train(load_config(settings(metric=METRIC, above=1e-6))).directory
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line.split() for line in (run / "alarms.txt").read_text().splitlines()]
    assert [(int(step), float(value)) for step, value in lines] == [(line["step"], line[METRIC]) for line in steps]
    assert len(lines) == 3
    shown = json.loads(json.dumps(load_config(str(run / "config.yaml")).to_dict()["log"]["extra"]))
    assert shown == [{"name": "alarms:Alarms", "metric": METRIC, "above": 1e-6}]


def test_one_that_fails_is_dropped_and_the_run_goes_on() -> None:
    run = keel.train(load_config(settings(metric="no/such", above=1.0))).directory
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    dropped = [e for e in map(json.loads, (run / "events.jsonl").open()) if e["kind"] == "logger/dropped"]
    assert [(event["logger"], event["error"]) for event in dropped] == [("alarms:Alarms", "KeyError: 'no/such'")]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"metric": METRIC, "above": 0.2, "bellow": 1}, "bellow"),
        ({"metric": METRIC, "above": -1}, "above"),
        ({"metric": METRIC}, "above"),
    ],
)
def test_parameters_are_checked_before_anything_is_built(params: dict, line: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=rf"alarms:Alarms.*{line}") as caught:
        load_config(settings(**params))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
