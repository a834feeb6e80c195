"""`--nproc N`: the command in several processes, its refusals, its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keel.cli import launch, main
from trainer.small import BASE

pytestmark = pytest.mark.processes


TESTS = Path(__file__).parents[1]
PATIENCE_S = 300  # three processes that import torch take half a minute on two free cores


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**BASE, "run": {"name": "small", "dir": str(tmp_path), "max_steps": 6}}))
    return path


def start(*command: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", *command], env=environment, text=True, **pipes)


def test_sigterm_at_the_launcher_saves_and_the_run_goes_on_to_its_end(config: Path, tmp_path: Path) -> None:
    process = start("keel", "train", str(config), "run.max_steps=100000", "--nproc", "2")
    metrics = tmp_path / "small" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (143, "")
    step = len(metrics.read_text().splitlines())
    assert out == f"stopped after step {step}; resume with: keel train --resume {tmp_path / 'small'} --nproc 2\n"
    assert (tmp_path / "small" / "checkpoints" / f"step-{step}").is_dir()
    process = start("keel", "train", "--resume", str(tmp_path / "small"), f"run.max_steps={step + 2}", "--nproc=2")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert err.count("100%") <= 1  # one bar of transformers, not one a rank
    assert any(line.startswith(f"letters, {step + 2} steps") for line in out.splitlines())  # findings come first


def test_under_torchrun_an_error_before_the_first_step_is_one_line(config: Path) -> None:
    rows = "data.path=nowhere.jsonl"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    process = start(*torchrun, "keel", "train", str(config), "task.name=dataset", rows)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1  # torchrun's own
    (line,) = [line for line in err.splitlines() if line.startswith("keel:")]
    assert "nowhere.jsonl" in line
    assert out == ""


@pytest.mark.parametrize(
    ("exits", "status", "line"),
    [
        ({0: 143}, 143, ""),
        ({1: 2, 0: -15}, 2, ""),
        ({1: -9, 0: 137}, 137, ""),
        ({0: -15, 1: -15}, 143, ""),
        ({0: -15, 1: -9}, 137, "keel: error: SIGKILL killed rank 1 of 2, which ended the other ranks\n"),
        ({0: -11}, 139, "keel: error: SIGSEGV killed rank 0 of 2, which ended the other ranks\n"),
    ],
)
def test_exit_status_is_that_of_who_failed_first(
    exits: dict[int, int], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch._status(exits, 2) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "0"], "--nproc 0: give the number of processes"),
        (["--nproc=-1"], "--nproc -1: give the number of processes"),
        (["--nproc", "3", "model.device=auto"], "this machine has 2 CUDA devices"),
        (["--nproc", "2", "kl.beta=x"], "kl.beta"),
        (["--nproc", "2", "--no-such-option=1"], "no_such_option"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_what_cannot_run_is_refused_before_anything_is_launched(
    command: str,
    options: list[str],
    message: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", None)
    assert main([command, str(config), "warmstart.steps=2", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keel: error: ")
    assert message in line


def test_one_process_that_is_killed_is_named_with_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch._status({0: 0}, 1) == 0
    assert launch._status({0: -9}, 1, "; go on with: keel train --resume r --on ray") == 137
    expected = "keel: error: SIGKILL killed rank 0 of 1; go on with: keel train --resume r --on ray\n"
    assert capsys.readouterr().err == expected


def test_the_processes_get_all_other_arguments() -> None:
    given = ["train", "c.yaml", "--nproc", "2", "a=b", "--resume"]
    assert launch.drop_flags(given, "--nproc") == ["train", "c.yaml", "a=b", "--resume"]
    assert launch.drop_flags(["train", "--nproc=4", "--on", "ray", "a=b"], "--nproc", "--on") == ["train", "a=b"]


def test_a_command_of_one_process_says_so_in_several(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("keel.cli.is_first_failure", lambda status: True)
    monkeypatch.setattr("keel.cli.hard_exit", lambda status: None)  # it would end the tests
    assert main(["kl", "tiny", "tiny"]) == 2
    assert "keel kl runs in one process" in capsys.readouterr().err
