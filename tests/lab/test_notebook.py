"""A run as a notebook has it: tables equal to the files, figures of the report's charts, HTML that is only shown."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys

import pytest

import keel
from keel.api import TrainResult
from keel.base.errors import KeelError
from keel.lab.report.panels import panels
from keel.loggers import JsonlLogger, RunDirectory
from lab.report.synthetic import make_run
from lab.report.test_report import ATTACK, Page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return keel.Run(make_run(tmp_path_factory.mktemp("runs") / "run", total=40))


def framed(shown):
    """The document in a frame: what stands around it, and the page."""
    frame = re.fullmatch(r"<iframe sandbox='allow-scripts' style='[^']*' srcdoc='([^']*)'></iframe>", shown)
    assert frame is not None
    return Page(html.unescape(frame[1]))


def test_metrics_are_the_file_as_a_table(run):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    table = run.metrics
    assert table.index.name == "step"
    assert list(table.index) == [line["step"] for line in lines]
    assert set(table.columns) == {name for line in lines for name in line} - {"step", "nonfinite"}
    assert list(table["reward/mean"]) == [line["reward/mean"] for line in lines]
    assert math.isnan(table["grad/norm"][20])  # the skipped update
    assert table.dtypes.map(str).unique().tolist() == ["float64"]


def test_a_run_that_goes_on_is_read_anew(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        directory.write_text("config.yaml", "run: {max_steps: 9}\n")
        going = keel.Run(directory.path)
        assert going.metrics.empty
        with pytest.raises(KeelError, match="nothing to plot yet"):
            going.plot()
        JsonlLogger(directory).step(1, {"reward/mean": 0.5})
        assert going.metrics.loc[1, "reward/mean"] == 0.5
        assert repr(going).endswith("still running, 1 of 9 steps")


def test_evaluations_have_their_intervals(run):
    table = run.evaluations
    assert list(table["task"].unique()) == ["add", "subtract", "copy", "reverse"]
    row = json.loads((run.path / "eval.jsonl").read_text().splitlines()[0])
    assert tuple(table.loc[0, ["step", "pass@1", "ci95/low", "ci95/high"]]) == (0, row["pass@1"], *row["ci95"])


def test_the_figure_has_the_reports_curves(run):
    figure = run.plot()
    drawn = {axis.get_title(): axis for axis in figure.axes}
    assert list(drawn) == [
        "Accuracy on held-out problems", "Reward", "KL(policy‖reference)", "KL penalty weight", "Entropy",
        "Gradient norm", "Completion length",
    ]  # fmt: skip
    (panel,) = [panel for panel in panels([run.record]) if panel.title == "Entropy"]
    (line,) = drawn["Entropy"].get_lines()[:1]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == list(panel.series[0].points)
    assert [text.get_text() for text in drawn["KL(policy‖reference)"].get_legend().get_texts()] == ["k3", "k1", "exact"]
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [axis.get_title() for axis in run.plot("Speed", "Reward").axes] == ["Speed", "Reward"]


def test_runs_are_drawn_over_each_other(run, tmp_path):
    other = keel.Run(make_run(tmp_path / "other", total=40, beta=0.0, seed=1))
    titles = [axis.get_title() for axis in run.plot("KL(policy‖reference)", beside=[other]).axes]
    assert titles == [f"KL(policy‖reference), {kind}" for kind in ("k3", "k1", "exact")]


def test_figures_do_not_pile_up_in_pyplot(run):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    run.plot("Reward")
    assert plt.get_fignums() == before


def test_rollouts_are_the_records_and_are_shown_in_colour(run):
    rollouts = run.rollouts(order="best", limit=3)
    assert rollouts.step == 40
    assert len(rollouts) == 3
    assert [record["reward"] for record in rollouts] == sorted((r["reward"] for r in rollouts), reverse=True)
    page = framed(rollouts._repr_html_())
    assert ("span", "title", f"{rollouts[0]['kl'][-3]:+.4f} nats") in page.attributes
    assert "step 40, 3 completion(s)" in repr(rollouts)
    assert run.rollouts(1).step == 1
    with pytest.raises(KeelError, match=r"step 3 of .* has no rollouts"):
        run.rollouts(3)
    with pytest.raises(KeelError, match="did you mean 'best'"):
        run.rollouts(order="bst")


def test_a_run_shows_its_verdict_findings_and_curves(run):
    page = framed(run._repr_html_())
    assert "completed, 40 of 40 steps" in page.text
    assert "raise rollout.max_completion_length to 48" in page.text
    assert page.tags.count("svg") == 17


def test_the_doctor_is_asked(run):
    shown = run.doctor()
    assert "run" in repr(shown)
    assert "What was looked at" in framed(shown._repr_html_()).text


def test_nothing_of_a_rollout_leaves_its_frame(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        log = JsonlLogger(directory)
        log.step(1, {"reward/mean": 0.5})
        record = {
            "problem": ATTACK,
            "prompt": ATTACK,
            "completion": ATTACK,
            "tokens": [ATTACK, "\ud83d"],
            "kl": [0.5, 0.1],
        }
        log.rollouts(1, [record])
    run = keel.Run(directory.path)
    for shown in (run._repr_html_(), run.rollouts()._repr_html_(), run.doctor()._repr_html_()):
        shown.encode()  # half a character too can be written to the notebook's file
        outer = Page(shown)
        assert outer.tags == ["iframe"]
        page = framed(shown)
        assert "img" not in page.tags
        assert len(page.scripts) == 2
    assert "<img src=http://evil.example/x" in framed(run.rollouts()._repr_html_()).text


def test_what_train_returns_can_be_plotted_and_shown(run):
    result = TrainResult({"steps": 40}, run.path, 40)
    assert [axis.get_title() for axis in result.plot("Reward").axes] == ["Reward"]
    assert "completed, 40 of 40 steps" in framed(result._repr_html_()).text
    dry = TrainResult({"dry_run": True}, run.path, 1)
    assert dry._repr_html_() is None
    with pytest.raises(KeelError, match="a dry run writes nothing"):
        dry.plot()
    assert TrainResult({}, run.path / "deleted", 1)._repr_html_() is None


def test_mistakes_are_one_line(run, tmp_path, monkeypatch):
    with pytest.raises(KeelError, match="no run directory at"):
        keel.Run(tmp_path / "none")
    with pytest.raises(KeelError, match="did you mean 'Entropy'"):
        run.plot("Entropie")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(KeelError, match=r"Run.metrics needs pandas: pip install 'keel-rl\[notebook\]'"):
        _ = run.metrics


def test_looking_at_a_run_loads_neither_torch_nor_pandas(run):
    code = (
        "import keel, sys\nprint('completed' in keel.Run(sys.argv[1])._repr_html_())\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, run.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["True", "[]", ""]
