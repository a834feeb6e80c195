"""The generator's logs: operators break healthy ones and leave them as they were; files and names are the trainers'."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import faults
from faults import logs
from faults.base import OPERATORS
from keel.doctor.findings import CODES

for module in pkgutil.iter_modules(faults.__path__):
    importlib.import_module(f"faults.{module.name}")  # which registers its operators

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def healthy() -> list[Any]:
    return [logs.healthy_log(seed) for seed in range(60)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_operators_change_the_files_and_not_their_subject(healthy: list[Any], tmp_path: Path) -> None:
    operators = [operator for operator in OPERATORS.values() if operator.kind == "log"]
    assert len(operators) > 50
    for number, operator in enumerate(operators):
        log = next(log for log in healthy if operator.fits(log))
        before = {name: curve.copy() for name, curve in log.series.items()}
        broken = operator.apply(log, Random(0))
        assert all(np.array_equal(before[name], curve) for name, curve in log.series.items()), operator.name
        assert {len(curve) for curve in broken.series.values()} == {len(broken.steps)}, operator.name
        for name, subject in (("sound", log), ("broken", broken)):
            logs.write_log(subject, tmp_path / str(number) / name)
        sound, other = (contents(tmp_path / str(number) / name) for name in ("sound", "broken"))
        assert sound != other, operator.name


def test_the_codes_that_operators_accept_exist() -> None:
    for operator in OPERATORS.values():
        assert set(operator.codes) <= set(CODES), operator.name


def test_a_healthy_log_is_the_same_for_the_same_seed() -> None:
    first, again = logs.healthy_log(7), logs.healthy_log(7)
    assert first.options == again.options
    assert all(np.array_equal(first.series[name], again.series[name]) for name in first.series)
    assert logs.healthy_log(8).options != first.options


def test_kl_and_groups_are_those_of_a_run_that_begins_at_its_reference(healthy: list[Any]) -> None:
    for log in healthy:
        kl = log.series.get("kl")
        if kl is not None and log.steps[0] == 1:
            assert kl[0] < 0.005
        if "zero_variance" in log.series and "all_right" in log.series:
            assert (log.series["all_right"] <= log.series["zero_variance"] + 1e-9).all()
        low, high = log.options["reward_low"], log.options["reward_high"]
        assert (log.series["reward"] >= low).all()
        assert (log.series["reward"] <= high).all()


def test_the_names_of_trl_are_those_of_its_own_log(tmp_path: Path) -> None:
    own = json.loads((ROOT / "tests/doctor/trl_runs/good-two-rewards/trainer_state.json").read_text())
    written = set()
    for seed in range(8):  # a log may have lost a metric
        folder = logs.write_log(logs.healthy_log(seed, "trl", "state"), tmp_path / str(seed))
        (state,) = folder.glob("checkpoint-*/trainer_state.json")
        written |= {name for line in json.loads(state.read_text())["log_history"] for name in line}
    theirs = {name for line in own["log_history"] for name in line}
    assert {name for name in theirs - written if not name.startswith(("rewards/", "train_", "eval_"))} <= {"total_flos"}
