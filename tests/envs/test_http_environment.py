"""An environment behind a URL: the example server, and servers that fail in every way a server can."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import keel
from envs.playing import lines, replies, short_run
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.cli import main
from keel.envs import http as http_module
from keel.envs.base import Task, play_turns
from keel.envs.calls import CallFailed
from keel.envs.episode import step_sync
from keel.envs.problems import is_held_out
from keel.envs.registry import build_task
from keel.envs.validity import check

ROOT = Path(__file__).resolve().parents[2]
PLAYER = "examples.http_environment:player"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(http_module, "BACKOFF_S", 0.01)
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def listening(server: ThreadingHTTPServer) -> str:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def gone(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


@pytest.fixture
def example() -> Iterator[Any]:
    """The server of examples/http_environment.py."""
    from examples.http_environment import Server

    server = Server(0)
    server.url = listening(server)
    yield server
    gone(server)


Answer = tuple[int, dict[str, str], bytes]


def said(body: Any, status: int = 200, **headers: str) -> Answer:
    return status, headers, body if isinstance(body, bytes) else json.dumps(body).encode()


class Scripted(ThreadingHTTPServer):
    """Answers by `reset(body)` and `step(body)`, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.reset: Callable[[Any], Answer] = lambda body: said({"id": f"e{body['seed']}", "observation": "say"})
        self.step: Callable[[Any], Answer] = lambda body: said({"observation": "more", "reward": 0.25})
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = listening(self)

    def handle_error(self, *args: Any) -> None: ...


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.server.headers.append(dict(self.headers))
        calls: dict[str, Callable[[Any], Answer]] = {
            "/reset": self.server.reset,
            "/step": self.server.step,
            "/close": lambda body: said({}),
        }
        status, headers, data = calls[self.path](body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not headers.get("drip"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for part in [data[i : i + 1] for i in range(len(data))] if headers.get("drip") else [data]:
            self.wfile.write(part)
            time.sleep(0.02 if headers.get("drip") else 0)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    gone(made)


def first(task: Task) -> Problem:
    return task.sample(1, seed=0, step=0)[0]


def failure(server: Scripted, **options: Any) -> str:
    """Why the first step of an episode fails."""
    task = build_task("http", url=server.url, **options)
    (reply,) = replies(task, [(first(task), "x")])
    assert isinstance(reply, CallFailed), reply
    return str(reply)


# ------------------------------------------------------------------------------------------------ the protocol


def test_what_is_sent_and_what_is_read(server: Scripted) -> None:
    task = build_task("http", url=f"{server.url}/", size=3, success=0.5)
    train, held = task.sample(4, seed=1, step=2), task.held_out(2)
    server.asked.clear()
    told = [{"role": "tool", "content": "more"}]
    answers = [{"observation": told, "reward": 0.25}, {"reward": 0.5, "done": True, "metrics": {"moves": 2}}]
    server.step = lambda body: said(answers[body["turn"] - 1])
    with play_turns(task, train[0], ["a", "b", "c"]) as (episode, heard):
        assert heard == [told, None]
        assert episode.reward().total == 0.75
        assert episode.reward().parts == {"correct": 1.0}
        assert episode.counts() == {"env/moves": 2.0}
    seed = train[0].info["seed"]
    assert server.asked == [
        ("/reset", {"seed": seed, "held_out": False, "params": {"size": 3}}),
        ("/step", {"id": f"e{seed}", "turn": 1, "text": "a"}),
        ("/step", {"id": f"e{seed}", "turn": 2, "text": "b"}),
        ("/close", {"id": f"e{seed}"}),
    ]
    assert all(is_held_out(str(problem.info["seed"])) for problem in held)
    server.asked.clear()
    task.held_out(1)
    assert server.asked[0][1]["held_out"] is True


@pytest.mark.slow
def test_the_example_is_a_sound_task(example: Any) -> None:
    check(build_task("http", url=example.url, player=PLAYER), count=2)
    assert example.episodes == {}  # all were closed


@pytest.mark.slow
def test_check_task_finds_nothing_wrong_with_the_example(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"task.url={example.url}", f"task.player={PLAYER}", "task.success=1"]
    assert main(["check-task", "http", *options, "--samples", "2"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_examples_player_wins_in_the_turns_that_bisection_takes(example: Any) -> None:
    """The middle of ten digits is found at once, two in two turns, four in three, and the other three in four."""
    task = build_task("http", url=example.url, player=PLAYER)
    from examples.http_environment import Episode

    taken: dict[int, int] = {}
    for problem in task.sample(40, seed=0, step=0):
        turns = task.gold_turns(problem)
        assert task.reward(problem, turns).total == 1.0
        taken[Episode(problem.info["seed"]).digit] = len(turns)
    assert sorted(taken.values()) == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4]


def test_a_restarted_server_plays_on_from_reset(example: Any) -> None:
    from examples.http_environment import Server

    task = build_task("http", url=example.url)
    problem = first(task)
    episode, port = task.start(problem), example.server_address[1]
    step_sync(episode, "x")
    gone(example)
    example.__init__(port)
    listening(example)
    with pytest.raises(http_module.ServerFailed, match="404"):
        step_sync(episode, "x")  # its episode went with the server
    assert step_sync(task.start(problem), "x") == [{"role": "user", "content": "a digit, please"}]
    assert isinstance(example, Server)


def test_episodes_wait_beside_each_other(server: Scripted) -> None:
    """Each step is answered once eight have arrived: one after another none ever would be."""
    together = threading.Barrier(8, timeout=10)

    def step(body: Any) -> Answer:
        together.wait()
        return said({"observation": "more"})

    server.step = step
    task = build_task("http", url=server.url)
    turns = [(problem, "x") for problem in task.sample(8, seed=0, step=0)]
    assert replies(task, turns) == [[{"role": "user", "content": "more"}]] * 8


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (said({}, 404), "step answered with status 404"),
        (said({}, 500), "step answered with status 500"),
        (said({}, 302, Location="/elsewhere"), r"step redirects.*task\.url"),
        (said(b"<html>"), "JSON"),
        (said([1]), "list"),
        (said(b'"' + b"x" * (1 << 20) + b'"'), "1 MiB"),
        (said({"reward": 1}), "observation"),
        (said({"observation": []}), "observation"),
        (said({"observation": [{"role": "user"}]}), "observation"),
        (said({"observation": "x", "reward": "1"}), "reward"),
        (said({"observation": "x", "reward": True}), "reward"),
        (said(b'{"observation": "x", "reward": NaN}'), "reward"),
        (said({"observation": "x", "done": 1}), "done"),
        (said({"observation": "x", "metrics": 3}), "metrics"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_breaks_the_protocol_is_a_failure(server: Scripted, answer: Answer, names: str) -> None:
    server.step = lambda body: answer
    assert re.search(names, failure(server))
    assert [path for path, _ in server.asked].count("/step") == 1  # never repeated


def test_a_redirect_is_not_followed(server: Scripted) -> None:
    other = Scripted()
    try:
        server.step = lambda body: said({}, 307, Location=f"{other.url}/step")
        assert "redirects" in failure(server, headers={"Authorization": "Bearer abc"})
        assert other.asked == []
    finally:
        gone(other)


@pytest.mark.parametrize("drip", ["", "yes"])
def test_the_time_limit_is_that_of_the_whole_answer(server: Scripted, drip: str) -> None:
    server.step = lambda body: said({"observation": "x" * 100}, drip=drip) if drip else (time.sleep(2), said({}))[1]
    began = time.monotonic()
    assert "0.3 s (task.timeout_s)" in failure(server, timeout_s=0.3)
    assert time.monotonic() - began < 1.9


def test_only_reset_is_tried_again(server: Scripted) -> None:
    tries = iter([said({}, 503), said({}, 429), said({"id": "a", "observation": "say"})] * 4)
    server.reset = lambda body: next(tries)
    task = build_task("http", url=server.url)
    assert first(task).prompt == [{"role": "user", "content": "say"}]
    server.reset = lambda body: said({}, 503)
    asked = len(server.asked)
    with pytest.raises(KeelError, match=r"^http does not start: .*reset answered with status 503; .*task\.url"):
        first(task)
    assert len(server.asked) - asked == 1 + http_module.RETRIES
    server.reset = lambda body: said({}, 400)
    with pytest.raises(KeelError, match="400"):
        first(task)
    assert len(server.asked) - asked == 2 + http_module.RETRIES


def test_an_environment_that_does_not_repeat_is_refused(server: Scripted) -> None:
    ticks = iter(range(9))
    server.reset = lambda body: said({"id": "a", "observation": str(next(ticks))})
    with pytest.raises(KeelError, match="same seed"):
        build_task("http", url=server.url)


def test_an_episode_that_begins_otherwise_is_a_failure(server: Scripted) -> None:
    task = build_task("http", url=server.url)
    problem = first(task)
    server.reset = lambda body: said({"id": "a", "observation": "other"})
    (reply,) = replies(task, [(problem, "x")])
    assert "differs from the prompt" in str(reply)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"url": "127.0.0.1:80"}, "task.url"),
        ({"url": "ftp://127.0.0.1/"}, "task.url"),
        ({"url": "http://127.0.0.1/?x=1"}, "task.url"),
        ({"url": "http://127.0.0.1", "timeout_s": 0}, "task.timeout_s"),
        ({"url": "http://127.0.0.1", "timeout_s": "long"}, "timeout_s"),
        ({"url": "http://$NOWHERE_AT_ALL/"}, "NOWHERE_AT_ALL"),
        ({"url": "http://127.0.0.1", "headers": {"Authorization": "$NOWHERE_AT_ALL"}}, "task.headers"),
        ({"url": "http://127.0.0.1", "player": "nothing:there"}, "task.player"),
        ({}, "'url'"),
    ],
    ids=str,
)
def test_bad_options_are_one_line(options: dict[str, Any], names: str) -> None:
    with pytest.raises(KeelError) as refused:
        build_task("http", **options)
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(KeelError, match=rf"^http does not start: .*{url}/reset cannot be reached.*task\.url$"):
        build_task("http", url=url)


def test_the_secret_travels_in_the_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.http_environment import Server

    server = Server(0, "s3cret-of-the-server")
    url = listening(server)
    headers = {"Authorization": "Bearer $ENV_TOKEN"}
    try:
        monkeypatch.setenv("ENV_TOKEN", "s3cret-of-the-server")
        assert first(build_task("http", url=url, headers=headers)).prompt
        monkeypatch.setenv("ENV_TOKEN", "another-secret-42")
        with pytest.raises(KeelError, match="status 401") as refused:
            build_task("http", url=url.replace("127.0.0.1", "user:pass-w0rd@127.0.0.1"), headers=headers)
        assert "another-secret-42" not in str(refused.value)
        assert "pass-w0rd" not in str(refused.value)
    finally:
        gone(server)


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.slow
def test_a_resumed_run_is_the_run_in_one_go_also_on_another_server(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.http_environment import Server

    example.token = "f1rst-secret"
    monkeypatch.setenv("ENV_TOKEN", example.token)
    spec = {"name": "http", "url": example.url, "player": PLAYER, "headers": {"Authorization": "Bearer $ENV_TOKEN"}}
    start = {"steps": 4, "batch_size": 4}
    whole = keel.train(short_run(tmp_path / "whole", spec, warmstart=start)).directory
    part = short_run(tmp_path / "part", spec, warmstart=start)
    keel.train(part, overrides=["run.max_steps=2"])
    moved = Server(0, "n3w-secret-9")
    monkeypatch.setenv("ENV_TOKEN", "n3w-secret-9")
    try:
        resumed = keel.train(part, overrides=[f"task.url={listening(moved)}"], resume=True).directory
    finally:
        gone(moved)
    assert lines(resumed, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert lines(whole, "metrics.jsonl")[-1]["turn/count_mean"] >= 1
    assert not any("n3w-secret-9" in path.read_text(errors="replace") for path in resumed.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_server_that_loses_episodes_is_recorded_and_the_run_goes_on(server: Scripted, tmp_path: Path) -> None:
    """One that drops the connection in the second turn, where the seed is a multiple of three."""

    def step(body: Any) -> Answer:
        if body["turn"] == 2 and int(body["id"][1:]) % 3 == 0:
            raise ConnectionError
        return said({"observation": "more", "reward": float("e" in body["text"]), "done": body["turn"] == 3})

    server.step = step
    config = short_run(tmp_path, {"name": "http", "url": server.url}, reward={"on_error": "skip_group"})
    config["run"]["max_steps"], config["rollout"]["prompts_per_step"] = 2, 8
    run = keel.train(config).directory
    assert len(lines(run, "metrics.jsonl")) == 2
    failed = [event["message"] for event in lines(run, "events.jsonl") if event["kind"] == "reward/failed"]
    assert failed
    assert all("step" in message and server.url in message for message in failed)
    with pytest.raises(KeelError, match=r"cannot be reached.*reward\.on_error"):
        keel.train(config, overrides=["run.name=stops", "reward.on_error=stop"])
