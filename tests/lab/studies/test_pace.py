"""The time a study still takes, against simulated studies whose true duration is known."""

import heapq
import random
from functools import reduce

import pytest

from keel.lab.studies.pace import Event, Pace, WorkList, observe, remaining_s, training_plan, warmstart_plan

SHARES = (0.25, 0.4, 0.55, 0.7, 0.85)  # of the true duration
CASES = 100


def simulated(seed):
    """(plans of the warm starts and the jobs, events, true duration, parallel).

    Points differ in length and pace, first steps are slow, pieces vary, warm starts are made first unless cached.
    """
    draw = random.Random(seed)
    parallel, points, seeds = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 4)
    step, evaluation, start = draw.uniform(0.3, 20), draw.uniform(1, 60), draw.uniform(3, 25)
    seconds = {
        "start": start,
        "evaluation": evaluation,
        "first step": step * draw.uniform(1, 8),
        "step": step,
        "measure": start + evaluation * draw.uniform(0.5, 2),
        "supervised step": step * draw.uniform(0.05, 0.3),
    }
    seconds["first supervised step"] = 4 * seconds["supervised step"]
    plans, paces = {}, {}
    if draw.random() < 0.5:
        for number in range(seeds):
            plans[f"warm {number}"] = WorkList("warm", warmstart_plan(draw.choice((20, 100, 300))))
            paces[f"warm {number}"] = 1.0
    every = draw.choice((0, 10, 25))
    for point in range(points):
        steps, pace = draw.choice((20, 60, 60, 120)), draw.lognormvariate(0, 0.2)
        for number in range(seeds):
            label = f"{point} {number}"
            plans[label] = WorkList(str(point), training_plan(steps, every))
            paces[label] = pace * draw.lognormvariate(0, 0.05)
    events, free = [], [0.0] * parallel
    warm = [label for label in plans if label.startswith("warm")]
    for stage in (warm, [label for label in plans if label not in warm]):
        free = [max(free)] * parallel if stage is not warm else free  # jobs wait for all warm starts
        heapq.heapify(free)
        for label in stage:
            now = free[0]
            events.append(Event(now, label, 0))
            for done, kind in enumerate(plans[label].pieces, start=1):
                now += seconds[kind] * paces[label] * draw.lognormvariate(0, 0.1)
                events.append(Event(now, label, done))
            heapq.heapreplace(free, now)
    return plans, sorted(events, key=lambda event: event.time), max(free), parallel


def estimates(seed):
    """(true time left, estimate) at every share of the duration; the estimate is None before it can be known."""
    plans, events, duration, parallel = simulated(seed)
    pace, seen, pairs = Pace(plans), 0, []
    for share in SHARES:
        now = share * duration
        while seen < len(events) and events[seen].time <= now:
            pace, seen = observe(pace, events[seen]), seen + 1
        pairs.append((duration - now, remaining_s(pace, now, parallel)))
    return pairs


@pytest.fixture(scope="module")
def errors():
    """The factor between estimate and truth, of every estimate."""
    pairs = [pair for seed in range(CASES) for pair in estimates(seed)]
    known = [(left, guess) for left, guess in pairs if guess is not None]
    assert len(known) > 0.9 * len(pairs)
    return sorted(max(left / guess, guess / left) for left, guess in known)


def test_after_the_first_quarter_the_estimate_is_within_half(errors):
    """Nineteen of twenty; the others wait for a point that is much slower or faster than all that were seen."""
    assert errors[len(errors) // 2] < 1.1
    assert errors[int(0.95 * len(errors))] < 1.5
    assert errors[int(0.99 * len(errors))] < 2


def run(*events, plans, workers=None, now):
    return remaining_s(reduce(observe, (Event(*event) for event in events), Pace(plans)), now, workers)


def test_by_hand():
    """Two runs one after another: 10 s to start, 5 an evaluation, 8 the first step, 2 each of the others."""
    plans = {"a": WorkList("a", training_plan(4, 0)), "b": WorkList("b", training_plan(4, 0))}
    first = [(0, "a", 0), (10, "a", 1), (15, "a", 2), (23, "a", 3), (25, "a", 4)]
    whole = 10 + 5 + 8 + 3 * 2 + 5 + (10 + 5)  # the drift is taken for a start and an evaluation
    assert run(*first, plans=plans, now=25) == pytest.approx(whole - 25 + whole)
    assert run(*first, plans=plans, now=26) == pytest.approx(whole - 26 + whole)
    assert run(*first, plans=plans, now=25, workers=2) == pytest.approx(whole)
    end = [(29, "a", 6), (34, "a", 7), (44, "a", 8)]
    assert run(*first, *end, plans=plans, now=44) == pytest.approx(10 + 5 + 8 + 6 + 5 + 10)


def test_nothing_is_estimated_before_a_step_was_seen():
    plans = {"warm": WorkList("warm", warmstart_plan(50)), "a": WorkList("a", training_plan(4, 0))}
    warm = [(float(done), "warm", done) for done in range(51)]
    begun = [(60, "a", 0), (70, "a", 1), (75, "a", 2), (83, "a", 3)]
    for count in range(len(begun) + 1):
        assert run(*warm, *begun[:count], plans=plans, now=84) is None
    assert run(*warm, *begun, (85, "a", 4), plans=plans, now=85) is not None


def test_what_was_done_before_counts_in_no_pace():
    """Resumed at the 90th of 100 steps: loading took 30 s, which is no step's time."""
    plans = {"a": WorkList("a", training_plan(100, 0))}
    resumed = [(0, "a", 92), (30, "a", 93), (32, "a", 94), (34, "a", 95)]
    pace = reduce(observe, (Event(*event) for event in resumed), Pace(plans))
    assert pace.spent[(), "step"].seconds == 4
    assert pace.spent[(), "step"].count == 2


def test_a_run_that_its_guard_stops_leaves_the_pace_alone():
    plans = {"a": WorkList("a", training_plan(100, 0)), "b": WorkList("b", training_plan(2, 0))}
    events = [(0, "a", 0), (1, "a", 1), (2, "a", 2), (3, "a", 3), (4, "a", 4), (9, "a", len(plans["a"].pieces))]
    pace = reduce(observe, (Event(*event) for event in events), Pace(plans))
    assert pace.spent[(), "step"].seconds == 1
    assert pace.running == []


def test_pieces_that_were_finished_between_two_looks_share_the_time():
    plans = {"a": WorkList("a", ("start", "step", "step", "step", "step", "evaluation"))}
    events = [(0, "a", 0), (1, "a", 1), (3, "a", 2), (9, "a", 5)]
    pace = reduce(observe, (Event(*event) for event in events), Pace(plans))
    assert pace.spent[(), "step"].seconds == 8
    assert pace.spent[(), "step"].count == 4
