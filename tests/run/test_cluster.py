"""`keel train --on ray`, on a cluster of this machine: placed, lost, started again, stopped, gone on with."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import yaml

from keel.base.errors import KeelError
from keel.cli import main
from keel.rollout.registry import PLACEHOLDER_URL
from keel.rollout.vllm.service import Service
from keel.run.cluster.placement import Placement, bundles_of
from keel.run.cluster.train import ClusterSampler, serve_options, server_overrides
from keel.trainer.options import RayOptions
from ranks import free_port
from run.native_server import NativeBackend
from trainer.small import BASE, small_config, small_model

pytestmark = pytest.mark.processes


TESTS = Path(__file__).parents[1]
SERVED = server_overrides(PLACEHOLDER_URL)


START = """
import logging, sys, ray
here = ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
print(here.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with four CPUs, which asks for the token in the user's home as Ray's own do."""
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_AUTH_MODE": "token"}
    variables["RAY_worker_niceness"] = "0"  # at Ray's 15 its processes hardly run beside other tests
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", START], text=True, **pipes) as process:
            yield f"ray:{process.stdout.readline().strip()}"
            process.communicate()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run, and a stand-in for `keel serve` as the samplers' interpreter."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m run.native_server "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("KEEL_TEST_ROWS", str(tmp_path / "rows"))
    settings = {**BASE, "run": {"name": "small", "dir": str(tmp_path), "max_steps": 4}}
    settings["ray"] = {"sampler_python": str(python), "trainer_cpus": 0.5, "sampler_cpus": 0.5}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    numbers = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "speed/", "memory/"))} for line in numbers]


def rollouts(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options of a training that samples by a server in this process, without Ray."""
    secret, port = secrets.token_hex(8), free_port()
    monkeypatch.setenv("KEEL_SERVE_SECRET", secret)
    app = Service(NativeBackend(*small_model()), secret).app()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield ["ray=null", *server_overrides(f"http://127.0.0.1:{port}")]
    server.should_exit = True
    thread.join()


def test_a_run_whose_sampler_is_killed_again_and_again_is_the_run_left_alone(
    cluster: str, config: Path, server: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert main(["train", str(config), "run.name=alone", *server]) == 0
    kills = {20: "itself", 30: "actor"}
    monkeypatch.setenv("KEEL_TEST_KILLS", json.dumps(kills))
    capfd.readouterr()
    assert main(["train", str(config), "--on", cluster]) == 0
    out, err = capfd.readouterr()
    assert any(line.startswith("letters, 4 steps") for line in out.splitlines())
    notes = [line for line in err.splitlines() if "was lost" in line and line.startswith("keel: note: sampler 0")]
    assert [("SIGKILL" in note, "actor has died" in note) for note in notes] == [(1, 0), (0, 1)]
    assert notes[1].endswith("it is restarted (2 of 3)")
    run, alone = tmp_path / "small", tmp_path / "alone"
    assert metrics(run) == metrics(alone)
    assert rollouts(run) == rollouts(alone)
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert (kinds.count("sampler/lost"), kinds.count("sampler/back")) == (2, 2)
    assert (run / "report.html").read_text().count("sampler/lost") >= 2
    assert "KEEL_SERVE_SECRET" not in (run / "config.yaml").read_text()


def test_a_sampler_that_is_lost_too_often_ends_the_run_which_can_go_on_by_another_server(
    cluster: str, config: Path, server: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("KEEL_TEST_KILLS", json.dumps({40: "itself"}))
    options = ["ray.max_restarts=0", "rollout.vllm.wait_s=2", "checkpoint.every=1"]
    assert main(["train", str(config), "--on", cluster, *options]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert any("ray.max_restarts is 0" in line for line in lines)
    assert sum(line.startswith("keel: error: ") and "has not answered for 2 s" in line for line in lines) == 1
    done, run = len(metrics(tmp_path / "small")), tmp_path / "small"
    assert 0 < done < 4
    monkeypatch.delenv("KEEL_TEST_KILLS")
    assert main(["train", "--resume", str(run), *server]) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]


def test_a_lost_trainer_rank_ends_all_with_one_line_and_the_run_goes_on(
    cluster: str, config: Path, tmp_path: Path, capfd: Any
) -> None:
    more = ["checkpoint.every=1", "optim.eps=0.01"]  # rounding does not flip the sign of an update that is almost 0
    assert main(["train", str(config), *more, "ray=null", "run.name=alone"]) == 0
    killer = f'task={{name: "run.killed:task", rank: 1, flag: "{tmp_path / "flag"}"}}'
    options = [*more, "ray.samplers=0", "--nproc", "2", killer]
    assert main(["train", str(config), "--on", cluster, *options]) == 137
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("keel: error: ")]
    resume = ["train", "--resume", str(tmp_path / "small"), "--on", cluster]
    assert line.startswith("keel: error: rank 1 of 2 ")
    assert line.endswith(f"resume with: keel {' '.join(resume)}")
    assert len(metrics(tmp_path / "small")) == 2
    assert main(resume) == 0
    for line, expected in zip(metrics(tmp_path / "small"), metrics(tmp_path / "alone"), strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_ctrl_c_reaches_the_ranks_which_save(cluster: str, config: Path, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "small"

    def interrupt() -> None:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_bytes().count(b"\n"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(["train", str(config), "--on", cluster, "run.max_steps=100000"]) == 130
    step = len(metrics(run))
    resume = f"keel train --resume {run} --on {cluster}"
    assert capfd.readouterr().out == f"stopped after step {step}; resume with: {resume}\n"
    assert (run / "checkpoints" / f"step-{step}").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ray.trainers=3", "ray.trainer_cpus=2"], "6.5 CPU, and the cluster has 4 CPU: "),
        (["model.device=cuda"], "1 CPU, 2 GPU, and the cluster has 4 CPU, 0 GPU: "),
        (["ray.sampler_python=/bin/false"], "sampler 0 did not start: exit status 1"),
        (["ray.sampler_python=/nowhere/python"], "cannot start a process: [Errno 2] No such file or directory: '/now"),
    ],
)
def test_what_cannot_be_placed_or_started_is_one_line(
    options: list[str], message: str, cluster: str, config: Path, capfd: Any
) -> None:
    assert main(["train", str(config), "--on", cluster, *options]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("keel: ")]
    assert line.startswith("keel: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the section ray has no effect without --on ray: give --on ray, or set ray=null"),
        (["--on", "mars"], "--on mars is not known: use local, ray or ray:ADDRESS"),
        (["--on", "ray", "--nproc", "0"], "ray.trainers"),
        (["--on", "ray", "kl.beta=x"], "kl.beta"),
    ],
)
def test_what_is_refused_before_a_cluster_is_asked(
    options: list[str], message: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("keel.run.cluster.train.connected", None)
    assert main(["train", str(config), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


class OneStart:
    """An actor that starts a process once. The process ends at once, and the node cannot start another."""

    starts = 0

    def write(self, name: str, text: str) -> str:
        return name

    def free_port(self, host: str) -> int:
        return 1

    def serving(self, host: str, port: int) -> bool:
        return True

    def follow(self) -> int:
        return -signal.SIGKILL

    def start(self, *_: Any) -> None:
        self.starts += 1
        if self.starts > 1:
            raise KeelError("no interpreter here")


def test_a_sampler_that_cannot_be_started_again_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    actor = OneStart()
    placement: Any = SimpleNamespace(
        hosts=["h", "h"], actor=lambda index: actor, call=lambda method, *arguments: method(*arguments)
    )
    sampler = ClusterSampler(placement, 0, RayOptions(), "", [], "secret")
    sampler.start()
    sampler.wait()
    sampler._supervisor.join(10)
    assert not sampler._supervisor.is_alive()
    assert "no interpreter here" in capsys.readouterr().err.splitlines()[-1]


def test_each_process_asks_for_what_it_needs() -> None:
    options, config = RayOptions(trainers=2, trainer_cpus=4), small_config("model.device=auto")
    gpus = [{"CPU": 4, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 1}]
    assert bundles_of(config, options, {"CPU": 8, "GPU": 8}) == gpus
    assert bundles_of(config, options, {"CPU": 8}) == [{"CPU": 4}, {"CPU": 4}, {"CPU": 1}]
    spread = small_config(*SERVED, "rollout.vllm.tensor_parallel_size=2", "model.device=cuda")
    assert bundles_of(spread, RayOptions(), {})[1] == {"CPU": 1, "GPU": 2}


def test_processes_listen_on_loopback_while_they_share_a_node() -> None:
    assert Placement(None, None, [], ["10.0.0.1"] * 2).hosts == ["127.0.0.1"] * 2
    assert Placement(None, None, [], ["10.0.0.1", "10.0.0.2"]).hosts == ["10.0.0.1", "10.0.0.2"]


def test_the_samplers_get_what_the_configuration_decides() -> None:
    assert serve_options(small_config()) == {}
    given = ["rollout.vllm.max_model_len=64", "rollout.dtype=bfloat16", "model.lora.r=4"]
    config = small_config(*SERVED, *given)
    assert serve_options(config) == {
        "max-model-len": 64,
        "max-lora-rank": 4,
        "dtype": "bfloat16",
    }
