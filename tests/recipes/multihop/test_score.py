"""SQuAD's normal form and scores against a table and against its definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.recipes.multihop.score import (
    WEIGHTS,
    best,
    exact_match,
    f1,
    normalise,
    precision,
    recall,
    total,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("the  the\tTheory of a\nthe man an", "theory of man"),
        ("theatre", "theatre"),
        ("A.", ""),
        ("an-the", "anthe"),  # punctuation goes first, and joins
        ("U.S.A.", "usa"),
        ("rock'n'roll!", "rocknroll"),
        ("Jean-Luc", "jeanluc"),
        ("$1,000.50", "100050"),
        ("Beyoncé", "beyoncé"),
        ("İstanbul", "i̇stanbul"),
        ("l’été", "l’été"),  # only ASCII punctuation is taken away
        ("10\u00a0000", "10 000"),
        ("«the»", "« »"),
        ("東京", "東京"),
        ("", ""),
        ("   ", ""),
        ("the", ""),
    ],
)
def test_normal_forms(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("said", "answer", "exact", "overlap"),
    [
        ("The Old Ashford.", "old ashford", 1.0, 1.0),
        ("Ashford", "Old Ashford", 0.0, 2 / 3),
        ("Old Old Ashford", "Old Ashford", 0.0, 4 / 5),
        ("Ashford Old", "Old Ashford", 0.0, 1.0),
        ("Paris", "London", 0.0, 0.0),
        ("", "London", 0.0, 0.0),
        ("London", "", 0.0, 0.0),
        ("", "", 1.0, 1.0),  # a question without an answer, as in SQuAD 2
        ("the", "", 1.0, 1.0),
        ("a b c d", "d e f g", 0.0, 2 / 7),
    ],
)
def test_exact_match_and_f1(said: str, answer: str, exact: float, overlap: float) -> None:
    assert exact_match(said, answer) == exact
    assert f1(said, answer) == pytest.approx(overlap, abs=1e-9)


@given(st.lists(st.sampled_from("xyz"), min_size=1), st.lists(st.sampled_from("xyz"), min_size=1))
def test_f1_is_the_harmonic_mean_of_precision_and_recall(said: list[str], wanted: list[str]) -> None:
    left, common = list(wanted), 0
    for word in said:
        if word in left:
            left.remove(word)
            common += 1
    p, r = common / len(said), common / len(wanted)
    assert f1(" ".join(said), " ".join(wanted)) == pytest.approx(2 * p * r / (p + r) if common else 0.0, abs=1e-12)


def test_the_best_alias_counts_and_no_answer_is_no_match() -> None:
    assert best(exact_match, "the town of Old Ashford", ("Old Ashford", "town of old ashford")) == 1.0
    assert best(f1, "Ashford", ("London", "Old Ashford")) == pytest.approx(2 / 3)
    assert best(exact_match, None, ("", "x")) == 0.0


def test_retrieval_counts_each_document_once() -> None:
    assert recall(["1", "1", "4"], ["1", "2"]) == 0.5
    assert precision(["1", "1", "4", "5"], ["1", "2"]) == pytest.approx(1 / 3)
    assert precision([], ["1"]) == 0.0
    assert recall(["1"], ["1"]) == 1.0


def test_the_total_is_the_hops_over_two_times_the_weighted_mean() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(4.0)
    ones = dict.fromkeys(WEIGHTS, 1.0)
    assert total(ones, WEIGHTS, 2, True) == pytest.approx(1.0, abs=1e-12)
    assert total(ones, WEIGHTS, 4, True) == pytest.approx(2.0, abs=1e-12)
    assert total(ones, WEIGHTS, 4, False) == pytest.approx(1.0, abs=1e-12)
