"""The report as a reader gets it: parsed, searched for what must be there and for what must not."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from keel.base.errors import KeelError
from keel.lab.report import write_report
from keel.loggers import JsonlLogger, RunDirectory
from lab.report.synthetic import make_run

VOID = {"meta", "br", "line", "circle", "path", "polygon", "link", "img", "hr", "input"}
ATTACK = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>'\"&"


class Page(HTMLParser):
    """Tags, attributes, visible text, and whether every element is closed by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not (self.open and self.open[-1] == "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert_self_contained(text, page)
    return text, page


def assert_self_contained(text: str, page: Page) -> None:
    """Nothing is loaded: no element that could, no address in an attribute or style, two scripts of our own."""
    assert not {"img", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert name not in ("src", "href", "xlink:href", "srcset", "action"), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style is not None
    assert "@import" not in style[1]
    assert "url(" not in style[1]
    assert len(page.scripts) == 2
    assert "fetch" not in page.scripts[1]
    assert "default-src 'none'" in text


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", total=40)
    make_run(folder / "second", total=40, beta=0.0, seed=1)
    make_run(folder / "partial", total=40, upto=25, finish=False, beta=1.0, seed=2)
    return folder


def test_one_run_says_everything(runs):
    out = write_report([runs / "first"])
    assert out == runs / "first" / "report.html"
    text, page = read(out)
    summary = json.loads((runs / "first" / "summary.json").read_text())
    before, after = (f"{100 * summary['accuracy'][key]:.1f} %" for key in ("before", "after"))
    assert f"add: {before} → {after} on held-out problems" in page.text
    assert "The intervals do not overlap" in page.text
    assert "completed, 40 of 40 steps, in 3.2 minutes" in page.text
    exact = summary["kl"]["exact"]
    assert f"{exact['mean']:.3g} ± {exact['se']:.2g} nats per token (exact)" in page.text
    assert f"{summary['kl']['sequence']['mean']:.3g} ± 0.02 nats per sequence" in page.text
    assert "Retention: 1 of 3 other skills dropped: reverse" in page.text
    assert "output/truncated" in page.text
    assert "raise rollout.max_completion_length to 48" in page.text
    for title in ("Reward", "KL(policy‖reference)", "KL penalty weight", "Entropy", "Gradient norm",
                  "Completion length", "Clipped ratios", "Groups without variance",
                  "Time per step", "Timeline", "Configuration", "Versions",
                  "Accuracy on held-out problems"):  # fmt: skip
        assert title in page.text, title
    assert "learning_rate: 0.0005" in page.text
    assert "5.17.0" in page.text
    assert "guard/skipped" in page.text
    assert "prefers-color-scheme" in text
    assert "viewport" in text
    assert page.tags.count("svg") == page.tags.count("figure") == 16
    assert "KL penalty weight: 0.01 (β)" in page.text  # constant: said, not drawn
    assert "warning output/truncated: 18 % of the completions of step 40 were cut at 24 tokens." in page.text


def test_chart_data_is_embedded_and_keeps_gaps(runs):
    _, page = read(write_report([runs / "first"]))
    charts = {chart["title"]: chart["series"] for chart in json.loads(page.scripts[0])["charts"]}
    assert [series["label"] for series in charts["KL(policy‖reference)"]] == ["k3", "k1", "exact"]
    assert len(charts["KL(policy‖reference)"][0]["e"]) == 40
    norm = charts["Gradient norm"][0]
    assert norm["x"][19] == 20
    assert norm["y"][19] is None  # the skipped step
    lines = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    assert charts["Reward"][0]["y"] == pytest.approx([line["reward/mean"] for line in lines], rel=1e-5)


def test_a_gap_breaks_the_curve_in_two(runs):
    text, _ = read(write_report([runs / "first"]))
    picture = text[text.index('aria-label="Gradient norm"') :]
    assert picture[: picture.index("</svg>")].count("M") == 2
    picture = text[text.index('aria-label="Reward"') :]
    assert picture[: picture.index("</svg>")].count("M") == 1


def test_samples_are_the_same_problems_before_and_after_with_coloured_tokens(runs):
    text, page = read(write_report([runs / "first"]))
    assert "Step 1" in page.text
    assert "Step 40" in page.text
    records = [json.loads(line) for line in (runs / "first" / "rollouts.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["step"] == 40)
    assert f"title='log-ratio {first['kl'][-3]:+.4f} nats'" in text
    assert "&lt;answer&gt;" in text


def test_several_runs_overlay_with_a_comparison(runs):
    out = write_report([runs / "first", runs / "second", runs / "partial"])
    assert out == runs / "comparison.html"
    _, page = read(out)
    assert "Comparison" in page.text
    charts = {chart["title"]: chart["series"] for chart in json.loads(page.scripts[0])["charts"]}
    assert [series["label"] for series in charts["KL(policy‖reference), k3"]] == ["first", "second", "partial"]
    assert len(charts["KL(policy‖reference), k3"][2]["x"]) == 25
    assert "Options that differ" in page.text
    assert "kl.beta" in page.text
    assert "kl.estimator" not in page.text.split("Options that differ")[1].split("Findings")[0]


def test_a_partial_run_says_what_is_missing_and_how_far_it_got(runs):
    _, page = read(write_report([runs / "partial"], runs / "elsewhere" / "page.html"))
    assert (runs / "elsewhere" / "page.html").exists()
    assert "interrupted: 25 of 40 steps" in page.text
    assert "summary.json does not exist" in page.text
    assert "findings.json does not exist" in page.text
    assert "Findings: not examined yet" in page.text
    assert "nats per token (exact)" in page.text


def test_a_running_run_and_a_torn_line(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_text("config.yaml", "run: {name: run, max_steps: 9}\n")
        JsonlLogger(run).step(1, {"reward/mean": 0.1})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "reward/me')
        _, page = read(write_report([run.path]))
        assert "still running, 1 of 9 steps" in page.text
        assert "the last line of metrics.jsonl is incomplete" in page.text
        assert "KL to the reference was not measured" in page.text
        assert "Accuracy on held-out problems has not been measured yet" in page.text


def test_a_summary_that_the_run_has_gone_on_from_is_left_out(tmp_path):
    make_run(tmp_path / "run", total=20)
    with RunDirectory.resume(tmp_path / "run") as run:
        JsonlLogger(run).step(21, {"reward/mean": 0.1})
        run.write_text("config.yaml", "run: {max_steps: 40}\n")
        _, page = read(write_report([run.path]))
    assert "still running, 21 of 40 steps" in page.text
    assert "summary.json is of step 20, but the run is at 21" in page.text


@pytest.mark.parametrize("content", ["", "not: [yaml", "just text", "run: null\n"])
def test_a_run_with_nothing_but_a_config(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    _, page = read(write_report([tmp_path]))
    assert "No steps have been recorded yet" in page.text
    assert "metrics.jsonl does not exist" in page.text


def test_files_of_the_wrong_shape_do_not_stop_it(tmp_path):
    (tmp_path / "summary.json").write_text('{"accuracy": 3, "kl": [1], "retention": {"a": 2}, "findings": "x"}')
    (tmp_path / "findings.json").write_text("[3, {}]")
    (tmp_path / "env.json").write_text("[]")
    (tmp_path / "metrics.jsonl").write_text('[]\n{"step": "a", "reward/mean": "b"}\n{"reward/mean": true}\n\xff\n')
    (tmp_path / "rollouts.jsonl").write_text(
        '{"step": 1}\n{"step": 1, "tokens": 4, "kl": {}, "parts": 3, "reward": []}\n'
    )
    (tmp_path / "eval.jsonl").write_text('{"task": null, "ci95": [1], "pass@1": "x"}\n')
    (tmp_path / "events.jsonl").write_text('{"kind": 4, "time": "yesterday", "step": "x"}\n{"time": 1e300}\n')
    read(write_report([tmp_path]))


def test_everything_untrusted_is_escaped(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        run.write_text("config.yaml", f"run: {{name: {json.dumps(ATTACK)}}}\n")
        run.write_json("env.json", {ATTACK: ATTACK})
        run.write_json("findings.json", [dict.fromkeys(("code", "severity", "evidence", "cause", "advice"), ATTACK)])
        run.write_json("summary.json", {"task": ATTACK, "accuracy": {"before": 0.1, "after": 0.2},
                                        "retention": {ATTACK: {"before": 0.5, "after": 0.1}}})  # fmt: skip
        log = JsonlLogger(run)
        log.step(1, {"reward/mean": 0.5})
        log.evaluation(0, {"task": ATTACK, "pass@1": 0.5, "split": ATTACK})
        log.event(ATTACK, step=1, time=1.0, message=ATTACK, other={ATTACK: [ATTACK]})
        for step in (1, 2):
            record = {"problem": ATTACK, "prompt": ATTACK, "completion": ATTACK, "tokens": [ATTACK, ATTACK, "\ud83d"],
                      "kl": [0.5, None, -0.1], "parts": {ATTACK: 1.0}, "stop_reason": ATTACK}  # fmt: skip
            turns = [{"tokens": 1, "reply": 1, "stop_reason": ATTACK, "note": ATTACK}] * 8
            episode = {
                **record,
                "tokens": [ATTACK] * 16,
                "kl": [0.5, None] * 8,
                "action": [True, False] * 8,
                "turns": turns,
            }
            log.rollouts(
                step, [record, episode, {**record, "tokens": None}, {"messages": [{"role": ATTACK, "content": ATTACK}]}]
            )
    for runs in ([tmp_path / "run"], [tmp_path / "run", tmp_path / "run"]):
        text, page = read(write_report(runs, tmp_path / "out.html"))
        assert "alert(1)</script>" not in text
        assert "<img" not in text
        assert "alert" not in page.scripts[1]
    assert "</script><script>alert(1)</script><img src=http://evil.example/x" in page.text  # shown as text


def test_missing_and_empty_directories_are_one_line(tmp_path):
    for runs, message in (
        ([tmp_path / "absent"], "no run directory at"),
        ([tmp_path], "is not a run folder"),
        ([], "no run directory given"),
    ):
        with pytest.raises(KeelError, match=message) as caught:
            write_report(runs)
        assert "\n" not in str(caught.value)
