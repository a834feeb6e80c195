"""A study on a Ray cluster that is started here: the same table as without it."""

import os
from pathlib import Path

import pytest

from keel.base.errors import KeelError
from keel.lab.studies import read_study
from keel.lab.studies.report import write_study
from keel.lab.studies.run import open_pool, run_study
from lab.studies.small_study import STUDY

TESTS = Path(__file__).parents[2]


def test_two_points_on_ray(tmp_path, monkeypatch):
    paths = [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    study = read_study(STUDY, ["run.max_steps=2", "checkpoint.every=2"])
    tables = []
    for on in ("ray", "local"):
        folder = tmp_path / on
        ended = run_study(study, folder, parallel=2, on=on, say=lambda line: None)
        assert {how.state for how in ended.values()} == {"done"}, ended
        write_study(study, folder, ended)
        tables.append((folder / "table.csv").read_bytes())
    assert tables[0] == tables[1]


def test_where_else():
    with pytest.raises(KeelError, match="--on mars is not known: use local, ray or ray:ADDRESS"), open_pool("mars", 1):
        pass
