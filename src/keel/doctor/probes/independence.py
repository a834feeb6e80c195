"""What a tool's result depends on: its own call, and none that was made before it, beside it, or by others.

The batch's first calls are played in other company: after other episodes, as the second one of an episode, and two in
one turn. A result that says nothing but the call, or nothing that the tokenizer can write, depends on nothing at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from keel.base.types import Problem
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.replayed import FEWEST, MOST, Replayed, Wrong
from keel.doctor.probes.replies import TAG, answers_again, contents, is_useless, played_again, squeezed
from keel.doctor.rendering import words

ECHOED = 3  # different calls that come back as they are
PLAYED = 8  # calls that are made in another order
PAIRS = 5  # of calls that are made in one episode

_TERMINAL = re.compile(r"\x1b[\[\]][0-9;?]*[A-Za-z]")
_BYTES = re.compile(r"\s*b(['\"]).*\1\s*", re.DOTALL)


def echoed(rows: Sequence[Replayed]) -> Wrong | None:
    """Replies that are the turn itself, or all its call gives, and nothing more; a tool to think with does that."""
    if len(rows) < FEWEST or len({row.asked for row in rows}) < ECHOED:
        return None
    if not all(_bare(row.again) in _said(row) for row in rows):
        return None
    return Wrong(
        f"each of {len(rows)} replies repeats what it was asked and says nothing else: {rows[0].again.strip()[:60]!r}",
        "the tool returns its own arguments, or the environment hands the model's text back to it",
        "warning",
        "; if the environment is meant to repeat what it is told, nothing",
        "error",
    )


def _bare(text: str) -> str:
    return squeezed(TAG.sub("", text))


def _said(row: Replayed) -> set[str]:
    said = {_bare(row.text)}
    if isinstance(row.asked, tuple):
        values = [value for _, arguments in row.asked for value in (json.loads(arguments) or {}).values()]
        said.add(squeezed("".join(map(str, values))))
    return said - {""}


def unreadable(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    """Results of which the tokenizer keeps no word, that are bytes written out, or what moves a terminal's cursor."""
    results = [row.again for row in rows if words(row.again)]
    if len(results) < FEWEST or len(results) < len(rows):
        return None
    if all(_BYTES.fullmatch(TAG.sub("", result)) for result in results):
        return Wrong(
            f"all of {len(results)} results are bytes written out, such as {results[0].strip()[:60]!r}",
            "the tool returns bytes and not a text: what is not ASCII is unreadable",
        )
    if all(_TERMINAL.search(result) for result in results):
        return Wrong(
            f"all of {len(results)} results hold the codes of a terminal, such as {results[0].strip()[:60]!r}",
            "the tool returns what a terminal would show, with its colours and its cursor: the model reads the codes",
            "warning",
            in_failures="error",
        )
    encode, decode = setup.policy.tokenizer.encode, setup.policy.tokenizer.decode
    for result in results:
        bare = TAG.sub(" ", result)
        kept = words(str(decode(encode(bare, add_special_tokens=False), skip_special_tokens=True)))
        if not words(bare) or set(words(bare)) & set(kept) or "".join(words(bare)) in "".join(kept):
            return None
    return Wrong(
        f"no word of {len(results)} results comes back from its tokens, such as {results[0].strip()[:60]!r}",
        "the tool writes characters that the tokenizer has no tokens for, so that the model cannot read them",
    )


def by_others(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    """Calls that return the same twice in a row, something else after other episodes' calls, and the same once more.

    The last is after the call that came before at first: a clock that went on or a server's limit brings nothing back.
    """
    if len(rows) < FEWEST or not all(row.first == row.again for row in rows):
        return None
    moved, played = list[tuple[Replayed, str]](), 0
    last = rows[-PLAYED - 2 :]
    for number in range(len(last) - 1, 0, -1):  # from the last to the first: each after another one than before
        row, before, after = last[number], last[number - 1], last[(number + 1) % len(last)]
        with suppress(Exception):
            reply = answers_again(setup, row.problem, row.text)
            apart = number + 1 < len(last) and len({r.problem.key for r in (row, before, after)}) == 3
            if not apart or reply is None or is_useless(contents(reply)):
                continue
            if contents(reply) != row.again:
                answers_again(setup, before.problem, before.text)
                back = contents(answers_again(setup, row.problem, row.text)) == row.again
                moved += [(row, contents(reply))] if back else []
            played += 1
    if len(moved) < FEWEST or len(moved) <= MOST * played:
        return None
    row, other = moved[0]
    return Wrong(
        f"{len(moved)} of {played} calls that return the same twice in a row return something else after calls of "
        f"other episodes, and the same again after those of before: {row.again.strip()[:60]!r}, then "
        f"{other.strip()[:60]!r}",
        "episodes share what each should have for itself: what another one asked decides what this one is told",
    )


def of_its_episode(setup: KeelSubject, rows: Sequence[Replayed]) -> Wrong | None:
    """A second call of an episode that returns what the first did, and two calls of one turn in the wrong order.

    That order is wrong in every pair, whichever call comes first: a tool may sort its results.
    """
    results = [row for row in rows if row.is_result and row.first == row.again and row.again.strip()]
    kept = swapped = told = compared = 0
    for row, other in _pairs(results):
        with suppress(Exception):
            if compared == PAIRS:
                break
            with played_again(setup, row.problem, [other.text]) as (_, (alone, *_)):
                pass
            if not contents(alone).strip() or contents(alone) == row.again:
                continue
            compared += 1
            with played_again(setup, row.problem, [row.text, other.text]) as (_, both):
                told += len(both) == 2 and both[1] is not None
                kept += len(both) == 2 and contents(both[1]) == row.again
            calls = (row.text, row.again), (other.text, contents(alone))
            swapped += _swapped(setup, row.problem, calls) and _swapped(setup, row.problem, calls[::-1])
    if kept >= FEWEST and kept > MOST * told:
        return Wrong(
            f"{kept} of {told} second calls of an episode return what its first call did, and their own result where "
            "they are the only one",
            "results are kept by episode, or by problem, and not by what is asked",
        )
    if swapped == PAIRS:
        return Wrong(
            f"all of {swapped} pairs of calls in one turn are answered in the opposite order, whichever comes first",
            "results of one turn's calls are put together in another order than the calls",
        )
    return None


def _swapped(setup: KeelSubject, problem: Problem, calls: Sequence[tuple[str, str]]) -> bool:
    """Whether one turn of two calls has the result of the second before that of the first."""
    (one, first), (two, second) = ((text, _bare(result)) for text, result in calls)
    reply = _bare(contents(answers_again(setup, problem, f"{one}\n{two}")))
    return first not in second and second not in first and 0 <= reply.find(second) < reply.find(first)


def _pairs(rows: Sequence[Replayed]) -> Iterator[tuple[Replayed, Replayed]]:
    """Calls of neighbours that ask for different things."""
    return ((row, other) for row, other in pairwise(rows) if row.asked != other.asked)
