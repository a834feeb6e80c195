"""The rewards of a multi-hop episode: SQuAD's exact match and F1, and precision and recall of documents."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from keel.base.errors import KeelError, unknown

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
    """The harmonic mean of precision and recall over words, counted with repetition; of two empty texts 1."""
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
    for name, weight in weights.items():
        if name not in WEIGHTS:
            raise unknown("multihop weight", name, WEIGHTS)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise KeelError(f"multihop weights.{name} is {weight!r}: it must be 0 or more")
    if not sum(weights.values()):
        raise KeelError("multihop weights are all 0: give one of them a weight")
    return {name: float(weight) for name, weight in weights.items()}
