"""Tools of MCP servers: a real one over stdio and over HTTP, and everything that goes wrong on the way to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from envs.playing import episode_of, replies
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.cli import main
from keel.config import load_config
from keel.envs import mcp
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.toolbox import Toolbox
from keel.envs.tools import Tool
from keel.envs.with_tools import tools_of
from keel.rollout import SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.render import Renderer
from rollout.chats import chats
from rollout.test_turns_tools import Scripted

pytestmark = pytest.mark.processes


SERVER = Path(__file__).with_name("mcp_server.py")
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
KEYS = count()
NO_DISK = "error: fails raised ToolError: Error executing tool fails: no disk"


def entry(*arguments: object, **options: Any) -> dict[str, Any]:
    """The small server as `task.tools` names it."""
    command = " ".join(map(str, (sys.executable, SERVER, *arguments)))
    return {"mcp": command, **options, "env": {**ENV, **options.get("env", {})}}


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    """Leave no server behind for the tests of other files."""
    yield
    mcp.end_servers()


def turn(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(tools: tuple[Tool, ...], name: str, **arguments: Any) -> tuple[str, str | None]:
    """What the model is told of one call, and as what it counts."""
    toolbox = Toolbox(lambda problem: tools)
    episode, _ = episode_of(toolbox, Problem(str(next(KEYS)), "?"), [turn(name, arguments)])
    (result,) = episode.every_result
    return result.content, result.kind


def is_running(pid: int) -> bool:
    """Whether a process lives; one that has ended and waits to be read does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(tools: tuple[Tool, ...]) -> None:
    """Kill the server behind some tools."""
    pid = int(ask(tools, "server_pid")[0].split()[0])
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_running(pid))


def until(condition: Any, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def test_a_servers_tools_are_listed_as_it_describes_them() -> None:
    tools = tools_of([entry()])
    assert [tool.name for tool in tools] == [
        "add", "find", "fails", "talks", "sleeps", "draws", "server_pid", "ends",
    ]  # fmt: skip
    add = tools[0]
    assert (add.description, add.required, add.hints) == ("Add two numbers.", ("a",), {"a": int, "b": float})
    assert (add.timeout_s, add.max_characters, add.at_once) == (10.0, 4000, 1)
    schema = add.schema["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("add", ["a"])
    assert schema["parameters"]["properties"]["b"] == {"default": 1.0, "title": "B", "type": "number"}
    assert tools[1].hints == {"query": str, "kind": Literal["web", "news"], "words": list[str] | None}


def test_equal_entries_share_a_server_and_others_have_their_own() -> None:
    first, again = tools_of([entry(only=["server.pid"])]), tools_of([entry(only=["server.pid"], timeout_s=3)])
    other = tools_of([entry(only=["server.pid"], env={"SMALL_WORD": "hello"})])
    assert ask(first, "server_pid") == ask(again, "server_pid")
    (pid, word), (others_pid, others_word) = (ask(tools, "server_pid")[0].split() for tools in (first, other))
    assert pid != others_pid
    assert (word, others_word) == ("-", "hello")


@pytest.mark.parametrize(
    ("name", "arguments", "said", "kind"),
    [
        ("add", {"a": 3, "b": 2}, "3 + 2.0 = 5.0", None),
        ("add", {"a": "3"}, "3 + 1.0 = 4.0", None),
        ("add", {"a": "three"}, "error: add: 'a' must be int, not 'three'", "bad_arguments"),
        ("add", {"b": 1}, "error: add: the parameter 'a' is missing", "bad_arguments"),
        ("add", {"a": 1, "c": 1}, "error: add: unknown parameter 'c'; the parameters are a, b", "bad_arguments"),
        ("find", {"query": 7, "words": ["x"]}, "7/web/['x']", None),
        ("find", {"query": "q", "kind": "news", "words": None}, "q/news/None", None),
        ("find", {"query": "q", "kind": "old"}, "error: find: 'kind' must be Literal['web', 'news']", "bad_arguments"),
        ("fails", {"reason": "no disk"}, NO_DISK, "failed"),
        ("talks", {"letters": 30}, "a" * 20 + "\n[cut: 10 characters more]", "too_long"),
        ("draws", {}, "here:\n[image]", None),
        ("sleeps", {"seconds": 5}, "error: sleeps took too long", "timeout"),
        ("server.pid", {}, "error: there is no tool 'server.pid'", "unknown_tool"),
    ],
)
def test_calls(name: str, arguments: dict[str, Any], said: str, kind: str | None) -> None:
    tools = tools_of([entry(max_characters=20, timeout_s=1.0)])
    content, counted = ask(tools, name, **arguments)
    assert (content[: len(said)], counted) == (said, kind)
    assert content == said or counted in ("bad_arguments", "unknown_tool")


def test_calls_run_together_as_far_as_the_entry_allows() -> None:
    """Four calls of a second each, and each reply goes to its own episode."""
    task: Any = build_task("tools", task={"name": "arithmetic"}, tools=[entry(only=["sleeps"], at_once=4)])
    times = (1.0, 1.1, 1.2, 1.3)
    problems = task.sample(4, seed=0, step=0)
    turns = [(problem, turn("sleeps", {"seconds": s})) for problem, s in zip(problems, times, strict=True)]
    began = time.monotonic()
    told = replies(task, turns)
    assert time.monotonic() - began < 3.5
    assert [reply[0]["content"] for reply in told] == [f"slept {seconds}" for seconds in times]


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        ({"type": "array", "items": {"type": "integer"}}, list[int]),
        ({"type": "array"}, list[Any]),
        ({"type": "object", "properties": {}}, dict),
        ({"type": ["string", "null"]}, str | None),
        ({"type": "integer", "nullable": True}, int | None),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, int | bool),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}, Any),
        ({"enum": [1, "a", None]}, Literal[1, "a", None]),
        ({"enum": [[1], [2]]}, Any),
        ({"$ref": "#/$defs/x"}, Any),
        ({}, Any),
        (True, Any),
    ],
)
def test_what_a_schema_asks_for_is_checked_where_it_is_simple(schema: Any, hint: Any) -> None:
    assert mcp.hint_of(schema) == hint


def test_a_server_that_ends_fails_the_call_and_is_started_again_once() -> None:
    tools = tools_of([entry(env={"SMALL_WORD": "ends"})])
    pid, _ = ask(tools, "server_pid")
    ended = "error: ends raised ToolError: its server ended during the call", "failed"
    assert ask(tools, "ends") == ended
    assert ask(tools, "server_pid")[0] != pid
    assert ask(tools, "ends") == ended
    assert ask(tools, "ends") == ended  # by the server that was started again, and has answered nothing since
    gone = "error: add raised ToolError: its server has ended again and is not restarted", "failed"
    assert ask(tools, "add", a=1) == gone
    assert ask(tools_of([entry(env={"SMALL_WORD": "ends"})]), "add", a=1) == ("1 + 1.0 = 2.0", None)


def test_a_server_that_is_killed_between_calls_is_started_again() -> None:
    tools = tools_of([entry(env={"SMALL_WORD": "killed"})])
    kill(tools)
    assert ask(tools, "add", a=1)[1] == "failed"
    assert ask(tools, "add", a=1) == ("1 + 1.0 = 2.0", None)


def test_a_task_built_later_finds_a_server_that_answers() -> None:
    """The server that an equal entry started has ended unseen."""
    kill(tools_of([entry(env={"SMALL_WORD": "later"})]))
    assert ask(tools_of([entry(env={"SMALL_WORD": "later"})]), "add", a=1) == ("1 + 1.0 = 2.0", None)


def test_a_server_that_does_not_start_again_is_left_alone(tmp_path: Path) -> None:
    tools = tools_of([entry("once", tmp_path / "started")])
    assert ask(tools, "ends")[1] == "failed"
    said, kind = ask(tools, "add", a=1)
    assert said.startswith("error: add raised ToolError: its server did not start: Connection closed (stderr: small: ")
    assert kind == "failed"
    assert ask(tools, "add", a=1)[0].endswith("has ended again and is not restarted")


def test_servers_that_do_not_start_are_one_line() -> None:
    for wrong, message in (
        (entry("broken"), r"did not start: .* \(stderr: small: cannot find its database\); try the command in a term"),
        (
            {"mcp": "no-such-command --p 1"},
            r"the MCP server 'no-such-command --p 1' did not start: .*No such file",
        ),
        (
            {"mcp": f"http://127.0.0.1:{free_port()}/mcp"},
            r"/mcp' cannot be reached: .*; start it, or check",
        ),
    ):
        with pytest.raises(KeelError, match=message) as raised:
            tools_of([wrong])
        assert "\n" not in str(raised.value)


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "START_S", 3.0)
    with pytest.raises(KeelError, match=r"mute .* did not answer within 3 s; try the command"):
        tools_of([entry("mute", tmp_path / "pid")])
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry(only=["ad"]), "unknown tool of the MCP server .* 'ad': did you mean 'add'"),
        (entry(only=[]), r"only is \[\].*list"),
        (entry(only="add"), "only is .*add.*list"),
        (entry(timeout_s=0), "timeout_s.* is 0.*above 0"),
        (entry(max_characters=2.5), "max_characters.* is 2.5.*whole number"),
        (entry(at_once=True), "at_once.* is true.*whole number"),
        (entry(timeout=3), r"unknown option .*timeout.*did you mean .*timeout_s"),
        ({"mcp": "serve 'it"}, "mcp is .*: give the server's command or its URL"),
        ({"mcp": 3}, "mcp is 3"),
        ({"only": ["add"]}, "mcp is required"),
        ({"mcp": "serve", "env": ["A"]}, "env is .*A.*mapping"),
        ({"mcp": "http://127.0.0.1:1/mcp", "env": {"A": "1"}}, "env of .*command.*headers"),
    ],
)
def test_wrong_entries_are_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        tools_of([wrong])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(KeelError, match="two tools have the name 'add'"):
        tools_of([entry(only=["add"]), entry(only=["find", "add"])])


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(KeelError, match=r"needs mcp 2.0 or newer: pip install 'keel-rl\[mcp\]'"):
        tools_of([entry()])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(port: int) -> subprocess.Popen[bytes]:
    """The small server on a port of the loopback, once it can be reached."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "http", str(port)], env={**os.environ, **ENV}, stderr=subprocess.DEVNULL
    )

    def is_up() -> bool:
        with socket.socket() as there:
            return there.connect_ex(("127.0.0.1", port)) == 0

    assert until(is_up)
    return process


def test_over_http_also_when_the_server_comes_back() -> None:
    port = free_port()
    served = serve(port)
    try:
        tools = tools_of([{"mcp": f"http://127.0.0.1:{port}/mcp", "timeout_s": 2.0}])
        assert ask(tools, "add", a="3", b=2) == ("3 + 2.0 = 5.0", None)
        assert ask(tools, "fails", reason="no disk") == (NO_DISK, "failed")
        assert ask(tools, "sleeps", seconds=5) == ("error: sleeps took too long", "timeout")
        assert ask(tools, "talks", letters=5000)[1] == "too_long"
        served.kill()
        served.wait()
        assert [ask(tools, "add", a=1)[1] for _ in range(3)] == ["failed"] * 3
        served = serve(port)
        assert until(lambda: ask(tools, "add", a=1) == ("1 + 1.0 = 2.0", None))
    finally:
        served.kill()
        served.wait()


LEAVES = """
import os, sys, time
from keel.envs.with_tools import tools_of
from keel.envs.episode import step_sync
from keel.envs.toolbox import Toolbox, ToolEpisode
from keel.base.types import Problem

tools = tools_of([{"mcp": sys.argv[1], "env": {"PYTHONPATH": os.environ["PYTHONPATH"]}}])
call = '<tool_call>{"name": "server_pid", "arguments": {}}</tool_call>'
episode = ToolEpisode(Toolbox(lambda problem: tools), Problem("p", "?"))
print(step_sync(episode, call)[0]["content"], flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "raises":
    raise SystemExit(1)
"""


@pytest.mark.parametrize("way", ["returns", "raises", "killed"])
def test_no_server_outlives_python(way: str) -> None:
    command = [sys.executable, "-c", LEAVES, entry()["mcp"], way]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=60)
    pid = int(done.stdout.split()[0])
    assert done.stderr == ""
    assert until(lambda: not is_running(pid), 5.0 if way == "killed" else 0.0)


@pytest.mark.parametrize("format", ["json", "tags"])
def test_episodes_with_a_servers_tools_are_collected(format: str) -> None:
    tools = [entry(only=["add", "fails"])]
    task = build_task("tools", task={"name": "arithmetic"}, tools=tools, format=format)
    problems = task.sample(1, seed=0, step=0)
    gold = task.gold(problems[0])
    calls = {
        "json": (turn("add", {"a": 3, "b": 4}), turn("fails", {"reason": "x"})),
        "tags": ('<add>{"a": 3, "b": 4}</add>', "<fails>x</fails>"),
    }
    tokenizer = chats()["chatml"].tokenizer
    engine = Scripted(tokenizer, [[calls[format][0], gold], [calls[format][1], "no"]])
    sampling = SamplingParams(num_generations=2, max_completion_length=2000)
    collector = Collector(engine, task, Renderer(tokenizer), sampling, Judge.of(task), max_turns=3)
    (group,) = collector.collect(problems)
    right, wrong = group.completions
    assert "3 + 4.0 = 7.0" in right.text
    assert "error: fails raised ToolError: Error executing tool fails: x" in wrong.text
    assert [reward.total for reward in group.rewards] == [1.0, 0.0]


def test_configurations_and_check_task_take_such_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"name": "tools", "task": {"name": "arithmetic"}, "tools": [entry(only=["add"])], "format": "tags"}
    assert load_config({"task": task}).task.params["tools"] == [entry(only=["add"])]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"task": task}))
    assert main(["check-task", str(path), "--samples", "4"]) == 0, capsys.readouterr().out
    task["tools"] = [{"mcp": "no-such-command"}]
    path.write_text(json.dumps({"task": task}))
    assert main(["check-task", str(path)]) == 2
    assert "the MCP server 'no-such-command' did not start" in capsys.readouterr().err


def test_an_entrys_variables_are_read_when_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_TEST_WORD", "from-outside")
    given = entry(only=["server.pid"], env={"SMALL_WORD": "$KEEL_TEST_WORD"})
    assert ask(tools_of([given]), "server_pid")[0].split()[1] == "from-outside"
    monkeypatch.delenv("KEEL_TEST_WORD")
    with pytest.raises(KeelError, match=r"names \$KEEL_TEST_WORD, which is not set"):
        tools_of([entry(env={"SMALL_WORD": "$KEEL_TEST_WORD-2"})])


def test_headers_go_to_an_address_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_TEST_TOKEN", "s3cret-token")
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_error(403, "s3cret-token may not")

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/mcp?k=$KEEL_TEST_TOKEN"
        with pytest.raises(KeelError) as caught:
            tools_of([{"mcp": address, "headers": {"Authorization": "Bearer $KEEL_TEST_TOKEN"}}])
        server.shutdown()
    assert seen[0] == ("/mcp?k=s3cret-token", "Bearer s3cret-token")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(KeelError, match=r"headers of .*URL.*env"):
        tools_of([{"mcp": "server", "headers": {"A": "1"}}])
