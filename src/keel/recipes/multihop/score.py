"""The final answer of an episode: its tool, its parsing, and its rewards (exact match, F1, recall of documents)."""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.envs.tools import tool

WEIGHTS: Mapping[str, float] = {
    "exact_match": 1.0,
    "f1": 0.9,
    "retrieval_recall": 1.0,
    "retrieval_precision": 0.4,
    "citation_recall": 0.6,
    "format": 0.1,
}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the normal forms are equal."""
    return float(normalise(prediction) == normalise(answer))


def f1(prediction: str, answer: str) -> float:
    """The harmonic mean of precision and recall over words, counted with repetition; 1 for two empty texts."""
    predicted, gold = normalise(prediction).split(), normalise(answer).split()
    if not predicted or not gold:
        return float(predicted == gold)
    common = sum((Counter(predicted) & Counter(gold)).values())
    return 2.0 * common / (len(predicted) + len(gold))


def best(measure: Callable[[str, str], float], prediction: str | None, answers: Sequence[str]) -> float:
    """The best score over an answer and its aliases; 0 without an answer."""
    return 0.0 if prediction is None else max(measure(prediction, answer) for answer in answers)


def recall(retrieved: Collection[str], relevant: Collection[str]) -> float:
    """The fraction of relevant documents that were retrieved."""
    return len(set(retrieved) & set(relevant)) / len(set(relevant)) if relevant else 0.0


def precision(retrieved: Collection[str], relevant: Collection[str]) -> float:
    """The fraction of retrieved documents that are relevant; 0 if nothing was retrieved."""
    return len(set(retrieved) & set(relevant)) / len(set(retrieved)) if retrieved else 0.0


def total(parts: Mapping[str, float], weights: Mapping[str, float], hops: int, hop_factor: bool) -> float:
    """(hops / 2) · Σ wᵢ·partᵢ / Σ wᵢ: long chains earn more."""
    mean = sum(weight * parts[name] for name, weight in weights.items()) / sum(weights.values())
    return mean * (hops / 2 if hop_factor else 1.0)


def checked_weights(changes: Mapping[str, float] | None) -> dict[str, float]:
    """The default weights of the parts with these `changes`."""
    weights = {**WEIGHTS, **(changes or {})}
    for name in weights:
        if name not in WEIGHTS:
            raise unknown("multihop weight", name, WEIGHTS)
    if not sum(weights.values()):
        raise KeelError("multihop weights are all 0: give one of them a weight")
    return {name: float(weight) for name, weight in weights.items()}


_LABEL = re.compile(r"[(#]*(?:documents?|docs?|ids?|no|and)\b[.:#-]*", re.IGNORECASE)  # words around an id, not ids
_AROUND = "()#.:"


@dataclass(frozen=True)
class Answer:
    """The final answer; `text` is None if there is none, `listed` is whether it was a list."""

    text: str | None
    cited: tuple[str, ...] = ()
    listed: bool = False


def retrieve_documents(query: str) -> str:
    """Find the documents that match a query best.

    Args:
        query: The words to look for, such as the name of a person, a place or a work.
    """
    raise NotImplementedError("each problem binds it to its documents")


@partial(tool, ends=True)
def complete(reasoning: str, final_answer: str | list[str], cited_doc_ids: list[str] | str) -> Answer:
    """Give the final answer and end the conversation.

    Args:
        reasoning: The steps that lead to the answer.
        final_answer: The answer itself, as short as possible.
        cited_doc_ids: The ids of the documents that support the answer.
    """
    return read_answer(final_answer, cited_doc_ids)


def read_answer(text: Any, cited: Any) -> Answer:
    """Parse an answer. A list becomes one answer, joined by commas.

    Ids are accepted in several notations: `Document ID: 3`, `(3)`, `#3` and `3.` are all `3`.
    """
    several = _as_list(text)
    answer = str(text).strip() if several is None else ", ".join(map(str, several))
    ids = cited if isinstance(cited, list | tuple) else [cited]
    parts = [
        _LABEL.sub("", part).strip(_AROUND) for cited_id in ids for part in re.split(r"[\s,;\[\]\"']+", str(cited_id))
    ]
    return Answer(answer or None, tuple(dict.fromkeys(filter(None, parts))), several is not None)


def _as_list(text: Any) -> list[Any] | None:
    """The entries of a list, or of a list written as text; None for other values."""
    if isinstance(text, list | tuple):
        return list(text)
    if not (isinstance(text, str) and text.strip().startswith("[") and text.strip().endswith("]")):
        return None
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return list(value) if isinstance(value, list) else None
