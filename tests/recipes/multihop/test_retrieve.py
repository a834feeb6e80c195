"""Retrievers against rankings known by hand and against another implementation of BM25's formula."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from envs.playing import counts, reply
from keel.envs.registry import build_task
from keel.recipes.multihop.question import Document, Question
from keel.recipes.multihop.retrieve import RRF, Hybrid, golden, lexical
from keel.recipes.multihop.score import normalise

DOCUMENTS = (
    Document("0", "Cats", "cats sleep and cats eat", False),
    Document("1", "Dogs", "dogs eat", True),
    Document("2", "Birds", "birds sing of dogs and cats", True),
    Document("3", "Empty", "", False),
)
QUESTION = Question("q", "?", ("x",), DOCUMENTS, ("2", "1"))


def ids(documents: list[Document]) -> list[str]:
    return [one.id for one in documents]


def test_golden_returns_support_only_nearest_first() -> None:
    assert ids(golden(QUESTION, "dogs")) == ["1", "2"]  # by the title, before the text of the other
    assert ids(golden(QUESTION, "cats")) == ["2", "1"]
    assert ids(golden(QUESTION, "")) == ["2", "1"]  # the chain's order


def test_lexical_leaves_out_what_does_not_match() -> None:
    assert ids(lexical(QUESTION, "Cats!")) == ["0", "2"]
    assert ids(lexical(QUESTION, "unheard of words")) == ["2"]  # only "of" is known
    assert lexical(QUESTION, "") == []
    assert lexical(QUESTION, "zebra") == []


def test_lexical_ranks_by_bm25() -> None:
    """Lucene's form: Σ ln(1 + (N − n + ½)/(n + ½)) · tf / (tf + k₁(1 − b + b·length/mean)), k₁ 1.5, b 0.75."""
    texts = [normalise(f"{one.title} {one.text}").split() for one in DOCUMENTS]
    mean = sum(map(len, texts)) / len(texts)

    def score(words: list[str], query: list[str]) -> float:
        found = 0.0
        for word in query:
            n = sum(word in text for text in texts)
            tf = Counter(words)[word]
            found += math.log(1 + (4 - n + 0.5) / (n + 0.5)) * tf / (tf + 1.5 * (0.25 + 0.75 * len(words) / mean))
        return found

    for query in ("dogs eat", "cats", "birds sing and eat", "sleep dogs"):
        expected = [score(words, query.split()) for words in texts]
        order = sorted((i for i in range(4) if expected[i] > 0), key=lambda i: -expected[i])
        assert ids(lexical(QUESTION, query)) == [str(i) for i in order]


def letters(texts: list[str]) -> list[list[float]]:
    """A made-up embedding: how often some letters occur."""
    return [[float(text.lower().count(letter)) for letter in "sdgb"] for text in texts]


def test_hybrid_fuses_the_ranks() -> None:
    retriever = Hybrid(letters)
    by_words = ids(lexical(QUESTION, "dogs"))
    asked = letters(["dogs"])[0]

    def cosine(row: list[float]) -> float:
        dot = sum(a * b for a, b in zip(asked, row, strict=True))
        return dot / (max(math.hypot(*row), 1e-12) * math.hypot(*asked))

    rows = letters([f"{one.title}\n{one.text}" for one in DOCUMENTS])
    by_meaning = [str(i) for i in sorted(range(4), key=lambda i: -cosine(rows[i]))]
    fused = {
        str(i): sum(1 / (RRF + ranks.index(str(i)) + 1) for ranks in (by_words, by_meaning) if str(i) in ranks)
        for i in range(4)
    }
    assert ids(retriever(QUESTION, "dogs")) == sorted(fused, key=lambda id: -fused[id])


def test_an_embedding_that_fails_is_told_to_the_model_and_counted() -> None:
    def bad(texts: list[str]) -> Any:
        return [[1.0]]

    task: Any = build_task("multihop", retriever="hybrid", embedding=bad)
    (problem,) = task.sample(1, seed=0, step=0)
    said = reply(task, problem, ["<retrieve> x </retrieve>"])
    assert "error: retrieve_documents raised ValueError: the embedding gave 1 vectors for 8 texts" in said
    assert counts(task, problem, ["<retrieve> x </retrieve>"])["tool/failed"] == 1.0
