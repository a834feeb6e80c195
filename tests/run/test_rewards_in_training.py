"""Rewards in a run: what is logged of each part, what becomes of failures, and a judge that is down."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keel.api import train
from keel.base.errors import KeelError
from keel.base.types import Problem
from trainer.small import small_config


async def half_fail(problem: Problem, text: str) -> float:
    await asyncio.sleep(0)
    if len(text) % 2:
        raise RuntimeError("odd")
    return 1.0


def run(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result = train(small_config(f"run.dir={tmp_path}", "run.max_steps=2", *overrides))
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    written = json.loads((result.directory / "summary.json").read_text())
    return written, [json.loads(line) for line in lines]


def test_each_part_is_logged_by_its_name(tmp_path: Path) -> None:
    entries = "[{name: task}, {name: tag_count, weight: 0.5}, {name: cosine, of: exact, max_length: 10, label: shaped}]"
    summary, lines = run(tmp_path, f"rewards={entries}")
    for line in lines:
        parts = {name: line[f"reward/part/{name}"] for name in ("letters", "tag_count", "shaped", "shaped/correct")}
        total = parts["letters"] + 0.5 * parts["tag_count"] + parts["shaped"]
        assert line["reward/mean"] == pytest.approx(total, abs=1e-5)
    assert summary["reward_failures"] == {}


def test_failures_are_counted_in_the_summary(tmp_path: Path) -> None:
    entry = f"{{name: '{__name__}:half_fail', label: mine}}"
    summary, _ = run(tmp_path, f"rewards=[{entry}]", "reward.on_error=zero")
    events = [json.loads(line) for line in (tmp_path / "small" / "events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["kind"] == "reward/failed"]
    assert summary["reward_failures"] == {"mine": len(failed)}
    assert failed
    assert "raised RuntimeError: odd" in failed[0]["message"]


def test_a_judge_that_is_down_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/judge"
    with pytest.raises(KeelError, match=f"the judge at {url} is down"):
        run(tmp_path, f"rewards=[{{name: http, url: '{url}'}}]", "reward.on_error=zero")
    assert not (tmp_path / "small").exists()


class Tires(BaseHTTPRequestHandler):
    """A judge that answers twelve times, then says that it is unavailable."""

    answered = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Tires.answered += 1
        text = b'{"score": 1}' if Tires.answered <= 12 else b""
        self.send_response(200 if text else 503)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.parametrize(("on_error", "steps"), [("zero", 2), ("stop", None)])
def test_a_judge_that_fails_later_is_handled_as_asked(
    on_error: str, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tires, "answered", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tires)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/judge"
    options = (f"rewards=[{{name: http, url: '{url}', retries: 0}}]", f"reward.on_error={on_error}")
    try:
        if steps is None:
            with pytest.raises(KeelError, match=f"{url} answered with status 503"):
                run(tmp_path, *options)
            return
        summary, lines = run(tmp_path, *options)
        assert len(lines) == steps
        assert 0 < summary["reward_failures"]["http"] <= Tires.answered - 12
    finally:
        server.shutdown()
        server.server_close()
