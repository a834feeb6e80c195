"""Draw training and held-out problems. A hash of the problem decides whether it is held out."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

from keel.base.errors import KeelError
from keel.base.types import Problem

HELD_OUT_FRACTION = 0.1
_MAX_MISSES = 2000  # draws without a new problem before a range counts as exhausted


def seeded_rng(*parts: object) -> random.Random:
    """A random generator seeded with a hash of `parts`, so that neighbouring seeds and steps are independent."""
    text = "\x1f".join(map(str, parts))
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def is_held_out(identity: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether the problem with this `identity` is held out.

    Only a hash of the identity decides, so every run, warm start and mixture uses the same split. Use one identity for
    problems whose answers imply each other, such as 3+4 and 4+3.
    """
    return held_out_rank(identity) < fraction * 2**64


def held_out_rank(identity: str) -> int:
    """The 64-bit hash that decides the split; the lowest are held out first."""
    return int.from_bytes(hashlib.blake2b(b"held-out\x1f" + identity.encode(), digest_size=8).digest(), "little")


def check_held_out(held_out: int | float) -> int | float:
    """Return `held_out` as a fraction up to 1.0 or as an integer (100.0 is the number 100), or raise a KeelError."""
    is_number = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if not is_number or not 0 <= held_out < math.inf or (held_out > 1 and held_out != int(held_out)):
        raise KeelError(f"task.held_out is {held_out!r}: give a fraction below 1 or a number of problems")
    return int(held_out) if held_out > 1 else held_out


def split_held_out(identities: Iterable[str], held_out: int | float) -> set[str]:
    """The held-out identities: `held_out` of them, or a fraction (at least one, and below 1.0 not all)."""
    held_out = check_held_out(held_out)
    by_hash = sorted(set(identities), key=held_out_rank)
    if held_out == 0 or isinstance(held_out, int):
        return set(by_hash[: int(held_out)])
    chosen = [identity for identity in by_hash if is_held_out(identity, float(held_out))] or by_hash[:1]
    leaves_none = len(chosen) == len(by_hash) > 1 and held_out < 1
    return set(chosen[:-1] if leaves_none else chosen)


def check_split(source: str, count: int, train: int, held: int, *, distinct: int, more: str = "") -> None:
    """Raise a KeelError if the training or the held-out split is empty."""
    if train and held:
        return
    empty = "training" if not train else "evaluation"
    advice = "add problems, or change task.held_out" if distinct > 1 else "give at least two different ones"
    raise KeelError(
        f"{source} has {count} problem{'s' * (count != 1)} ({distinct} different), which leaves none for {empty}: "
        f"{advice}{more}"
    )


def choose_held_out(sizes: Mapping[str, int], count: int) -> frozenset[str]:
    """Choose held-out identities with exactly `count` problems in total, by the same hash.

    `sizes` has the number of problems per identity; all of them are in the same split. Use this for small ranges, where
    a fraction is inexact.
    """
    chosen: list[str] = []
    remaining = count
    for identity in sorted(sizes, key=held_out_rank):
        if sizes[identity] <= remaining:
            chosen.append(identity)
            remaining -= sizes[identity]
    total = sum(sizes.values())
    if count < 1 or remaining or count >= total:
        raise KeelError(f"held_out is {count}, but the range has {total} problems: give a number from 1 to {total - 1}")
    return frozenset(chosen)


def shares_of(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Divide `count` in proportion to the weights, rounded at random so that each expected share is exact.

    This is systematic sampling: one random offset for all weights rounds each share down or up.
    """
    edges = [*accumulate(map(Fraction, weights), initial=Fraction(0))]
    offset = Fraction(rng.random())
    marks = [math.floor(count * edge / edges[-1] + offset) for edge in edges]
    return [after - before for before, after in pairwise(marks)]


Draw = Callable[[random.Random], tuple[str, Problem]]
HeldOut = Callable[[str], bool]


def training_problems(draw: Draw, count: int, rng: random.Random, held_out: HeldOut = is_held_out) -> list[Problem]:
    """`count` problems that are not held out, distinct until the range is exhausted.

    A repeated problem gets another key: the key seeds the noise, so equal keys would give equal completions.
    """
    problems: dict[str, Problem] = {}
    repeating = False
    while len(problems) < count:
        seen = () if repeating else problems
        problem = _next(draw, rng, lambda identity, p, seen=seen: not held_out(identity) and p.key not in seen)
        if problem is None and repeating:
            raise KeelError("the task's range has no training problem: widen it (low/high, digits, size)")
        if problem is None:
            repeating = True
            continue
        if problem.key in problems:
            copies = sum(key.partition("#")[0] == problem.key for key in problems)
            problem = replace(problem, key=f"{problem.key}#{copies}")
        problems[problem.key] = problem
    return list(problems.values())


def held_out_problems(draw: Draw, count: int, rng: random.Random, held_out: HeldOut = is_held_out) -> list[Problem]:
    """`count` distinct held-out problems, or all if the range has fewer."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = _next(draw, rng, lambda identity, problem: held_out(identity) and problem.key not in problems)
        if problem is None:
            break
        problems[problem.key] = problem
    if count and not problems:
        raise KeelError("the task's range has no held-out problem: widen it (low/high, digits, size)")
    return list(problems.values())


def _next(draw: Draw, rng: random.Random, accept: Callable[..., bool]) -> Problem | None:
    for _ in range(_MAX_MISSES):
        identity, problem = draw(rng)
        if accept(identity, problem):
            return problem
    return None
