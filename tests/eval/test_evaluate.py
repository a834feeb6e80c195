"""Figures of an evaluation by hand, against enumeration and simulation, and on the real engine."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.envs.mixture import mixture
from keel.envs.rewards import wrap
from keel.eval.evaluate import EvalResult, evaluate, paired_difference, summarise
from keel.eval.statistics import normal_interval, paired_interval, pass_at_k, wilson
from keel.models.tiny import tiny_model, tiny_tokenizer
from keel.rollout import Engine, SamplingParams
from keel.rollout.collect import Collector
from keel.rollout.native.engine import NativeEngine
from keel.rollout.render import Renderer

TASK = arithmetic()


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = [any(i < right for i in some) for some in combinations(range(samples), k)]
    assert pass_at_k(samples, right, k) == pytest.approx(fmean(draws))


def test_wilson_with_one_sample_is_the_textbooks() -> None:
    """8 of 10: 0.4902 to 0.9433."""
    assert wilson([1.0] * 8 + [0.0] * 2) == pytest.approx((0.49016, 0.94331), abs=1e-5)
    assert wilson([0.0] * 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson([1.0] * 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_samples_count_as_much_as_they_differ_from_their_siblings() -> None:
    """Copies of one sample add nothing; independent ones count in full."""
    shares = [1.0] * 8 + [0.0] * 2
    assert wilson(shares, samples=16) == pytest.approx(wilson(shares), abs=0.02)
    low, high = wilson([0.5] * 10, samples=10)  # no spread between problems at all
    plain_low, plain_high = wilson([1.0] * 5 + [0.0] * 5)
    assert plain_low <= low < high <= plain_high


@pytest.mark.parametrize("spread", ["problems alike", "problems differ"])
def test_intervals_cover_about_as_often_as_they_say(spread: str) -> None:
    """600 simulated evaluations of 40 problems, 4 samples each: at least 91 % contain the truth."""
    rng = random.Random(0)
    covered = 0
    for _ in range(600):
        chances = [0.5 if spread == "problems alike" else rng.choice((0.05, 0.95)) for _ in range(40)]
        shares = [sum(rng.random() < c for _ in range(4)) / 4 for c in chances]
        low, high = wilson(shares, 4)
        covered += low <= 0.5 <= high
    assert 0.91 <= covered / 600 <= 0.99


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12))
def test_intervals_hold_their_mean_and_stay_in_bounds(shares: list[float]) -> None:
    low, high = wilson(shares, 4)
    assert 0 <= low <= fmean(shares) + 1e-12
    assert fmean(shares) - 1e-12 <= high <= 1
    assert low < high


def test_normal_interval_by_hand() -> None:
    assert normal_interval([0.0, 1.0]) == pytest.approx((0.5 - 1.96 * 0.5, 0.5 + 1.96 * 0.5), abs=1e-3)


def group_of(*texts: str, answer: str = "7") -> Group:
    completions = tuple(
        Completion((1,) * max(1, len(t)), (True,) * max(1, len(t)), (0.0,), (0.0,), t, "eos" if t else "length")
        for t in texts
    )
    problem = Problem(answer, "?", answer)
    return Group(problem, (1,), completions, tuple(TASK.reward(problem, [t]) for t in texts))


def test_summary_by_hand() -> None:
    groups = [group_of("7", "7", "8", ""), group_of("8", "8", "8", "88"), group_of("7", "8", "8", "8")]
    result = summarise(TASK, groups, [1, 2])
    assert result.accuracy == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert result.pass_at == pytest.approx({1: 0.25, 2: (5 / 6 + 0 + 1 / 2) / 3})
    assert result.reward == pytest.approx(0.25)
    assert result.parsed_fraction == pytest.approx(11 / 12)
    assert result.truncated_fraction == pytest.approx(1 / 12)
    assert result.length_mean == pytest.approx(13 / 12)
    assert (result.problems, result.samples) == (3, 4)
    line = json.loads(json.dumps(result.record("trained"), allow_nan=False))
    assert line["pass@k"]["2"] == pytest.approx(4 / 9)


def test_each_task_of_a_mixture_has_figures_of_its_own() -> None:
    def of(index: int, group: Group) -> Group:
        return replace(group, problem=replace(group.problem, info={"mixture": index}))

    groups = [of(0, group_of("7", "7")), of(1, group_of("7", "8")), of(0, group_of("8", "8"))]
    result = summarise(mixture([TASK, arithmetic("sort"), arithmetic("copy")]), groups, [1])
    figures = {"arithmetic/add/pass@1": 0.5, "arithmetic/sort/pass@1": 0.5}
    assert result.extra == {**figures, "arithmetic/add/reward": 0.5, "arithmetic/sort/reward": 0.5}
    assert result.record("trained")["extra"] == result.extra
    assert summarise(TASK, groups, [1]).extra == {}


def test_one_problem_still_makes_a_line_of_json() -> None:
    line = json.dumps(summarise(TASK, [group_of("7")], [1]).record("trained"), allow_nan=False)
    assert json.loads(line)["reward_ci95"] is None


def test_without_a_part_called_correct_the_gold_answers_reward_is_full() -> None:
    class Partial(Task):
        name = "partial"

        def gold(self, problem: Problem) -> str:
            return "7"

        def reward(self, problem: Problem, turns: Any) -> Reward:
            return Reward(3.0 if turns[-1] == "7" else 2.9)

    problem = Problem("p", "?", "7")
    group = group_of("7", "8")
    rewards = tuple(Partial().reward(problem, [c.text]) for c in group.completions)
    judged = Group(problem, (1,), group.completions, rewards)
    assert summarise(Partial(), [judged], [1]).accuracy == 0.5


def collector_of(
    engine: Engine,
    task: Task,
    sampling: SamplingParams | None = None,
    judge: Judge | None = None,
) -> Collector:
    sampling = sampling or SamplingParams(max_completion_length=3)
    return Collector(engine, task, Renderer(tiny_tokenizer()), sampling, judge or Judge.of(task))


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(*tiny_model())


def texts_of(result: EvalResult) -> list[list[str]]:
    return [[c.text for c in group.completions] for group in result.groups]


def test_evaluation_is_deterministic_and_greedy_is_one_sample(engine: NativeEngine) -> None:
    problems = TASK.held_out(6)
    collector = collector_of(engine, TASK, SamplingParams(max_completion_length=4))
    first = evaluate(collector, problems, k=(1, 4))
    assert evaluate(collector, problems, k=(1, 4)) == first
    fewer = evaluate(collector, problems[:3], k=(1, 4))
    assert texts_of(fewer) == texts_of(first)[:3]  # whatever else is evaluated
    other = evaluate(replace(collector, seed=1), problems, k=(1, 4))
    assert texts_of(other) != texts_of(first)
    greedy = evaluate(collector, problems, k=(1, 8), temperature=0)
    assert (greedy.samples, greedy.greedy, list(greedy.pass_at)) == (1, True, [1])


def test_several_tasks_and_what_they_retain(engine: NativeEngine) -> None:
    class Always(TaskWrapper):
        """A task on which everything is right."""

        name, inner = "always", TASK

        def reward(self, problem: Problem, turns: Any) -> Reward:
            return Reward(1.0, {"correct": 1.0})

    sampling = SamplingParams(max_completion_length=3, top_k=5)
    results = {
        name: evaluate(collector_of(engine, task, sampling), task.held_out(5))
        for name, task in {"add": TASK, "always": Always()}.items()
    }
    assert {name: r.accuracy for name, r in results.items()} == {"add": 0.0, "always": 1.0}
    assert results["add"].length_mean <= 3


@pytest.mark.parametrize("options", [{"k": (1, 8), "samples": 4}, {"k": (0,)}])
def test_impossible_k_is_refused(engine: NativeEngine, options: dict[str, Any]) -> None:
    with pytest.raises(KeelError, match=r"eval\.k"):
        evaluate(collector_of(engine, TASK), TASK.held_out(2), **options)


def test_nothing_to_evaluate_is_refused(engine: NativeEngine) -> None:
    with pytest.raises(KeelError, match="no held-out problems"):
        evaluate(collector_of(engine, TASK), [])


def test_a_judge_of_ones_own_pays_and_the_task_says_what_is_right(engine: NativeEngine) -> None:
    """Half pay for the right answer is still the right answer, and pay for anything is none."""
    problem = TASK.held_out(1)[0]
    answers = {0: TASK.gold(problem), 1: "1", 2: "2", 3: "3"}

    class Knows(Engine):
        def generate(self, requests: Any, sampling: Any, **noise: int) -> list[list[Completion]]:
            return [[Completion((1,), (True,), (0.0,), (0.0,), answers[i], "eos") for i in range(4)] for _ in requests]

    half = Judge.of(TASK, [{"name": "exact", "weight": 0.5}])
    result = evaluate(collector_of(Knows(), TASK, judge=half), [problem], samples=4)
    assert (result.accuracy, result.reward) == (0.25, 0.125)
    generous = Judge([wrap(lambda problem, text: 5.0, "generous")])
    result = evaluate(collector_of(Knows(), TASK, judge=generous), [problem], samples=4)
    assert (result.accuracy, result.reward) == (0.25, 5.0)


def test_failures_under_evaluation_are_in_the_judges_record(engine: NativeEngine) -> None:
    judge = Judge([wrap(lambda problem, text: None, "mine")], on_error="zero")
    evaluate(collector_of(engine, TASK, judge=judge), TASK.held_out(2))
    assert [f.function for f in judge.drain()] == ["mine", "mine"]
    assert judge.failures == []


def judged(texts_by_key: dict[str, tuple[str, ...]]) -> EvalResult:
    """An evaluation whose problems are all answered by 7."""
    groups = []
    for key, texts in texts_by_key.items():
        group = group_of(*texts)
        groups.append(Group(Problem(key, "?", "7"), (1,), group.completions, group.rewards))
    return summarise(TASK, groups, [1])


def test_the_paired_difference_by_hand() -> None:
    """Shares 0.5, 0, 1 before and 1, 0.5, 1 after: d = 0.5, 0.5, 0; m = 0.2, a² = 1/2, s = 1.5/5, ±1.96·√(0.26/5)."""
    before = judged({"a": ("7", "8"), "b": ("8", "8"), "c": ("7", "7"), "only before": ("7", "7")})
    after = judged({"c": ("7", "7"), "a": ("7", "7"), "b": ("8", "7"), "only after": ("8", "8")})
    mean, interval = paired_difference(before, after)
    assert mean == pytest.approx(1 / 3)
    assert interval == pytest.approx((0.2 - 0.446939, 0.2 + 0.446939), abs=1e-5)
    mirrored, other = paired_difference(after, before)
    assert mirrored == -mean
    assert other == pytest.approx((-interval[1], -interval[0]))
    with pytest.raises(KeelError, match="no problem in common"):
        paired_difference(before, judged({"z": ("7", "7")}))


def test_the_paired_interval_is_bonett_and_prices() -> None:
    """20 problems, 5 gained and 1 lost: p12 = 6/22, p21 = 2/22."""
    gained, lost = 6 / 22, 2 / 22
    margin = 1.959964 * ((gained + lost - (gained - lost) ** 2) / 22) ** 0.5
    assert paired_interval([1.0] * 5 + [-1.0] + [0.0] * 14) == pytest.approx(
        (4 / 22 - margin, 4 / 22 + margin), abs=1e-6
    )


def test_unchanged_problems_of_several_samples_have_a_narrower_interval() -> None:
    """Six problems × 4 samples: ±1.96·√(2/4/8/8) where nothing changed; one whole change tells that samples agree."""
    assert paired_interval([0.0] * 6, 4) == pytest.approx((-0.173238, 0.173238), abs=1e-6)
    assert paired_interval([0.0] * 6) == pytest.approx((-0.346476, 0.346476), abs=1e-6)
    assert paired_interval([1.0] + [0.0] * 5, 4) == pytest.approx(paired_interval([1.0] + [0.0] * 5))


@pytest.mark.parametrize(("size", "change"), [(1.0, 0.01), (1.0, 0.05), (0.5, 0.05), (None, 0.05)])
def test_paired_intervals_of_several_samples_cover(size: float | None, change: float) -> None:
    """400 pairs of 60 problems × 4 samples: a few change by `size`, or all of them by a little."""
    rng = random.Random(2)
    covered = 0
    for _ in range(400):
        differences = []
        for _ in range(60):
            before = 0.0 if size else rng.random() * (1 - change)
            after = before + change if size is None else size if rng.random() < change else 0.0
            draws = [rng.random() for _ in range(4)]
            differences.append((sum(d < after for d in draws) - sum(d < before for d in draws)) / 4)
        low, high = paired_interval(differences, 4)
        covered += low <= change * (size or 1.0) <= high
    assert covered / 400 >= 0.91


@pytest.mark.parametrize("change", [0.01, 0.3])
def test_paired_intervals_cover_about_as_often_as_they_say(change: float) -> None:
    """600 simulated pairs of 60 problems, few or many of which change: at least 91 % contain the true difference."""
    rng = random.Random(1)
    covered = 0
    for _ in range(600):
        draws = [rng.random() for _ in range(60)]
        differences = [1.0 if d < change else -1.0 if d < 1.5 * change else 0.0 for d in draws]
        low, high = paired_interval(differences)
        covered += low <= change / 2 <= high
    assert covered / 600 >= 0.91
