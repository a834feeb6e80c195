"""A curriculum draws with the probabilities that it computes, and its estimates are those of a hand calculation."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.types import Completion, Group, Problem, Reward
from keel.envs import Task
from keel.envs.arithmetic import arithmetic
from keel.envs.countdown import countdown
from keel.envs.curriculum import Curriculum, describe_draws, draw, has_signal, inclusion, stratum_of
from keel.envs.mixture import mixture
from keel.envs.options import CurriculumOptions
from keel.envs.problems import seeded_rng, shares_of

OPTIONS = CurriculumOptions(candidates=4, half_life=2.0)
COMPLETION = Completion((1,), (True,), (0.0,), (0.0,), "", "eos")


class Levels(Task):
    """Problems of the strata easy, middle and hard, in turn."""

    name = "levels"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        names = ("easy", "middle", "hard")
        return [Problem(f"{names[i % 3]}:{seed}/{step}/{i}", "?") for i in range(count)]

    def stratum(self, problem: Problem) -> str:
        return problem.key.partition(":")[0]


def group(key: str, *rewards: float) -> Group:
    return Group(Problem(key, "?"), (1,), (COMPLETION,) * len(rewards), tuple(map(Reward, rewards)))


def test_estimates_are_those_of_a_hand_calculation() -> None:
    task, empty = Levels(), Curriculum()
    new, seen = Problem("easy:new", "?"), Problem("easy:a", "?")
    assert empty.expected(task, new, OPTIONS, 0) == 1.0
    first = empty.observe(task, [group("easy:a", 1, 1), group("easy:b", 0, 1), group("easy:c", 0, 0)], OPTIONS, 0)
    assert first.strata == {"levels/easy": (3, 1, 0)}
    stratum = (1 + 1) / (3 + 1)
    assert first.expected(task, new, OPTIONS, 0) == stratum
    assert first.expected(task, seen, OPTIONS, 0) == (0 + stratum) / (1 + 1)
    # two steps later, one half-life, each group counts half
    later = (0.5 + 1) / (1.5 + 1)
    assert first.expected(task, new, OPTIONS, 2) == later
    assert first.expected(task, seen, OPTIONS, 2) == (0 + later) / (0.5 + 1)
    second = first.observe(task, [group("easy:a#2", 0, 1)], OPTIONS, 2)
    assert second.strata["levels/easy"] == (2.5, 1.5, 2)
    assert second.problems["easy:a"] == (1.5, 1.0, 2), "a repetition in a batch is the same problem"
    assert first.expected(task, Problem("hard:x", "?"), OPTIONS, 9) == 1.0, "an unknown stratum comes first"


def test_what_is_forgotten_takes_no_room() -> None:
    task, curriculum = Levels(), Curriculum()
    for step in range(60):
        curriculum = curriculum.observe(task, [group(f"easy:{step}", 0, 1)], OPTIONS, step)
    assert list(curriculum.problems) == [f"easy:{step}" for step in range(46, 60)]  # 0.5 ** (13 / 2) is above 0.01


def test_it_is_plain_data() -> None:
    curriculum = Curriculum().observe(Levels(), [group("easy:a", 0, 1), group("hard:b", 0, 0)], OPTIONS, 3)
    assert Curriculum.from_dict(json.loads(json.dumps(asdict(curriculum)))) == curriculum


@pytest.mark.parametrize(("rewards", "expected"), [((0, 0), False), ((1, 1), False), ((0, 1), True), ((0.1,), False)])
def test_signal(rewards: Sequence[float], expected: bool) -> None:
    assert has_signal(group("easy:a", *rewards)) is expected


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=40), st.data())
def test_probabilities_are_proportional_up_to_one(weights: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    found = inclusion(weights, count)
    assert math.isclose(sum(found), count, rel_tol=1e-9)
    assert max(found) <= 1.0 + 1e-12
    low, high = 0.0, 1e12  # the factor, by bisection
    for _ in range(200):
        middle = math.sqrt(low * high) if low else high / 2**20
        low, high = (middle, high) if sum(min(1.0, middle * w) for w in weights) < count else (low, middle)
    for weight, probability in zip(weights, found, strict=True):
        assert math.isclose(probability, min(1.0, high * weight), rel_tol=1e-6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(any), st.integers(0, 30), st.integers())
def test_shares_are_rounded_down_or_up_and_add_up(weights: list[float], count: int, seed: int) -> None:
    shares = shares_of(weights, count, random.Random(seed))
    assert sum(shares) == count
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - count * weight / sum(weights)) < 1 + 1e-9


@pytest.mark.slow
def test_problems_are_drawn_as_often_as_their_probabilities_say() -> None:
    task = Levels()
    known = [group(f"easy:{i}", 1, 1) for i in range(8)] + [group(f"middle:{i}", 0, 1) for i in range(8)]
    curriculum = Curriculum().observe(task, known, OPTIONS, 0)
    candidates = task.sample(12, seed=0, step=1)
    times, rounds = Counter[str](), 4000
    for number in range(rounds):
        drawn = draw(curriculum, task, candidates, 4, OPTIONS, step=1, rng=seeded_rng(number))
        assert len({problem.key for problem in drawn.problems}) == 4
        times.update(problem.key for problem in drawn.problems)
    weights = [curriculum.expected(task, problem, OPTIONS, 1) for problem in candidates]
    assert weights[0] < 0.2 < weights[1] == weights[2] == 1.0
    for problem, probability in zip(candidates, inclusion(weights, 4), strict=True):
        spread = math.sqrt(probability * (1 - probability) / rounds)
        assert abs(times[problem.key] / rounds - probability) < 4.5 * spread


def test_a_repetition_is_drawn_only_without_enough_other_problems() -> None:
    candidates = [Problem(key, "?") for key in ("a", "b", "a#1", "c", "b#1")]
    for count, expected in (
        (3, {"a", "b", "c"}),
        (5, {"a", "b", "a#1", "c", "b#1"}),
        (9, {problem.key for problem in candidates}),
    ):
        drawn = draw(Curriculum(), Levels(), candidates, count, OPTIONS, step=0, rng=random.Random(0))
        assert {problem.key for problem in drawn.problems} == expected


def test_what_is_recorded_of_a_draw() -> None:
    task = Levels()
    known = [group(f"easy:{i}", 1, 1) for i in range(3)] + [group(f"hard:{i}", 0, 1) for i in range(3)]
    curriculum = Curriculum().observe(task, known, OPTIONS, 0)
    candidates = [Problem("easy:x", "?"), Problem("hard:x", "?")]
    drawn = draw(curriculum, task, candidates, 1, OPTIONS, step=0, rng=random.Random(0))
    assert drawn.expected == (0.25, 1.0)
    assert drawn.probabilities == (0.2, 0.8)
    metrics = describe_draws([drawn])
    assert metrics["data/expected_signal_of_task"] == 0.625
    assert metrics["data/shift_kl"] == pytest.approx(0.2 * math.log(0.4) + 0.8 * math.log(1.6))
    assert metrics["data/share_of_task/levels/easy"] == metrics["data/share_of_task/levels/hard"] == 0.5
    chosen = drawn.problems[0].key.partition(":")[0]
    assert metrics[f"data/share/levels/{chosen}"] == 1.0
    assert metrics["data/expected_signal"] == {"easy": 0.25, "hard": 1.0}[chosen]
    even = draw(Curriculum(), task, candidates, 1, OPTIONS, step=0, rng=random.Random(0))
    assert describe_draws([even, even])["data/shift_kl"] == 0.0


def test_strata_of_middle_difficulty_are_drawn_and_others_come_back_when_they_carry_signal() -> None:
    """Pass rates 1, ½ and 0; from step 60 on the hard problems are solved half the time, the middle ones always."""
    task, curriculum, options = Levels(), Curriculum(), CurriculumOptions(candidates=4, half_life=8)
    shares: dict[str, list[float]] = {"easy": [], "middle": [], "hard": []}
    for step in range(160):
        rates = {"easy": 1.0, "middle": 0.5, "hard": 0.0} if step < 60 else {"easy": 1.0, "middle": 1.0, "hard": 0.5}
        candidates = task.sample(48, seed=0, step=step)
        drawn = draw(curriculum, task, candidates, 12, options, step=step, rng=seeded_rng("test", step))
        rng = seeded_rng("outcomes", step)
        groups = [
            group(p.key, *(float(rng.random() < rates[task.stratum(p)]) for _ in range(8))) for p in drawn.problems
        ]
        curriculum = curriculum.observe(task, groups, options, step)
        for stratum, mine in shares.items():
            mine.append(sum(task.stratum(p) == stratum for p in drawn.problems) / 12)
    before = {name: sum(mine[30:60]) / 30 for name, mine in shares.items()}
    after = {name: sum(mine[130:]) / 30 for name, mine in shares.items()}
    assert before["middle"] > 0.75
    assert min(before.values()) > 0.0, "no stratum is given up"
    assert after["hard"] > 0.75


def test_built_in_strata() -> None:
    add, down = arithmetic("add"), countdown(numbers=[3, 4])
    strata = {stratum_of(add, p) for p in add.sample(60, seed=0, step=0)}
    assert strata == {"arithmetic/add/1+1", "arithmetic/add/1+2", "arithmetic/add/2+2"}
    assert {stratum_of(down, p) for p in down.sample(20, seed=0, step=0)} == {"countdown/3", "countdown/4"}
    both = mixture([add, arithmetic("sort", digits=2), arithmetic("sort", digits=2)])
    strata = {stratum_of(both, p) for p in both.sample(60, seed=0, step=0)}
    assert {"1/arithmetic/sort-2/2", "2/arithmetic/sort-2/2", "arithmetic/add/2+2"} <= strata
