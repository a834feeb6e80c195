"""Pictures of a study with 13 points over two seeds: what is drawn fits, covers nothing, and is possible."""

import json
import re

import pytest

from keel.eval.statistics import Estimate, estimate
from keel.lab.studies import read_study
from keel.lab.studies.plots import bounds, limits, write_pictures
from keel.lab.studies.report import study_page
from keel.lab.studies.results import EXACT_CURVE, K3_CURVE, RunResult, kl_curve
from keel.lab.studies.table import summarise
from lab.studies.test_verdict import beta_study, row


def many():
    """Some points of a shipped study with made-up figures; seeds differ so much that intervals leave every range."""
    rows = []
    for index, point in enumerate(read_study("estimators").points[-13:]):
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


def test_kl_curves_beside_each_other_are_by_one_estimate():
    def with_curves(*names):
        return RunResult("a", 0, "done", "", {}, {}, curves={name: [(0, 0.1)] for name in names})

    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves(EXACT_CURVE, K3_CURVE)]) == EXACT_CURVE
    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves(K3_CURVE)]) == K3_CURVE
    assert kl_curve([with_curves(EXACT_CURVE, K3_CURVE), with_curves()]) == EXACT_CURVE
    assert kl_curve([]) == K3_CURVE
