"""A judge behind a URL, on a server of the test's own: what it is sent, how it is read, and how it can fail."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.envs.rewards import probe_rewards

TASK = arithmetic()
PROBLEM = Problem("add:3,4", "3+4=", "7")
QUICK = {"retries": 2, "backoff_s": 0.01, "timeout_s": 5.0}


class Server:
    """Answers each request by `answer(body) -> (status, text)` and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[Any], tuple[int, str]] = lambda body: (200, json.dumps({"score": 1.0}))
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.headers.append(dict(self.headers))
                outer.paths.append(self.path)
                status, text = outer.answer(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:  # a client that gave up
                ...

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/judge"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def closed_url() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/judge"


def judge_of(url: str, **params: Any) -> Judge:
    options = {"on_error": params.pop("on_error")} if "on_error" in params else {}
    return Judge.of(TASK, [{"name": "http", "url": url, **QUICK, **params}], **options)


def totals(judge: Judge, *texts: str) -> list[float] | None:
    rewards = judge.judge(PROBLEM, [[text] for text in texts])
    return None if rewards is None else [reward.total for reward in rewards]


def test_what_is_sent_and_what_is_read(server: Server) -> None:
    server.answer = lambda body: (200, json.dumps({"score": len(body["completion"])}))
    assert totals(judge_of(server.url), "a", "abc", "") == [1.0, 3.0, 0.0]
    assert {"key": "add:3,4", "prompt": "3+4=", "completion": "abc", "turns": ["abc"], "answer": "7"} in server.asked


@pytest.mark.parametrize(
    ("path", "answer", "value"),
    [
        ("score", {"score": 0.25}, 0.25),
        ("results.1.value", {"results": [{"value": 1}, {"value": 2}]}, 2.0),
        ("0.score", [{"score": "0.5"}], 0.5),
        ("ok", {"ok": True}, 1.0),
    ],
)
def test_the_score_is_found_by_its_path(server: Server, path: str, answer: Any, value: float) -> None:
    server.answer = lambda body: (200, json.dumps(answer))
    assert totals(judge_of(server.url, score=path), "x") == [value]


def test_a_fault_that_passes_is_tried_again(server: Server) -> None:
    states = iter([500, 429, 200])
    server.answer = lambda body: (next(states), '{"score": 1}')
    assert totals(judge_of(server.url), "x") == [1.0]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "text", "says", "tries"),
    [
        (500, "", "answered with status 500 (3 tries)", 3),
        (404, "", "answered with status 404", 1),
        (200, "no json", "did not answer in JSON", 1),
        (200, '{"mark": 1}', "answered without 'score': at 'score' the answer has mark", 1),
        (200, '{"score": "good"}', "gave 'good' at score", 1),
        (200, '{"score": null}', "at score, which is not a number", 1),
        (200, '{"score": NaN}', "returned nan", 1),
        (200, "[]", "answered without 'score'", 1),
    ],
)
def test_what_a_judge_can_do_wrong(server: Server, status: int, text: str, says: str, tries: int) -> None:
    server.answer = lambda body: (status, text)
    with pytest.raises(KeelError) as caught:
        totals(judge_of(server.url), "x")
    message = str(caught.value)
    assert says in message
    assert "http on problem 'add:3,4', completion 0" in message
    assert server.url in message or "returned nan" in message
    assert len(server.asked) == tries


def test_an_answer_that_drips_in_ends_too() -> None:
    """A byte before every limit of a single read: the whole answer has a limit of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    released = threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not released.wait(0.05):
                connection.sendall(b" ")

    threading.Thread(target=drip, daemon=True).start()
    with pytest.raises(KeelError, match="timed out"):
        totals(judge_of(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=0.3, retries=0), "x")
    released.set()
    listening.close()


def test_an_answer_without_end_is_no_score(server: Server) -> None:
    server.answer = lambda body: (200, '{"score": 1}' + " " * (1 << 20))
    with pytest.raises(KeelError, match="did not answer in JSON: longer than 1 MiB"):
        totals(judge_of(server.url), "x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, server.url.removesuffix("/judge"))
    probe_rewards([{"name": "http", "url": "http://judge.invalid/score"}])  # who is behind a proxy shows later
    assert totals(judge_of("http://judge.invalid/score"), "x") == [1.0]
    assert server.paths == ["http://judge.invalid/score"]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert totals(judge_of(server.url), "x") == [1.0]
    assert server.paths[1:] == ["/judge"]


def test_a_slow_judge_is_left_after_its_time(server: Server) -> None:
    server.answer = lambda body: (time.sleep(3), (200, '{"score": 1}'))[1]
    began = time.monotonic()
    with pytest.raises(KeelError, match="cannot be reached: timed out;"):
        totals(judge_of(server.url, timeout_s=0.1, retries=0), "x")
    assert time.monotonic() - began < 2


def test_a_judge_that_is_down_is_named_and_handled_as_asked() -> None:
    url = closed_url()
    with pytest.raises(KeelError, match=f"{url} cannot be reached.*reward.on_error"):
        totals(judge_of(url), "x")
    zero = judge_of(url, on_error="zero")
    assert totals(zero, "x", "y") == [0.0, 0.0]
    assert zero.counts == {"http": 2}
    assert totals(judge_of(url, on_error="skip_group"), "x") is None


def test_a_judge_that_is_down_is_found_before_anything_else() -> None:
    url = closed_url()
    entries = [{"name": "exact"}, {"name": "http", "url": f"{url}?key=secret"}]
    with pytest.raises(KeelError, match=f"the judge at {url} is down: .*refused") as caught:
        probe_rewards(entries)
    assert "secret" not in str(caught.value)


def test_one_that_listens_is_asked_nothing_by_the_probe(server: Server) -> None:
    probe_rewards([{"name": "http", "url": server.url}, {"name": "task"}])
    assert server.asked == []


def test_a_group_is_judged_concurrently_but_no_more_than_told(server: Server) -> None:
    busy, most, lock = 0, 0, threading.Lock()

    def answer(body: Any) -> tuple[int, str]:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.1)
        with lock:
            busy -= 1
        return 200, '{"score": 1}'

    server.answer = answer
    totals(judge_of(server.url, concurrency=3), *"abcdef")
    assert most == 3


def test_headers_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_TEST_TOKEN", "abc")
    headers = {"Authorization": "Bearer $KEEL_TEST_TOKEN"}
    totals(judge_of(server.url, headers=headers), "x")
    assert server.headers[0]["Authorization"] == "Bearer abc"
    monkeypatch.delenv("KEEL_TEST_TOKEN")
    with pytest.raises(KeelError, match=r"\$KEEL_TEST_TOKEN"):
        probe_rewards([{"name": "http", "url": server.url, "headers": headers}])


def chat(url: str, **params: Any) -> Judge:
    entry = {"name": "chat_judge", "url": url, "model": "m", **QUICK, **params}
    return Judge.of(TASK, [entry])


def replies(text: str) -> Callable[[Any], tuple[int, str]]:
    return lambda body: (200, json.dumps({"choices": [{"message": {"content": text}}]}))


def test_a_chat_model_is_asked_and_its_last_score_counts(server: Server) -> None:
    server.answer = replies("Score: 1 would be harsh.\nScore: 7.5")
    assert totals(chat(server.url), "it is {answer}") == [0.75]
    assert server.paths == ["/judge/chat/completions"]
    body = server.asked[0]
    asked = body["messages"][0]["content"]
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert "3+4=" in asked
    assert "it is {answer}" in asked  # what stands in a completion is not filled in


def test_a_chat_models_own_template_pattern_and_range(server: Server) -> None:
    server.answer = replies("<s>-1</s>")
    params = {"template": "Q {prompt} A {completion} R {answer}", "pattern": r"<s>(.*?)</s>", "low": -1, "high": 1}
    assert totals(chat(server.url + "/chat/completions", **params), "8") == [0.0]
    assert server.paths == ["/judge/chat/completions"]
    assert server.asked[0]["messages"][0]["content"] == "Q 3+4= A 8 R 7"


@pytest.mark.parametrize(
    ("reply", "says"), [("fine", "replied without a score"), ("Score: 11", "gave the score 11, outside 0 to 10")]
)
def test_no_score_is_a_failure_and_not_a_zero(server: Server, reply: str, says: str) -> None:
    server.answer = replies(reply)
    with pytest.raises(KeelError, match=says):
        totals(chat(server.url), "x")


def redirecting(server: Server, to: str, status: int) -> None:
    """Answer with a redirect: the handler reads the place from the text."""
    inner = server.http.RequestHandlerClass

    class Redirects(inner):  # type: ignore[misc,valid-type]
        def do_POST(self) -> None:
            if self.path == "/judge":
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Location", to)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                super().do_POST()

    server.http.RequestHandlerClass = Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_origin_is_not_followed(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Not with the token, not at all: another port is another server."""
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret-token")
    other = Server()
    asked: list[str] = []
    other.http.RequestHandlerClass.do_GET = lambda self: asked.append(self.path)  # type: ignore[attr-defined]
    try:
        redirecting(server, other.url + "?from=here", status)
        judge = judge_of(server.url, headers={"Authorization": "Bearer $JUDGE_TOKEN"})
        with pytest.raises(KeelError, match=rf"redirects to {other.url}.*rewards\.url") as caught:
            totals(judge, "7")
    finally:
        other.http.shutdown()
        other.http.server_close()
    assert (other.asked, other.headers, asked) == ([], [], [])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_within_the_server_is_refused_with_its_address(server: Server, status: int) -> None:
    """A followed 302 turns the POST into a GET without the body, and the score is that of an empty request."""
    asked: list[str] = []
    server.http.RequestHandlerClass.do_GET = lambda self: asked.append(self.path)  # type: ignore[attr-defined]
    redirecting(server, "/judge/", status)
    with pytest.raises(KeelError, match=rf"redirects to {server.url}/.*rewards\.url"):
        totals(judge_of(server.url), "7")
    assert (server.asked, asked) == ([], [])


def test_the_query_comes_from_the_environment_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-1234567")
    assert totals(judge_of(server.url + "?api_key=$JUDGE_KEY"), "7") == [1.0]
    assert server.paths == ["/judge?api_key=k-1234567"]
    server.answer = replies("Score: 10")
    assert totals(chat(server.url + "?api-version=2&key=${JUDGE_KEY}"), "7") == [1.0]
    assert server.paths[1] == "/judge/chat/completions?api-version=2&key=k-1234567"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(KeelError, match=r"rewards\.url names \$JUDGE_KEY, which is not set"):
        probe_rewards([{"name": "http", "url": server.url + "?api_key=$JUDGE_KEY"}])


def test_what_a_judge_echoes_of_the_token_is_masked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret-token")
    server.answer = lambda body: (200, json.dumps({"detail": "unknown s3cret-token"}))
    with pytest.raises(KeelError) as caught:
        totals(judge_of(server.url, score="detail", headers={"X-Key": "$JUDGE_TOKEN"}), "7")
    assert "s3cret" not in str(caught.value)
    assert "unknown <masked>" in str(caught.value)
