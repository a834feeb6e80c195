"""Resume: a run that was killed with SIGKILL and gone on with is, in its numbers, the run that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import keel
from keel.base.errors import KeelError
from keel.config import load_config
from keel.run.resume import check_same_run
from processes import LIMIT_S, process
from trainer.small import BASE

TIMED = ("time/", "speed/", "memory/")


def options(folder: Path, *more: str) -> list[str]:
    return [f"run.dir={folder}", "run.max_steps=20", "checkpoint.every=3", "eval.every=5", *more]


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(TIMED)} for record in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return keel.train(BASE, overrides=options(folder)).directory


def train(overrides: list[str]) -> int:
    """A run, for a process of its own."""
    return keel.train(BASE, overrides=overrides).exit_status


def train_until_killed(folder: Path, metrics: Path, step: int, *more: str) -> None:
    """A run in a process of its own, killed with SIGKILL once the file has that many lines."""
    running = process(folder, train, options(folder, *more))
    running.start()
    limit = time.monotonic() + LIMIT_S
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
        assert running.is_alive() and time.monotonic() < limit, f"the run did not reach step {step}"  # noqa: PT018
        time.sleep(0.002)
    running.kill()
    running.join()


def assert_same(run: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl", "rollouts.jsonl"):
        assert lines(run, name) == lines(whole, name), name
    ours, theirs = (json.loads((r / "summary.json").read_text()) for r in (run, whole))
    assert {**ours, "wall_s": 0} == {**theirs, "wall_s": 0}


@pytest.mark.slow
def test_killed_and_resumed_equals_in_one_go(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "small"
    train_until_killed(tmp_path, run / "metrics.jsonl", 10)
    assert lines(run, "metrics.jsonl")[-1]["step"] < 20
    keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert_same(run, whole)
    events = [event["kind"] for event in lines(run, "events.jsonl")]
    assert "resume" in events


@pytest.mark.slow
def test_every_moment_of_a_save_can_be_the_last(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at each of the writes of one save in turn, as a kill would, and go on each time."""

    class Killed(BaseException):
        pass

    from keel.trainer import checkpoint

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    targets = [
        (checkpoint, "save_weights"),
        (checkpoint, "model_card"),
        (checkpoint, "rng_state"),
        (checkpoint, "_flush"),
    ]
    resume = False
    for module, name in targets:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            with pytest.raises(Killed):
                keel.train(BASE, overrides=options(tmp_path), resume=resume)
        resume = True
    keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert_same(tmp_path / "small", whole)


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(state: Any, metrics: Any) -> None:
        if state.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    result = keel.train(BASE, overrides=options(tmp_path), callbacks=[stop])
    assert result.exit_status == 143
    assert (result.directory / "checkpoints" / "step-7").is_dir()
    last_event = lines(result.directory, "events.jsonl")[-1]
    assert f"keel train --resume {result.directory}" in last_event["message"]
    keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert_same(result.directory, whole)


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(whole: Path, tmp_path: Path) -> None:
    first = keel.train(BASE, overrides=options(tmp_path))
    before = lines(first.directory, "eval.jsonl")
    again = keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert lines(again.directory, "eval.jsonl") == before
    assert again.summary["accuracy"] == first.summary["accuracy"]


def test_a_run_that_is_there_is_refused_and_one_that_is_not_too(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="resume"):
        keel.train(BASE, overrides=options(tmp_path), resume=True)
    once = [f"run.dir={tmp_path}", "run.max_steps=1"]
    keel.train(BASE, overrides=once)
    with pytest.raises(KeelError, match="if_exists"):
        keel.train(BASE, overrides=once)


@pytest.mark.slow
def test_resuming_under_other_settings_is_refused(whole: Path, tmp_path: Path) -> None:
    """Controller and optimizer go on from what was saved, so a new β would be recorded and not used."""
    shutil.copytree(whole, tmp_path / whole.name)
    with pytest.raises(KeelError, match=r"kl\.beta was .* and is 0\.5 now"):
        keel.train(BASE, overrides=options(tmp_path, "kl.beta=0.5"), resume=True)
    longer = [option.replace("max_steps=20", "max_steps=21") for option in options(tmp_path)]
    keel.train(BASE, overrides=longer, resume=True)
    assert len(lines(tmp_path / whole.name, "metrics.jsonl")) == 21


def test_an_option_that_an_earlier_version_did_not_know_was_its_default(tmp_path: Path) -> None:
    config = load_config(BASE)
    written = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    del written["rollout"]["overlap_tools"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    check_same_run(tmp_path, config)
    with pytest.raises(KeelError, match=r"rollout\.overlap_tools was False in .* and is True now"):
        check_same_run(tmp_path, load_config(BASE, ["rollout.overlap_tools=true"]))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**written, "loss": {**written["loss"], "mismatch": None}}))
    with pytest.raises(KeelError, match=r"loss\.mismatch\.cap was None"):
        check_same_run(tmp_path, config)


@pytest.mark.parametrize("damage", ["removed", "damaged"])
def test_a_run_without_its_checkpoints_does_not_begin_again(whole: Path, tmp_path: Path, damage: str) -> None:
    run = tmp_path / whole.name
    shutil.copytree(whole, run)
    for folder in (run / "checkpoints").glob("step-*"):
        if damage == "removed":
            shutil.rmtree(folder)
        else:
            (folder / "trainer" / "state.json").write_text("{")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(KeelError, match="checkpoint"):
        keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_saved_configuration_does_not_delete_its_own_run(whole: Path) -> None:
    with pytest.raises(KeelError):
        keel.train(whole / "config.yaml")
    assert (whole / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_finished_run_that_is_extended_equals_one_that_was_not_finished(tmp_path: Path, whole: Path) -> None:
    """What is measured at an end leaves no trace, and the end of the extended run is measured as the other's."""
    shorter = [option.replace("max_steps=20", "max_steps=12") for option in options(tmp_path)]
    first = keel.train(BASE, overrides=shorter)
    assert first.summary["kl"]["k3"]["mean"] == lines(whole, "metrics.jsonl")[12]["kl/policy_ref/k3/mean"]
    again = keel.train(BASE, overrides=shorter, resume=True)
    assert again.summary["kl"] == first.summary["kl"]
    result = keel.train(BASE, overrides=options(tmp_path), resume=True)
    assert lines(result.directory, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert result.summary["kl"] == json.loads((whole / "summary.json").read_text())["kl"]
