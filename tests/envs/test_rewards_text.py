"""Every reward that is read off the text, against values worked out by hand."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.arithmetic import arithmetic
from keel.envs.judge import Judge
from keel.envs.rewards import check_reward, combine

TASK = arithmetic()
PROBLEM = Problem("add:3,4", "3+4=", "7")
BOTH = "<think>x</think><answer>7</answer>"
RUNGS = [
    {"tag": "answer", "value": 0.1},
    {"pattern": r"<answer>\d+</answer>", "value": 0.2},
    {"reward": {"name": "numeric", "tag": "answer"}, "value": 0.7},
]


def paid(entry: dict[str, Any], text: str, problem: Problem = PROBLEM) -> Reward:
    rewards = Judge.of(TASK, [entry]).judge(problem, [[text]])
    assert rewards is not None
    return rewards[0]


@pytest.mark.parametrize(
    ("entry", "text", "value"),
    [
        # tags: each of the four marks that occurs once is a quarter
        ({"name": "tag_count"}, BOTH, 1.0),
        ({"name": "tag_count"}, "<think>x</think>", 0.5),
        ({"name": "tag_count"}, "<think>x</think><answer>7", 0.75),
        ({"name": "tag_count"}, BOTH + "<answer>8</answer>", 0.5),
        ({"name": "tag_count"}, "", 0.0),
        ({"name": "tag_count", "tags": ["cite"]}, "<cite>1", 0.5),
        ({"name": "tag_count", "tags": ["a", "b", "c"]}, "<a></a><b>", 0.5),
        # patterns
        ({"name": "regex", "pattern": r"\d{2}"}, "a 12 b", 1.0),
        ({"name": "regex", "pattern": r"\d{2}", "full": True}, "a 12 b", 0.0),
        ({"name": "regex", "pattern": r"a.*b", "full": True}, "a\nb", 1.0),
        ({"name": "regex", "pattern": r"= (\S+)", "group": 1}, "2+2 = 4, 3+4 = 7", 1.0),
        ({"name": "regex", "pattern": r"= (\S+)", "group": 1}, "3+4 = 7, 2+2 = 4", 0.0),
        ({"name": "regex", "pattern": r"= (?P<n>\S+)", "group": "n"}, "3+4 = 7.0", 1.0),
        ({"name": "regex", "pattern": r"= (\S+)", "group": 1}, "seven", 0.0),
        ({"name": "regex", "pattern": r"(x)?7", "group": 1}, "7", 0.0),
        # rungs: 0.1, 0.1 + 0.2, 0.1 + 0.2 + 0.7; a rung behind one that was missed does not count
        ({"name": "ladder", "rungs": RUNGS}, "7", 0.0),
        ({"name": "ladder", "rungs": RUNGS}, "<answer>seven</answer>", 0.1),
        ({"name": "ladder", "rungs": RUNGS}, "<answer>8</answer>", 0.3),
        ({"name": "ladder", "rungs": RUNGS}, "<answer>7</answer>", 1.0),
        ({"name": "ladder", "rungs": RUNGS}, "<answer>7</answer><answer>7</answer>", 0.0),
        ({"name": "ladder", "rungs": [{"reward": "task", "value": 2.0}]}, "7", 2.0),
        ({"name": "ladder", "rungs": [{"reward": "tag_count", "at_least": 0.5, "value": 1}]}, "<think></think>", 1.0),
        # half a cosine: at a quarter, a half, the whole, and beyond
        ({"name": "cosine", "of": "numeric", "max_length": 4}, "7", 0.5 + 0.25 * (1 + math.sqrt(0.5))),
        ({"name": "cosine", "of": "numeric", "max_length": 2}, "7", 0.75),
        ({"name": "cosine", "of": "numeric", "max_length": 1}, "7", 0.5),
        ({"name": "cosine", "of": "numeric", "max_length": 1}, "is 7", 0.5),
        ({"name": "cosine", "of": "numeric", "max_length": 2}, "", -1.0),
        ({"name": "cosine", "of": "numeric", "max_length": 2}, "8", -0.75),
        ({"name": "cosine", "of": "numeric", "max_length": 2}, "88", -0.5),
        ({"name": "cosine", "of": "numeric", "max_length": 2, "exceeded": -9.0}, "07", -9.0),
        ({"name": "cosine", "of": "numeric", "max_length": 3, "exceeded": -9.0}, "07", 0.5 + 0.25 * (1 - 0.5)),
        ({"name": "cosine", "max_length": 2}, "7", 0.75),
    ],
)
def test_by_hand(entry: dict[str, Any], text: str, value: float) -> None:
    reward = paid(entry, text)
    assert reward.total == pytest.approx(value)
    assert reward.parts[entry["name"]] == pytest.approx(value)


def test_what_a_reward_is_made_of_is_logged_below_it() -> None:
    assert paid({"name": "ladder", "rungs": RUNGS}, "<answer>8</answer>").parts["ladder/rungs"] == 2.0
    assert paid({"name": "cosine", "of": "exact"}, "7").parts["cosine/correct"] == 1.0
    assert paid({"name": "cosine", "of": "exact"}, "8").parts["cosine/correct"] == 0.0


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200))
def test_cosine_keeps_its_bounds_and_its_order(first: int, second: int, longest: int) -> None:
    """Correct in [0.5, 1] and never rising with length, wrong in [-1, -0.5] and never falling."""
    short, long = sorted((first, second))
    entry = {"name": "cosine", "of": {"name": "regex", "pattern": "^r"}, "max_length": longest}
    right = [paid(entry, "r" + "x" * n).total for n in (short, long)]
    wrong = [paid(entry, "w" + "x" * n).total for n in (short, long)]
    assert 1.0 >= right[0] >= right[1] - 1e-12
    assert right[1] >= 0.5 - 1e-12
    assert -1.0 - 1e-12 <= wrong[0] <= wrong[1] + 1e-12
    assert wrong[1] <= -0.5 + 1e-12


@pytest.mark.parametrize(
    ("answer", "text", "value", "parsed"),
    [
        ("1/2", "so it is $\\frac{1}{2}$", 1.0, True),
        ("1/2", "The answer is 0.5", 1.0, True),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0, True),
        ("72", "<think>8*9</think><answer>72</answer>", 1.0, True),
        ("1000", "1,000", 1.0, True),
        ("2x+2", "$2(x+1)$", 1.0, True),
        ("2x+2", "<answer>2x+2</answer>", 1.0, True),
        ("2x+2", "2", 0.0, True),
        ("\\sqrt{2}", "2", 0.0, True),
        ("15", "12 + 3 = 15", 1.0, True),
        ("72 apples", "72", 1.0, True),
        ("5", "-5", 0.0, True),
        ("72", "71", 0.0, True),
        ("72", "I do not know", 0.0, False),
        ("72", "", 0.0, False),
        ("7", "\\boxed{9^{9^{9^{9}}}}", 0.0, False),
        ("7", "\\boxed{9 ** 9 ** 9}", 0.0, False),
        ("7", "\\boxed{(1 + 1)**99999}", 0.0, False),
        ("7", "\\boxed{(9999!)!}", 0.0, False),
        ("7", "\\boxed{(2\\cdot(999!+1))!}", 0.0, False),
        ("18000", "Total: **18000** (12 months of $1500). It is \\boxed{18000}", 1.0, True),
        ("18000", "Step 1) **18000** in all, great! (as shown)! \\boxed{18000}", 1.0, True),
    ],
)
def test_mathematics_is_compared_as_such(answer: str, text: str, value: float, parsed: bool) -> None:
    reward = paid({"name": "math"}, text, Problem("m", "?", answer))
    assert (reward.total, reward.parsed) == (value, parsed)


def test_mathematics_within_a_tag() -> None:
    problem = Problem("m", "?", "72")
    assert paid({"name": "math", "tag": "answer"}, "<answer>72</answer> or 71", problem).total == 1.0
    assert not paid({"name": "math", "tag": "answer"}, "72", problem).parsed


def test_mathematics_outside_the_main_thread() -> None:
    """Where math-verify's own clock cannot be set."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(paid({"name": "math"}, "$\\frac{14}{2}$").total))
    thread.start()
    thread.join(60)
    assert found == [1.0]


def test_a_composite_on_a_users_function_is_guarded() -> None:
    entry = {"name": "cosine", "of": f"{__name__}:hangs"}
    with pytest.raises(KeelError, match="did not return"):
        Judge.of(TASK, [entry], timeout_s=0.05).judge(PROBLEM, [["7"]])


def hangs(problem: Problem, text: str) -> float:
    threading.Event().wait(20)
    return 1.0


async def later(problem: Problem, text: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("tag_count", {"tags": "think"}, "tags is 'think': expected a list"),
        ("tag_count", {"tags": []}, "tags is"),
        ("tag_count", {"tags": ["<think>"]}, "tags is"),
        ("format", {"tags": [1]}, "tags is"),
        ("regex", {}, "needs the parameter 'pattern'"),
        ("regex", {"pattern": "("}, "a valid regular expression"),
        ("regex", {"pattern": "a", "group": 1}, "no group 1"),
        ("regex", {"pattern": "(?P<x>a)", "group": "y"}, "no group 'y'"),
        ("regex", {"pattern": "a", "full": "yes"}, "full is the text 'yes': expected true or false"),
        ("ladder", {"rungs": []}, "rungs is"),
        ("ladder", {"rungs": [{"tag": "a"}]}, r"rungs\[0\].*must have a value"),
        ("ladder", {"rungs": [{"tag": "a", "pattern": "b", "value": 1}]}, "one of pattern, tag, reward"),
        ("ladder", {"rungs": [{"tag": "a", "value": "1"}]}, r"rungs\[0\].value is '1'"),
        ("ladder", {"rungs": [{"tag": "a", "value": 1, "at_least": 1}]}, "has 'at_least'"),
        ("ladder", {"rungs": [{"pattern": "(", "value": 1}]}, "a valid regular expression"),
        ("ladder", {"rungs": [{"reward": "exat", "value": 1}]}, "ladder: .*did you mean 'exact'"),
        (
            "ladder",
            {"rungs": [{"reward": {"name": "exact", "x": 1}, "value": 1}]},
            "exact has no parameters: leave 'x' out",
        ),
        ("ladder", {"rungs": [{"reward": 3, "value": 1}]}, "3 is not a reward"),
        ("ladder", {"rungs": [{"reward": {"name": "http", "url": "http://h/"}, "value": 1}]}, "is remote or async"),
        ("cosine", {"of": f"{__name__}:later"}, "is remote or async"),
        ("cosine", {"max_length": 0}, "above 0"),
        ("cosine", {"max_length": 1.5}, "a whole number"),
        ("cosine", {"correct_short": float("nan")}, "correct_short is .nan: expected a finite number"),
        ("length", {"scale": 0}, "above 0"),
        ("length", {"target": True}, "a whole number"),
        ("math", {"tag": 1}, "math.tag is 1: expected a text"),
        ("http", {}, "needs the parameter 'url'"),
        ("http", {"url": "judge:8000"}, "http.url is"),
        ("http", {"url": "file:///etc/passwd"}, "http.url is"),
        ("http", {"url": "http://h/", "score": "a..b"}, "http.score is"),
        ("http", {"url": "http://h/", "timeout_s": 0}, "above 0"),
        ("http", {"url": "http://h/", "retries": -1}, "http.retries is"),
        ("http", {"url": "http://h/", "headers": {"A": 1}}, "headers is"),
        ("chat_judge", {"url": "http://h/"}, "needs the parameter 'model'"),
        ("chat_judge", {"url": "http://h/", "model": "m", "pattern": "x"}, "one group"),
        ("chat_judge", {"url": "http://h/", "model": "m", "template": "hm"}, "with {completion}"),
        ("chat_judge", {"url": "http://h/", "model": "m", "low": 3, "high": 3}, "high must be above low"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_built(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        check_reward(name, params)
    assert "\n" not in str(caught.value)


def test_sum_and_normalised_sum_can_prefer_different_completions() -> None:
    """By hand: a part of scale 100 decides the sum; brought to one scale, both parts count alike."""
    parts = {"right": [1.0, 0.0, 0.0], "chars": [0.0, 50.0, 100.0]}
    weights = {"right": 1.0, "chars": 0.5}
    assert combine(parts, weights) == [1.0, 25.0, 50.0]
    normalised = combine(parts, weights, "normalised_sum")
    spread = math.sqrt(2) / 3  # of (1, 0, 0)
    step = math.sqrt(1.5)  # (50 - 0) / the deviation of (0, 50, 100)
    third = 1 / 3 / spread
    assert normalised == pytest.approx([2 * third - 0.5 * step, -third, -third + 0.5 * step])
    assert max(normalised) == normalised[0]
