"""keel serve as a user types it; what it serves is tested elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file

from keel.base.errors import KeelError
from keel.cli import main
from keel.envs.endpoint import SECRET
from keel.models.tiny import tiny_model
from keel.rollout import serving
from keel.rollout.native.engine import NativeEngine
from keel.rollout.options import VllmOptions
from keel.rollout.vllm import serve


@pytest.mark.parametrize(
    ("arguments", "secret", "message"),
    [
        (["tiny"], None, "cannot be imported here"),
        (["tiny"], "short", f"{SECRET} has 5 characters"),
        (["tiny", "--port", "99999"], None, "'--port'"),
        (["tiny", "--gpu-memory-utilization", "2"], None, "'--gpu-memory-utilization'"),
        (["tiny", "--dtype", "bf17"], None, "did you mean 'bf16'?"),
        (["tiny", "--engine", "natve"], None, "did you mean 'native'?"),
        (["tiny", "--engine", "native", "--max-lora-rank", "2"], None, "--max-lora-rank"),
        (["tiny", "--engine", "native", "--transfer", "nccl"], None, "--transfer"),
        (["tiny", "--max-batch", "4"], None, "--max-batch"),
        (["nowhere/at/all"], None, "nowhere/at/all"),
        ([], None, "MODEL"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    secret: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delenv(SECRET, raising=False)
    if secret is not None:
        monkeypatch.setenv(SECRET, secret)
    assert main(["serve", *arguments]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("keel: error:")]
    assert message in error


def test_of_an_adapted_model_the_base_is_served_in_the_named_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    given: dict[str, Any] = {}

    def look(folder: str, tokenizer: Any, options: VllmOptions, **more: Any) -> None:
        names.extend(name for path in Path(folder).glob("*.safetensors") for name in load_file(path))
        given.update(more)

    monkeypatch.setattr(serve, "serve", look)
    config = tmp_path / "lora.yaml"
    config.write_text("model: {name: tiny, lora: {r: 2}}\n")
    assert main(["serve", str(config), "--dtype", "bf16", "--max-lora-rank", "2"]) == 0
    assert sorted(names) == sorted(name for name, _ in tiny_model()[0].named_parameters())
    assert given["dtype"] == "bfloat16"


def test_another_engine_is_served_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def look(engine: Any, **more: Any) -> None:
        given.update(more, engine=engine)

    monkeypatch.setattr(serving, "serve", look)
    monkeypatch.setenv(SECRET, "sesame, open")
    assert main(["serve", "tiny", "--engine", "native", "--port", "0", "--max-batch", "3"]) == 0
    assert isinstance(given["engine"], NativeEngine)
    assert (given["secret"], given["max_batch"], given["vocabulary"]) == ("sesame, open", 3, 119)


@pytest.mark.processes
def test_a_served_model_answers_until_a_signal(tmp_path: Path) -> None:
    """A request that runs when the signal comes is refused at once, and the process ends well."""
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "keel", "serve", "tiny", "--engine", "native", "--port", "0"],
            env={**os.environ, SECRET: "sesame, open"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", printed.read_text())):
            assert process.poll() is None, printed.read_text()
            assert time.monotonic() < deadline, "it did not start"
            time.sleep(0.05)
        with httpx2.Client(base_url=found[0], headers={"authorization": "Bearer sesame, open"}, timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            body = {"token_ids": [5], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}
            answers: list[httpx2.Response] = []
            asking = threading.Thread(target=lambda: answers.append(client.post("/inference/v1/generate", json=body)))
            asking.start()
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            asking.join()
            assert answers[0].status_code == 503
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_without_its_own_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith(("starlette", "keel.rollout.vllm.serv"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["serve", "tiny"]) == 2
    assert "pip install 'keel-rl[serve]'" in capsys.readouterr().err


async def _started() -> Any:
    raise AssertionError("vLLM was started")


def test_a_port_that_is_taken_is_known_before_vllm_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(KeelError, match=rf"cannot listen at 127.0.0.1:{port} .*give another --host or --port"):
            asyncio.run(serve._serve(_started, "", "127.0.0.1", port, "secret", print))
    with pytest.raises(KeelError, match=r"cannot listen at 203\.0\.113\.1:0"):
        asyncio.run(serve._serve(_started, "", "203.0.113.1", 0, "secret", print))
