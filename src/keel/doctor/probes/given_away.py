"""Answers that a prompt gives away without calling them so: behind the same question, or by a mark at the right one."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.leaks import at_least, before, calls_answer, of_others, read_pairs
from keel.doctor.thresholds import Thresholds

_NEAR = 24  # characters behind a question in which its answer may stand
_BRACKETED = r"[\[(]\s*[^\W\d]{0,12}\s*[\])]"
_ITEM = re.compile(rf"</?\w[^<>\n]*>|{_BRACKETED}|\w+(?:\.\w+)*|([^\w\s])\1*")
# Signs of sentences, sums and amounts stand where they do for reasons of their own.
_ORDINARY = frozenset(".,:;!?…\"'“”‘’«»()[]{}-–—/\\%°=+")
Pair = tuple[str, str]  # an answer and the text of its prompt


@dataclass(frozen=True)
class Pointed:
    """How likely a mark points to the answer by chance in one prompt, and where that stands, from either end."""

    chance: float
    place: int
    from_end: int


def given_away_findings(
    setup: KeelSubject, prompts: Sequence[tuple[Problem, str]], thresholds: Thresholds
) -> Iterator[Finding]:
    """Both are properties of texts and answers alone, held against what other problems' answers or places would do."""
    pairs = read_pairs(setup, prompts)
    if not pairs:
        return
    if repeated := [*_asked_before(pairs, thresholds)]:
        yield from repeated
        return
    yield from _marked(pairs, thresholds)


# ------------------------------------------------------------------------ the question stands twice


def _asked_before(pairs: Sequence[Pair], thresholds: Thresholds) -> Iterator[Finding]:
    """The question that a prompt ends with stands in it before, with its own answer right behind."""
    gaps = [between_askings(text, [other for _, other in pairs if other != text]) for _, text in pairs]

    def answers(answer: str, i: int) -> bool:
        return any(before(answer, gap[: len(answer) + _NEAR]) for gap in gaps[i])

    told = [answers(answer, i) for i, (answer, _) in enumerate(pairs)]
    rate = of_others(pairs, answers)
    chance = at_least(sum(told), len(pairs), rate)
    if sum(told) < thresholds["leak_share"] * len(pairs) or chance > thresholds["travel_chance"]:
        return
    yield finding(
        "prompt/answer-leak",
        f"{sum(told)} of {len(pairs)} prompts hold their own question twice and its answer behind the first (others' "
        f"answers in {100 * rate:.0f} %; chance {chance:.1g}), such as {pairs[told.index(True)][1][-80:]!r}",
        "the solved example of a prompt is its own problem, so that copying earns the reward",
        "draw examples from other rows than the one that is asked, and from none that are evaluated",
    )


def between_askings(text: str, others: Sequence[str]) -> list[str]:
    """What stands between the question at a prompt's end and the same one before it, for each that there is.

    The question is known by the shortest end of its text that no other text has. Where it is merely said again, what
    stands between the two is nothing.
    """
    text = text.rstrip()
    others = [other.rstrip() for other in others]
    sizes = range(1, len(text) // 2 + 1)
    size = next((size for size in sizes if not any(other.endswith(text[-size:]) for other in others)), None)
    if size is None:
        return []
    last = len(text) - size
    found = []
    for place in (match.start() for match in re.finditer(re.escape(text[last:]), text[:last])):
        stop, begins = place + size, last
        while begins > stop and place > 0 and text[begins - 1] == text[place - 1]:
            begins, place = begins - 1, place - 1
        found.append(text[stop:begins])
    return found


# ------------------------------------------------------------------------ a mark stands at the right answer


def _marked(pairs: Sequence[Pair], thresholds: Thresholds) -> Iterator[Finding]:
    """A mark that stands at the answer, wherever that stands among words of its kind, and at no other of them."""
    rows = [pointing_marks(answer, text) for answer, text in pairs]
    counts = Counter(mark for row in rows for mark in row)
    if not counts:
        return
    mark, own = counts.most_common(1)[0]
    places = [row[mark] for row in rows if mark in row]
    moves = len({p.place for p in places}) > 1 and len({p.from_end for p in places}) > 1
    missed = math.comb(len(pairs), own)  # any of the prompts may be those without it
    chance = min(1.0, math.prod(place.chance for place in places) * missed * len(counts))
    if own < thresholds["leak_share"] * len(pairs) or not moves or chance > thresholds["travel_chance"]:
        return
    called = calls_answer(mark)
    shown = next(text for (_, text), row in zip(pairs, rows, strict=True) if mark in row)
    yield finding(
        "prompt/answer-leak",
        f"in {own} of {len(pairs)} prompts {mark!r} stands at their own answer, which is now here and now there, and "
        f"at nothing else of its kind (chance {chance:.1g}), such as {shown[-80:]!r}",
        "what marks the right choice for annotators was left in the prompt, so that reading the mark earns the reward",
        "leave the mark out of the prompt" + ("" if called else "; nothing, if the task is to find what is marked"),
        severity=None if called else "warning",
    )


def pointing_marks(answer: str, text: str) -> dict[str, Pointed]:
    """The marks of a text all of which stand at its answer, of those that have a choice of words to stand at."""
    items = [*_ITEM.finditer(text)]
    alike = [i for i, item in enumerate(items) if _is_word(item[0]) and _number(item[0]) == _number(answer)]
    right = {i for i in alike if items[i][0] == answer}
    if not right:
        return {}
    at: dict[str, list[set[int]]] = {}
    for i, item in enumerate(items):
        if _may_mark(item[0]):
            at.setdefault(item[0], []).append(_owners(items, i, alike))
    return {
        mark: Pointed(len(right) / len(alike), min(owners[0]), len(items) - min(owners[0]))
        for mark, owners in at.items()
        if all(owned and owned <= right for owned in owners)
    }


def _owners(items: Sequence[re.Match[str]], i: int, alike: Collection[int]) -> set[int]:
    """Of a mark's neighbours that are alike the one it is written at without a blank; both where that does not tell."""
    near = {i - 1, i + 1} & {*alike}
    return {n for n in near if items[min(n, i)].end() == items[max(n, i)].start()} or near


def _may_mark(item: str) -> bool:
    """A word that calls something an answer, a tag, a box that is ticked, or a sign of no sentence, sum or amount."""
    if _is_word(item):
        return calls_answer(item)
    if item[-1] in "])" and len(item) > 1:
        return re.search(r"\w", item) is not None
    return item[0] not in _ORDINARY and unicodedata.category(item[0]) != "Sc"


def _is_word(item: str) -> bool:
    return item[0].isalnum() or item[0] == "_"


def _number(item: str) -> bool:
    return item.replace(".", "", 1).isdigit()
