"""Pictures of a study with 46 points over two seeds: what is drawn fits, covers nothing, and is possible."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from keel.eval.statistics import Estimate, estimate
from keel.lab.studies import read_study
from keel.lab.studies.layout import COLOURS, bounds, colouring, facets, limits
from keel.lab.studies.plots import numbered, write_pictures
from keel.lab.studies.report import study_page
from keel.lab.studies.results import EXACT_CURVE, K3_CURVE, RunResult, kl_curve
from keel.lab.studies.table import summarise
from lab.studies.test_verdict import beta_study, row


def many():
    """The shipped study of estimators with made-up figures; seeds differ so much that intervals leave every range."""
    rows = []
    for index, point in enumerate(read_study("estimators").points):
        for seed in range(2):
            right = 0.3 + 0.01 * index + 0.2 * seed
            rows.append(row(point.label, seed, right, 0.1 * seed, 0.01 * (index + 1), right, **point.values))
    return summarise(rows, "no penalty")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The figures by name, as they were when they were written."""
    import matplotlib.pyplot as plt

    folder, figures = tmp_path_factory.mktemp("pictures"), {}
    with pytest.MonkeyPatch.context() as patch:
        names = iter(("axis", "frontier", "curves", "forgetting"))
        patch.setattr(plt, "close", lambda: figures.update({next(names): plt.gcf()}))
        write_pictures(many(), folder, "many")
    yield figures
    plt.close("all")


@pytest.mark.slow
def test_nothing_impossible_is_drawn(drawn):
    accuracy, kl, skills, _ = drawn["axis"].axes
    assert estimate([0.3, 0.5]).low < -0.8  # the t-interval of two seeds
    for axis, (low, high) in ((accuracy, (0, 1)), (skills, (0, 1)), (kl, (0, float("inf")))):
        for container in axis.containers:
            for x1, x2 in ((s[0][0], s[1][0]) for s in container.lines[2][0].get_segments()):
                assert low <= x1 <= x2 <= high
        room = 0.06 * (axis.get_xlim()[1] - axis.get_xlim()[0])
        assert axis.get_xlim()[0] >= low - room
        assert axis.get_xlim()[1] <= high + room


def test_a_picture_draws_what_the_page_draws(drawn):
    """The same panels: accuracy by point and the frontier are in the files as in the page's data."""
    page = charts(study_page("t", "c", many(), "no penalty", []))
    accuracy = [y for chart in page if chart["title"].startswith("Accuracy") for y in chart["series"][0]["y"]]
    container = drawn["axis"].axes[0].containers[0]
    assert list(container.lines[0].get_xdata()) == pytest.approx(accuracy)
    chart = next(chart for chart in page if chart["title"].startswith("Reward against"))
    line = next(line for line in chart["series"] if line["label"] == "frontier of the means")
    dashed = [line for line in drawn["frontier"].axes[0].lines if line.get_linestyle() == "--"]
    assert list(dashed[0].get_ydata()) == pytest.approx(line["y"])
    assert [axis.get_title() for axis in drawn["forgetting"].axes] == [
        chart["title"] for chart in page if chart["title"].startswith("Forgetting")
    ]


def test_every_point_is_named_and_names_do_not_overlap(drawn):
    figure = drawn["axis"]
    labels = [text for text in figure.axes[0].get_yticklabels() if text.get_text()]
    assert [text.get_text() for text in labels] == numbered(many())
    assert labels[11].get_text() == "12  k3 in loss, plain beta=1"
    boxes = [text.get_window_extent() for text in labels]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
    written = next(text.get_text() for text in drawn["frontier"].axes[0].texts if "\n" in text.get_text())
    assert written.split("\n") == numbered(many())


def test_no_legend_covers_a_chart(drawn):
    for name in ("frontier", "curves", "forgetting"):
        figure = drawn[name]
        legend = figure.legends[0].get_window_extent()
        assert not any(axis.get_visible() and legend.overlaps(axis.get_window_extent()) for axis in figure.axes)


LONG = "k3 in advantage, sequence level, with a gradient of its own and beta="
CHARTS = (  # of axis.png, with the figures of each
    ("reward",),
    ("accuracy_after", "accuracy_before"),
    ("kl_policy_ref", "kl_ref_policy"),
    ("retention_after", "retention_before"),
)


def few(count, name, panels):
    """A study of `count` points with the figures of `panels` charts; two points have one place on the frontier."""
    absent = dict.fromkeys(itertools.chain(*CHARTS[panels:]))
    rows = []
    for index in range(count):
        for seed in range(3):
            rank = max(0, index - 1) + 0.1 * seed
            made = row(f"{name}{index}", seed, 0.3 + 0.05 * rank, 0.02 * rank, 0.05 * (rank + 1), 0.4 + 0.03 * rank)
            curves = {"reward/mean": [(float(step), 0.1 * index + 0.01 * step) for step in range(1, 9)]}
            rows.append(replace(made, figures={**made.figures, **absent}, curves=curves))
    return summarise(rows, rows[0].point)


def texts_on(figure):
    """(text, box in pixels) of everything that is written: ticks beyond an axis' ends are not."""
    from matplotlib.text import Text

    unseen = {id(text) for chart in figure.axes if not chart.get_visible() for text in chart.findobj(Text)}
    for axis in (axis for chart in figure.axes for axis in (chart.xaxis, chart.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for location, tick in zip(axis.get_majorticklocs(), axis.get_major_ticks(), strict=True):
            if not low <= location <= high:
                unseen |= {id(tick.label1), id(tick.label2)}
        unseen |= {id(text) for tick in axis.get_minor_ticks() for text in (tick.label1, tick.label2)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in unseen]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "name", "panels"),
    [*((n, "beta=" if n % 4 in (0, 3) else LONG, 1 + n % 4) for n in range(1, 13)), (11, LONG, 4)],
)
def test_no_text_is_printed_over_another(count, name, panels, tmp_path, monkeypatch):
    """Captions, legends, titles, names, numbers and tags, by their boxes as the renderer lays them out."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figure.draw_without_rendering())
    monkeypatch.setattr(plt, "close", lambda: figures.append(plt.gcf()))
    write_pictures(few(count, name, panels), tmp_path, "a study of β")
    monkeypatch.undo()
    assert len(figures[0].axes) == panels
    for figure in figures:
        written = texts_on(figure)
        assert any("a study of β" in text for text, _ in written)
        for (text, box), (other, other_box) in itertools.combinations(written, 2):
            assert not box.padded(-0.5).overlaps(other_box), f"{text!r} is printed over {other!r}"
        for text, box in written:
            inside = type(box).intersection(box, figure.bbox)
            assert inside is not None, f"{text!r} is outside"
            assert (inside.width, inside.height) == pytest.approx((box.width, box.height), abs=1), f"{text!r} is cut"
    plt.close("all")


def test_no_two_points_of_a_chart_share_a_colour():
    summaries = many()
    parts, colours = facets(summaries), colouring(summaries)
    assert [point for _, members in parts for point in members] == summaries
    for _, members in parts:
        assert len({colours.by_label[point.label] for point in members}) == len(members) <= COLOURS
    assert [title for title, _ in parts][:2] == ["k1 in loss, plain", "k1 in loss"]
    assert colours.names == ["beta=0.01", "beta=0.1", "beta=1", "beta=0"]
    assert facets(summarise(beta_study(), "beta=0"))[0][0] == ""


def test_bounds_and_limits_by_hand():
    assert bounds("accuracy_after", Estimate(0.5, -5.0, 6.0, 2)) == (0.0, 1.0)
    assert bounds("forgetting", Estimate(0.5, -5.0, 6.0, 2)) == (-1.0, 1.0)
    assert bounds("kl_policy_ref", Estimate(0.5, -5.0, 6.0, 2)) == (0.0, 6.0)
    assert bounds("reward", Estimate(0.5, -5.0, 6.0, 2)) == (-5.0, 6.0)
    assert bounds("reward", Estimate(0.5, None, None, 1)) is None
    # means 1 and 2: one apart, so intervals are shown from 0 to 3, with 6 % of room
    wide = limits({"reward": [Estimate(1.0, -50.0, 52.0, 2), Estimate(2.0, 1.9, 2.1, 2)]})
    assert wide == pytest.approx((-0.18, 3.18))
    assert limits({"reward": []}) is None


def charts(page):
    return json.loads(re.search(r'id="charts">(.*?)</script>', page, re.S).group(1))["charts"]


def test_the_pages_frontier_has_its_line_both_intervals_and_both_units():
    """beta=0.01 has the reward of 0 at half the KL: the line goes 1, 0.1, 0.01."""
    summaries = summarise(beta_study(), "beta=0")
    page = study_page("t", "c", summaries, "beta=0", [])
    chart = next(chart for chart in charts(page) if chart["title"].startswith("Reward against"))
    series = {curve["label"]: curve for curve in chart["series"]}
    assert series["frontier of the means"]["y"] == pytest.approx([0.353333, 0.61, 0.911667])
    kl = summaries[0].means["kl_policy_ref"]
    arms = series["95 % intervals of √KL"]
    assert (arms["x"][:2], arms["y"][:3]) == (pytest.approx([kl.low**0.5, kl.high**0.5]), [0.91, 0.91, None])
    assert "reward, mean of the last 10 steps; across, √(nats per token)" in page


def test_the_pages_charts_of_many_points_name_each_once():
    summaries = many()
    accuracy_charts = [
        c for c in charts(study_page("t", "c", summaries, "no penalty", [])) if c["title"].startswith("Accuracy")
    ]
    assert [name for chart in accuracy_charts for name in chart["names"]] == [str(n) for n in range(1, 47)]
    assert max(len(chart["names"]) for chart in accuracy_charts) <= 23


def test_kl_curves_beside_each_other_are_by_one_estimate():
    def with_curves(*names):
        return RunResult("a", 0, "done", "", {}, {}, curves={name: [(0, 0.1)] for name in names})

    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves(EXACT_CURVE, K3_CURVE)]) == EXACT_CURVE
    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves(K3_CURVE)]) == K3_CURVE
    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves()]) == EXACT_CURVE
    assert kl_curve([]) == K3_CURVE
