"""Queries for demonstrations, built only from text that the policy has seen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

from keel.recipes.multihop.question import Question
from keel.recipes.multihop.score import normalise

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
        """Whether a question's word is an unseen name; the first word only if the documents have it as a name."""
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
    """The phrase without words at its ends, longest first."""
    for length in range(len(words) - 1, 0, -1):
        for start in range(len(words) - length + 1):
            yield words[start : start + length]


@lru_cache(maxsize=1024)
def _names(question: Question) -> frozenset[str]:
    """The words of a document that are names or numbers, in normal form."""
    words = (word for document in question.documents for word in f"{document.title} {document.text}".split())
    return frozenset(term for word in words if _is_name(word) for term in normalise(word).split())


def _is_name(word: str) -> bool:
    """Whether a word has a capital, a digit, or a script without capitals."""
    return not word.islower() or any(map(str.isdigit, word))
