"""The server beside a training: a process of its own that is there with the run and ends with it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from keel.base.errors import KeelError
from keel.lab.watch.serve import listen, serve_while
from keel.loggers import JsonlLogger, RunDirectory

pytestmark = pytest.mark.processes


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def test_the_page_is_there_before_the_run_and_is_told_its_end(tmp_path):
    lines, states = [], []
    with serve_while(tmp_path / "run", 0, lines.append):
        port = int(re.search(r":(\d+)/$", lines[0])[1])
        assert "Nothing has been written" in ask(port, "/section/state")
        with RunDirectory.create(tmp_path / "run") as run:
            run.write_text("config.yaml", "run: {max_steps: 1}\n")
            JsonlLogger(run).step(1, {"reward/mean": 0.5})
            end = time.monotonic() + 30
            while "step 1 of 1" not in ask(port, "/section/state") and time.monotonic() < end:
                time.sleep(0.05)  # a page is not drawn again at once: drawing may take a part of the time only
            assert "step 1 of 1" in ask(port, "/section/state")
            run.write_json("summary.json", {"steps": 1})

        def poll():
            while not (states and states[-1]["final"]):
                states.append(json.loads(ask(port, "/state")))
                time.sleep(0.2)

        page = threading.Thread(target=poll, daemon=True)
        page.start()
        while not states:
            time.sleep(0.05)
    page.join(10)
    assert states[0]["final"] is False
    assert states[-1]["final"] is True
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/state")


def test_a_port_in_use_is_told_before_anything_is_trained(tmp_path):
    with listen(0) as taken:
        port = taken.getsockname()[1]
        message = f"port {port} of 127.0.0.1 is in use, .*: set --watch-port to another one"
        with pytest.raises(KeelError, match=message), serve_while(tmp_path, port, print):
            pytest.fail("the block was entered")


@pytest.fixture
def interruptible():
    """Where tests run in the background SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_pages_fetch_the_end_keeps_the_outcome(tmp_path, number, interruptible, monkeypatch):
    """The page here is one that asked and never comes back: without the signal the server would wait for it."""
    lines, servers, start = [], [], subprocess.Popen

    def started(*args, **options):
        servers.append(start(*args, **options))
        return servers[-1]

    def echo(line):
        lines.append(line)
        if "open pages" in line:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", started)
    before = signal.getsignal(signal.SIGTERM)
    with serve_while(tmp_path / "run", 0, echo):
        port = int(re.search(r":(\d+)/$", lines[0])[1])
        ask(port, "/state")
    assert servers[0].returncode == -signal.SIGKILL  # it did not come to its own end
    assert "open pages" in lines[-1]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/state")


def test_the_server_ends_with_a_training_that_is_killed(tmp_path):
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom keel.lab.watch.serve import serve_while\n"
        "with serve_while(Path(sys.argv[1]), 0, lambda line: print(line, flush=True)):\n    time.sleep(120)\n"
    )
    training = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    port = int(re.search(r":(\d+)/$", training.stdout.readline().strip())[1])
    ask(port, "/state")
    training.kill()
    training.wait()
    training.stdout.close()
    assert ended(port)


def ended(port, within_s=30):
    """Whether nobody answers any more."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            ask(port, "/state")
        except ConnectionError:
            return True
        time.sleep(0.2)
    return False
