"""Estimate the remaining time of a study from its plan and the times of finished pieces (pure functions)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

START, EVALUATION, MEASURE = "start", "evaluation", "measure"
FIRST_STEP, STEP = "first step", "step"  # the first one of a process is slower than the others
FIRST_SUPERVISED, SUPERVISED = "first supervised step", "supervised step"
OVERDUE = 0.9  # an unfinished piece counts as at most this fraction done
SHRINK = 3.0  # shrinkage: number of own pieces with the same weight as the mean of the wider scope


Scope = tuple[str, ...]  # (), (group,) or (group, label)


@dataclass(frozen=True)
class WorkList:
    """The pieces of work of one process, in order. Processes of one `group` (a point's seeds) have a similar pace."""

    group: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Event:
    """At `time`, process `label` was seen with `done` pieces finished; the first such event is its start."""

    time: float
    label: str
    done: int


@dataclass(frozen=True)
class Spent:
    """Seconds and the number of pieces that took them."""

    seconds: float = 0.0
    count: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.count + other.count)


@dataclass(frozen=True)
class Pace:
    """What is known of a study's processes: how far each is, since when, and the time of every kind of piece.

    `spent` is by kind, and by process, group or all together.
    """

    plans: Mapping[str, WorkList]
    done: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    spent: Mapping[tuple[Scope, str], Spent] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()  # processes whose present piece began before it was seen
    most_running: int = 1

    @property
    def running(self) -> list[str]:
        return [label for label, done in self.done.items() if done < len(self.plans[label].pieces)]


def training_plan(steps: int, eval_every: int) -> tuple[str, ...]:
    """The pieces of a run: evaluations of the start, every `eval_every` steps and at the end; the drift comes last."""
    pieces = [START, EVALUATION]
    for step in range(1, steps + 1):
        pieces.append(FIRST_STEP if step == 1 else STEP)
        if step == steps or (eval_every and step % eval_every == 0):
            pieces.append(EVALUATION)
    return (*pieces, MEASURE)


def warmstart_plan(steps: int) -> tuple[str, ...]:
    """The pieces of a warm start."""
    return (START, *([FIRST_SUPERVISED] if steps else []), *[SUPERVISED] * (steps - 1))


def observe(pace: Pace, event: Event) -> Pace:
    """The pace after one more event.

    A process that was resumed, or taken back, also spends time on getting there: its next piece is not measured. Nor is
    the end of one that leaves pieces out.
    """
    label, pieces = event.label, pace.plans[event.label].pieces
    before = pace.done.get(label, 0)
    finished = Counter(pieces[before : event.done])
    ended_early = event.done == len(pieces) and finished.total() > 2
    spent = dict(pace.spent)
    if label in pace.done and label not in pace.resumed and not ended_early:
        seconds = event.time - pace.since[label]
        weights = {kind: count * (cost(pace, label, kind) or 1.0) for kind, count in finished.items()}
        for kind, weight in weights.items():
            share = Spent(seconds * weight / sum(weights.values()), finished[kind])
            for scope in _scopes(pace, label):
                spent[scope, kind] = spent.get((scope, kind), Spent()) + share
    resumed = event.done < before or (label not in pace.done and event.done > 0)
    changed = replace(
        pace,
        done={**pace.done, label: event.done},
        since={**pace.since, label: event.time},
        spent=spent,
        resumed=pace.resumed | {label} if resumed else pace.resumed - {label},
    )
    return replace(changed, most_running=max(pace.most_running, len(changed.running)))


def _scopes(pace: Pace, label: str) -> tuple[Scope, ...]:
    group = pace.plans[label].group
    return (), (group,), (group, label)


def cost(pace: Pace, label: str, kind: str) -> float | None:
    """Seconds a piece, None while unknown: the process' own mean, drawn to that of its group, and that to all."""
    everything, *narrower = (pace.spent.get((scope, kind), Spent()) for scope in _scopes(pace, label))
    if not everything.count:
        return _guess(pace, label, kind)
    mean = everything.seconds / everything.count
    for spent in narrower:
        mean = (spent.seconds + SHRINK * mean) / (spent.count + SHRINK)
    return mean


def _guess(pace: Pace, label: str, kind: str) -> float | None:
    """An estimate without data: measuring the drift loads two models and samples, as a start does."""
    parts = [cost(pace, label, part) for part in (START, EVALUATION)] if kind == MEASURE else [None]
    return None if None in parts else sum(filter(None, parts))


def remaining_s(pace: Pace, now: float, workers: int | None = None) -> float | None:
    """Seconds until the last process ends; None while a kind of piece that is to come has never been seen.

    Waiting processes start in the order of the plan as soon as one of `workers` is free; by default as many as have
    been seen running at once.
    """
    ahead: dict[str, float] = {}
    for label, plan in pace.plans.items():
        done = pace.done.get(label, 0)
        left = Counter(plan.pieces[done:])
        costs = {kind: seconds for kind in left if (seconds := cost(pace, label, kind)) is not None}
        if len(costs) < len(left):
            return None
        spent = min(now - pace.since[label], OVERDUE * costs[plan.pieces[done]]) if label in pace.done and left else 0.0
        ahead[label] = sum(costs[kind] * count for kind, count in left.items()) - spent
    busy = sorted(ahead[label] for label in pace.running)
    free_at = [0.0] * ((workers or pace.most_running) - len(busy)) + busy
    for label, seconds in ahead.items():
        if label not in pace.done:
            heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)
