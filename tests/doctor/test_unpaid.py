"""What a text comes down to, whatever its form."""

from __future__ import annotations

import pytest

from keel.doctor.probes.unpaid import value

SEVEN = [
    "7",
    "7.0",
    "\\boxed{7}",
    "<answer> 7 </answer>",
    "so 3 + 4\n#### 7",
    "The answer is 7.",
    "**Answer:** $7$",
    "7 cm",
    "the number 7",
    "The larger one is 7",
    "seven",
    "7, which is the larger one",
]


@pytest.mark.parametrize("text", SEVEN)
def test_forms_of_one_value(text: str) -> None:
    assert value(text) == "7"


@pytest.mark.parametrize(("text", "other"), [("Paris", "the answer is **Paris**."), ("(B)", "Answer: (B)")])
def test_words(text: str, other: str) -> None:
    assert value(text) == value(other)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r"\frac{3}{4}", r"\frac{1}{4}"),
        ("(3, 5)", "(2, 5)"),
        ("10:30", "9:30"),
        ("(25 - 7) * 4", "(25 + 7) - 4"),
        ("2x", "2y"),
        ("1/2", "2"),
        ("x^2", "y^2"),
        ("x = 2", "y = 2"),
        ("2 apples and 3 pears", "2 apples and 4 pears"),
    ],
)
def test_the_last_number_is_not_the_value(text: str, other: str) -> None:
    assert value(text) != value(other)


def test_other_values_differ() -> None:
    assert len({value(text) for text in ("7", "-7", "17", "Paris", "London", "")}) == 6


@pytest.mark.parametrize("text", ["minus 5", "negative 5", "not 5", "less than 5", "5 million", "at least 5 apples"])
def test_words_that_make_another_number_of_it(text: str) -> None:
    assert value(text) != value("5")
