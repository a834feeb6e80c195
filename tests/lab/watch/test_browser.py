"""The page in a real browser: it follows a run that grows without being loaded again, and runs nothing of a rollout."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from chromium import browse, needs_chromium, tab
from keel.lab.watch.page import Watcher
from keel.lab.watch.serve import Handler, listen, served
from keel.loggers import JsonlLogger, RunDirectory
from lab.report.synthetic import make_run
from lab.report.test_report import VOID, Page
from lab.watch.test_watch import Clock

EVIL = "</pre><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


class Dom(Page):
    """What a browser writes out: it closes the elements of an SVG."""

    def handle_endtag(self, tag):
        if tag not in VOID:
            super().handle_endtag(tag)


class Growing(Watcher):
    """Every look at the runs finds a step more, so that the test depends on no clock."""

    def __init__(self, paths, log, last):
        super().__init__(paths, Clock())
        self.log, self.last, self.step = log, last, 0

    def refresh(self):
        raise AssertionError("only requests look here")

    def _refresh(self):
        if self.step < self.last:
            self.step += 1
            kl = {"kl/policy_ref/k3/mean": 0.01 * self.step, "kl/policy_ref/k3/se": 0.001}
            self.log.step(self.step, {"reward/mean": self.step / 10, "kl/beta": 0.01, "time/total_s": 3.0} | kl)
            self.log.rollouts(self.step, [{"problem": "p", "prompt": EVIL, **record} for record in self.records()])
        super()._refresh()

    def records(self) -> list[dict[str, Any]]:
        return [{"completion": f"{EVIL} {self.step}"}]


class Playing(Growing):
    """Two long episodes a step, whose folds have the same title."""

    def records(self) -> list[dict[str, Any]]:
        turns = [{"tokens": 1, "reply": 1, "stop_reason": "eos", "note": EVIL}] * 9
        tokens = [EVIL, f"{self.step}"] * 9
        return [{"tokens": tokens, "action": [True, False] * 9, "kl": [0.5, None] * 9, "turns": turns}] * 2


@needs_chromium
def test_the_page_follows_a_run_and_is_loaded_once(tmp_path, monkeypatch):
    asked = []
    route = Handler._route
    monkeypatch.setattr(Handler, "_route", lambda self, path: asked.append(path) or route(self, path))
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_text("config.yaml", "run: {name: run, max_steps: 40}\n")
        watcher, listener = Growing([run.path], JsonlLogger(run), last=9), listen(0)
        with served(watcher, listener):
            dom = browse(f"http://localhost:{listener.getsockname()[1]}/", tmp_path / "profile", "--dump-dom")
    page = Dom(dom)
    assert asked.count("/") == 1
    assert asked.count("/state") >= 4
    assert asked.count("/section/options") == 0  # what has not changed is not fetched
    assert "step 9 of 40 · about 1m 33s left" in page.text
    assert "Live · last change" in page.text
    assert re.search(r"<title>Keel · run</title>", dom)
    assert "img" not in page.tags
    assert f"{EVIL} 9" in page.text.replace("&lt;", "<")
    charts = page.scripts[0]
    assert '"x":[1,2,3,4,5,6,7,8,9]' in charts.replace(".0", "")


@needs_chromium
def test_the_page_says_that_its_server_has_ended(tmp_path, monkeypatch):
    """After the page itself and its first question nobody answers: as behind a tunnel that was closed."""
    answered = []
    route = Handler._route

    def few(self, path):
        if len(answered) > 1:
            self.close_connection = True
            raise ConnectionResetError
        answered.append(path)
        return route(self, path)

    monkeypatch.setattr(Handler, "_route", few)
    run, listener = make_run(tmp_path / "run", total=5), listen(0)
    with served(Watcher([run], Clock()), listener):
        dom = browse(f"http://127.0.0.1:{listener.getsockname()[1]}/", tmp_path / "profile", "--dump-dom")
    assert "No longer live: " in Dom(dom).text
    assert "step 5 of 5" in Dom(dom).text


@needs_chromium
def test_a_picture_of_two_runs_beside_each_other(tmp_path):
    runs = [make_run(tmp_path / "one", total=30), make_run(tmp_path / "two", total=30, upto=21, finish=False, seed=1)]
    listener, picture = listen(0), tmp_path / "page.png"
    with served(Watcher(runs, Clock()), listener):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        browse(address, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1200,900")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 900)
    assert len(data) > 20_000  # an empty page is some 5 kB


@needs_chromium
@pytest.mark.processes
def test_folds_stay_as_the_reader_left_them_and_a_tap_tells_the_log_ratio(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_text("config.yaml", "run: {name: run, max_steps: 40}\n")
        watcher, listener = Playing([run.path], JsonlLogger(run), last=40), listen(0)
        with served(watcher, listener), tab(tmp_path / "profile") as page:
            page.open(f"http://localhost:{listener.getsockname()[1]}/")
            page.run("document.querySelectorAll('#rollouts details')[1].open = true")
            before = page.run("document.querySelector('#rollouts h4').textContent")
            page.until(f"document.querySelector('#rollouts h4').textContent !== {before!r}")
            folds = "[...document.querySelectorAll('#rollouts details')].map((fold) => fold.open)"
            assert page.run(folds) == [False, True]
            page.run("document.querySelector('#rollouts .turn .t').click()")
            assert page.run("document.querySelector('#rollouts .turn output').textContent").endswith(
                "log-ratio +0.5000 nats"
            )
            assert page.run("document.title") == "Keel · run"
            assert page.run("document.querySelectorAll('#rollouts img').length") == 0
