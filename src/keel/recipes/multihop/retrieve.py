"""Retrievers (only the supporting documents, BM25, BM25 fused with embeddings), and the queries of demonstrations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from keel.base.errors import KeelError
from keel.base.parts import import_object
from keel.recipes.multihop.question import Document, Question
from keel.recipes.multihop.score import normalise

RetrieverName = Literal["golden", "lexical", "hybrid"]
RRF = 60  # the constant of reciprocal rank fusion, Cormack et al. 2009


Retriever = Callable[[Question, str], list[Document]]  # ranks the documents of a question by a query, best first


@dataclass(frozen=True)
class Retrieved:
    """The retrieved documents; `str` is the text for the model."""

    documents: tuple[Document, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.documents)) or "No document matches."


def golden(question: Question, query: str) -> list[Document]:
    """Only the supporting documents: an upper bound.

    Sorted by the number of words shared with the query in the title, then in the text, then by the chain's order.
    """
    query_words = set(normalise(query).split())

    def shared(document: Document) -> tuple[int, int]:
        title, text = (len(query_words & set(normalise(part).split())) for part in (document.title, document.text))
        return -title, -text

    return sorted((document for id in question.chain if (document := question.document(id)) is not None), key=shared)


def lexical(question: Question, query: str) -> list[Document]:
    """The documents with a BM25 score above 0."""
    scores = _bm25(question)(query)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [question.documents[i] for i in order if scores[i] > 0]


@dataclass(frozen=True)
class Hybrid:
    """Reciprocal rank fusion of BM25 and the cosine of embeddings: Σ 1 / (60 + rank)."""

    embed: Callable[[list[str]], Any]
    _vectors: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, question: Question, query: str) -> list[Document]:
        by_words = [document.id for document in lexical(question, query)]
        similar = self._similarities(question, query)
        by_meaning = [question.documents[i].id for i in sorted(range(len(similar)), key=lambda i: -similar[i])]
        scores = {
            document.id: sum(
                1.0 / (RRF + ranks.index(document.id) + 1) for ranks in (by_words, by_meaning) if document.id in ranks
            )
            for document in question.documents
        }
        return sorted(question.documents, key=lambda document: -scores[document.id])

    def _similarities(self, question: Question, query: str) -> list[float]:
        if question.key not in self._vectors:
            if len(self._vectors) >= 1024:
                self._vectors.pop(next(iter(self._vectors)))
            self._vectors[question.key] = self._unit(
                [f"{document.title}\n{document.text}" for document in question.documents]
            )
        documents, (query_vector,) = self._vectors[question.key], self._unit([query])
        return [float(sum(a * b for a, b in zip(query_vector, document, strict=True))) for document in documents]

    def _unit(self, texts: list[str]) -> list[list[float]]:
        rows = [[float(x) for x in row] for row in self.embed(texts)]
        if len(rows) != len(texts):
            raise ValueError(f"the embedding gave {len(rows)} vectors for {len(texts)} texts")
        norms = [max(sum(x * x for x in row) ** 0.5, 1e-12) for row in rows]
        return [[x / norm for x in row] for row, norm in zip(rows, norms, strict=True)]


def build_retriever(name: RetrieverName, embedding: str | Callable[[list[str]], Any] | None) -> Retriever:
    """The retriever called `name`; `hybrid` needs `embedding`, a function from texts to vectors (`module:attr`)."""
    if name != "hybrid" and embedding is not None:
        raise KeelError(
            f"multihop embedding has no effect with retriever={name}: set retriever=hybrid, or leave it out"
        )
    if name == "golden":
        return golden
    require_bm25()
    if name == "lexical":
        return lexical
    if embedding is None:
        raise KeelError("multihop retriever=hybrid needs embedding: module:attr of a function from texts to vectors")
    return Hybrid(import_object(embedding, "embedding") if isinstance(embedding, str) else embedding)


def require_bm25() -> Any:
    """Import bm25s, or raise a KeelError with the pip command."""
    try:
        import bm25s
    except ImportError as error:
        raise KeelError("the retrievers lexical and hybrid need bm25s: pip install bm25s") from error
    return bm25s


@lru_cache(maxsize=1024)
def _bm25(question: Question) -> Callable[[str], list[float]]:
    """BM25 scores of a question's documents; the index is built once."""
    bm25s = require_bm25()
    index = bm25s.BM25()
    texts = [normalise(f"{document.title} {document.text}").split() or [""] for document in question.documents]
    index.index(texts, show_progress=False)
    known = {term for text in texts for term in text}

    def scores(query: str) -> list[float]:
        terms = [term for term in normalise(query).split() if term in known]
        return [float(x) for x in index.get_scores(terms)] if terms else [0.0] * len(texts)

    return scores


MAX_QUERIES = 100  # maximum per document, because each may compute an embedding
_REFERENCE = re.compile(r"#(\d+)")


def queries(question: Question, id: str, shown: str) -> list[str]:
    """Queries for a document, best first; `shown` is the text that the episode has returned so far.

    They are the document's sub-questions with known answers filled in, the seen words of its title, the question, and
    shorter parts of the sub-questions. They contain only names that occur in the question or in `shown`.
    """
    document = question.document(id)
    seen = f" {normalise(f'{question.text} {shown}')} "
    seen_words, names = set(seen.split()), _names(question)

    def is_seen(word: str) -> bool:
        return set(normalise(word).split()) <= seen_words

    def is_named(words: Sequence[str]) -> bool:
        return any(names.intersection(normalise(word).split()) for word in words)

    def has_unread_name(position: int, word: str) -> bool:
        """Whether a question's word is an unseen name; the first word only if it is a name in the documents."""
        return not is_seen(word) and (is_named([word]) or (position > 0 and _is_name(word)))

    sub_questions = [
        [word for position, word in enumerate(text.split()) if not has_unread_name(position, word)]
        for text in _resolved(question, id, seen)
    ]
    title = document.title.split() if document is not None else []
    seen_title = [word for word in title if is_seen(word)]
    whole = [*sub_questions, seen_title if seen_title == title or is_named(seen_title) else [], question.text.split()]
    shorter = (part for words in sub_questions or [question.text.split()] for part in _shorter(words) if is_named(part))
    texts = (" ".join(words) for words in (*whole, *islice(shorter, MAX_QUERIES - len(whole))))
    return list(dict.fromkeys(text for text in texts if normalise(text)))


def _resolved(question: Question, id: str, seen: str) -> Iterator[str]:
    """The sub-questions of a document with references filled in, if the referenced answers have been seen."""
    answers = [step.answer for step in question.decomposition]
    for step in question.decomposition:
        numbers = [int(number) for number in _REFERENCE.findall(step.question)]
        known = all(0 < number <= len(answers) and f" {normalise(answers[number - 1])} " in seen for number in numbers)
        if step.document == id and known:
            text = step.question.replace(">>", " ")  # relations are written as `subject >> relation`
            yield _REFERENCE.sub(lambda match: answers[int(match[1]) - 1], text)


def _shorter(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """All shorter parts of the phrase, longest first."""
    for length in range(len(words) - 1, 0, -1):
        for start in range(len(words) - length + 1):
            yield words[start : start + length]


@lru_cache(maxsize=1024)
def _names(question: Question) -> frozenset[str]:
    """The words of a question's documents that are names or numbers, in normal form."""
    words = (word for document in question.documents for word in f"{document.title} {document.text}".split())
    return frozenset(term for word in words if _is_name(word) for term in normalise(word).split())


def _is_name(word: str) -> bool:
    """Whether a word has a capital, a digit, or a script without capitals."""
    return not word.islower() or any(map(str.isdigit, word))
