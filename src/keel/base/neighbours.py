"""The options that a misspelt or half-remembered name may mean: near by letters, or by the words that it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Words that trainers use for one thing; a plural's s is dropped before.
_SAME = {
    **dict.fromkeys(("coeff", "coefficient", "weight"), "coef"),
    **dict.fromkeys(("freq", "frequency", "interval", "period"), "every"),
    **dict.fromkeys(("val", "validation", "test"), "eval"),
    **dict.fromkeys(("n", "number", "count"), "num"),
    **dict.fromkeys(("response", "generate"), "completion"),
    **dict.fromkeys(("grad", "gradient"), "grad"),
    **dict.fromkeys(("eps", "epsilon"), "eps"),
    **dict.fromkeys(("norm", "normalize", "normalise", "scale", "whiten"), "scale"),
    "len": "length",
    "ckpt": "checkpoint",
    "temp": "temperature",
    "ref": "reference",
    "kl3": "k3",
    "lr": "learning rate",
}
# Words of so many options that sharing one means little.
_COMMON = frozenset({"max", "min", "num", "use", "name", "type", "size", "per", "enable", "total", "step", "in", "of"})
# Words that make another thing of a name: they are in both names or in none.
_DECISIVE = frozenset(
    {"eval", "critic", "value", "reward", "reference", "micro", "mini", "high", "low", "epoch", "warmup"}
)
_MAX_SHOWN = 3


def near_options(name: str, known: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Options that `name` may mean, nearest first, as they are written; none where nothing is near.

    `aliases` are other names that are taken, each with the option that it becomes (empty: none).
    """
    leaf, section = _leaf(name), name.rpartition(".")[0]
    written = {**{option: option for option in known}, **{alias: target or alias for alias, target in aliases.items()}}
    inside = [option for option in known if option.rpartition(".")[0] == section] if section else []
    spelt = (
        [option for option in written if section and _edits(name, option, 1) <= 1]
        or [option for option in known if _leaf(option) == leaf]
        or [option for option in written if len(name) > 3 and _edits(name, option, 1) <= 1]
        or _nearest_leaf(leaf, inside)
        or _nearest_leaf(leaf, list(written))
    )
    if spelt:
        return _unique([written[option] for option in spelt])
    # a section is no answer, least of all to a name inside it
    options = [option for option in written if "." in written[option] and not name.startswith(f"{option}.")]
    scored = [(max(_shared(name, tail) for tail in _tails(option)), option) for option in options]
    best = max((score for score, _ in scored), default=0.0)
    return _unique([written[option] for score, option in scored if score == best]) if best >= 0.6 else []


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _tails(name: str) -> list[str]:
    """`a.b.c`, `b.c` and `c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))[:_MAX_SHOWN]


def _nearest_leaf(leaf: str, options: Sequence[str]) -> list[str]:
    """Options whose last part is a misspelling away; a short word has few letters to get wrong."""
    limit = sum(len(leaf) >= length for length in (4, 10, 15))
    distances = [(_edits(leaf, _leaf(option), limit), option) for option in options if _leaf(option)[:1] == leaf[:1]]
    best = min((distance for distance, _ in distances), default=limit + 1)
    return [option for distance, option in distances if distance == best <= limit]


def _edits(a: str, b: str, limit: int) -> int:
    """Letters to insert, delete, replace or swap with the next; more than `limit` is limit + 1."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        following = [i]
        for j, other in enumerate(b, 1):
            cost = min(row[j] + 1, following[-1] + 1, row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        if min(following) > limit:
            return limit + 1
        before, row = row, following
    return row[-1]


def _words(name: str) -> frozenset[str]:
    words = (word[:-1] if len(word) > 3 and word.endswith("s") else word for word in re.split(r"[._\-]", name.lower()))
    return frozenset(part for word in words if word for part in _SAME.get(word, word).split())


def _shared(a: str, b: str) -> float:
    """The share of words that both names have; those of many options count little, and alone not at all."""
    first, second = _words(a), _words(b)
    both = first & second
    if both <= _COMMON or (first ^ second) & _DECISIVE:
        return 0.0
    return _size(both) / _size(first | second)


def _size(words: frozenset[str]) -> float:
    return sum(0.3 if word in _COMMON else 1.0 for word in words)
