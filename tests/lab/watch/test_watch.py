"""The server on loopback with a run that grows under it, as a browser and a curious stranger meet it."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from keel.base.errors import KeelError
from keel.cli import main
from keel.doctor.runs import read_run
from keel.lab.report.html import page as report_page
from keel.lab.watch.page import RENDER_SHARE, FollowedRun, Watcher, progress, seconds_left, why_ended
from keel.lab.watch.serve import EVERY_PAGE_S, REFRESH_S, addresses, is_local, listen, served, show_end, watch
from keel.loggers import JsonlLogger, RunDirectory
from lab.report.synthetic import make_run
from lab.report.test_report import ATTACK, Page


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def page_of(*runs, clock=None):
    """(ask, watcher): `ask(path, **headers)` is one request to a server of these runs."""
    watcher = Watcher(runs, clock or Clock())
    listener = listen(0)
    port = listener.getsockname()[1]

    def ask(path, host=None, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}", **names})
        answer = connection.getresponse()
        answer.body = answer.read()
        packed = answer.getheader("Content-Encoding") == "gzip"
        answer.text = (gzip.decompress(answer.body) if packed else answer.body).decode()
        connection.close()
        return answer

    with served(watcher, listener):
        yield ask, watcher


@contextmanager
def growing(path, max_steps=20):
    """(run, log) of a run that a process is at work on."""
    with RunDirectory.create(path) as run:
        run.write_text("config.yaml", f"run: {{name: {path.name}, max_steps: {max_steps}}}\n")
        yield run, JsonlLogger(run)


def step(log, number, **metrics):
    log.step(number, {"reward/mean": 0.1 * number, "time/total_s": 2.0, "kl/policy_ref/k3/mean": 0.01} | metrics)


def digests(answer):
    return {section["name"]: section["digest"] for section in json.loads(answer.text)["sections"]}


def test_a_warm_start_says_how_far_it_is(tmp_path):
    with growing(tmp_path / "run") as (run, log), page_of(run.path) as (ask, _):
        for done in (30, 60):
            log.event("warmstart", step=0, message=f"supervised step {done}: loss 0.9")
        assert "step 0 of 20 · warm start: supervised step 60: loss 0.9" in Page(ask("/").text).text
        step(log, 1)
        assert "warm start" not in Page(ask("/section/state").text).text


def test_a_page_follows_a_run_that_grows(tmp_path):
    with growing(tmp_path / "run") as (run, log), page_of(run.path) as (ask, watcher):
        step(log, 1)
        first = ask("/")
        assert first.status == 200
        assert "step 1 of 20 · about 38s left" in Page(first.text).text
        state = ask("/state")
        before = digests(state)
        step(log, 2)
        log.rollouts(2, [{"problem": "p/1", "prompt": "2 + 2?", "completion": "four", "reward": 1.0}])
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/me')  # half a line, as a reader may meet it
        changed = ask("/state", If_None_Match=state.getheader("ETag"))
        assert changed.status == 200
        after = digests(changed)
        assert {name for name in after if after[name] != before[name]} == {"state", "curves", "rollouts"}
        assert "step 2 of 20 · about 36s left" in Page(ask("/section/state").text).text
        assert "four" in ask("/section/rollouts").text
        curves = Page(ask("/section/curves").text)
        charts = {chart["title"]: chart["series"][0] for chart in json.loads(curves.scripts[0])["charts"]}
        assert charts["Reward"]["x"] == [1, 2]
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('an": 0.3}\n')
        assert "step 3 of 20" in Page(ask("/section/state").text).text
        assert watcher.runs[0].kind == "running"


def test_the_curves_are_the_reports(tmp_path):
    run = make_run(tmp_path / "run", total=30)
    with page_of(run) as (ask, _):
        live = Page(ask("/section/curves").text)
    report = Page(report_page([read_run(run)]))
    assert json.loads(live.scripts[0]) == json.loads(report.scripts[0])
    assert live.tags.count("svg") == report.tags.count("svg") == 16
    assert "KL penalty weight: 0.01 (β)" in live.text


def test_an_idle_page_costs_no_body_and_no_drawing(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", total=10)
    with page_of(run) as (ask, _):
        etag = ask("/state").getheader("ETag")
        monkeypatch.setattr(Watcher, "_draw", lambda self: pytest.fail("nothing has changed"))
        monkeypatch.setattr("keel.doctor.runs.RunReader.read", lambda self: pytest.fail("nothing has changed"))
        for path in ("/state", "/"):
            again = ask(path, If_None_Match=etag)
            assert (again.status, again.text) == (304, "")


def test_a_costly_page_is_drawn_seldom(tmp_path, monkeypatch):
    """Drawing that takes three seconds is done again when it was at most a tenth of the time."""
    clock = Clock()
    with growing(tmp_path / "run") as (run, log):
        step(log, 1)
        watcher = Watcher([run.path], clock)
        draw = Watcher._draw

        def slow(self):
            clock.now += 3.0
            return draw(self)

        monkeypatch.setattr(Watcher, "_draw", slow)
        first = watcher.snapshot()
        step(log, 2)
        clock.now += 3.0 / RENDER_SHARE - 0.1
        assert watcher.snapshot() is first
        clock.now += 0.2
        assert watcher.snapshot().etag != first.etag


def test_findings_of_the_log_are_shown_while_it_grows_and_its_own_when_it_has_ended(tmp_path):
    clock = Clock()
    with growing(tmp_path / "run") as (run, log), page_of(run.path, clock=clock) as (ask, watcher):
        for number in range(1, 13):
            step(log, number, **{"reward/mean": float("nan") if number > 6 else 0.5})
        assert "Not examined yet" in ask("/section/findings").text
        watcher.judge()
        assert "<code>" in ask("/section/findings").text
        assert "reward/non-finite" in Page(ask("/section/findings").text).text
        run.write_json("findings.json", [{"code": "kl/unneeded", "severity": "note", "advice": "of its end"}])
        assert "of its end" not in ask("/section/findings").text  # of an earlier end: it goes on
        run.close()
        assert "of its end" in ask("/section/findings").text
    assert not (run.path / "report.html").exists()


def test_the_line_of_a_run_that_ends_names_its_worst_finding(tmp_path):
    with growing(tmp_path / "run") as (run, log):
        step(log, 1, **{"reward/mean": 0.5})
        run.write_json(
            "findings.json", [{"code": "kl/explosion", "severity": "error", "evidence": "of an earlier end"}]
        )
        followed = FollowedRun(run.path)
        followed.refresh()
        assert followed.state_text.startswith("still running")
        run.close()
        followed.refresh()
        assert followed.state_text.startswith("error kl/explosion; ")


def test_findings_of_an_earlier_run_are_not_those_of_the_next_in_its_folder(tmp_path, monkeypatch):
    """The next one begins, and is read, while the doctor looks at the log of the first."""
    from keel.doctor import examine

    with growing(tmp_path / "run") as (run, log):
        for number in range(1, 13):
            step(log, number, **{"reward/mean": float("nan") if number > 6 else 0.5})
    followed = FollowedRun(run.path)
    followed.refresh()
    look = examine.examine_run

    def slow(record):
        with RunDirectory.create(run.path, overwrite=True) as again:
            step(JsonlLogger(again), 1, **{"time/total_s": 2.1})
        followed.refresh()
        return look(record)

    monkeypatch.setattr(examine, "examine_run", slow)
    assert followed.judge()
    assert followed.shown.record.steps == 1
    assert followed.shown.record.findings is None


def test_a_doctor_that_fails_leaves_its_findings_and_is_told(tmp_path, monkeypatch):
    clock = Clock()
    with growing(tmp_path / "run") as (run, log), page_of(run.path, clock=clock) as (ask, watcher):
        for number in range(1, 13):
            step(log, number, **{"reward/mean": float("nan") if number > 6 else 0.5})
        ask("/")
        watcher.judge()

        def fails(record):
            raise ZeroDivisionError("<b>")

        with monkeypatch.context() as patch:
            patch.setattr("keel.doctor.examine.examine_run", fails)
            step(log, 13)
            watcher.refresh()
            watcher.judge()
        state = Page(ask("/section/state").text)
        assert "The doctor's check of the log so far failed: ZeroDivisionError: <b>." in state.text
        assert "step 13 of 20" in state.text
        assert "reward/non-finite" in ask("/section/findings").text
        step(log, 14)
        watcher.refresh()
        watcher.judge()
        assert "failed" not in Page(ask("/section/state").text).text


def test_a_run_that_cannot_be_read_is_told_and_read_again(tmp_path, monkeypatch):
    def fails(self, running=None):
        raise OSError("stale file handle")

    with growing(tmp_path / "run") as (run, log), page_of(run.path) as (ask, watcher):
        step(log, 1)
        ask("/")
        step(log, 2)
        with monkeypatch.context() as patch:
            patch.setattr("keel.doctor.runs.RunReader.read", fails)
            watcher.refresh()
            state = Page(ask("/section/state").text).text
        assert "step 1 of 20" in state
        assert "New data cannot be read: OSError: stale file handle." in state
        state = Page(ask("/section/state").text).text
        assert "step 2 of 20" in state
        assert "cannot be read" not in state


def test_a_page_is_told_the_end_only_with_what_was_read_after_it(tmp_path, monkeypatch):
    """The run ends while the page is drawn: that page is not told that it is the last one."""
    run = make_run(tmp_path / "run", total=3)
    with page_of(run) as (ask, watcher):
        draw = Watcher._draw

        def ends_meanwhile(self):
            drawn = draw(self)
            self.final = True
            return drawn

        monkeypatch.setattr(Watcher, "_draw", ends_meanwhile)
        first = ask("/state")
        assert json.loads(first.text)["final"] is False
        assert not watcher.final_sent
        last = ask("/state", If_None_Match=first.getheader("ETag"))
        assert json.loads(last.text)["final"] is True
        assert watcher.final_sent


@pytest.mark.slow
def test_every_open_page_is_given_the_time_to_ask_for_the_end(tmp_path):
    """The first one that is told does not end it for the others, which ask every two seconds."""
    with page_of(make_run(tmp_path / "run", total=3)) as (ask, watcher):
        begun = time.monotonic()
        show_end(watcher)
        assert time.monotonic() - begun < 1  # nobody looks
        ask("/state")
        begun = time.monotonic()
        show_end(watcher)
        assert json.loads(ask("/state").text)["final"]
        assert time.monotonic() - begun > EVERY_PAGE_S > REFRESH_S


def test_nobody_asks_and_the_doctor_rests(tmp_path, monkeypatch):
    monkeypatch.setattr(FollowedRun, "judge", lambda self: pytest.fail("no page is open"))
    Watcher([make_run(tmp_path / "run", total=3, finish=False)], Clock()).judge()


def test_watching_writes_nothing_into_the_run(tmp_path):
    run = make_run(tmp_path / "run", total=5, finish=False)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    with page_of(run) as (ask, watcher):
        ask("/")
        watcher.judge()
        ask("/state")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def test_several_runs_stand_beside_each_other(tmp_path):
    one, other = make_run(tmp_path / "one", total=10), make_run(tmp_path / "other", total=10, beta=0.0, seed=1)
    with page_of(one, other) as (ask, _):
        page = Page(ask("/").text)
    charts = {chart["title"]: chart["series"] for chart in json.loads(page.scripts[0])["charts"]}
    assert [series["label"] for series in charts["Entropy"]] == ["one", "other"]
    assert "kl.beta" in page.text.split("Options that differ")[1]
    assert "one, step 10" in page.text
    assert "other, step 10" in page.text


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [make_run(tmp_path / folder / "run", total=4) for folder in ("a", "b")]
    names = [run.shown.name for run in Watcher(paths, Clock()).runs]
    assert names == [str(path) for path in paths]
    with pytest.raises(KeelError, match="is named twice"):
        Watcher([paths[0], tmp_path / "b" / ".." / "a" / "run"])


def test_everything_untrusted_is_escaped(tmp_path):
    with growing(tmp_path / "run") as (run, log):
        step(log, 1, **{f"reward/part/{ATTACK}": 1.0})
        log.event(ATTACK, step=1, time=1.0, message=ATTACK)
        log.event("interrupted", step=1, time=1.0, message=ATTACK)
        record = {"problem": ATTACK, "prompt": ATTACK, "completion": ATTACK, "tokens": [ATTACK, "\ud83d"],
                  "kl": [0.5, None], "parts": {ATTACK: 1.0}, "stop_reason": ATTACK}  # fmt: skip
        turns = [{"tokens": 1, "reply": 1, "stop_reason": ATTACK, "note": ATTACK}] * 8
        episode = {
            **record,
            "tokens": [ATTACK] * 16,
            "kl": [0.5, None] * 8,
            "action": [True, False] * 8,
            "turns": turns,
        }
        log.rollouts(
            1, [record, episode, {**record, "tokens": None}, {"messages": [{"role": ATTACK, "content": ATTACK}]}]
        )
    with page_of(run.path) as (ask, _):
        text = ask("/").text
        page = Page(text)
        assert "connect-src 'self'" in text
    assert page.open == []
    assert len(page.scripts) == 3
    assert not {"img", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.text.count("</script><script>alert(1)</script><img src=http://evil.example/x") > 3  # shown as text
    assert "http" not in page.scripts[1] + page.scripts[2]  # every address is relative


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:5335", True),
        ("localhost", True),
        ("LOCALHOST:8001", True),
        ("[::1]:5335", True),
        ("evil.example", False),
        ("evil.example:5335", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example#localhost", False),
        ("[::1", False),
        ("", False),
        (None, False),
    ],
)
def test_only_this_machines_names_are_answered(host, local):
    assert is_local(host) is local


def test_another_name_that_leads_here_is_refused(tmp_path):
    """DNS rebinding: a page of evil.example whose name now means 127.0.0.1 gets nothing of ours."""
    run = make_run(tmp_path / "run", total=3)
    with page_of(run) as (ask, _):
        for path in ("/", "/state", "/section/rollouts"):
            refused = ask(path, host="evil.example:5335")
            assert refused.status == 403
            assert "run" not in refused.text.split("http://")[0].replace("this machine's", "")
        assert ask("/elsewhere").status == 404
        assert ask("/", method="POST").status == 501
        assert ask("/").getheader("Access-Control-Allow-Origin") is None


def test_pages_are_packed_where_the_browser_asks_for_it(tmp_path):
    run = make_run(tmp_path / "run", total=10)
    with page_of(run) as (ask, _):
        plain, packed = ask("/"), ask("/", Accept_Encoding="gzip, br")
        small = ask("/state", Accept_Encoding="gzip")
    assert packed.getheader("Content-Encoding") == "gzip"
    assert packed.text == plain.text
    assert len(packed.body) < len(plain.body) / 3
    assert small.getheader("Content-Encoding") is None


def test_a_run_that_begins_anew_is_read_anew(tmp_path):
    path = make_run(tmp_path / "run", total=20)
    with page_of(path) as (ask, _):
        assert "step 20 of 20" in Page(ask("/section/state").text).text
        with RunDirectory.create(path, overwrite=True) as run:
            assert "Nothing has been written" in ask("/section/state").text
            run.write_text("config.yaml", "run: {max_steps: 7}\n")
            step(JsonlLogger(run), 1)
            assert "step 1 of 7" in Page(ask("/section/state").text).text


def test_a_run_that_goes_on_from_its_end_is_running(tmp_path):
    """Before its first new step the summary of its earlier end still fits the metrics."""
    path = make_run(tmp_path / "run", total=20)
    watcher = Watcher([path], Clock())
    with RunDirectory.resume(path) as run:
        run.write_text("config.yaml", "run: {max_steps: 40}\n")
        watcher.refresh()
        assert (watcher.runs[0].kind, watcher.runs[0].state_text) == ("running", "still running, 20 of 40 steps")
    watcher.refresh()
    assert watcher.runs[0].kind == "stopped"


def test_a_folder_that_disappears_is_told_and_the_others_go_on(tmp_path):
    one, other = make_run(tmp_path / "one", total=4), make_run(tmp_path / "other", total=4)
    with page_of(one, other) as (ask, watcher):
        ask("/")
        shutil.rmtree(one)
        assert f"{one} was deleted or moved" in Page(ask("/section/state").text).text
        assert ask("/section/curves").status == 200
        assert [run.kind for run in watcher.runs] == ["gone", "completed"]


def test_the_only_run_that_disappears_ends_it_in_one_line(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", total=4)
    monkeypatch.setattr("time.sleep", lambda seconds: shutil.rmtree(run, ignore_errors=True))
    assert main(["watch", str(run), "--port", "0"]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"keel: error: {run} was deleted or moved: check the path"]
    assert f"{run}: warning output/truncated; completed, 4 of 4 steps" in said.out


def test_bad_input_is_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run", total=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in (
            ([str(tmp_path / "none")], "no run directory at"),
            ([str(tmp_path)], "is not a run folder"),
            ([str(run), str(run)], "is named twice"),
            (
                [str(run), "--port", str(port)],
                f"port {port} of 127.0.0.1 is in use, perhaps by another keel watch: set --port ",
            ),
            ([str(run), "--port", "70000"], "'--port': Input should be less than or equal to 65535"),
            ([], "RUN"),
        ):
            assert main(["watch", *arguments]) == 2
            said = capsys.readouterr()
            assert message in said.err
            assert len(said.err.splitlines()) == 1


def test_until_end_ends_with_the_last_run(tmp_path):
    """A finished run beside one that goes on: the second one's end is the watch's."""
    said: list[str] = []
    done = make_run(tmp_path / "done", total=3)
    with growing(tmp_path / "run") as (run, log):
        step(log, 1)
        arguments = {"until_end": True, "echo": said.append}
        thread = threading.Thread(target=watch, args=([done, run.path], 0), kwargs=arguments, daemon=True)
        thread.start()
        thread.join(1.5)
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert f"{done}: warning output/truncated; completed, 3 of 3 steps" in said
    assert f"{run.path}: still running, 1 of 20 steps" in said
    assert said[-1].startswith(f"{run.path}: interrupted: 1 of 20 steps")


@pytest.mark.slow
def test_until_end_shows_open_pages_the_end(tmp_path):
    said: list[str] = []
    with growing(tmp_path / "run") as (run, log):
        step(log, 1)
        arguments = {"until_end": True, "echo": said.append}
        thread = threading.Thread(target=watch, args=([run.path], 0), kwargs=arguments, daemon=True)
        thread.start()
        while not said:
            time.sleep(0.05)
        port = int(said[0].rstrip("/").rpartition(":")[2])
        asked = [json.loads(urlopen(f"http://127.0.0.1:{port}/state", timeout=20).read())["final"]]
    while not asked[-1]:
        time.sleep(0.3)
        asked.append(json.loads(urlopen(f"http://127.0.0.1:{port}/state", timeout=20).read())["final"])
    assert asked[0] is False
    thread.join(20)
    assert not thread.is_alive()


def test_the_first_lines_say_how_to_get_there_from_elsewhere():
    here, elsewhere = addresses(5335)
    assert here == "watch at http://127.0.0.1:5335/"
    assert "ssh -L 5335:127.0.0.1:5335 " in elsewhere


def test_why_a_run_ended(tmp_path):
    with growing(tmp_path / "run") as (run, log):
        step(log, 1)
        assert why_ended(read_run(run.path), "running") == ""
    record = read_run(run.path)
    assert why_ended(record, "interrupted") == f"Killed or failed; resume with: keel train --resume {run.path}"
    with RunDirectory.resume(run.path) as again:
        JsonlLogger(again).event("interrupted", step=1, time=1.0, message="SIGINT: stopped after step 1")
    assert why_ended(read_run(run.path), "interrupted") == "SIGINT: stopped after step 1"
    with RunDirectory.resume(run.path) as again:
        JsonlLogger(again).event("stop", step=1, time=2.0, message="KL over its budget")
    assert why_ended(read_run(run.path), "stopped") == "Stopped by a guard: KL over its budget."
    assert "KL over its budget" in progress(read_run(run.path), "stopped")


def test_the_time_left_is_that_of_the_last_steps(tmp_path):
    with growing(tmp_path / "run", max_steps=100) as (run, log):
        assert seconds_left(read_run(run.path)) is None
        for number in range(1, 61):
            step(log, number, **{"time/total_s": 100.0 if number <= 10 else 2.0})
        assert seconds_left(read_run(run.path)) == pytest.approx(80.0)
    (Path(run.path) / "config.yaml").unlink()
    assert seconds_left(read_run(run.path)) is None
