"""Drawing problems: streams of random numbers by name, and a held-out part that is a property of the problem itself."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from keel.base.errors import KeelError
from keel.base.types import Problem

HELD_OUT_FRACTION = 0.1
_PATIENCE = 2000  # draws in a row that may bring nothing new before a range counts as used up


def stream(*parts: object) -> random.Random:
    """A random stream that depends on `parts` and nothing else; neighbouring seeds and steps share nothing."""
    text = "\x1f".join(map(str, parts))
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def is_held_out(identity: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether the problem called `identity` is held out for evaluation.

    A hash of the problem decides, not a seed or a range: whatever other run, warm start or mixture draws it, it is on
    the same side. `identity` should be equal for problems that give each other away, such as 3+4 and 4+3.
    """
    return held_out_rank(identity) < fraction * 2**64


def held_out_rank(identity: str) -> int:
    """The hash that decides, below 2**64: what has the lowest is held out first."""
    return int.from_bytes(hashlib.blake2b(b"held-out\x1f" + identity.encode(), digest_size=8).digest(), "little")


def split_held_out(identities: Iterable[str], held_out: int | float) -> set[str]:
    """Those held out: that many, or that share of them but at least one, and not all; always by the same hash."""
    by_hash = sorted(set(identities), key=held_out_rank)
    if held_out == 0 or (held_out >= 1 and isinstance(held_out, int)):
        return set(by_hash[: int(held_out)])
    chosen = [identity for identity in by_hash if is_held_out(identity, float(held_out))] or by_hash[:1]
    leaves_none = len(chosen) == len(by_hash) > 1 and held_out < 1
    return set(chosen[:-1] if leaves_none else chosen)


def check_sides(source: str, count: int, train: int, held: int, *, distinct: int, more: str = "") -> None:
    """Refuse `count` problems whose split leaves a side empty; `distinct` of them can be told apart."""
    if train and held:
        return
    lacks = "train on" if not train else "evaluate on"
    advice = "give more of them, or another task.held_out" if distinct > 1 else "give at least two different ones"
    raise KeelError(
        f"{source} has {count} problem{'s' * (count != 1)}, {distinct} of them different, which leaves none to "
        f"{lacks}: {advice}{more}"
    )


def choose_held_out(sizes: Mapping[str, int], count: int) -> frozenset[str]:
    """Identities with exactly `count` problems behind them (`sizes`: how many each stands for), by the same hash.

    For ranges so small that a share of the hash says little. Identities stay whole, so that 3+4 never gives away 4+3.
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


Draw = Callable[[random.Random], tuple[str, Problem]]
HeldOut = Callable[[str], bool]


def training_problems(draw: Draw, count: int, rng: random.Random, held_out: HeldOut = is_held_out) -> list[Problem]:
    """`count` problems that are not held out, distinct as long as the range has more to give.

    A problem that has to come again gets another key, because noise is keyed by it: two groups with one key would be
    the same completions twice.
    """
    problems: dict[str, Problem] = {}
    repeating = False
    while len(problems) < count:
        seen = () if repeating else problems
        problem = _next(draw, rng, lambda identity, p, seen=seen: not held_out(identity) and p.key not in seen)
        if problem is None and repeating:
            raise KeelError("the task's range holds no training problem: widen its range (low/high, digits, size)")
        if problem is None:
            repeating = True
            continue
        if problem.key in problems:
            copies = sum(key.partition("#")[0] == problem.key for key in problems)
            problem = replace(problem, key=f"{problem.key}#{copies}")
        problems[problem.key] = problem
    return list(problems.values())


def held_out_problems(draw: Draw, count: int, rng: random.Random, held_out: HeldOut = is_held_out) -> list[Problem]:
    """`count` distinct held-out problems, or all there are where the range has fewer."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = _next(draw, rng, lambda identity, problem: held_out(identity) and problem.key not in problems)
        if problem is None:
            break
        problems[problem.key] = problem
    if count and not problems:
        raise KeelError("the task's range holds no held-out problem: widen its range (low/high, digits, size)")
    return list(problems.values())


def _next(draw: Draw, rng: random.Random, accept: Callable[..., bool]) -> Problem | None:
    for _ in range(_PATIENCE):
        identity, problem = draw(rng)
        if accept(identity, problem):
            return problem
    return None
